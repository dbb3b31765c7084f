//! A VMM in memory whose guests answer `/health` and `/init` over real TCP.
//!
//! Captures are real files of a few pages. A driver either keeps a log of writes, as Firecracker does, or hands over all that
//! was written since the start, as QEMU does.
//!
//! A guest answers only while its vCPUs run. VMs live in the [`FakeHost`], not here: dropping this changes nothing.

mod memory;
pub(crate) mod process;

use crate::fake_host::{FakeHost, Operation};
use aenv_vmm::{
    CaptureBase, CaptureFiles, CaptureReport, Exit, ExitCause, Identity, Machine, MachineSpec, Placement,
    ProcessRecord, Vmm, VmmError,
};
use async_trait::async_trait;
use memory::FakeMemory;
use process::{FakeProcess, Guest};
use std::path::Path;
use std::sync::Arc;

/// The fake driver.
pub struct FakeVmm {
    host: Arc<FakeHost>,
    identity: Identity,
    keeps_log: bool,
}

impl FakeVmm {
    /// A driver of VMs on `host`.
    #[must_use]
    pub fn new(host: Arc<FakeHost>) -> Self {
        Self::with_version(host, "1")
    }

    /// As [`Self::new`], of another version: captures of one are of no use to the other.
    #[must_use]
    pub fn with_version(host: Arc<FakeHost>, version: &str) -> Self {
        let identity = Identity {
            driver: "fake".to_owned(),
            version: version.to_owned(),
            accelerator: "tcg".to_owned(),
            cpu_model: "fake".to_owned(),
        };
        Self { host, identity, keeps_log: false }
    }

    /// One whose machines hand over what was written since their previous capture.
    #[must_use]
    pub fn keeping_log(self) -> Self {
        Self { keeps_log: true, ..self }
    }

    async fn start(
        &self,
        operation: Operation,
        guest: Guest,
        memory: FakeMemory,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        let start_error =
            |reason: String| VmmError::Start { program: format!("fake VMM {}", placement.name), reason };
        let call = self.host.begin(operation).await.map_err(start_error)?;
        for path in [&placement.run_dir, &placement.disk] {
            exists(path).map_err(start_error)?;
        }
        if self.host.process(&placement.name).is_some() {
            return Err(start_error("a VM of that name runs".to_owned()));
        }
        let process = FakeProcess::start(&self.host, &placement, guest, memory)
            .map_err(|source| VmmError::Io { context: "starting a fake guest".to_owned(), source })?;
        self.host.add(Arc::clone(&process));
        if call.is_fatal() {
            self.host.end(&process, planned_death());
        }
        call.reply().await;
        Ok(Box::new(FakeMachine { host: Arc::clone(&self.host), process, keeps_log: self.keeps_log }))
    }
}

fn exists(path: &Path) -> Result<(), String> {
    if path.exists() { Ok(()) } else { Err(format!("{} does not exist", path.display())) }
}

fn planned_death() -> Exit {
    Exit { cause: ExitCause::VmmCrashed, detail: "planned death".to_owned() }
}

#[async_trait]
impl Vmm for FakeVmm {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    async fn boot(&self, spec: &MachineSpec, placement: Placement) -> Result<Box<dyn Machine>, VmmError> {
        let memory = FakeMemory::new(spec.memory_mib, None);
        self.start(Operation::Boot, Guest::Running, memory, placement).await
    }

    async fn prepare(
        &self,
        spec: &MachineSpec,
        capture: &CaptureFiles,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        for path in [&capture.memory, &capture.state] {
            exists(path).map_err(|reason| VmmError::Start { program: "fake VMM".to_owned(), reason })?;
        }
        let memory = FakeMemory::new(spec.memory_mib, Some(&capture.memory));
        self.start(Operation::Restore, Guest::None, memory, placement).await
    }

    async fn adopt(
        &self,
        _spec: &MachineSpec,
        record: &ProcessRecord,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        let gone = |exit: Exit| VmmError::Gone {
            name: placement.name.clone(),
            cause: exit.cause,
            detail: exit.detail,
        };
        let call = self.host.begin(Operation::Adopt).await.map_err(|reason| VmmError::Command {
            name: placement.name.clone(),
            command: "adopt".to_owned(),
            reason,
        })?;
        let process =
            self.host.process(&placement.name).filter(|process| process.record() == record).ok_or_else(
                || {
                    let detail = "no such process".to_owned();
                    gone(Exit { cause: ExitCause::VmmKilled, detail })
                },
            )?;
        call.reply().await;
        Ok(Box::new(FakeMachine { host: Arc::clone(&self.host), process, keeps_log: self.keeps_log }))
    }

    async fn reap_strays(&self, prefix: &str, keep: &[String]) -> Result<Vec<String>, VmmError> {
        let call = self.host.begin(Operation::Reap).await.map_err(|reason| VmmError::Command {
            name: prefix.to_owned(),
            command: "reap".to_owned(),
            reason,
        })?;
        let names: Vec<String> = self
            .host
            .vm_names()
            .into_iter()
            .filter(|name| name.starts_with(prefix) && !keep.contains(name))
            .collect();
        for name in &names {
            self.host.end_vm(name, ExitCause::Killed, "reaped");
        }
        call.reply().await;
        Ok(names)
    }
}

struct FakeMachine {
    host: Arc<FakeHost>,
    process: Arc<FakeProcess>,
    keeps_log: bool,
}

impl FakeMachine {
    async fn command(
        &self,
        operation: Operation,
        effect: impl FnOnce(&FakeProcess) -> Result<(), String> + Send,
    ) -> Result<(), VmmError> {
        let refused = |reason: String| VmmError::Command {
            name: self.process.name().to_owned(),
            command: format!("{operation:?}"),
            reason,
        };
        let call = self.host.begin(operation).await.map_err(refused)?;
        if let Some(exit) = self.process.exit() {
            let Exit { cause, detail } = exit;
            return Err(VmmError::Gone { name: self.process.name().to_owned(), cause, detail });
        }
        effect(&self.process).map_err(refused)?;
        if call.is_fatal() {
            self.host.end(&self.process, planned_death());
        }
        call.reply().await;
        Ok(())
    }

    async fn write_capture(
        &self,
        into: &CaptureFiles,
        memory: impl FnOnce(&FakeProcess) -> std::io::Result<(CaptureBase, u64)> + Send,
    ) -> Result<CaptureReport, VmmError> {
        let mut written = Err(std::io::Error::other("the machine runs"));
        self.command(Operation::Capture, |process| {
            if !process.is_running() {
                written = memory(process).and_then(|done| {
                    std::fs::write(&into.state, b"state")?;
                    Ok(done)
                });
            }
            Ok(())
        })
        .await?;
        let (base, changed_pages) = written
            .map_err(|source| VmmError::Io { context: "writing a fake capture".to_owned(), source })?;
        Ok(CaptureReport { base, changed_pages, state_bytes: 5, ..CaptureReport::default() })
    }
}

#[async_trait]
impl Machine for FakeMachine {
    fn record(&self) -> &ProcessRecord {
        self.process.record()
    }

    async fn load(&self) -> Result<(), VmmError> {
        self.command(Operation::Load, FakeProcess::load).await
    }

    async fn is_running(&self) -> Result<bool, VmmError> {
        let mut running = false;
        self.command(Operation::IsRunning, |process| {
            running = process.is_running();
            Ok(())
        })
        .await?;
        Ok(running)
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.command(Operation::Resume, |process| process.run(true)).await
    }

    async fn stop(&self) -> Result<(), VmmError> {
        self.command(Operation::Stop, |process| process.run(false)).await
    }

    async fn capture(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError> {
        self.write_capture(into, |process| {
            Ok((CaptureBase::Nothing, process.memory().capture(&into.memory)?))
        })
        .await
    }

    async fn capture_changes(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError> {
        let keeps_log = self.keeps_log;
        let write = |process: &FakeProcess| {
            let mut memory = process.memory();
            let base = match keeps_log && memory.was_captured() {
                true => CaptureBase::PreviousCapture,
                false => CaptureBase::Start,
            };
            Ok((base, memory.capture_changes(&into.memory, keeps_log)?))
        };
        self.write_capture(into, write).await
    }

    async fn kill(&self) -> Result<Exit, VmmError> {
        let call = self.host.begin(Operation::Kill).await.map_err(|reason| VmmError::Command {
            name: self.process.name().to_owned(),
            command: "kill".to_owned(),
            reason,
        })?;
        if self.process.exit().is_none() {
            let exit = Exit { cause: ExitCause::Killed, detail: "fake console".to_owned() };
            self.host.end(&self.process, exit);
        }
        call.reply().await;
        Ok(self.wait().await)
    }

    async fn wait(&self) -> Exit {
        self.process.wait().await
    }
}

//! Makes the capture of a template: boots it once, waits for its guest daemon, stops it and keeps what it was.
//!
//! Journalled like a sandbox: a node killed in the middle leaves nothing that the next one does not remove. The capture
//! counts only when its description was written, which is the last thing done.

use super::file::CaptureFile;
use super::{Capture, Progress, Template};
use crate::admission::Purpose;
use crate::clearing;
use crate::disks::CaptureName;
use crate::journal::Role;
use crate::node::Node;
use crate::random;
use crate::stage::{Cause, Failure, Stages};
use crate::vm::{Origin, Vm, file_error, new_record};
use aenv_vmm::CaptureReport;
use std::path::Path;
use std::sync::Arc;

/// Makes the capture and publishes it in the template's progress.
pub(crate) async fn prepare(node: &Arc<Node>, template: &Arc<Template>) {
    let name = &template.file.name;
    tracing::info!(template = %name, key = %template.key, "making the template's capture");
    let progress = match make(node, template).await {
        Ok(capture) => {
            tracing::info!(template = %name, "template is ready");
            Progress::Ready(Arc::new(capture))
        }
        Err(failure) => {
            tracing::error!(template = %name, error = %failure, "the template's capture could not be made");
            Progress::Failed(failure.to_string())
        }
    };
    let measured = Arc::clone(template);
    if let Err(error) = tokio::task::spawn_blocking(move || measured.measure()).await {
        tracing::warn!(template = %name, %error, "size of the template's files unknown");
    }
    template.set_progress(progress);
}

async fn make(node: &Arc<Node>, template: &Arc<Template>) -> Result<Capture, Failure> {
    let bytes = template.memory_bytes();
    let permit = node.admission.for_background(Purpose::Preparation, bytes).await?;
    node.admission.check_room(&node.dir)?;
    let id = random::sandbox_id().map_err(|error| Failure::new("journal", error))?;
    let mut vm = Vm::with_memory(new_record(id, Role::Preparation, template, None), permit.memory);
    let directory = Capture::directory(&template.dir, &template.key);
    let result = match boot_and_capture(node, template, &mut vm, &directory).await {
        Ok(report) => keep(node, &vm, template, &directory, report).await,
        Err(failure) => Err(failure),
    };
    clearing::discard(node, vm).await;
    result
}

async fn boot_and_capture(
    node: &Arc<Node>,
    template: &Template,
    vm: &mut Vm,
    directory: &Path,
) -> Result<CaptureReport, Failure> {
    let at = |stage, source| {
        Failure::new(stage, file_error(format!("cannot use {}", directory.display()), source))
    };
    // An unfinished capture of the same key, left by a killed node.
    match tokio::fs::remove_dir_all(directory).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at("capture", error)),
        _ => {}
    }
    tokio::fs::create_dir_all(directory).await.map_err(|error| at("capture", error))?;
    let mut stages = Stages::default();
    let earlier = template.capture_name();
    let forgotten = node.disks.forget_capture(&earlier);
    stages.run("capture", node.settings.deadlines.step, forgotten).await?;
    vm.make(node, &Origin::Image(&template.image), &mut stages).await?;
    let settled = async {
        greet(node, vm).await?;
        tokio::time::sleep(node.settings.deadlines.settle).await;
        Ok(())
    };
    tokio::select! {
        settled = settled => settled?,
        () = node.stopping.cancelled() => {
            return Err(Failure::new("boot", Cause::Unexpected("the node is shutting down".to_owned())));
        }
    }
    vm.stop(node, &mut stages).await?;
    let files = Capture::files_in(directory);
    stages.run("capture", node.settings.deadlines.memory, vm.machine("capture")?.capture(&files)).await
}

/// Waits for the guest daemon. The channel ends here, so that the capture holds no open connection.
async fn greet(node: &Node, vm: &Vm) -> Result<(), Failure> {
    let (machine, channel) = (vm.machine("boot")?, vm.channel()?);
    let answer = tokio::select! {
        answer = channel.wait_until_healthy(node.settings.deadlines.boot) => answer,
        exit = machine.wait() => {
            let reason = format!("the VM ended while it booted ({:?}): {}", exit.cause, exit.detail);
            return Err(Failure::new("boot", Cause::Unexpected(reason)));
        }
    };
    match answer {
        Ok(()) => Ok(()),
        Err(error) => {
            // Its end brings the last lines of the guest's console.
            let seen = match machine.kill().await {
                Ok(exit) => exit.detail,
                Err(kill) => format!("(no console: {kill})"),
            };
            Err(Failure::new("boot", Cause::Unexpected(format!("{error}; the guest's last words: {seen}"))))
        }
    }
}

/// Ends the VM and makes what it was a capture.
async fn keep(
    node: &Node,
    vm: &Vm,
    template: &Template,
    directory: &Path,
    report: CaptureReport,
) -> Result<Capture, Failure> {
    let mut stages = Stages::default();
    stages.run("kill", node.settings.deadlines.step, vm.machine("kill")?.kill()).await?;
    let capture = template.capture_name();
    let kept = node.disks.keep(&vm.record.id, &capture, directory);
    let disk = stages.run("capture", node.settings.deadlines.memory, kept).await?;
    let CaptureName { key, .. } = capture;
    let file = CaptureFile {
        key: key.clone(),
        vmm: node.parts.vmm.identity().clone(),
        disk: disk.relative_to(directory, node.dir.root()),
        created_at: jiff::Timestamp::now(),
        report,
    };
    let finished = directory.to_owned();
    let result = tokio::task::spawn_blocking(move || Capture::finish(&finished, &file))
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)));
    result.map_err(|error| {
        Failure::new("capture", file_error(format!("cannot finish capture {}", directory.display()), error))
    })?;
    Ok(Capture { key, files: Capture::files_in(directory), disk })
}

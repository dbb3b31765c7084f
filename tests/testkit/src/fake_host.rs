//! A host in memory: the VMs and network slots that exist, and the faults that will happen to them.
//!
//! It outlives the node under test, as a real host does: a test may drop the node's whole runtime in the middle of a
//! call and start another node on the same data directory. Guests are real HTTP servers on a runtime of this host.
//!
//! Faults are planned for the n-th call of an operation, for the n-th call of any operation, or drawn from a seed. Commits of the
//! node's journal are calls too, but only hang, or are the moment at which something else dies.

mod commits;

use crate::fake_store::FakeStore;
use crate::fake_vmm::process::{FakeProcess, Guest};
use aenv_network::SlotName;
use aenv_orchestrator::{JournalWatch, MemoryReading};
use aenv_protocol::envd::InitRequest;
use aenv_vmm::{Exit, ExitCause};
use commits::Commits;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::watch;

/// A call that can go wrong. `Restore` is the start of a VMM process for a capture, `Load` the loading of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names are those of the calls")]
pub enum Operation {
    Boot,
    Restore,
    Load,
    Adopt,
    Reap,
    IsRunning,
    Resume,
    Stop,
    Capture,
    Kill,
    Acquire,
    AdoptSlot,
    DenyEgress,
    Release,
    Sweep,
    Health,
    Init,
    Sync,
    Commit,
    LookAtStore,
    CreateDisk,
    FlushDisk,
    SealDisk,
    RewindDisk,
    MakeDiskDurable,
    DeleteDisk,
    CreateImage,
    DeleteImage,
    ReleaseLayer,
    CollectLayers,
}

impl Operation {
    /// Whether it is a request to the block service.
    #[must_use]
    pub fn is_of_store(self) -> bool {
        self >= Self::LookAtStore
    }
}

/// How a call goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An error, and no effect.
    Fail,
    /// No effect and no answer, ever.
    HangBefore,
    /// The effect, but no answer, ever.
    LoseReply,
    /// The effect and the answer, then the VM ends by itself. Of the block service: the effect, and it ends instead of an answer.
    Die,
    /// Every VM is killed; then the call is let in.
    EndVms,
    /// The block service is killed; then the call is let in. It is back a moment later.
    EndStore,
}

/// What exists on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Live VMs.
    pub vms: usize,
    /// Slots, those of the pool excluded.
    pub slots: usize,
}

#[derive(Debug, Clone, Copy)]
enum When {
    /// The call number of one operation, counted from 0 since the fault was planned.
    Call(Operation, usize),
    /// The call number of all operations together.
    Any(usize),
    /// The call number of all requests to the block service together.
    Store(usize),
    /// Every call of one operation.
    Always(Operation),
}

#[derive(Default)]
struct State {
    vms: BTreeMap<String, Arc<FakeProcess>>,
    slots: BTreeMap<SlotName, SlotState>,
    made_slots: u32,
    made_vms: u32,
    plan: Vec<(When, Fault)>,
    log: Vec<Operation>,
    random: Option<Random>,
    /// None where disks are plain files.
    store: Option<Arc<FakeStore>>,
    memory: Option<MemoryReading>,
    connections: usize,
}

#[derive(Default)]
struct SlotState {
    egress_denied: bool,
}

struct Random {
    state: u64,
    one_in: u64,
}

/// The host. Shared by the fakes of one test.
pub struct FakeHost {
    runtime: Option<Runtime>,
    state: Mutex<State>,
    hung: watch::Sender<usize>,
    /// How often everything was forgotten that hangs at a commit.
    healed: Mutex<u64>,
    healing: Condvar,
}

/// A call that has been let in; its reply may still be lost.
pub(crate) struct Call<'a> {
    host: &'a FakeHost,
    fault: Option<Fault>,
}

impl Call<'_> {
    /// Whether the VM is to end by itself after this call.
    pub(crate) fn is_fatal(&self) -> bool {
        self.fault == Some(Fault::Die)
    }

    /// To be awaited when the effect is there.
    pub(crate) async fn reply(self) {
        if self.fault == Some(Fault::LoseReply) {
            self.host.hang().await;
        }
    }
}

impl FakeHost {
    /// An empty host without faults.
    ///
    /// # Panics
    /// When the machine has no threads left.
    #[must_use]
    pub fn new() -> Arc<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fake-host")
            .enable_all()
            .build()
            .expect("a runtime for fake guests");
        Arc::new(Self {
            runtime: Some(runtime),
            state: Mutex::default(),
            hung: watch::Sender::new(0),
            healed: Mutex::new(0),
            healing: Condvar::new(),
        })
    }

    /// What exists now.
    pub fn counts(&self) -> Counts {
        let state = self.state();
        Counts { vms: state.vms.len(), slots: state.slots.len() }
    }

    /// Names of the live VMs.
    pub fn vm_names(&self) -> Vec<String> {
        self.state().vms.keys().cloned().collect()
    }

    /// Plans a fault for the `nth` call (from 0, counted from now) of an operation.
    pub fn fail_call(&self, operation: Operation, nth: usize, fault: Fault) {
        self.state().plan.push((When::Call(operation, nth), fault));
    }

    /// Plans a fault for the `nth` call (from 0, counted from now) of any operation.
    pub fn fail_any(&self, nth: usize, fault: Fault) {
        self.state().plan.push((When::Any(nth), fault));
    }

    /// Plans a fault for the `nth` request (from 0, counted from now) to the block service.
    pub fn fail_store(&self, nth: usize, fault: Fault) {
        self.state().plan.push((When::Store(nth), fault));
    }

    /// Makes every call of an operation go wrong.
    pub fn fail_always(&self, operation: Operation, fault: Fault) {
        self.state().plan.push((When::Always(operation), fault));
    }

    /// Makes about one call in `one_in` fail, lose its VM or lose its reply; the same seed gives the same draws.
    pub fn fail_randomly(&self, seed: u64, one_in: u64) {
        self.state().random = Some(Random { state: seed | 1, one_in });
    }

    /// Forgets every planned fault. A journal that hangs at a commit ends: to be called when its node is gone, then.
    pub fn heal(&self) {
        let mut state = self.state();
        state.plan.clear();
        state.random = None;
        drop(state);
        *self.healed.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.healing.notify_all();
    }

    /// For the journal of a node on this host.
    #[must_use]
    pub fn journal_watch(self: &Arc<Self>) -> Arc<dyn JournalWatch> {
        Arc::new(Commits::new(Arc::clone(self)))
    }

    /// Sets what the host has left of its memory, in bytes.
    pub fn set_available_memory(&self, available_bytes: u64) {
        self.state().memory = Some(MemoryReading { available_bytes, ..MemoryReading::PLENTY });
    }

    pub(crate) fn memory_reading(&self) -> MemoryReading {
        self.state().memory.unwrap_or(MemoryReading::PLENTY)
    }

    /// The calls let in or refused so far, in order.
    pub fn log(&self) -> Vec<Operation> {
        self.state().log.clone()
    }

    /// Waits until `calls` calls in all hang.
    ///
    /// # Panics
    /// Never: the host holds the sender.
    pub async fn wait_for_hang(&self, calls: usize) {
        self.hung.subscribe().wait_for(|hung| *hung >= calls).await.expect("the host lives");
    }

    /// Ends a VM from outside. False when there is none of that name.
    pub fn end_vm(&self, name: &str, cause: ExitCause, detail: &str) -> bool {
        let process = self.process(name);
        if let Some(process) = &process {
            self.end(process, Exit { cause, detail: detail.to_owned() });
        }
        process.is_some()
    }

    /// Ends every VM and slot, as a restart of the host does.
    pub fn restart(&self) {
        for name in self.vm_names() {
            self.end_vm(&name, ExitCause::VmmKilled, "host restart");
        }
        self.state().slots.clear();
    }

    /// The `/init` requests a VM has got as a sandbox: rehearsals of a standby are left out.
    pub fn inits(&self, name: &str) -> Vec<InitRequest> {
        let mut inits = self.process(name).map(|process| process.inits()).unwrap_or_default();
        inits.retain(|init| init.identity.as_ref().is_none_or(|identity| identity.sandbox_id != "standby"));
        inits
    }

    /// How many connections to guests were opened so far.
    pub fn connections(&self) -> usize {
        self.state().connections
    }

    pub(crate) fn note_connection(&self) {
        self.state().connections += 1;
    }

    /// Whether a VM's vCPUs run; none when there is no such VM.
    pub fn is_running(&self, name: &str) -> Option<bool> {
        self.process(name).map(|process| process.is_running())
    }

    /// Whether a VM has a guest, and is not only a process that is prepared for one; none when there is no such VM.
    pub fn has_guest(&self, name: &str) -> Option<bool> {
        self.process(name).map(|process| process.guest() != Guest::None)
    }

    /// Stops or continues a VM's vCPUs behind the node's back.
    ///
    /// # Panics
    /// When the VM has no guest yet: the test is wrong.
    pub fn set_running(&self, name: &str, running: bool) {
        if let Some(process) = self.process(name) {
            process.run(running).expect("a VM with a guest");
        }
    }

    /// Lets the guest of a VM write a byte over a page of its memory, and the same over a block of its disk.
    ///
    /// # Panics
    /// When there is no such VM, its guest does not run, or its disk cannot be written: the test is wrong.
    pub fn write(&self, name: &str, page: u64, value: u8) {
        self.process(name).expect("a VM of that name").write(page, value);
    }

    /// As [`Self::write`]; false when there is no such VM, or its guest does not run.
    pub fn try_write(&self, name: &str, page: u64, value: u8) -> bool {
        let process = self.process(name).filter(|process| process.is_running());
        process.is_some_and(|process| process.try_write(page, value).is_ok())
    }

    /// What the guest of a VM has in a page of its memory and in the same block of its disk.
    ///
    /// # Panics
    /// As [`Self::write`].
    pub fn read(&self, name: &str, page: u64) -> (u8, u8) {
        self.process(name).expect("a VM of that name").read(page)
    }

    /// Lets connections to `port` of a guest arrive at `address`. False when there is no such VM.
    pub fn expose(&self, name: &str, port: u16, address: SocketAddr) -> bool {
        let process = self.process(name);
        if let Some(process) = &process {
            process.open_port(port, address);
        }
        process.is_some()
    }

    /// Whether the slot of a VM lets nothing out; none when there is no such VM or slot.
    pub fn egress_denied(&self, name: &str) -> Option<bool> {
        let netns = self.process(name)?.netns().to_owned();
        let slot = SlotName(netns.file_name()?.to_str()?.to_owned());
        self.state().slots.get(&slot).map(|slot| slot.egress_denied)
    }

    pub(crate) fn handle(&self) -> Handle {
        self.runtime
            .as_ref()
            .map(|runtime| runtime.handle().clone())
            .expect("the runtime lives as long as the host")
    }

    pub(crate) fn set_store(&self, store: Arc<FakeStore>) {
        self.state().store = Some(store);
    }

    /// Lets a call in, or not.
    pub(crate) async fn begin(&self, operation: Operation) -> Result<Call<'_>, String> {
        let fault = self.draw(operation);
        self.end_bystanders(fault);
        match fault {
            Some(Fault::Fail) => Err(format!("planned fault of {operation:?}")),
            Some(Fault::HangBefore) => self.hang().await,
            fault => Ok(Call { host: self, fault }),
        }
    }

    fn draw(&self, operation: Operation) -> Option<Fault> {
        let mut state = self.state();
        state.log.push(operation);
        let mut hit = None;
        state.plan.retain_mut(|(when, fault)| {
            let left = match when {
                When::Always(always) => {
                    hit = hit.or((*always == operation).then_some(*fault));
                    return true;
                }
                When::Call(other, _) if *other != operation => return true,
                When::Store(_) if !operation.is_of_store() => return true,
                When::Call(_, left) | When::Any(left) | When::Store(left) => left,
            };
            if *left == 0 {
                hit = hit.or(Some(*fault));
                return false;
            }
            *left -= 1;
            true
        });
        let random = state.random.as_mut().filter(|_| operation != Operation::Commit);
        hit.or_else(|| random.and_then(Random::draw))
    }

    /// Kills what a fault says that dies at the moment of a call.
    fn end_bystanders(&self, fault: Option<Fault>) {
        match fault {
            Some(Fault::EndVms) => {
                for name in self.vm_names() {
                    self.end_vm(&name, ExitCause::VmmKilled, "planned kill");
                }
            }
            Some(Fault::EndStore) => {
                let store = self.state().store.clone();
                if let Some(store) = store {
                    store.kill();
                }
            }
            _ => {}
        }
    }

    async fn hang(&self) -> ! {
        self.hung.send_modify(|hung| *hung += 1);
        std::future::pending().await
    }

    pub(crate) fn process(&self, name: &str) -> Option<Arc<FakeProcess>> {
        self.state().vms.get(name).cloned()
    }

    pub(crate) fn process_in(&self, netns: &std::path::Path) -> Option<Arc<FakeProcess>> {
        self.state().vms.values().find(|process| process.netns() == netns).cloned()
    }

    /// A number no other VM of this host has had.
    pub(crate) fn next_vm(&self) -> u32 {
        let mut state = self.state();
        state.made_vms += 1;
        state.made_vms
    }

    pub(crate) fn add(&self, process: Arc<FakeProcess>) {
        self.state().vms.insert(process.name().to_owned(), process);
    }

    pub(crate) fn end(&self, process: &FakeProcess, exit: Exit) {
        self.state().vms.remove(process.name());
        process.end(exit);
    }

    pub(crate) fn add_slot(&self) -> SlotName {
        let mut state = self.state();
        state.made_slots += 1;
        let name = SlotName(format!("fake{}", state.made_slots));
        state.slots.insert(name.clone(), SlotState::default());
        name
    }

    pub(crate) fn has_slot(&self, name: &SlotName) -> bool {
        self.state().slots.contains_key(name)
    }

    /// False when there is no such slot.
    pub(crate) fn deny_egress(&self, name: &SlotName) -> bool {
        self.state().slots.get_mut(name).map(|slot| slot.egress_denied = true).is_some()
    }

    pub(crate) fn remove_slot(&self, name: &SlotName) {
        self.state().slots.remove(name);
    }

    pub(crate) fn slot_names(&self) -> Vec<SlotName> {
        self.state().slots.keys().cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for FakeHost {
    fn drop(&mut self) {
        // A runtime must not be dropped where a test may be async.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Random {
    /// xorshift64: seeded, and good enough to spread faults.
    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn draw(&mut self) -> Option<Fault> {
        if !self.next().is_multiple_of(self.one_in) {
            return None;
        }
        Some(match self.next() % 3 {
            0 => Fault::Fail,
            1 => Fault::LoseReply,
            _ => Fault::Die,
        })
    }
}

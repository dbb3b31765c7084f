//! The slots of one node instance on Linux, with a pool of fresh ones.
//!
//! Owns the registry of slots, the thread that opens sockets inside namespaces, and the tasks that keep the pool filled. The slots themselves live in the kernel and survive it: [`LinuxSlots::shutdown`]
//! removes only those that nobody has taken, a crash removes none, and a successor adopts or sweeps them.

use crate::construct::{self, SlotPlan};
use crate::dialer::PinDialer;
use crate::host;
use crate::policy::{self, Egress, GUEST_ADDRESS, TAP};
use crate::registry::{Purpose, Registry};
use crate::settings::{AddressPlan, SettingsError, SlotSettings, index_of_slot};
use crate::slot::{NetworkError, Slot, SlotName, Slots};
use aenv_sys::netns::SocketOpener;
use async_trait::async_trait;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Slots made while nobody waits: more would only queue for the kernel's one lock on network configuration.
const POOL_BUILDERS: usize = 2;
/// Slots made at once for callers who found the pool empty.
const CALLER_BUILDERS: usize = 4;
/// How long the pool rests after a failure, and at most after several.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(30);

/// Why slots cannot be had at all.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StartError {
    /// The settings cannot work.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The host cannot be prepared.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

/// The slots of one instance.
pub struct LinuxSlots {
    shared: Arc<Shared>,
}

struct Shared {
    settings: SlotSettings,
    addresses: AddressPlan,
    opener: Arc<SocketOpener>,
    registry: Mutex<Registry>,
    /// A slot left the pool, or a number became free.
    changed: Notify,
    caller_builders: Semaphore,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl LinuxSlots {
    /// Puts the instance's rules into force on the host and begins to fill the pool. Slots of an earlier process stay
    /// until they are adopted or swept. Needs root and a tokio runtime.
    ///
    /// # Errors
    /// When the settings cannot work, or the kernel refuses the rules.
    pub async fn start(settings: SlotSettings) -> Result<Self, StartError> {
        let addresses = AddressPlan::new(&settings)?;
        host::prepare(&settings).await?;
        let mut numbers = host::veth_numbers(&settings.instance).await?;
        let pinned = host::pinned_slots(&settings.instance).await?;
        numbers.extend(pinned.iter().filter_map(|slot| index_of_slot(slot).ok()));
        let shared = Arc::new(Shared {
            registry: Mutex::new(Registry::new(addresses.capacity(), numbers)),
            settings,
            addresses,
            opener: Arc::new(SocketOpener::new()),
            changed: Notify::new(),
            caller_builders: Semaphore::new(CALLER_BUILDERS),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        for _ in 0..POOL_BUILDERS {
            shared.tasks.spawn(Arc::clone(&shared).keep_pool_filled());
        }
        Ok(Self { shared })
    }

    /// How many fresh slots wait in the pool.
    #[must_use]
    pub fn pooled(&self) -> usize {
        self.shared.registry().pooled()
    }

    /// Stops filling the pool and removes the slots in it. Slots in use stay, and with them the rules on the host; see
    /// [`crate::purge`] for removing everything.
    ///
    /// # Errors
    /// The first slot that could not be removed; the rest was tried.
    pub async fn shutdown(&self) -> Result<(), NetworkError> {
        self.shared.stop.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        let fresh = self.shared.registry().drain_pool();
        let mut outcome = Ok(());
        for slot in fresh {
            let removed = self.shared.remove(&slot).await;
            outcome = outcome.and(removed);
        }
        outcome
    }
}

impl Drop for LinuxSlots {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

#[async_trait]
impl Slots for LinuxSlots {
    async fn acquire(&self) -> Result<Slot, NetworkError> {
        if self.shared.stop.is_cancelled() {
            return Err(NetworkError::ShuttingDown);
        }
        let fresh = self.shared.registry().take();
        if let Some(name) = fresh {
            self.shared.changed.notify_waiters();
            return self.shared.slot(name);
        }
        let (handover, built) = oneshot::channel();
        let shared = Arc::clone(&self.shared);
        // A task of its own: a caller that goes away must not leave half a slot.
        self.shared.tasks.spawn(async move {
            // With the receiver gone this drops the slot into the pool.
            drop(handover.send(shared.build_for_caller().await));
        });
        let ended = |_| NetworkError::ShuttingDown;
        built.await.map_err(ended)??.accept()
    }

    async fn adopt(&self, name: &SlotName) -> Result<Slot, NetworkError> {
        let plan = self.shared.plan(name, Egress::Open)?;
        if !construct::exists(plan).await? {
            return Err(NetworkError::NotFound(name.0.clone()));
        }
        self.shared.registry().hold(name);
        self.shared.slot(name.clone())
    }

    async fn deny_egress(&self, name: &SlotName) -> Result<(), NetworkError> {
        construct::replace_policy(self.shared.plan(name, Egress::Denied)?).await
    }

    async fn release(&self, name: &SlotName) -> Result<(), NetworkError> {
        if index_of_slot(name).is_err() {
            // No slot ever had such a name, so nothing of it is left; and it names no file elsewhere.
            return Ok(());
        }
        self.shared.remove(name).await
    }

    async fn sweep(&self, keep: &[SlotName]) -> Result<Vec<SlotName>, NetworkError> {
        let shared = &self.shared;
        let sweep = shared.registry().begin_sweep();
        let pinned = host::pinned_slots(&shared.settings.instance).await?;
        let numbers = host::veth_numbers(&shared.settings.instance).await?;
        let (mut strays, numbers) = shared.registry().strays(sweep, keep, pinned, numbers);
        for stray in &strays {
            shared.remove(stray).await?;
        }
        for number in numbers {
            let veth = shared.settings.instance.veth(number);
            host::remove_veth(&veth).await?;
            shared.registry().forget_number(number);
            // Its name went with its namespace.
            strays.push(SlotName(number.to_string()));
        }
        shared.changed.notify_waiters();
        Ok(strays)
    }
}

/// A slot on its way to the caller who waits for it; goes to the pool when nobody takes it.
struct Handover {
    shared: Arc<Shared>,
    name: Option<SlotName>,
}

impl Handover {
    fn accept(mut self) -> Result<Slot, NetworkError> {
        match self.name.take() {
            Some(name) => {
                self.shared.registry().hold(&name);
                self.shared.slot(name)
            }
            None => unreachable!("a handover holds its slot until it is accepted, which consumes it"),
        }
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            self.shared.registry().pool(name);
        }
    }
}

impl Shared {
    /// Held only for moments, never across an await.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn plan(&self, name: &SlotName, egress: Egress) -> Result<SlotPlan, NetworkError> {
        let index = index_of_slot(name)?;
        if index >= self.addresses.capacity() {
            return Err(NetworkError::NotFound(name.0.clone()));
        }
        let instance = &self.settings.instance;
        Ok(SlotPlan {
            name: name.clone(),
            pin: instance.pin(name),
            veth: instance.veth(index),
            host_end: self.addresses.host_end(index),
            inner_end: self.addresses.inner_end(index),
            user: self.addresses.user(index),
            policy: policy::inside(instance, &self.settings.blocked, egress),
        })
    }

    fn slot(&self, name: SlotName) -> Result<Slot, NetworkError> {
        let user = self.addresses.user(index_of_slot(&name)?);
        let pin = self.settings.instance.pin(&name);
        Ok(Slot {
            name,
            netns: pin.clone(),
            tap: TAP.to_owned(),
            user,
            guest_address: GUEST_ADDRESS,
            dialer: Arc::new(PinDialer { pin, opener: Arc::clone(&self.opener) }),
        })
    }

    fn reserve(&self, purpose: Purpose) -> Option<SlotName> {
        self.registry().reserve(purpose, rand::random())
    }

    /// Builds what was reserved; forgets it when that fails.
    async fn build(&self, name: &SlotName) -> Result<(), NetworkError> {
        let built = construct::build(self.plan(name, Egress::Open)?).await;
        if built.is_err() {
            self.registry().forget(name);
        }
        built
    }

    async fn build_for_caller(self: Arc<Self>) -> Result<Handover, NetworkError> {
        // The semaphore is never closed.
        let _turn = self.caller_builders.acquire().await.map_err(|_| NetworkError::ShuttingDown)?;
        let exhausted = || NetworkError::Exhausted(self.addresses.capacity() as usize);
        let name = self.reserve(Purpose::Caller).ok_or_else(exhausted)?;
        self.build(&name).await?;
        Ok(Handover { shared: Arc::clone(&self), name: Some(name) })
    }

    async fn keep_pool_filled(self: Arc<Self>) {
        let mut pause = RETRY_PAUSE;
        while !self.stop.is_cancelled() {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            let wanted = self.registry().pool_wants(self.settings.pool_size);
            let Some(name) = wanted.then(|| self.reserve(Purpose::Pool)).flatten() else {
                tokio::select! {
                    () = changed => {}
                    () = self.stop.cancelled() => {}
                }
                continue;
            };
            match self.build(&name).await {
                Ok(()) => {
                    self.registry().pool(name);
                    pause = RETRY_PAUSE;
                }
                Err(error) => {
                    tracing::warn!(slot = name.0, %error, ?pause, "cannot fill the pool of network slots");
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = self.stop.cancelled() => {}
                    }
                    pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
                }
            }
        }
    }

    /// Removes a slot, or what there is of one with such a name.
    async fn remove(&self, name: &SlotName) -> Result<(), NetworkError> {
        let instance = &self.settings.instance;
        // A slot may be released again long after it was removed, and its number has gone to another one.
        let veth = if self.registry().has_heir(name) { None } else { instance.veth_of_slot(name) };
        construct::remove(name, instance.pin(name), veth).await?;
        self.registry().forget(name);
        self.changed.notify_waiters();
        Ok(())
    }
}

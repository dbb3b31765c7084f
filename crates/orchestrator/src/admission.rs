//! Who may start a VM now. Owns the permits and the number of callers that wait for one.
//!
//! Cold starts are limited, first come, first served. Background work (standbys, preparations) is done one at a time and
//! only while no caller waits.

use crate::data_dir::DataDir;
use crate::stage::{Cause, Failure};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

/// Limits of one node.
pub(crate) struct Admission {
    starting: Arc<Semaphore>,
    background: Semaphore,
    waiting: watch::Sender<usize>,
    queue_limit: Duration,
    max_starting: usize,
    min_free_bytes: u64,
}

/// The right to start one VM (or, to one who wants that nobody does, all such rights), until dropped.
pub(crate) struct Permit<'a> {
    _starting: SemaphorePermit<'a>,
    _background: Option<SemaphorePermit<'a>>,
}

impl Admission {
    pub(crate) fn new(max_starting: usize, queue_limit: Duration, min_free_bytes: u64) -> Self {
        Self {
            starting: Arc::new(Semaphore::new(max_starting)),
            background: Semaphore::new(1),
            waiting: watch::Sender::new(0),
            queue_limit,
            max_starting,
            min_free_bytes,
        }
    }

    /// Refuses when the data directory is nearly full.
    pub(crate) fn check_room(&self, dir: &DataDir) -> Result<(), Failure> {
        let root = dir.root().display();
        let free = dir.free_bytes().map_err(|source| {
            Failure::new(
                "admission",
                Cause::File { context: format!("cannot ask for free space of {root}"), source },
            )
        })?;
        if free < self.min_free_bytes {
            let reason = format!(
                "{root} has {} MiB free, {} MiB are required: remove sandboxes or templates, or enlarge its disk",
                free >> 20,
                self.min_free_bytes >> 20
            );
            return Err(Failure::new("admission", Cause::NoCapacity(reason)));
        }
        Ok(())
    }

    /// Waits for a caller's turn to start a VM.
    pub(crate) async fn for_caller(&self) -> Result<Permit<'_>, Failure> {
        let _waiting = Waiting::new(&self.waiting);
        match tokio::time::timeout(self.queue_limit, self.starting.acquire()).await {
            Ok(Ok(permit)) => Ok(Permit { _starting: permit, _background: None }),
            Ok(Err(closed)) => Err(Failure::new("admission", Cause::Unexpected(closed.to_string()))),
            Err(_) => Err(Failure::new(
                "admission",
                Cause::NoCapacity(format!(
                    "{} sandboxes are being started at once, and no turn came within {:?}",
                    self.max_starting, self.queue_limit
                )),
            )),
        }
    }

    /// Waits until background work may start a VM.
    pub(crate) async fn for_background(&self) -> Result<Permit<'_>, Failure> {
        let closed = |reason: String| Failure::new("admission", Cause::Unexpected(reason));
        let background = self.background.acquire().await.map_err(|error| closed(error.to_string()))?;
        let mut waiting = self.waiting.subscribe();
        waiting.wait_for(|callers| *callers == 0).await.map_err(|error| closed(error.to_string()))?;
        let starting = self.starting.acquire().await.map_err(|error| closed(error.to_string()))?;
        Ok(Permit { _starting: starting, _background: Some(background) })
    }

    /// Waits until no VM is being started and no caller waits to; then nobody may until this is dropped.
    pub(crate) async fn for_nobody_else(&self) -> Result<Permit<'_>, Failure> {
        let closed = |reason: String| Failure::new("admission", Cause::Unexpected(reason));
        let all = u32::try_from(self.max_starting).map_err(|error| closed(error.to_string()))?;
        let background = self.background.acquire().await.map_err(|error| closed(error.to_string()))?;
        let mut waiting = self.waiting.subscribe();
        waiting.wait_for(|callers| *callers == 0).await.map_err(|error| closed(error.to_string()))?;
        let starting = self.starting.acquire_many(all).await.map_err(|error| closed(error.to_string()))?;
        Ok(Permit { _starting: starting, _background: Some(background) })
    }
}

/// Counts one waiting caller for as long as it lives.
struct Waiting<'a>(&'a watch::Sender<usize>);

impl<'a> Waiting<'a> {
    fn new(count: &'a watch::Sender<usize>) -> Self {
        count.send_modify(|waiting| *waiting += 1);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_house_refuses_after_the_limit() {
        let admission = Admission::new(1, Duration::from_millis(50), 0);
        let first = admission.for_caller().await.unwrap();
        let error = admission.for_caller().await.err().unwrap();
        assert!(matches!(error.cause, Cause::NoCapacity(_)), "{error}");
        drop(first);
        assert!(admission.for_caller().await.is_ok());
    }

    #[tokio::test]
    async fn background_work_lets_waiting_callers_go_first() {
        let admission = Arc::new(Admission::new(1, Duration::from_secs(60), 0));
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let running = admission.for_caller().await.unwrap();
        let spawn = |name: &'static str, background: bool| {
            let (admission, order) = (Arc::clone(&admission), Arc::clone(&order));
            tokio::spawn(async move {
                let permit =
                    if background { admission.for_background().await } else { admission.for_caller().await };
                order.lock().unwrap().push(name);
                drop(permit);
            })
        };
        let caller = spawn("caller", false);
        tokio::task::yield_now().await;
        let background = spawn("background", true);
        let second = spawn("second caller", false);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(order.lock().unwrap().is_empty());
        drop(running);
        for task in [caller, second, background] {
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), ["caller", "second caller", "background"]);
    }

    #[tokio::test]
    async fn one_who_wants_to_be_alone_waits_for_all_and_lets_nobody_in() {
        let admission = Admission::new(2, Duration::from_millis(50), 0);
        let limit = Duration::from_millis(50);
        let running = admission.for_caller().await.unwrap();
        assert!(tokio::time::timeout(limit, admission.for_nobody_else()).await.is_err());
        assert!(admission.for_caller().await.is_ok(), "one who gave up holds nothing");
        drop(running);
        let alone = admission.for_nobody_else().await.unwrap();
        assert!(admission.for_caller().await.is_err());
        drop(alone);
        assert!(admission.for_caller().await.is_ok());
    }

    #[test]
    fn a_full_disk_is_named() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = DataDir::open(temporary.path()).unwrap();
        let error = Admission::new(1, Duration::ZERO, u64::MAX).check_room(&dir).unwrap_err();
        assert!(error.to_string().contains(dir.root().to_str().unwrap()), "{error}");
        assert!(Admission::new(1, Duration::ZERO, 1).check_room(&dir).is_ok());
    }
}

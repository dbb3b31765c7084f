//! How long a sandbox may still run: set, extended, journalled.
//!
//! A snapshot works on a copy of the record and takes that over at its end, so a time that is asked for meanwhile waits for that.

use super::transitions::Kind;
use super::{Reply, SandboxTask, answer, end_after};
use crate::error::Error;
use crate::journal::Tenancy;
use crate::lifecycle::Event;
use crate::view::SandboxView;
use std::time::Duration;
use tokio::time::Instant;

/// What somebody wants of the time that remains.
pub(super) enum NewTime {
    /// To be so much from now on.
    Set(Duration, Reply<()>),
    /// To be at least so much.
    Extend(Duration, Reply<SandboxView>),
}

impl SandboxTask {
    /// Sets it now, or after the snapshot that is being taken.
    pub(super) async fn set_time(&mut self, time: NewTime) {
        if matches!(self.work, Some((Kind::Snapshot, _))) {
            return self.postponed_times.push(time);
        }
        match time {
            NewTime::Set(timeout, reply) => {
                let result = self.change_end(timeout).await;
                answer(reply, result);
            }
            NewTime::Extend(at_least, reply) => {
                let result = self.extend(at_least).await;
                answer(reply, result.map(|()| self.view()));
            }
        }
    }

    /// Sets what was asked for during the work that has just ended, in that order.
    pub(super) async fn set_postponed_times(&mut self) {
        for time in std::mem::take(&mut self.postponed_times) {
            self.set_time(time).await;
        }
    }

    pub(super) async fn change_end(&mut self, timeout: Duration) -> Result<(), Error> {
        self.allows(Event::ChangeTime)?;
        let (deadline, end_at) = end_after(timeout);
        let mut record = self.vm.record.clone();
        let tenancy = Tenancy { end_at, ..self.tenancy.clone() };
        record.tenancy = Some(tenancy.clone());
        self.node.journal.put(&record).await.map_err(|error| Error::Internal {
            context: format!("changing the time of sandbox {}", record.id),
            reason: error.to_string(),
        })?;
        (self.vm.record, self.tenancy, self.deadline) = (record, tenancy, deadline);
        self.node.table.update(self.view());
        Ok(())
    }

    /// Makes sure that so much time remains.
    pub(super) async fn extend(&mut self, at_least: Duration) -> Result<(), Error> {
        self.allows(Event::ChangeTime)?;
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left >= at_least { Ok(()) } else { self.change_end(at_least).await }
    }
}

//! The commits of a node's journal as calls of the fake host, which hang on the journal's own thread.
//!
//! Owns what was planned for the commit under way. A hung one ends when the host is healed, and its journal with it.

use super::{FakeHost, Fault, Operation};
use aenv_orchestrator::JournalWatch;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

/// The commits of one node's journal.
pub(super) struct Commits {
    host: Arc<FakeHost>,
    /// How often the host had been healed when the reply of the present commit was planned to be lost.
    to_be_lost: Mutex<Option<u64>>,
}

impl Commits {
    pub(super) fn new(host: Arc<FakeHost>) -> Self {
        Self { host, to_be_lost: Mutex::new(None) }
    }
}

impl JournalWatch for Commits {
    fn before_commit(&self) -> ControlFlow<()> {
        let healed = self.host.healed();
        let fault = self.host.draw(Operation::Commit);
        self.host.end_bystanders(fault);
        match fault {
            Some(Fault::HangBefore) => {
                self.host.hang_here(healed);
                return ControlFlow::Break(());
            }
            Some(Fault::LoseReply) => {
                *self.to_be_lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(healed);
            }
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn after_commit(&self) -> ControlFlow<()> {
        let planned = self.to_be_lost.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(healed) = planned else { return ControlFlow::Continue(()) };
        self.host.hang_here(healed);
        ControlFlow::Break(())
    }
}

impl FakeHost {
    fn healed(&self) -> u64 {
        *self.healed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until [`Self::heal`] is called once more than `before`.
    fn hang_here(&self, before: u64) {
        self.hung.send_modify(|hung| *hung += 1);
        let mut healed = self.healed.lock().unwrap_or_else(PoisonError::into_inner);
        while *healed == before {
            healed = self.healing.wait(healed).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

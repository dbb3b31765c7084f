//! The end of the VMM that stands by for a paused sandbox: asked for, or given way to others who need the memory.

use super::transitions::Kind;
use super::{Reply, SandboxTask, answer};
use crate::error::Error;
use crate::lifecycle::Phase;
use crate::view::Durability;

/// What a paused sandbox did that was asked to give way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GaveWay {
    /// Its VMM is gone.
    Now,
    /// Its VMM goes as soon as what was saved is durable.
    WhenDurable,
}

/// Who waits for the end of the VMM.
pub(super) enum Releaser {
    /// Whoever asked for that.
    Caller(Reply<()>),
    /// Whoever needs the memory.
    MemoryShort(Reply<GaveWay>),
}

impl Releaser {
    pub(super) fn answer(self, result: Result<(), Error>) {
        match self {
            Self::Caller(reply) => answer(reply, result),
            Self::MemoryShort(reply) => answer(reply, result.map(|()| GaveWay::Now)),
        }
    }
}

impl SandboxTask {
    /// Ends the VMM of a paused sandbox, if there is one.
    pub(super) fn release(&mut self, releaser: Releaser) {
        match (self.vm.record.phase, &self.work) {
            (Phase::Paused, None) if self.vm.machine.is_some() => {
                self.releasers.push(releaser);
                self.begin_release();
            }
            (Phase::Paused, Some((Kind::Release, _))) => self.releasers.push(releaser),
            (Phase::Paused, None) => releaser.answer(Ok(())),
            (Phase::Paused, Some(_)) => {
                releaser.answer(Err(Error::Transitioning(self.vm.record.id.clone())));
            }
            _ => {
                let reason = format!("sandbox {} is not paused", self.vm.record.id);
                releaser.answer(Err(Error::Conflict(reason)));
            }
        }
    }

    /// As [`Self::release`], but what a loss of power would take is made durable before.
    pub(super) fn give_way(&mut self, reply: Reply<GaveWay>) {
        let stands_by =
            self.vm.record.phase == Phase::Paused && self.work.is_none() && self.vm.machine.is_some();
        if stands_by && !self.is_local() {
            self.gives_way = true;
            self.save_on(true);
            return answer(reply, Ok(GaveWay::WhenDurable));
        }
        self.release(Releaser::MemoryShort(reply));
    }

    /// Keeps the promise to give way, if nobody wanted the sandbox to go on meanwhile.
    pub(super) fn give_way_if_promised(&mut self) {
        let stands_by =
            self.vm.record.phase == Phase::Paused && self.work.is_none() && self.vm.machine.is_some();
        if self.gives_way && stands_by && self.is_local() && self.resumers.is_empty() {
            self.begin_release();
        }
    }

    fn is_local(&self) -> bool {
        self.vm.record.saves.last().is_some_and(|save| save.durability >= Durability::Local)
    }
}

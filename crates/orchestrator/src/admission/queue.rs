//! Who may start a VM next. Pure: no clock, no waiting, no I/O.
//!
//! ```text
//! callers      first come, first served: one that lacks something holds up those behind it, so that nobody is passed by
//! background   one at a time, and only while no caller waits; standbys only while the host has memory to spare
//! alone        waits for a moment without callers; from then on nobody is let in until it was, and has left
//! ```
//! A caller or a background start takes a place until the VM runs, and the memory of its guest for as long as the VM is kept.
//! What an earlier process left is counted without being asked for: only then more may be committed than the limit.

use std::collections::VecDeque;

/// Names one who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Ticket(u64);

/// On whose behalf something is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Somebody waits for the answer.
    Caller,
    /// A standby: it never makes others give way.
    Standby,
    /// The boot of a template, without which there are no sandboxes of it.
    Preparation,
    /// Nobody else may start anything meanwhile.
    Alone,
}

/// What is asked for, besides a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) purpose: Purpose,
    /// Memory of the guest in bytes; zero when it is counted already.
    pub(super) bytes: u64,
}

/// What there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// VMs that may be starting at once.
    pub(crate) places: usize,
    /// Memory of guests in bytes.
    pub(crate) bytes: u64,
    /// Callers that may wait.
    pub(crate) waiting: usize,
}

/// What is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// VMs that are starting.
    pub(crate) starting: usize,
    /// Memory of guests in bytes.
    pub(crate) bytes: u64,
    /// Callers that wait.
    pub(crate) waiting: usize,
}

/// Why one is not let in, or not even to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lack {
    /// Too little memory is left for it, or for one before it.
    Memory,
    /// All places are taken, or promised to those before it.
    Place,
}

#[derive(Debug)]
pub(super) struct Queue {
    limits: Limits,
    starting: usize,
    committed: u64,
    callers: VecDeque<(Ticket, Demand)>,
    background: VecDeque<(Ticket, Demand)>,
    background_runs: bool,
    /// Somebody who wants to be alone is next.
    closing: bool,
    /// And is.
    alone: bool,
    memory_is_low: bool,
    last_ticket: u64,
}

impl Queue {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            starting: 0,
            committed: 0,
            callers: VecDeque::new(),
            background: VecDeque::new(),
            background_runs: false,
            closing: false,
            alone: false,
            memory_is_low: false,
            last_ticket: 0,
        }
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    pub(super) fn taken(&self) -> Taken {
        Taken { starting: self.starting, bytes: self.committed, waiting: self.callers.len() }
    }

    /// Lets one wait; refuses when that is in vain, or too many callers do.
    pub(super) fn enter(&mut self, demand: Demand) -> Result<Ticket, Lack> {
        if demand.bytes > self.limits.bytes {
            return Err(Lack::Memory);
        }
        let caller = demand.purpose == Purpose::Caller;
        if caller
            && self.callers.len() >= self.limits.waiting
            && let Some(lack) = self.lack_of_next(demand)
        {
            return Err(lack);
        }
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        let lane = if caller { &mut self.callers } else { &mut self.background };
        lane.push_back((ticket, demand));
        Ok(ticket)
    }

    /// What a caller lacks that would be the next to come.
    fn lack_of_next(&self, demand: Demand) -> Option<Lack> {
        match self.callers.front() {
            Some((_, first)) => Some(self.lack_of(*first).unwrap_or(Lack::Place)),
            None => self.lack_of(demand),
        }
    }

    /// What a waiting one lacks.
    pub(super) fn lack(&self, ticket: Ticket) -> Lack {
        let waiting = self.callers.iter().chain(&self.background).find(|(other, _)| *other == ticket);
        let own = waiting.and_then(|(_, demand)| self.lack_of(*demand));
        let first = self.callers.front().and_then(|(_, demand)| self.lack_of(*demand));
        own.or(first).unwrap_or(Lack::Place)
    }

    /// Forgets one who waited.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        self.callers.retain(|(other, _)| *other != ticket);
        let alone = |(other, demand): &(Ticket, Demand)| *other == ticket && demand.purpose == Purpose::Alone;
        if self.background.iter().any(alone) {
            self.closing = false;
        }
        self.background.retain(|(other, _)| *other != ticket);
    }

    /// Lets the next one in, if somebody can be. To be asked again until nobody can.
    pub(super) fn grant(&mut self) -> Option<(Ticket, Demand)> {
        if self.alone {
            return None;
        }
        let background = self.background.front().copied().filter(|_| !self.background_runs);
        if let Some((_, Demand { purpose: Purpose::Alone, .. })) = background
            && (self.closing || self.callers.is_empty())
        {
            self.closing = true;
            if self.starting > 0 {
                return None;
            }
            (self.closing, self.alone) = (false, true);
            return self.background.pop_front();
        }
        let lane = match (self.callers.front(), background) {
            (Some((_, demand)), _) if self.lack_of(*demand).is_none() => &mut self.callers,
            (None, Some((_, demand))) if self.lack_of(demand).is_none() && self.may_begin(demand) => {
                self.background_runs = true;
                &mut self.background
            }
            _ => return None,
        };
        let granted = lane.pop_front();
        if let Some((_, demand)) = granted {
            self.starting += 1;
            self.committed = self.committed.saturating_add(demand.bytes);
        }
        granted
    }

    /// Whether the host lets this begin, however much may be committed.
    fn may_begin(&self, demand: Demand) -> bool {
        match demand.purpose {
            Purpose::Standby => !self.memory_is_low,
            Purpose::Caller | Purpose::Preparation | Purpose::Alone => true,
        }
    }

    fn lack_of(&self, demand: Demand) -> Option<Lack> {
        let sum = self.committed.checked_add(demand.bytes);
        let fits = demand.bytes == 0 || sum.is_some_and(|sum| sum <= self.limits.bytes);
        match (fits, self.starting < self.limits.places) {
            (false, _) => Some(Lack::Memory),
            (true, false) => Some(Lack::Place),
            (true, true) => None,
        }
    }

    /// How many bytes would have to be given back for the next one to be let in, and for no more to be committed than the limit.
    pub(super) fn lacking(&self) -> u64 {
        let preparation = |(_, demand): &&(Ticket, Demand)| demand.purpose == Purpose::Preparation;
        let first = self.callers.front().or_else(|| self.background.front().filter(preparation));
        let wanted = first.map_or(0, |(_, demand)| demand.bytes);
        self.committed.saturating_add(wanted).saturating_sub(self.limits.bytes)
    }

    /// A place is free again.
    pub(super) fn end_start(&mut self, purpose: Purpose) {
        match purpose {
            Purpose::Alone => self.alone = false,
            Purpose::Caller => self.starting = self.starting.saturating_sub(1),
            Purpose::Standby | Purpose::Preparation => {
                self.starting = self.starting.saturating_sub(1);
                self.background_runs = false;
            }
        }
    }

    /// Counts memory that is in use already.
    pub(super) fn adopt(&mut self, bytes: u64) {
        self.committed = self.committed.saturating_add(bytes);
    }

    /// Memory is free again.
    pub(super) fn free(&mut self, bytes: u64) {
        self.committed = self.committed.saturating_sub(bytes);
    }

    /// Whether the host has little memory left, whatever is committed.
    pub(super) fn set_low(&mut self, low: bool) {
        self.memory_is_low = low;
    }
}

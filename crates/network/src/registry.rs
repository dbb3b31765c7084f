//! Which slots there are and who has them, as data; no I/O.
//!
//! Owns the numbers (which address pair is in use), the queue of fresh slots, and where each slot of this process stands:
//!
//! ```text
//!            reserve                  pool                  take
//!   (free) ──────────▶ Building ───────────────▶ Pooled ──────────▶ Held ──forget──▶ (free)
//!                         │ └─────────hold──────────────────────────▲ ▲
//!                         └forget─▶ (free)        adopted by name ────┘
//! ```
//!
//! A number is free again only when [`Registry::forget`] says that nothing of its slot is left in the kernel.

use crate::settings::index_of_slot;
use crate::slot::SlotName;
use std::collections::{HashMap, HashSet, VecDeque};

/// The slots of one instance.
#[derive(Debug)]
pub(crate) struct Registry {
    capacity: u32,
    /// Where to look for the next free number: used ones rest for as long as possible.
    next: u32,
    numbers: HashSet<u32>,
    slots: HashMap<SlotName, Standing>,
    pool: VecDeque<SlotName>,
    sweeps: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Building(Purpose),
    Pooled,
    /// Handed out; how many sweeps had begun by then.
    Held(u64),
}

/// For whom a slot is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Pool,
    Caller,
}

/// A sweep that has begun: what was handed out since is safe from it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sweep(u64);

impl Registry {
    /// A registry for numbers below `capacity`, of which those in `found` are in use by slots of an earlier process.
    pub(crate) fn new(capacity: u32, found: impl IntoIterator<Item = u32>) -> Self {
        Self {
            capacity,
            next: 0,
            numbers: found.into_iter().collect(),
            slots: HashMap::new(),
            pool: VecDeque::new(),
            sweeps: 0,
        }
    }

    /// A name with a free number for a slot to be built, or none. `random` makes the name unique.
    pub(crate) fn reserve(&mut self, purpose: Purpose, random: u64) -> Option<SlotName> {
        let from_next = (self.next..self.capacity).chain(0..self.next);
        let number = from_next.into_iter().find(|number| !self.numbers.contains(number))?;
        self.next = (number + 1) % self.capacity;
        self.numbers.insert(number);
        let name = SlotName(format!("{number}-{random:016x}"));
        self.slots.insert(name.clone(), Standing::Building(purpose));
        Some(name)
    }

    /// The slot is complete and waits to be taken.
    pub(crate) fn pool(&mut self, name: SlotName) {
        self.slots.insert(name.clone(), Standing::Pooled);
        self.pool.push_back(name);
    }

    /// The oldest slot of the pool.
    pub(crate) fn take(&mut self) -> Option<SlotName> {
        let name = self.pool.pop_front()?;
        self.slots.insert(name.clone(), Standing::Held(self.sweeps));
        Some(name)
    }

    /// The slot is with a caller: built for it, or adopted.
    pub(crate) fn hold(&mut self, name: &SlotName) {
        if let Ok(number) = index_of_slot(name) {
            self.numbers.insert(number);
        }
        self.slots.insert(name.clone(), Standing::Held(self.sweeps));
    }

    /// Whether another slot has the number of this one by now. The number, and the veth that is named by it, are then
    /// that slot's: this one was removed before.
    pub(crate) fn has_heir(&self, name: &SlotName) -> bool {
        let Ok(number) = index_of_slot(name) else { return false };
        self.slots.keys().any(|other| other != name && index_of_slot(other).is_ok_and(|its| its == number))
    }

    /// Nothing of the slot is left.
    pub(crate) fn forget(&mut self, name: &SlotName) {
        if let Ok(number) = index_of_slot(name)
            && !self.has_heir(name)
        {
            self.numbers.remove(&number);
        }
        self.slots.remove(name);
        self.pool.retain(|pooled| pooled != name);
    }

    /// Nothing of a half-made slot is left, of which only the number was known.
    pub(crate) fn forget_number(&mut self, number: u32) {
        self.numbers.remove(&number);
    }

    /// Would another slot, beyond those being built for the pool, leave it within `size`?
    pub(crate) fn pool_wants(&self, size: usize) -> bool {
        let coming = Standing::Building(Purpose::Pool);
        let building = self.slots.values().filter(|standing| **standing == coming).count();
        self.pool.len() + building < size
    }

    /// How many slots wait in the pool.
    pub(crate) fn pooled(&self) -> usize {
        self.pool.len()
    }

    /// Takes all slots out of the pool.
    pub(crate) fn drain_pool(&mut self) -> Vec<SlotName> {
        std::iter::from_fn(|| self.take()).collect()
    }

    /// To be called before the kernel is asked what there is.
    pub(crate) fn begin_sweep(&mut self) -> Sweep {
        self.sweeps += 1;
        Sweep(self.sweeps)
    }

    /// Is this slot to stay: named by the caller, being built, in the pool, or handed out since the sweep began?
    fn survives(&self, sweep: Sweep, keep: &HashSet<&SlotName>, name: &SlotName) -> bool {
        keep.contains(name)
            || match self.slots.get(name) {
                None => false,
                Some(Standing::Building(_) | Standing::Pooled) => true,
                Some(Standing::Held(since)) => *since >= sweep.0,
            }
    }

    /// Of the slots and of the numbers found in the kernel, those that nobody has.
    pub(crate) fn strays(
        &self,
        sweep: Sweep,
        keep: &[SlotName],
        found: Vec<SlotName>,
        found_numbers: Vec<u32>,
    ) -> (Vec<SlotName>, Vec<u32>) {
        let keep: HashSet<&SlotName> = keep.iter().collect();
        let known = self.slots.keys().chain(keep.iter().copied());
        let mut named: HashSet<u32> = known
            .filter(|name| self.survives(sweep, &keep, name))
            .filter_map(|name| index_of_slot(name).ok())
            .collect();
        let strays: Vec<SlotName> =
            found.into_iter().filter(|name| !self.survives(sweep, &keep, name)).collect();
        // These go with their slot.
        named.extend(strays.iter().filter_map(|name| index_of_slot(name).ok()));
        let numbers = found_numbers.into_iter().filter(|number| !named.contains(number)).collect();
        (strays, numbers)
    }
}

#[cfg(test)]
mod tests;

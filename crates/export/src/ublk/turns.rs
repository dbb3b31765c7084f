//! Whose turn it is: devices one after the other, each with a limited share of the workers.
//!
//! Owns what waits, in the order in which it came. Knows neither threads nor time.

use std::collections::{HashMap, VecDeque};

#[derive(Debug)]
pub(super) struct Turns<T> {
    lines: HashMap<u32, Line<T>>,
    /// Devices whose turn comes, in this order.
    ready: VecDeque<u32>,
    /// What of one device may run at once, 1 or more.
    share: usize,
}

/// One device.
#[derive(Debug)]
struct Line<T> {
    waiting: VecDeque<T>,
    running: usize,
    /// It is in `ready`.
    listed: bool,
}

impl<T> Turns<T> {
    pub(super) fn new(share: usize) -> Self {
        Self { lines: HashMap::new(), ready: VecDeque::new(), share: share.max(1) }
    }

    /// Puts something at the end of a device's line.
    pub(super) fn push(&mut self, device: u32, item: T) {
        let new = || Line { waiting: VecDeque::new(), running: 0, listed: false };
        self.lines.entry(device).or_insert_with(new).waiting.push_back(item);
        self.list(device);
    }

    /// What is to run next; [`Turns::finished`] is to be called for it.
    pub(super) fn take(&mut self) -> Option<T> {
        let device = self.ready.pop_front()?;
        let line = self.lines.get_mut(&device)?;
        line.listed = false;
        let item = line.waiting.pop_front()?;
        line.running += 1;
        self.list(device);
        Some(item)
    }

    /// Something of the device runs no longer.
    pub(super) fn finished(&mut self, device: u32) {
        if let Some(line) = self.lines.get_mut(&device) {
            line.running = line.running.saturating_sub(1);
        }
        self.list(device);
    }

    /// Whether [`Turns::take`] would give something.
    pub(super) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Gives a device a turn if it has something to do and may.
    fn list(&mut self, device: u32) {
        let Some(line) = self.lines.get_mut(&device) else { return };
        if line.waiting.is_empty() && line.running == 0 {
            self.lines.remove(&device);
        } else if !line.listed && !line.waiting.is_empty() && line.running < self.share {
            line.listed = true;
            self.ready.push_back(device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn devices_take_turns_within_their_share() {
        let mut turns = Turns::new(2);
        for item in 0..4 {
            turns.push(1, (1, item));
        }
        turns.push(2, (2, 0));
        let taken: Vec<_> = std::iter::from_fn(|| turns.take()).collect();
        assert_eq!(taken, [(1, 0), (2, 0), (1, 1)]);
        assert!(!turns.is_ready());
        turns.finished(1);
        assert_eq!((turns.take(), turns.take()), (Some((1, 2)), None));
    }

    proptest! {
        /// Against a plain account of what waits and runs: nothing is lost, doubled or out of order, no device has more than
        /// its share, and nothing waits while it could run.
        #[test]
        fn all_that_is_pushed_is_taken(share in 1_usize..4, steps in prop::collection::vec((0_u32..4, 0_u8..3), 0..200)) {
            let mut turns = Turns::new(share);
            let mut waiting: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
            let mut running: BTreeMap<u32, usize> = BTreeMap::new();
            for (item, (device, step)) in steps.into_iter().enumerate() {
                match step {
                    0 => {
                        turns.push(device, (device, item));
                        waiting.entry(device).or_default().push_back(item);
                    }
                    1 => match turns.take() {
                        Some((device, item)) => {
                            prop_assert_eq!(waiting.get_mut(&device).and_then(VecDeque::pop_front), Some(item));
                            *running.entry(device).or_default() += 1;
                        }
                        None => {
                            let able = |(device, line): (&u32, &VecDeque<usize>)| {
                                !line.is_empty() && running.get(device).copied().unwrap_or(0) < share
                            };
                            prop_assert!(!waiting.iter().any(able));
                        }
                    },
                    _ => if let Some(count) = running.get_mut(&device).filter(|count| **count > 0) {
                        *count -= 1;
                        turns.finished(device);
                    },
                }
                prop_assert!(running.values().all(|count| *count <= share));
            }
        }
    }
}

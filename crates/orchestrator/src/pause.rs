//! Pauses between attempts at the same thing: each is twice as long as the one before, up to a longest one.
//!
//! A value, without a clock: it says how long to wait, and does not wait.

use std::time::Duration;

/// The pauses of one thing that is tried again and again.
#[derive(Debug, Clone)]
pub(crate) struct GrowingPause {
    next: Duration,
    longest: Duration,
}

impl GrowingPause {
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Self { next: first, longest }
    }

    /// The pause before the next attempt; the one after it will be longer.
    pub(crate) fn take(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.longest);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let mut pauses = GrowingPause::new(Duration::from_secs(1), Duration::from_secs(5));
        let seconds: Vec<_> = (0..5).map(|_| pauses.take().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 5, 5]);
    }
}

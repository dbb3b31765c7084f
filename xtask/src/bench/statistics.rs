//! Percentiles of measured times. Pure.

use std::time::Duration;

/// Measured times of one thing, in milliseconds.
#[derive(Debug, Clone, Default)]
pub(super) struct Sample {
    values: Vec<f64>,
}

impl Sample {
    pub(super) fn add(&mut self, time: Duration) {
        self.add_milliseconds(time.as_secs_f64() * 1000.0);
    }

    pub(super) fn add_milliseconds(&mut self, value: f64) {
        let place = self.values.partition_point(|known| *known <= value);
        self.values.insert(place, value);
    }

    pub(super) fn count(&self) -> usize {
        self.values.len()
    }

    /// The smallest value that at least `percent` of all values do not exceed (nearest rank); none without values.
    pub(super) fn percentile(&self, percent: usize) -> Option<f64> {
        let rank = (self.values.len() * percent).div_ceil(100).max(1);
        self.values.get(rank - 1).copied()
    }

    pub(super) fn max(&self) -> Option<f64> {
        self.values.last().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let mut sample = Sample::default();
        for value in (1..=100).rev() {
            sample.add(Duration::from_millis(value));
        }
        assert_eq!(sample.percentile(50), Some(50.0));
        assert_eq!(sample.percentile(99), Some(99.0));
        assert_eq!(sample.percentile(100), sample.max());
        assert_eq!(sample.count(), 100);
    }

    #[test]
    fn nothing_measured_gives_nothing() {
        assert_eq!(Sample::default().percentile(50), None);
        assert_eq!(Sample::default().max(), None);
    }
}

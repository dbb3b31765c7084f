//! Lets no more bytes through than a publication may upload.
//!
//! Owns the count of one publication. Must not know what the bytes are.

use super::PublishOptions;
use crate::error::{RepositoryError, Result};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use std::num::NonZeroU32;

/// What is counted: so that rates from 1 KiB to 1 TiB a second fit into the limiter's numbers.
const CELL_BYTES: u64 = 1024;

/// The bytes that may go now.
#[derive(Debug)]
pub(super) struct Bandwidth {
    limiter: Option<DefaultDirectRateLimiter>,
    burst: NonZeroU32,
}

impl Bandwidth {
    pub(super) fn new(options: &PublishOptions) -> Self {
        // One part may go at once: its bytes are sent in one request.
        let burst = cells(options.part_bytes);
        let limiter = options
            .bytes_per_second
            .map(|rate| RateLimiter::direct(Quota::per_second(cells(rate.get())).allow_burst(burst)));
        Self { limiter, burst }
    }

    /// Waits until `bytes` more may go.
    pub(super) async fn take(&self, bytes: u64) -> Result<()> {
        let Some(limiter) = &self.limiter else { return Ok(()) };
        let mut left = cells(bytes).get();
        // A blob of very many bytes has larger parts than the limiter lets through at once.
        while let Some(now) = NonZeroU32::new(left.min(self.burst.get())) {
            limiter.until_n_ready(now).await.map_err(|error| RepositoryError::Invalid {
                what: "the bandwidth".to_owned(),
                reason: error.to_string(),
            })?;
            left -= now.get();
        }
        Ok(())
    }
}

fn cells(bytes: u64) -> NonZeroU32 {
    let cells = u32::try_from(bytes.div_ceil(CELL_BYTES)).unwrap_or(u32::MAX);
    NonZeroU32::new(cells).unwrap_or(NonZeroU32::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;
    use std::time::{Duration, Instant};

    #[tokio::test]
    async fn no_more_than_the_rate_goes_through() {
        let options = PublishOptions {
            bytes_per_second: NonZeroU64::new(1 << 20),
            part_bytes: 64 << 10,
            ..PublishOptions::default()
        };
        let bandwidth = Bandwidth::new(&options);
        let begin = Instant::now();
        for bytes in [64 << 10, 200 << 10, 1, 56 << 10] {
            bandwidth.take(bytes).await.unwrap();
        }
        // 321 KiB, of which 64 KiB go at once, at 1 MiB a second. A slow machine only makes it longer.
        assert!(begin.elapsed() >= Duration::from_millis(240), "{:?}", begin.elapsed());
    }
}

//! How much of the image below is looked through: a run of it may be as long as the disk, and its end as far to seek.

use super::*;
use crate::commit::write_layer;

const SIZE: u64 = 1 << 30;

/// Data from its beginning to its end, in one run, that counts how many bytes it was looked through.
#[derive(Debug, Default)]
struct OneRun {
    seen: AtomicU64,
}

impl OneRun {
    fn seen_by<T>(&self, act: impl FnOnce() -> T) -> u64 {
        let before = self.seen.load(Ordering::Relaxed);
        act();
        self.seen.load(Ordering::Relaxed) - before
    }
}

impl Image for OneRun {
    fn size(&self) -> u64 {
        SIZE
    }

    fn read_at(&self, buffer: &mut [u8], _: u64) -> Result<(), StorageError> {
        buffer.fill(7);
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        self.next_data_in(offset..SIZE)
    }

    fn next_data_in(&self, range: Range<u64>) -> Result<Option<Range<u64>>, StorageError> {
        let run = range.start..range.end.min(SIZE);
        self.seen.fetch_add(run.end.saturating_sub(run.start), Ordering::Relaxed);
        Ok((run.start < run.end).then_some(run))
    }
}

/// A disk on one run of data; a sealed top has every fourth block of 4 MiB in its middle if it is `fragmented`.
fn new_disk(lower: &Arc<OneRun>, fragmented: bool) -> LayeredDisk {
    let directory = Simulation::default().directory();
    let disk = LayeredDisk::create_in(directory, lower.clone(), SIZE, u64::MAX, &BOOT).unwrap();
    if fragmented {
        for block in (0..1024).step_by(4) {
            disk.write_at(&[1; 4096], SIZE / 2 + block * BLOCK_BYTES).unwrap();
        }
        disk.seal().unwrap();
    }
    disk
}

#[test]
fn a_discard_looks_through_what_it_covers_once() {
    for fragmented in [false, true] {
        let lower = Arc::new(OneRun::default());
        let disk = new_disk(&lower, fragmented);
        let all = lower.seen_by(|| disk.discard(0, SIZE).unwrap());
        assert!(all <= SIZE, "{all} bytes for {SIZE}, fragmented: {fragmented}");
        assert_eq!(disk.usage().zero_blocks, SIZE / BLOCK_BYTES);
        let again = lower.seen_by(|| disk.discard(0, SIZE).unwrap());
        assert!(again <= SIZE, "{again} bytes for {SIZE}, fragmented: {fragmented}");
    }
}

#[test]
fn a_short_discard_looks_through_little() {
    const COUNT: u64 = 100;
    for fragmented in [false, true] {
        let lower = Arc::new(OneRun::default());
        let disk = new_disk(&lower, fragmented);
        let seen = lower.seen_by(|| {
            for number in 0..COUNT {
                disk.discard(SIZE / 2 + number * 3 * BLOCK_BYTES, 2 * BLOCK_BYTES).unwrap();
                disk.write_zeroes(number * 3 * BLOCK_BYTES + 100, 2 * BLOCK_BYTES).unwrap();
            }
        });
        assert!(seen <= COUNT * 3 * BLOCK_BYTES, "{seen} bytes, fragmented: {fragmented}");
    }
}

#[test]
fn the_runs_of_a_stack_are_found_in_one_pass() {
    let lower = Arc::new(OneRun::default());
    let disk = new_disk(&lower, true);
    let image = disk.sealed_image();
    let seen = lower.seen_by(|| assert_eq!(image.next_data(0).unwrap(), Some(0..SIZE)));
    assert!(seen <= SIZE, "{seen} bytes for {SIZE}");
}

#[test]
fn zeros_of_a_new_layer_look_through_what_they_hide() {
    let lower = Arc::new(OneRun::default());
    let disk = new_disk(&lower, false);
    for number in 0..100 {
        disk.discard(number * 2 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    }
    disk.seal().unwrap();
    let image = disk.sealed_image();
    let source = Source::Delta(&image, Below::Image(&**image.lower()));
    let mut layer = Vec::new();
    let seen = lower
        .seen_by(|| write_layer(source, &LayerOptions::default(), &mut layer, Path::new("layer")).unwrap());
    assert!(seen <= 100 * BLOCK_BYTES, "{seen} bytes for 100 blocks");
}

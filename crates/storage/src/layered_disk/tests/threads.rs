//! Many threads on one disk.

use super::faults::SmallFilesystem;
use super::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::atomic::AtomicBool;

const WRITERS: u64 = 4;
const BLOCKS_PER_WRITER: u64 = 40;
const SIZE: u64 = WRITERS * BLOCKS_PER_WRITER * BLOCK_BYTES;

/// Writers have blocks of their own, next to one another's, and know what is in them.
fn write(disk: &LayeredDisk, writer: u64, model: &mut [u8], rounds: u64) {
    let mut random = StdRng::seed_from_u64(writer);
    for _ in 0..rounds {
        let own = random.random_range(0..BLOCKS_PER_WRITER);
        let start = random.random_range(0..BLOCK_BYTES);
        let range = start..random.random_range(start + 1..=BLOCK_BYTES);
        let offset = (own * WRITERS + writer) * BLOCK_BYTES;
        let block = &mut model[(own * BLOCK_BYTES) as usize..((own + 1) * BLOCK_BYTES) as usize];
        match random.random_range(0..10) {
            0 => {
                disk.discard(offset, BLOCK_BYTES).unwrap();
                block.fill(0);
            }
            1 => {
                disk.write_zeroes(offset + range.start, range.end - range.start).unwrap();
                block[range.start as usize..range.end as usize].fill(0);
            }
            2 => {
                let mut found = vec![0xEE; BLOCK_BYTES as usize];
                disk.read_at(&mut found, offset).unwrap();
                assert_same(&found, block, "my block");
            }
            3 if random.random_bool(0.1) => disk.flush().unwrap(),
            _ => {
                let bytes = vec![random.random(); (range.end - range.start) as usize];
                disk.write_at(&bytes, offset + range.start).unwrap();
                block[range.start as usize..range.end as usize].copy_from_slice(&bytes);
            }
        }
    }
}

#[test]
fn threads_do_not_disturb_one_another() {
    // In memory: hundreds of seals and merges would wait for a disk.
    let host = SmallFilesystem::new(256 << 20);
    let path = host.0.path().join("disk");
    let lower = Arc::new(Stripes { size: SIZE / 2 });
    let start = model_of(&lower, SIZE);
    let own = |block: u64, writer: u64| ((block * WRITERS + writer) * BLOCK_BYTES) as usize;
    let mut models: Vec<Vec<u8>> = (0..WRITERS)
        .map(|writer| {
            (0..BLOCKS_PER_WRITER)
                .flat_map(|block| start[own(block, writer)..][..BLOCK_BYTES as usize].to_vec())
                .collect()
        })
        .collect();
    let disk = LayeredDisk::create(&path, lower.clone(), SIZE, u64::MAX, &BOOT).unwrap();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (disk, ended) = (&disk, &ended);
        let structure = scope.spawn(move || {
            let mut merged = 0;
            while merged == 0 || !ended.load(Ordering::Acquire) {
                let sealed = disk.seal().unwrap();
                let checksum = || {
                    let mut bytes = vec![0; SIZE as usize];
                    sealed.read_changed(&mut bytes, 0).unwrap();
                    crc32c::crc32c(&bytes)
                };
                let first = checksum();
                std::thread::yield_now();
                assert_eq!(checksum(), first, "nothing is written to what is sealed");
                drop(sealed);
                if disk.usage().sealed_tops > 6
                    && matches!(disk.compact(5).unwrap(), Compaction::Merged { .. })
                {
                    merged += 1;
                }
            }
        });
        let writers: Vec<_> = (0..WRITERS)
            .zip(&mut models)
            .map(|(writer, model)| scope.spawn(move || write(disk, writer, model, 20_000)))
            .collect();
        let outcomes: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        ended.store(true, Ordering::Release);
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
        structure.join().unwrap();
    });
    let check = |disk: &LayeredDisk| {
        let found = content(disk);
        for (writer, model) in (0..WRITERS).zip(&models) {
            for block in 0..BLOCKS_PER_WRITER {
                let expected = &model[(block * BLOCK_BYTES) as usize..][..BLOCK_BYTES as usize];
                assert_same(&found[own(block, writer)..][..BLOCK_BYTES as usize], expected, "at the end");
            }
        }
    };
    check(&disk);
    let used = disk.usage();
    assert_eq!(used.charged_bytes, quota::shown_bytes(&disk));
    drop(disk);
    let disk = LayeredDisk::open(&path, lower, &BOOT).unwrap();
    check(&disk);
    let found = disk.usage();
    assert_eq!((found.stored_bytes, found.charged_bytes), (used.stored_bytes, used.charged_bytes));
}

#[test]
fn overlapping_writes_end_one_way_or_the_other_in_each_block() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let lower = Arc::new(Stripes { size: 0 });
    let size = 512 * BLOCK_BYTES;
    let disk = LayeredDisk::create(&path, lower.clone(), size, size, &BOOT).unwrap();
    std::thread::scope(|scope| {
        for thread in 1..=4_u8 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..200_u64 {
                    let offset = round * 7 % 500 * BLOCK_BYTES;
                    disk.write_at(&[thread; 3 * BLOCK_BYTES as usize], offset).unwrap();
                    if round % 5 == 0 {
                        disk.discard(offset, 2 * BLOCK_BYTES).unwrap();
                    }
                }
            });
        }
    });
    let found = content(&disk);
    assert!(found.iter().all(|byte| *byte <= 4));
    let usage = disk.usage();
    assert_eq!(usage.charged_bytes, usage.data_blocks * BLOCK_BYTES);
    drop(disk);
    let disk = LayeredDisk::open(&path, lower, &BOOT).unwrap();
    assert_same(&content(&disk), &found, "what was acknowledged");
    assert_eq!(disk.usage().data_blocks, usage.data_blocks);
}

#[test]
fn parts_of_a_block_that_are_written_at_once_are_both_there() {
    let directory = tempfile::tempdir().unwrap();
    let lower = Arc::new(Stripes { size: BLOCK_BYTES });
    let disk =
        LayeredDisk::create(&directory.path().join("disk"), lower, BLOCK_BYTES, BLOCK_BYTES, &BOOT).unwrap();
    let (together, torn) = (std::sync::Barrier::new(2), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for half in 0..2_u64 {
            let (disk, together, torn) = (&disk, &together, &torn);
            scope.spawn(move || {
                for round in 0..2000_u64 {
                    if half == 0 {
                        disk.discard(0, BLOCK_BYTES).unwrap();
                    }
                    together.wait();
                    disk.write_at(&[round as u8 | 1; 2048], half * 2048).unwrap();
                    together.wait();
                    // Told at the end: the other thread waits for this one.
                    if content(disk).iter().any(|byte| *byte != round as u8 | 1) {
                        torn.fetch_add(1, Ordering::Relaxed);
                    }
                    together.wait();
                }
            });
        }
    });
    assert_eq!(torn.into_inner(), 0);
}

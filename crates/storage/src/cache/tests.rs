use super::*;
use std::sync::Barrier;
use std::time::Duration;

fn block(fill: u8, bytes: usize) -> Arc<[u8]> {
    vec![fill; bytes].into()
}

fn failure() -> StorageError {
    StorageError::Damaged { name: "blob".to_owned(), reason: "on purpose".to_owned() }
}

#[test]
fn a_block_is_decoded_once_and_counted() {
    let cache = BlockCache::new(1 << 20);
    let (one, other) = (cache.new_blob_id(), cache.new_blob_id());
    assert_ne!(one, other);
    let first = cache.get_or_decode(one, 7, || Ok(block(1, 4096))).unwrap();
    let again = cache.get_or_decode(one, 7, || panic!("it is there")).unwrap();
    assert!(Arc::ptr_eq(&first, &again));
    assert_eq!(*cache.get_or_decode(other, 7, || Ok(block(2, 4096))).unwrap(), [2; 4096]);
    let counts = cache.counts();
    assert_eq!((counts.hits, counts.misses, counts.blocks), (1, 2, 2));
    assert_eq!(counts.bytes, 2 * (4096 + ENTRY_OVERHEAD_BYTES));
    cache.clear();
    assert_eq!(cache.counts().bytes, 0);
}

#[test]
fn a_failure_is_returned_and_not_kept() {
    let cache = BlockCache::new(1 << 20);
    let blob = cache.new_blob_id();
    assert!(cache.get_or_decode(blob, 0, || Err(failure())).is_err());
    assert_eq!(*cache.get_or_decode(blob, 0, || Ok(block(3, 8))).unwrap(), [3; 8]);
    assert_eq!(cache.counts().misses, 2);
}

#[test]
fn readers_at_once_decode_once_and_a_failure_passes_the_turn() {
    const READERS: usize = 8;
    let cache = BlockCache::new(1 << 20);
    let blob = cache.new_blob_id();
    let (start, decoded) = (Barrier::new(READERS), AtomicU64::new(0));
    let results: Vec<_> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    cache.get_or_decode(blob, 1, || {
                        let turn = decoded.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(20));
                        if turn == 0 { Err(failure()) } else { Ok(block(9, 4096)) }
                    })
                })
            })
            .collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert_eq!(decoded.load(Ordering::SeqCst), 2, "the failed one and the next");
    assert_eq!(results.iter().filter(|result| result.is_err()).count(), 1);
    assert!(results.iter().flatten().all(|found| **found == [9; 4096]));
}

#[test]
fn bytes_stay_bounded_whatever_the_capacity_and_block_size() {
    for capacity in [0, 1 << 20, 3 << 20, 9 << 20, 70 << 20] {
        for bytes in [4096, 65536] {
            let cache = BlockCache::new(capacity);
            let blob = cache.new_blob_id();
            let enough = cache.counts().capacity_bytes * 2 / bytes as u64;
            for number in 0..enough {
                cache.get_or_decode(blob, number, || Ok(block(1, bytes))).unwrap();
            }
            let counts = cache.counts();
            assert!(counts.bytes <= counts.capacity_bytes, "{counts:?}");
            assert!(counts.bytes * 2 > counts.capacity_bytes, "it is used: {counts:?}");
        }
    }
}

#[test]
fn a_reader_of_small_pieces_does_not_decode_again() {
    let cache = BlockCache::new(0);
    let blob = cache.new_blob_id();
    let blocks = 100;
    for number in 0..blocks {
        for _piece in 0..16 {
            cache.get_or_decode(blob, number, || Ok(block(1, 65536))).unwrap();
        }
    }
    assert_eq!(cache.counts().misses, blocks);
}

#[test]
fn a_long_scan_leaves_what_is_used_again() {
    let cache = BlockCache::new(8 << 20);
    let (used, scanned) = (cache.new_blob_id(), cache.new_blob_id());
    let working_set = 256;
    for _round in 0..4 {
        for number in 0..working_set {
            cache.get_or_decode(used, number, || Ok(block(1, 4096))).unwrap();
        }
    }
    for number in 0..20_000 {
        cache.get_or_decode(scanned, number, || Ok(block(2, 4096))).unwrap();
    }
    let before = cache.counts().misses;
    for number in 0..working_set {
        cache.get_or_decode(used, number, || Ok(block(1, 4096))).unwrap();
    }
    let lost = cache.counts().misses - before;
    assert!(lost * 10 < working_set, "{lost} of {working_set} were displaced");
}

#[test]
fn scratch_is_reused_and_bounded() {
    let cache = BlockCache::new(0);
    cache.with_scratch(|scratch| scratch.record.resize(123, 1));
    cache.with_scratch(|scratch| assert_eq!(scratch.record.len(), 123));
    let threads = IDLE_SCRATCHES + 8;
    let all_at_once = Barrier::new(threads);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                cache.with_scratch(|_| {
                    all_at_once.wait();
                });
            });
        }
    });
    assert_eq!(cache.idle().len(), IDLE_SCRATCHES);
}

//! Memory layers against plain bytes.

use super::*;
use crate::blob::FileBlob;
use crate::zfile::{self, ZFileOptions};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt;

const PAGES: u64 = 40;
const BYTES: u64 = PAGES * BLOCK_BYTES;

fn cache() -> Arc<BlockCache> {
    Arc::new(BlockCache::new(1 << 20))
}

/// A sparse file with pages of one byte each.
fn file(path: &Path, pages: &[(u64, u8)]) {
    let file = File::create(path).unwrap();
    file.set_len(BYTES).unwrap();
    for (page, byte) in pages {
        file.write_all_at(&[*byte; BLOCK_BYTES as usize], page * BLOCK_BYTES).unwrap();
    }
}

fn read(files: &MemoryFiles) -> Vec<u8> {
    let image = open(files, BYTES, &cache()).unwrap();
    let mut bytes = vec![9; BYTES as usize];
    // Not whole pages, to see the borders of segments.
    for (number, part) in bytes.chunks_mut(5000).enumerate() {
        image.read_at(part, number as u64 * 5000).unwrap();
    }
    let mut shown = vec![0; BYTES as usize];
    let mut position = 0;
    while let Some(data) = image.next_data(position).unwrap() {
        assert!(data.start >= position && data.end > data.start);
        image.read_at(&mut shown[data.start as usize..data.end as usize], data.start).unwrap();
        position = data.end;
    }
    assert!(shown == bytes, "what is no data is zeros");
    bytes
}

/// The first byte of each page.
fn pages(files: &MemoryFiles) -> Vec<u8> {
    let bytes = read(files);
    bytes
        .chunks(BLOCK_BYTES as usize)
        .map(|page| {
            assert!(page.iter().all(|byte| *byte == page[0]));
            page[0]
        })
        .collect()
}

struct Testbed {
    directory: tempfile::TempDir,
    made: usize,
}

impl Testbed {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), made: 0 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn image(&self, pages: &[(u64, u8)]) -> MemoryFiles {
        file(&self.path("image"), pages);
        MemoryFiles { image: Some(self.path("image")), layers: Vec::new() }
    }

    fn save(
        &mut self,
        below: &MemoryFiles,
        start: &MemoryFiles,
        changes: &[(u64, u8)],
        over: Over,
    ) -> Result<NewMemory, StorageError> {
        let file_path = self.path("changes");
        file(&file_path, changes);
        self.made += 1;
        let new = NewLayer { below, start, changes: &file_path, over, bytes: BYTES };
        write(&new, &self.path(&format!("layer-{}", self.made)), &cache())
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[test]
fn only_what_differs_is_stored() {
    let mut testbed = Testbed::new();
    let start = testbed.image(&[(0, 1), (1, 2), (2, 3), (30, 4)]);
    // Equal, other, zeros over data, zeros over nothing, new.
    let changes = [(0, 1), (1, 9), (2, 0), (5, 0), (6, 7)];
    let made = testbed.save(&start, &start, &changes, Over::Start).unwrap();
    assert_eq!(made.summary.data_bytes, 2 * BLOCK_BYTES);
    assert_eq!(made.summary.entries, 3, "page 1, zeros at 2, page 6");
    let now = pages(&made.files);
    assert_eq!((now[0], now[1], now[2], now[5], now[6], now[30]), (1, 9, 0, 0, 7, 4));
    // The same changes once more cost nothing.
    let again = testbed.save(&made.files, &start, &changes, Over::Start).unwrap();
    assert_eq!((again.summary.entries, again.summary.data_bytes), (0, 0));
    assert_eq!(pages(&again.files), now);
}

#[test]
fn pages_that_are_not_changed_any_more_are_the_starts_again() {
    let mut testbed = Testbed::new();
    let start = testbed.image(&[(0, 1), (1, 2)]);
    let first = testbed.save(&start, &start, &[(0, 8), (1, 8), (2, 8)], Over::Start).unwrap();
    let second = testbed.save(&first.files, &start, &[(1, 8)], Over::Start).unwrap();
    assert_eq!(pages(&second.files)[..3], [1, 8, 0]);
    assert_eq!(second.summary.data_bytes, BLOCK_BYTES, "page 0; page 2 is a zeroed entry");
    // A log of writes says nothing of them.
    let third = testbed.save(&first.files, &start, &[(1, 9)], Over::Below).unwrap();
    assert_eq!(pages(&third.files)[..3], [8, 9, 8]);
}

#[test]
fn a_whole_capture_hides_all_that_is_below() {
    let mut testbed = Testbed::new();
    let start = testbed.image(&[(0, 1), (1, 2), (39, 3)]);
    let made = testbed.save(&start, &start, &[(1, 2), (7, 7)], Over::Nothing).unwrap();
    let mut expected = vec![0; PAGES as usize];
    (expected[1], expected[7]) = (2, 7);
    assert_eq!(pages(&made.files), expected);
    assert_eq!(made.summary.data_bytes, BLOCK_BYTES);
    let nothing = MemoryFiles::default();
    let alone = testbed.save(&nothing, &nothing, &[(1, 2), (3, 0)], Over::Nothing).unwrap();
    assert_eq!(alone.summary.entries, 1, "zeros over nothing are nothing");
    assert_eq!(pages(&alone.files)[..4], [0, 2, 0, 0]);
}

#[test]
fn a_long_chain_is_replaced_by_one_layer_and_its_files_stay() {
    let mut testbed = Testbed::new();
    let start = testbed.image(&[(0, 1), (20, 5)]);
    let mut files = start.clone();
    for number in 0..LONGEST as u8 {
        let changes = [(u64::from(number), 100 + number), (39, number)];
        files = testbed.save(&files, &start, &changes, Over::Below).unwrap().files;
    }
    assert_eq!(files.layers.len(), LONGEST);
    let before = pages(&files);
    let made = testbed.save(&files, &start, &[(20, 0), (2, 0)], Over::Below).unwrap();
    assert_eq!((made.files.layers.len(), &made.files.image), (1, &start.image));
    let mut expected = before.clone();
    (expected[20], expected[2]) = (0, 0);
    assert_eq!(pages(&made.files), expected);
    assert_eq!(made.summary.data_bytes, LONGEST as u64 * BLOCK_BYTES, "each changed page once");
    assert_eq!(pages(&files), before, "whoever maps the old chain sees what it was");
}

#[test]
fn damage_below_and_wrong_sizes_are_errors_and_leave_no_file() {
    let mut testbed = Testbed::new();
    let start = testbed.image(&[(0, 1)]);
    let made = testbed.save(&start, &start, &[(3, 7), (4, 200)], Over::Start).unwrap();
    // Compressed, so that it has checksums; then one bit of its data is wrong.
    let (plain, damaged) = (FileBlob::open(&made.files.layers[0]).unwrap(), testbed.path("damaged"));
    let options = ZFileOptions::lz4();
    let mut sink = File::create(&damaged).unwrap();
    zfile::write(&plain, &mut sink, options).unwrap();
    let mut bytes = std::fs::read(&damaged).unwrap();
    // The second block of 4 KiB of the layer is its first page of data.
    let place = 512 + 60;
    bytes[place] ^= 0x10;
    std::fs::write(&damaged, bytes).unwrap();
    let below = MemoryFiles { layers: vec![damaged], ..start.clone() };
    let names = testbed.names();
    for over in [Over::Below, Over::Start, Over::Nothing] {
        let error = testbed.save(&below, &start, &[(4, 9), (3, 1)], over).unwrap_err();
        assert!(matches!(error, StorageError::Damaged { .. }), "{error}");
        assert_eq!(testbed.names(), names);
    }
    let missing = MemoryFiles { layers: vec![testbed.path("missing")], ..start.clone() };
    assert!(testbed.save(&missing, &start, &[], Over::Below).is_err());
    File::options().write(true).open(testbed.path("image")).unwrap().set_len(BYTES - 4096).unwrap();
    let error = testbed.save(&start, &start, &[(1, 1)], Over::Below).unwrap_err();
    assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
    assert_eq!(testbed.names(), names);
}

#[test]
fn what_an_earlier_attempt_left_is_replaced() {
    let mut testbed = Testbed::new();
    let start = testbed.image(&[]);
    std::fs::write(testbed.path("layer-1"), "half").unwrap();
    let made = testbed.save(&start, &start, &[(3, 7)], Over::Start).unwrap();
    assert_eq!(pages(&made.files)[3], 7);
}

/// One step of a guest's life: pages that are written, and how the capture after it says so.
#[derive(Debug, Clone)]
struct Generation {
    writes: Vec<(u64, u8)>,
    over: Over,
    /// The VMM is another one after this capture, started from it.
    restarted: bool,
}

fn generation() -> impl Strategy<Value = Generation> {
    let over = prop_oneof![Just(Over::Nothing), Just(Over::Start), Just(Over::Below)];
    // Few contents, so that many pages are equal or zeros.
    let writes = proptest::collection::vec((0..PAGES, 0_u8..4), 0..30);
    (writes, over, proptest::bool::weighted(0.3)).prop_map(|(writes, over, restarted)| Generation {
        writes,
        over,
        restarted,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Whatever a guest writes and however its captures are told, the chain reads as its memory, stores no page that the chain
    /// below has, and earlier chains read as before.
    #[test]
    fn a_chain_reads_as_the_memory_over_many_generations(
        image in proptest::collection::vec((0..PAGES, 0_u8..4), 0..30),
        generations in proptest::collection::vec(generation(), 1..14),
    ) {
        let mut testbed = Testbed::new();
        let mut start = testbed.image(&image);
        let mut memory = pages(&start);
        let (mut start_memory, mut below, mut earlier) = (memory.clone(), start.clone(), Vec::new());
        // What was written since the VMM's start and since its last capture; a page may have got its old content again.
        let mut since_start = std::collections::BTreeSet::new();
        for generation in &generations {
            let mut since_capture = std::collections::BTreeSet::new();
            for (page, byte) in &generation.writes {
                memory[*page as usize] = *byte;
                since_capture.insert(*page);
            }
            since_start.extend(since_capture.iter().copied());
            let now = |page: &u64| (*page, memory[*page as usize]);
            let changes: Vec<(u64, u8)> = match generation.over {
                Over::Below => since_capture.iter().map(now).collect(),
                Over::Start => since_start.iter().map(now).collect(),
                Over::Nothing => (0..PAGES).map(|page| now(&page)).filter(|(_, byte)| *byte != 0).collect(),
            };
            let before = pages(&below);
            let made = testbed.save(&below, &start, &changes, generation.over).unwrap();
            prop_assert_eq!(&pages(&made.files), &memory);
            if made.files.layers.len() > 1 {
                let differ = before.iter().zip(&memory).filter(|(one, other)| one != other && **other != 0).count();
                prop_assert_eq!(made.summary.data_bytes, differ as u64 * BLOCK_BYTES);
            }
            prop_assert!(made.files.layers.len() <= LONGEST);
            earlier.push((made.files.clone(), memory.clone()));
            below = made.files;
            if generation.restarted {
                (start, start_memory) = (below.clone(), memory.clone());
                since_start.clear();
            }
        }
        prop_assert_eq!(&pages(&start), &start_memory);
        for (files, memory) in earlier {
            prop_assert_eq!(&pages(&files), &memory);
        }
    }
}

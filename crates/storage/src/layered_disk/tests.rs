//! Disks against a plain list of bytes: whatever is done to them, and whatever kills them.

mod child;
mod compaction;
mod cost;
mod faults;
mod log_rewrite;
mod power_cut;
mod quota;
mod threads;

use super::*;
use crate::blob::FileBlob;
use crate::chain::LayerChain;
use crate::commit::{Below, LayerOptions, Source, write_layer_file};
use crate::layer::Layer;
use crate::top::simulation::{Act, Simulation};
use crate::{ChangeKind, Delta};
use proptest::prelude::*;

/// Two blocks of data, one of zeros, and so on; an image that ends in the middle of a block.
#[derive(Debug)]
pub(super) struct Stripes {
    pub(super) size: u64,
}

impl Stripes {
    fn byte(position: u64) -> u8 {
        let block = position / BLOCK_BYTES;
        if block % 3 == 2 { 0 } else { (block as u8).wrapping_mul(7) | 1 }
    }
}

impl Image for Stripes {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        assert!(offset + buffer.len() as u64 <= self.size);
        (offset..).zip(buffer).for_each(|(position, byte)| *byte = Self::byte(position));
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        let block = offset / BLOCK_BYTES;
        let start = if block % 3 == 2 { (block + 1) * BLOCK_BYTES } else { offset };
        let end = (start / BLOCK_BYTES / 3 * 3 + 2) * BLOCK_BYTES;
        Ok((start < self.size).then(|| start..end.min(self.size)))
    }
}

pub(super) const BOOT: BootId = BootId::new([1; 16]);

/// What is done to a disk.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Write {
        offset: u64,
        length: u64,
        byte: u8,
    },
    Discard {
        offset: u64,
        length: u64,
    },
    Zero {
        offset: u64,
        length: u64,
    },
    Flush,
    Seal,
    Durable,
    Compact(usize),
    /// To the seal that was so many seals ago.
    Rewind(usize),
    RewriteLog,
}

pub(super) fn step(size: u64) -> impl Strategy<Value = Step> {
    let range = (0..size, prop_oneof![1_u64..700, Just(BLOCK_BYTES), 1_u64..5 * BLOCK_BYTES]).prop_map(
        move |(offset, length)| match length {
            // Half of the ranges are of whole blocks.
            length if length % 2 == 0 => {
                let offset = offset / BLOCK_BYTES * BLOCK_BYTES;
                (offset, length.next_multiple_of(BLOCK_BYTES).min(size - offset))
            }
            length => (offset, length.min(size - offset)),
        },
    );
    prop_oneof![
        6 => (range.clone(), 1_u8..).prop_map(|((offset, length), byte)| Step::Write { offset, length, byte }),
        2 => range.clone().prop_map(|(offset, length)| Step::Discard { offset, length }),
        2 => range.prop_map(|(offset, length)| Step::Zero { offset, length }),
        2 => Just(Step::Flush),
        2 => Just(Step::Seal),
        1 => Just(Step::Durable),
        1 => (2_usize..4).prop_map(Step::Compact),
        1 => (0_usize..3).prop_map(Step::Rewind),
        1 => Just(Step::RewriteLog),
    ]
}

impl Step {
    /// Does it to the disk, and says in the model what is to come of it.
    pub(super) fn run_with(&self, disk: &LayeredDisk, model: &mut [u8]) -> Result<(), StorageError> {
        let sealed = match self {
            Self::Rewind(back) => sealed_content(disk, *back),
            _ => None,
        };
        self.run(disk)?;
        self.apply(model);
        if let Some(sealed) = sealed {
            model.copy_from_slice(&sealed);
        }
        Ok(())
    }

    pub(super) fn run(&self, disk: &LayeredDisk) -> Result<(), StorageError> {
        match *self {
            Self::Write { offset, length, byte } => disk.write_at(&vec![byte; length as usize], offset),
            Self::Discard { offset, length } => disk.discard(offset, length),
            Self::Zero { offset, length } => disk.write_zeroes(offset, length),
            Self::Flush => disk.flush(),
            Self::Seal => disk.seal().map(drop),
            Self::Durable => disk.sealed_tops().last().map_or(Ok(()), |top| top.make_durable()),
            Self::RewriteLog => disk.rewrite_log(true),
            Self::Compact(oldest) => {
                assert_ne!(disk.compact(oldest)?, Compaction::Held);
                Ok(())
            }
            Self::Rewind(back) => {
                let tops = disk.sealed_tops();
                let Some(top) = tops.iter().rev().nth(back).map(|top| top.id()) else { return Ok(()) };
                drop(tops);
                assert_ne!(disk.rewind(&top)?, Rewound::Unknown);
                Ok(())
            }
        }
    }

    pub(super) fn apply(&self, model: &mut [u8]) {
        match *self {
            Self::Write { offset, length, byte } => {
                model[offset as usize..(offset + length) as usize].fill(byte);
            }
            Self::Discard { offset, length } => {
                let blocks = whole_blocks(&(offset..offset + length));
                model[(blocks.start * BLOCK_BYTES) as usize..]
                    [..((blocks.end - blocks.start) * BLOCK_BYTES) as usize]
                    .fill(0);
            }
            Self::Zero { offset, length } => model[offset as usize..(offset + length) as usize].fill(0),
            Self::Flush
            | Self::Seal
            | Self::Durable
            | Self::Compact(_)
            | Self::Rewind(_)
            | Self::RewriteLog => {}
        }
    }
}

/// What the disk was when it was sealed so many seals ago.
fn sealed_content(disk: &LayeredDisk, back: usize) -> Option<Vec<u8>> {
    let tops = disk.sealed_tops();
    let kept = tops.len().checked_sub(back + 1)? + 1;
    let image = StackedImage::new(Arc::clone(&disk.lower), tops[..kept].to_vec());
    let mut content = vec![0; disk.size() as usize];
    image.read_at(&mut content[..image.size() as usize], 0).unwrap();
    Some(content)
}

pub(super) fn model_of(lower: &Stripes, size: u64) -> Vec<u8> {
    (0..size).map(|position| if position < lower.size { Stripes::byte(position) } else { 0 }).collect()
}

pub(super) fn content(disk: &dyn BlockDevice) -> Vec<u8> {
    let mut content = vec![0xEE; disk.size() as usize];
    disk.read_at(&mut content, 0).unwrap();
    content
}

#[track_caller]
pub(super) fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    let different = found.iter().zip(expected).position(|(found, expected)| found != expected);
    assert_eq!((found.len(), different), (expected.len(), None), "{what}");
}

const BLOCKS: u64 = 600;

/// A life of a disk, `None` for the death of its process, against a list of bytes.
fn compare(directory: &dyn Fn() -> Arc<dyn Directory>, steps: &[Option<Step>], reads: &[(u64, u64)]) {
    let size = BLOCKS * BLOCK_BYTES;
    let lower = Arc::new(Stripes { size: 400 * BLOCK_BYTES + 100 });
    let mut model = model_of(&lower, size);
    let mut disk = LayeredDisk::create_in(directory(), lower.clone(), size, u64::MAX, &BOOT).unwrap();
    for step in steps {
        if let Some(step) = step {
            step.run_with(&disk, &mut model).unwrap();
        } else {
            drop(disk);
            disk = LayeredDisk::open_in(directory(), lower.clone(), &BOOT).unwrap();
        }
    }
    assert_same(&content(&disk), &model, "content");
    for (offset, length) in reads {
        let mut buffer = vec![0xEE; (*length).min(size - offset) as usize];
        disk.read_at(&mut buffer, *offset).unwrap();
        assert_same(&buffer, &model[*offset as usize..][..buffer.len()], "a part");
    }
    check_stack(&disk, &model);
    disk.flush().unwrap();
    let used = disk.usage();
    drop(disk);
    // Another boot: everything was flushed.
    let disk = LayeredDisk::open_in(directory(), lower, &BootId::new([2; 16])).unwrap();
    assert_same(&content(&disk), &model, "after a power cut");
    let found = disk.usage();
    assert_eq!((found.stored_bytes, found.charged_bytes), (used.stored_bytes, used.charged_bytes));
}

fn steps_and_deaths(count: usize) -> impl Strategy<Value = Vec<Option<Step>>> {
    let step = prop_oneof![9 => step(BLOCKS * BLOCK_BYTES).prop_map(Some), 1 => Just(None)];
    prop::collection::vec(step, 1..count)
}

fn reads() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..BLOCKS * BLOCK_BYTES, 0..9 * BLOCK_BYTES), 8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_is_its_bytes(steps in steps_and_deaths(80), reads in reads()) {
        let simulation = Simulation::default();
        compare(&|| simulation.directory(), &steps, &reads);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_on_the_host_is_its_bytes(steps in steps_and_deaths(40), reads in reads()) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::create_dir(&path).unwrap();
        compare(&|| Arc::new(HostDirectory::new(&path)), &steps, &reads);
        prop_assert_eq!(LayeredDisk::remove(&path).unwrap(), Vec::<PathBuf>::new());
        prop_assert!(!path.exists());
    }
}

/// A child of the disk has the same bytes, and the enumerations of tops and stacks are complete.
fn check_stack(disk: &LayeredDisk, model: &[u8]) {
    disk.seal().unwrap();
    let image = disk.sealed_image();
    let mut position = 0;
    while let Some(data) = image.next_data(position).unwrap() {
        assert!(data.start >= position && data.end > data.start && data.end <= image.size());
        assert!(model[position as usize..data.start as usize].iter().all(|byte| *byte == 0));
        let mut buffer = vec![0; (data.end - data.start) as usize];
        image.read_at(&mut buffer, data.start).unwrap();
        assert_same(&buffer, &model[data.start as usize..data.end as usize], "a run of data");
        position = data.end;
    }
    assert!(model[position as usize..].iter().all(|byte| *byte == 0));
    for start in (0..image.size() + 9000).step_by(7777) {
        for length in [1, 5000, 100_000, u64::MAX - start] {
            let whole = if start < image.size() { image.next_data(start).unwrap() } else { None };
            let part = whole.filter(|run| run.start < start + length);
            let part = part.map(|run| run.start..run.end.min(start + length));
            assert_eq!(image.next_data_in(start..start + length).unwrap(), part);
        }
    }
    let mut rebuilt = model_of(&Stripes { size: image.lower().size() }, disk.size());
    for top in image.tops() {
        let mut from = 0;
        while let Some(change) = top.changes(from) {
            let part = &mut rebuilt[change.range.start as usize..change.range.end as usize];
            match change.kind {
                ChangeKind::Data => top.read_changed(part, change.range.start).unwrap(),
                ChangeKind::Zeros => part.fill(0),
            }
            from = change.range.end;
        }
    }
    assert_same(&rebuilt, model, "tops, one by one");
    let mut rebuilt = model_of(&Stripes { size: image.lower().size() }, disk.size());
    let mut from = 0;
    while let Some(change) = image.next_change(from).unwrap() {
        assert!(change.range.start >= from && change.range.end > change.range.start);
        let part = &mut rebuilt[change.range.start as usize..change.range.end as usize];
        match change.kind {
            ChangeKind::Data => image.read_at(part, change.range.start).unwrap(),
            ChangeKind::Zeros => part.fill(0),
        }
        from = change.range.end;
    }
    assert_same(&rebuilt, model, "all tops as one change");
}

#[test]
fn children_share_a_parent_and_change_only_themselves() {
    let directory = tempfile::tempdir().unwrap();
    let lower: Arc<dyn Image> = Arc::new(Stripes { size: 8 * BLOCK_BYTES });
    let size = 16 * BLOCK_BYTES;
    let parent = LayeredDisk::create(&directory.path().join("parent"), lower, size, u64::MAX, &BOOT).unwrap();
    parent.write_at(&[9; 8192], 4096).unwrap();
    let sealed = parent.seal().unwrap();
    let expected = content(&parent);
    let base: Arc<dyn Image> = Arc::new(parent.sealed_image());
    let paths = [directory.path().join("first"), directory.path().join("second")];
    let children = paths
        .each_ref()
        .map(|path| LayeredDisk::create(path, Arc::clone(&base), 2 * size, u64::MAX, &BOOT).unwrap());
    children[0].write_at(&[1; 100], 5000).unwrap();
    parent.discard(0, size).unwrap();
    children[1].discard(0, 8192).unwrap();
    assert_same(&content(&children[1])[8192..16 * 4096], &expected[8192..], "the second child");
    assert_eq!(&content(&children[0])[5000..5100], [1; 100]);
    assert_same(&content(&children[0])[5100..16 * 4096], &expected[5100..], "the first child");
    assert_eq!(children[0].usage().stored_bytes, 4096);

    // What children stand on is neither merged nor removed.
    parent.seal().unwrap();
    assert_eq!(parent.compact(2).unwrap(), Compaction::Held);
    children[0].flush().unwrap();
    let path = sealed.path();
    drop((parent, sealed));
    assert_eq!(LayeredDisk::remove(&directory.path().join("parent")).unwrap(), vec![path.clone()]);
    drop((children, base));
    let reopened = SealedTop::open(&path, &BootId::new([2; 16])).unwrap();
    let stack = StackedImage::new(Arc::new(Stripes { size: 8 * BLOCK_BYTES }), vec![reopened]);
    let child = LayeredDisk::open(&paths[0], Arc::new(stack), &BootId::new([2; 16])).unwrap();
    assert_eq!(&content(&child)[5000..5100], [1; 100]);
    assert_same(&content(&child)[5100..16 * 4096], &expected[5100..], "after a power cut");
    drop(child);
    assert!(LayeredDisk::remove(&directory.path().join("parent")).unwrap().is_empty());
    assert!(!path.exists());
}

#[test]
fn sealed_tops_become_a_compact_layer() {
    let directory = tempfile::tempdir().unwrap();
    let size = 40 * BLOCK_BYTES;
    let layer = |name: &str, source| {
        let path = directory.path().join(name);
        write_layer_file(source, &LayerOptions::default(), &path).unwrap();
        Layer::from_blob(Arc::new(FileBlob::open(&path).unwrap())).unwrap()
    };
    let stripes = Stripes { size };
    let base = layer("base", Source::Image(&stripes));
    let lower = Arc::new(LayerChain::new(vec![Arc::clone(&base)]).unwrap());
    let path = directory.path().join("disk");
    let disk = LayeredDisk::create(&path, lower, 2 * size, u64::MAX, &BOOT).unwrap();
    disk.write_at(&[9; 7000], 3000).unwrap();
    disk.write_at(&[8; 5000], size + 300).unwrap();
    disk.seal().unwrap();
    disk.discard(0, 8192).unwrap();
    disk.write_at(&[7; 100], 10 * BLOCK_BYTES).unwrap();
    disk.seal().unwrap();
    let image = disk.sealed_image();
    let delta = layer("delta", Source::Delta(&image, Below::Image(&**image.lower())));
    assert!(delta.stored_size() < 8 * BLOCK_BYTES);
    let chain = LayerChain::new(vec![base, delta]).unwrap();
    let mut found = vec![0xEE; 2 * size as usize];
    chain.read_at(&mut found, 0).unwrap();
    assert_same(&found, &content(&disk), "the layers");
}

#[test]
fn a_disk_goes_back_to_any_of_its_seals_and_what_is_dropped_is_not_stored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let lower = Arc::new(Stripes { size: 8 * BLOCK_BYTES });
    let size = 16 * BLOCK_BYTES;
    let disk = LayeredDisk::create(&path, lower.clone(), size, u64::MAX, &BOOT).unwrap();
    assert_eq!(disk.rewind(&disk.current_top_id()).unwrap(), Rewound::Unknown, "it was never sealed");
    let mut seals = Vec::new();
    for number in 1..=3_u8 {
        disk.write_at(&[number; 8192], u64::from(number) * 8192).unwrap();
        let sealed = disk.seal().unwrap().id();
        seals.push((sealed, content(&disk), disk.usage().stored_bytes));
    }
    assert_eq!(disk.rewind(&seals[2].0).unwrap(), Rewound::NothingToDo);
    disk.discard(0, size).unwrap();
    assert_eq!(disk.rewind(&seals[2].0).unwrap(), Rewound::Dropped { freed_bytes: 0 });
    assert_same(&content(&disk), &seals[2].1, "the last seal");
    disk.write_at(&[9; 4096], 0).unwrap();
    assert_eq!(disk.rewind(&seals[0].0).unwrap(), Rewound::Dropped { freed_bytes: 5 * 4096 });
    assert_same(&content(&disk), &seals[0].1, "the first seal");
    assert_eq!(disk.usage().stored_bytes, seals[0].2);
    assert_eq!(disk.rewind(&seals[1].0).unwrap(), Rewound::Unknown, "it was dropped");
    // One sealed top and the current one, with a log each, and nothing else.
    let tops = std::fs::read_dir(&path)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("top-"));
    assert_eq!(tops.count(), 4);
    drop(disk);
    // It was made durable, since what was dropped is gone.
    let disk = LayeredDisk::open(&path, lower, &BootId::new([2; 16])).unwrap();
    assert_same(&content(&disk), &seals[0].1, "after a power cut");
    disk.write_at(&[7; 100], 5000).unwrap();
}

#[test]
fn what_is_discarded_is_not_stored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let lower = Arc::new(Stripes { size: 0 });
    let disk = LayeredDisk::create(&path, lower, 64 << 30, 8 << 20, &BOOT).unwrap();
    let stored =
        || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path.join("top-1.data")).unwrap()) * 512;
    for megabyte in 0..8_u64 {
        disk.write_at(&[5; 1 << 20], 40 << 30 | megabyte << 20).unwrap();
    }
    disk.flush().unwrap();
    assert!(stored() >= 8 << 20);
    assert_eq!(disk.usage().stored_bytes, 8 << 20);
    let refused = disk.write_at(&[1], 0).unwrap_err();
    assert!(matches!(refused, StorageError::QuotaExceeded { quota: 8_388_608, .. }), "{refused}");
    disk.write_at(&[6; 4096], 40 << 30).unwrap();
    let log = disk.usage().log_bytes;
    disk.discard(0, 64 << 30).unwrap();
    disk.flush().unwrap();
    assert!(stored() < 64 << 10, "{}", stored());
    assert_eq!(disk.usage().stored_bytes, 0);
    assert_eq!(disk.usage().zero_blocks, 0, "nothing is below that zeros would hide");
    assert!(disk.usage().log_bytes < log + 4096);
    disk.write_at(&[1], 0).unwrap();
}

#[test]
fn a_log_does_not_grow_for_ever() {
    let simulation = Simulation::default();
    let lower = Arc::new(Stripes { size: 600 * BLOCK_BYTES });
    let disk =
        LayeredDisk::create_in(simulation.directory(), lower, 600 * BLOCK_BYTES, u64::MAX, &BOOT).unwrap();
    let mut longest = 0;
    // Changes of 600 blocks at once would be one range: these are ranges of one block each.
    for round in 0..400_u64 {
        for block in (0..600).step_by(2) {
            disk.discard((block + round % 2) * BLOCK_BYTES, BLOCK_BYTES).unwrap();
        }
        simulation.forget();
        for block in (0..600).step_by(2) {
            disk.write_at(&[7; 4096], (block + round % 2) * BLOCK_BYTES).unwrap();
        }
        simulation.forget();
        longest = longest.max(disk.usage().log_bytes);
        disk.flush().unwrap();
    }
    assert!(longest > 8 << 20, "{longest}");
    assert!(disk.usage().log_bytes < 8 << 20);
    assert!(longest < 9 << 20, "{longest}");
    drop(disk);
    let disk =
        LayeredDisk::open_in(simulation.directory(), Arc::new(Stripes { size: 600 * BLOCK_BYTES }), &BOOT);
    assert!(content(&disk.unwrap()).iter().all(|byte| *byte == 7));
}

#[test]
fn disks_are_sealed_where_names_cannot_be_swapped() {
    let simulation = Simulation::default();
    let lower = || Arc::new(Stripes { size: 8192 });
    let disk = LayeredDisk::create_in(simulation.directory(), lower(), 40_960, u64::MAX, &BOOT).unwrap();
    for kind in [std::io::ErrorKind::InvalidInput, std::io::ErrorKind::Unsupported] {
        simulation.let_fail(move |act, _| (act == Act::Exchange).then_some(kind));
        disk.write_at(&[3; 5000], 100).unwrap();
        disk.seal().unwrap();
        disk.seal().unwrap();
        disk.flush().unwrap();
    }
    let expected = content(&disk);
    drop(disk);
    for boot in [BOOT, BootId::new([2; 16])] {
        let disk = LayeredDisk::open_in(simulation.directory(), lower(), &boot).unwrap();
        assert_eq!(disk.sealed_tops().len(), 4);
        assert_same(&content(&disk), &expected, "opened again");
    }
}

#[test]
fn a_disk_that_is_removed_takes_only_its_own_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let lower = Arc::new(Stripes { size: 0 });
    let disk = LayeredDisk::create(&path, lower, 40_960, u64::MAX, &BOOT).unwrap();
    for name in ["record.json", "disk.json.kept", "top-1.json", "notes"] {
        std::fs::write(path.join(name), name).unwrap();
    }
    disk.seal().unwrap();
    disk.flush().unwrap();
    disk.seal().unwrap();
    drop(disk);
    assert_eq!(LayeredDisk::remove(&path).unwrap(), Vec::<PathBuf>::new());
    let mut left: Vec<_> =
        std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["disk.json.kept", "notes", "record.json", "top-1.json"]);
}

#[test]
fn wrong_ranges_and_wrong_disks_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let lower: Arc<dyn Image> = Arc::new(Stripes { size: 8192 });
    let create = |size| LayeredDisk::create(&path, Arc::clone(&lower), size, 0, &BOOT);
    for size in [0, 4096, 8193, u64::MAX, (8 << 40) + 4096] {
        assert!(matches!(create(size), Err(StorageError::Unsupported { .. })), "{size}");
    }
    let disk = create(8192).unwrap();
    for (offset, length) in [(8192, 1), (u64::MAX, 1), (8191, 2)] {
        assert!(matches!(disk.write_at(&vec![0; length], offset), Err(StorageError::OutOfRange { .. })));
        assert!(matches!(disk.read_at(&mut vec![0; length], offset), Err(StorageError::OutOfRange { .. })));
        assert!(matches!(disk.discard(offset, length as u64), Err(StorageError::OutOfRange { .. })));
        assert!(matches!(disk.write_zeroes(offset, u64::MAX), Err(StorageError::OutOfRange { .. })));
    }
    disk.write_at(&[], 8192).unwrap();
    let open = |boot| LayeredDisk::open(&path, Arc::clone(&lower), &BootId::new([boot; 16]));
    assert!(matches!(open(1), Err(StorageError::InUse { .. })));
    assert!(matches!(LayeredDisk::remove(&path), Err(StorageError::InUse { .. })));
    drop(disk);
    assert!(matches!(create(8192), Err(StorageError::Io { .. })));
    assert!(matches!(open(2), Err(StorageError::NeverDurable { .. })));
    let other = LayeredDisk::open(&path, Arc::new(Stripes { size: 4096 }), &BOOT);
    assert!(matches!(other, Err(StorageError::Unsupported { .. })));
    open(1).unwrap();
}

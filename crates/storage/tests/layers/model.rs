//! A disk as a plain array of sectors, and an encoder of every form of a layer that shares no code with the crate's.
//!
//! Owns nothing.

use aenv_storage::blob::FileBlob;
use aenv_storage::layer::Layer;
use aenv_storage::{Blob, Image, MemoryBlob, StorageError};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Sectors that operations touch.
pub(crate) const SECTORS: u64 = 700;
/// A uuid in the two spellings there are.
pub(crate) const UUIDS: [&str; 2] =
    ["8F8A874E-B020-4F70-8371-A051FF3B57D6", "0000000a-000b-4c00-8d00-00000000000e"];

const PADDING: [u64; 2] = [(1 << 50) - 1, 0];

/// Something that is done to a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// Data made of this number, where 0 is zeros; `None` is a discard.
    pub(crate) data: Option<u8>,
}

/// What is done to one layer, one after the other.
pub(crate) fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let start = prop_oneof![0..SECTORS, (0..SECTORS / 8).prop_map(|block| block * 8)];
    let length = prop_oneof![1..4_u64, Just(8), 1..100_u64];
    let data = prop_oneof![3 => any::<u8>().prop_map(Some), 1 => Just(Some(0)), 1 => Just(None)];
    vec((start, length, data), 0..12).prop_map(|parts| {
        let operation = |(start, length, data): (u64, u64, _)| Operation {
            start,
            length: length.min(SECTORS - start),
            data,
        };
        parts.into_iter().map(operation).collect()
    })
}

/// The bytes that number stands for in one sector: no two sectors are the same.
fn content(data: u8, sector: u64) -> [u8; SECTOR] {
    let mut bytes = [data; SECTOR];
    if data != 0 {
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
        bytes[SECTOR - 1] = 1;
    }
    bytes
}

/// Does the same to a plain disk.
pub(crate) fn apply(operations: &[Operation], disk: &mut [u8]) {
    for operation in operations {
        for sector in operation.start..operation.start + operation.length {
            let at = sector as usize * SECTOR;
            disk[at..at + SECTOR].copy_from_slice(&content(operation.data.unwrap_or(0), sector));
        }
    }
}

/// One entry of an index.
pub(crate) fn entry(offset: u64, length: u64, stored: u64, zeroed: bool, tag: u8) -> [u64; 2] {
    [offset | length << 50, stored | u64::from(zeroed) << 55 | u64::from(tag) << 56]
}

/// The bytes of entries.
pub(crate) fn entry_bytes(entries: &[[u64; 2]]) -> Vec<u8> {
    entries.iter().flatten().flat_map(|word| word.to_le_bytes()).collect()
}

/// A header or trailer.
pub(crate) fn header(flags: u32, index_offset: u64, entries: u64, virtual_size: u64) -> Vec<u8> {
    let mut block = vec![0; 4096];
    block[..8].copy_from_slice(b"LSMT\0\x01\x02\0");
    block[8..24].copy_from_slice(&[
        0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a,
    ]);
    block[24..28].copy_from_slice(&390_u32.to_le_bytes());
    block[28..32].copy_from_slice(&flags.to_le_bytes());
    block[32..40].copy_from_slice(&index_offset.to_le_bytes());
    block[40..48].copy_from_slice(&entries.to_le_bytes());
    block[48..56].copy_from_slice(&virtual_size.to_le_bytes());
    block[56..92].copy_from_slice(UUIDS[0].as_bytes());
    block[93..129].copy_from_slice(UUIDS[1].as_bytes());
    block[132..134].copy_from_slice(&[1, 1]);
    block
}

/// Data and index of the writable, log-structured form.
pub(crate) fn log_pair(operations: &[Operation], virtual_size: u64) -> (Vec<u8>, Vec<u8>) {
    let mut data = header(3, 0, 0, virtual_size);
    let mut entries = Vec::new();
    for operation in operations {
        let stored = (data.len() / SECTOR) as u64;
        entries.push(entry(operation.start, operation.length, stored, operation.data.is_none(), 0));
        if let Some(number) = operation.data {
            let sectors = operation.start..operation.start + operation.length;
            data.extend(sectors.flat_map(|sector| content(number, sector)));
        }
        if operation.length % 3 == 0 {
            entries.push(PADDING);
        }
    }
    let mut index = header(1, 4096, 0, virtual_size);
    index.extend(entry_bytes(&entries));
    (data, index)
}

/// The sorted entries of a log pair: sector by sector, so that they are as short as they can be.
fn sorted_entries(operations: &[Operation]) -> Vec<[u64; 2]> {
    let mut sectors = vec![None; SECTORS as usize];
    let mut stored = 8;
    for operation in operations {
        for sector in 0..operation.length {
            let at = operation.data.map(|_| stored + sector);
            sectors[(operation.start + sector) as usize] = Some(at);
        }
        stored += if operation.data.is_some() { operation.length } else { 0 };
    }
    let entry = |(sector, state): (usize, Option<Option<u64>>)| {
        state.map(|at| entry(sector as u64, 1, at.unwrap_or(0), at.is_none(), sector as u8))
    };
    sectors.into_iter().enumerate().filter_map(entry).collect()
}

/// A log pair that was sealed in place.
pub(crate) fn sealed_in_place(operations: &[Operation], virtual_size: u64) -> Vec<u8> {
    let (mut file, _) = log_pair(operations, virtual_size);
    let (index_offset, entries) = (file.len() as u64, sorted_entries(operations));
    file.extend(entry_bytes(&entries));
    file.resize(file.len().next_multiple_of(SECTOR), 0);
    file.extend(header(6, index_offset, entries.len() as u64, virtual_size));
    file
}

/// A committed layer, with padding between the entries as well, and with data that belongs to no entry.
pub(crate) fn committed(operations: &[Operation], virtual_size: u64) -> Vec<u8> {
    let (mut file, _) = log_pair(operations, virtual_size);
    file[28] = 7;
    let mut entries = sorted_entries(operations);
    entries.insert(entries.len() / 2, PADDING);
    entries.resize(entries.len().next_multiple_of(256), PADDING);
    let index_offset = file.len() as u64;
    file.extend(entry_bytes(&entries));
    file.extend(header(6, index_offset, entries.len() as u64, virtual_size));
    file
}

/// A sparse layer, written to a file. What it discards shows what is below, so there must be no discard.
pub(crate) fn sparse(operations: &[Operation], virtual_size: u64, path: &Path) {
    let file = File::create(path).unwrap();
    file.set_len(4096 + virtual_size).unwrap();
    file.write_all_at(&header(0x13, 0, 0, virtual_size), 0).unwrap();
    for operation in operations {
        for sector in operation.start..operation.start + operation.length {
            file.write_all_at(&content(operation.data.unwrap(), sector), 4096 + sector * SECTOR as u64)
                .unwrap();
        }
    }
}

/// A blob of these bytes.
pub(crate) fn blob(bytes: Vec<u8>) -> Arc<dyn Blob> {
    Arc::new(MemoryBlob::new("layer", bytes))
}

/// Opens the sealed layer in a file.
pub(crate) fn open(path: &Path) -> Arc<Layer> {
    Layer::from_blob(Arc::new(FileBlob::open(path).unwrap())).unwrap()
}

/// Opens these bytes as a sealed layer.
pub(crate) fn open_bytes(bytes: Vec<u8>) -> Result<Arc<Layer>, StorageError> {
    Layer::from_blob(blob(bytes))
}

/// Reads a whole image, in pieces of no particular size.
pub(crate) fn read_all(image: &dyn Image) -> Result<Vec<u8>, StorageError> {
    let mut disk = vec![0xee; image.size() as usize];
    let mut offset = 0;
    for piece in disk.chunks_mut(10_007) {
        image.read_at(piece, offset)?;
        offset += piece.len() as u64;
    }
    Ok(disk)
}

/// The runs of data of an image, which must not be empty, come in order, and hold all bytes that are not zero.
pub(crate) fn data_runs(image: &dyn Image, disk: &[u8]) -> Vec<std::ops::Range<u64>> {
    let mut runs = Vec::new();
    let mut position = 0;
    while let Some(run) = image.next_data(position).unwrap() {
        assert!(
            run.start >= position && run.end > run.start && run.end <= image.size(),
            "{run:?} after {position}"
        );
        assert!(
            disk[position as usize..run.start as usize].iter().all(|byte| *byte == 0),
            "{position} to {run:?}"
        );
        let within = |end| image.next_data_in(position..end).unwrap();
        assert_eq!((within(run.start), within(u64::MAX)), (None, Some(run.clone())));
        assert_eq!(within(run.start + 1), Some(run.start..run.start + 1));
        position = run.end;
        runs.push(run);
    }
    assert!(disk[position as usize..].iter().all(|byte| *byte == 0), "behind {position}");
    runs
}

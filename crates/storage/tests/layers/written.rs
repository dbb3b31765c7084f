//! What the writer of layers puts into a file, byte by byte, and what it refuses.

use crate::model::*;
use aenv_storage::chain::LayerChain;
use aenv_storage::commit::{Below, LayerOptions, LayerSummary, Source, write_layer};
use aenv_storage::{Change, ChangeKind, Delta, Image, StorageError};
use std::ops::Range;
use std::path::Path;
use uuid::Uuid;

/// Bytes in memory as an image that is said to be data in some ranges.
#[derive(Debug)]
struct Bytes {
    bytes: Vec<u8>,
    data: Vec<Range<u64>>,
}

impl Image for Bytes {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        buffer.copy_from_slice(&self.bytes[offset as usize..offset as usize + buffer.len()]);
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        let run = self.data.iter().find(|run| run.end > offset);
        Ok(run.map(|run| run.start.max(offset)..run.end))
    }
}

/// Zeros in every second block of 4 KiB, and nothing else.
#[derive(Debug)]
struct Scattered {
    blocks: u64,
}

impl Image for Scattered {
    fn size(&self) -> u64 {
        2 * self.blocks * 4096
    }

    fn read_at(&self, buffer: &mut [u8], _offset: u64) -> Result<(), StorageError> {
        buffer.fill(0);
        Ok(())
    }

    fn next_data(&self, _offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        Ok(None)
    }
}

impl Delta for Scattered {
    fn next_change(&self, offset: u64) -> Result<Option<Change>, StorageError> {
        let start = offset.next_multiple_of(8192);
        let change = Change { range: start..start + 4096, kind: ChangeKind::Zeros };
        Ok((start < self.size()).then_some(change))
    }
}

fn write(source: Source<'_>, options: &LayerOptions) -> Result<(LayerSummary, Vec<u8>), StorageError> {
    let mut file = Vec::new();
    let summary = write_layer(source, options, &mut file, Path::new("new layer"))?;
    Ok((summary, file))
}

#[test]
fn the_bytes_are_the_documented_ones() {
    let mut bytes = vec![0; 10 * 4096 + 512];
    bytes[4096..8192].fill(1);
    bytes[5 * 4096 + 100] = 2;
    bytes[10 * 4096] = 3;
    let data = vec![0..7000, 16384..bytes.len() as u64];
    let image = Bytes { bytes, data };
    let uuid = |text: &str| Some(Uuid::parse_str(text).unwrap());
    let options = LayerOptions {
        uuid: uuid(UUIDS[0]),
        parent: uuid(UUIDS[1]),
        user_tag: b"tag".to_vec(),
        ..LayerOptions::default()
    };
    let (summary, file) = write(Source::Image(&image), &options).unwrap();

    let block = |flags, index_offset, entries| {
        let mut block = header(flags, index_offset, entries, image.size());
        block[56..92].make_ascii_lowercase();
        block[134..137].copy_from_slice(b"tag");
        block
    };
    let mut expected = block(7, 0, 0);
    for range in [4096..8192, 5 * 4096..6 * 4096, 10 * 4096..10 * 4096 + 512] {
        expected.extend(&image.bytes[range]);
    }
    let index_offset = expected.len() as u64;
    let mut entries = vec![entry(8, 8, 8, false, 0), entry(40, 8, 16, false, 0), entry(80, 1, 24, false, 0)];
    entries.resize(256, [(1 << 50) - 1, 0]);
    expected.extend(entry_bytes(&entries));
    expected.extend(block(6, index_offset, 256));
    assert!(file == expected);
    let data_bytes = 2 * 4096 + 512;
    assert_eq!(summary, LayerSummary { entries: 3, data_bytes, layer_bytes: file.len() as u64 });
}

#[test]
fn neighbours_are_joined_up_to_a_length_that_keeps_blocks_whole() {
    let size = 20 << 20;
    let image = Bytes {
        bytes: vec![7; size as usize],
        data: (0..size / 4096).map(|b| b * 4096..b * 4096 + 4096).collect(),
    };
    let (summary, file) = write(Source::Image(&image), &LayerOptions::default()).unwrap();
    assert_eq!((summary.entries, summary.data_bytes), (3, size));
    let layer = open_bytes(file).unwrap();
    for mapping in layer.index().iter() {
        assert!(mapping.offset % 8 == 0 && mapping.length % 8 == 0 && mapping.stored % 8 == 0, "{mapping:?}");
        assert!(mapping.length < 16383, "{mapping:?}");
    }
    let chain = LayerChain::new(vec![layer]).unwrap();
    assert_eq!(chain.next_data(5).unwrap(), Some(5..size));
    assert!(read_all(&chain).unwrap() == image.bytes);
}

#[test]
fn an_index_that_would_be_too_long_is_refused_unless_it_is_coarser() {
    let written = |blocks, granularity| {
        let options = LayerOptions { granularity, ..LayerOptions::default() };
        write(Source::Delta(&Scattered { blocks }, Below::Unknown), &options)
    };
    let (summary, file) = written(999_936, 4096).unwrap();
    assert_eq!(summary.entries, 999_936);
    assert_eq!(open_bytes(file).unwrap().index().len(), 999_936);
    let error = written(999_937, 4096).unwrap_err();
    assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("coarser"), "{error}");
    // Then neighbours touch, and nothing but zeros is there.
    let (summary, _) = written(999_937, 8192).unwrap();
    assert!(summary.entries < 2000 && summary.data_bytes == 0, "{summary:?}");
}

#[test]
fn sizes_that_cannot_be_said_are_refused() {
    for size in [0, 1, 511, 4097] {
        let error =
            write(Source::Image(&Bytes { bytes: vec![1; size], data: Vec::new() }), &LayerOptions::default());
        assert!(matches!(error, Err(StorageError::Unsupported { .. })), "{size}: {error:?}");
    }
}

#[test]
fn a_full_filesystem_is_told_as_such() {
    let mut full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let image = Bytes { bytes: vec![1; 4096], data: std::iter::once(0..4096).collect() };
    let error =
        write_layer(Source::Image(&image), &LayerOptions::default(), &mut full, Path::new("/dev/full"));
    assert!(matches!(error, Err(StorageError::NoSpace { .. })), "{error:?}");
}

use super::*;
use crate::MemoryBlob;
use proptest::prelude::*;
use std::io::Cursor;

fn blob(bytes: Vec<u8>) -> Arc<dyn Blob> {
    Arc::new(MemoryBlob::new("archive", bytes))
}

fn all_of(blob: &dyn Blob) -> Vec<u8> {
    let mut bytes = vec![0; blob.stored_size() as usize];
    blob.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn wrapped(payload: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    let length = wrap(&blob(payload.to_vec()), &mut archive).unwrap();
    assert_eq!(length, archive.len() as u64);
    archive
}

/// An archive with one file, made by the tar library.
fn plain(kind: EntryType, payload: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = file_header("a", kind).unwrap();
    header.set_size(payload.len() as u64);
    header.set_cksum();
    builder.append(&header, payload).unwrap();
    builder.into_inner().unwrap()
}

#[test]
fn the_tar_library_reads_what_we_write() {
    for size in [0, 1, 511, 512, 513, 99_999] {
        let payload = vec![7; size];
        let bytes = wrapped(&payload);
        assert_eq!(bytes.len() % BLOCK_BYTES, 0);
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut files = archive.entries().unwrap();
        let mut file = files.next().unwrap().unwrap();
        assert_eq!(file.path().unwrap().to_str(), Some(PAYLOAD_NAME));
        let mut found = Vec::new();
        file.read_to_end(&mut found).unwrap();
        assert_eq!(found, payload);
        assert!(files.next().is_none());
    }
}

#[test]
fn a_payload_of_unknown_size_is_wrapped_in_place() {
    let mut output = Cursor::new(b"before".to_vec());
    output.seek(SeekFrom::End(0)).unwrap();
    let wrapping = Wrapping::begin(&mut output).unwrap();
    output.write_all(&[9; 777]).unwrap();
    wrapping.finish(&mut output).unwrap();
    assert_eq!(output.position(), output.get_ref().len() as u64);
    let bytes = output.into_inner();
    assert_eq!(bytes[..6], *b"before");
    assert_eq!(bytes[6..], wrapped(&[9; 777]));
}

#[test]
fn plain_archives_and_other_files_are_told_apart() {
    let inside = unwrap(blob(plain(EntryType::Regular, b"layer"))).unwrap();
    assert_eq!(all_of(&*inside), b"layer");
    assert!(matches!(inside.read_exact_at(&mut [0; 2], 4), Err(StorageError::OutOfRange { size: 5, .. })));
    assert!(inside.read_exact_at(&mut [0; 2], u64::MAX).is_err());
    for other in [Vec::new(), vec![0; 100], vec![0; 4096]] {
        assert_eq!(all_of(&*unwrap(blob(other.clone())).unwrap()), other);
    }
    for kind in [EntryType::Directory, EntryType::Symlink, EntryType::GNULongName, EntryType::XGlobalHeader] {
        let error = unwrap(blob(plain(kind, b""))).unwrap_err();
        assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
    }
}

#[test]
fn a_cut_archive_is_damaged() {
    let whole = wrapped(&[5; 3000]);
    for length in 512..PREFIX_BYTES + 3000 {
        let error = unwrap(blob(whole[..length].to_vec())).unwrap_err();
        assert!(matches!(error, StorageError::Damaged { .. }), "{length}: {error}");
    }
}

#[test]
fn sizes_that_cannot_be_are_errors() {
    for record in [
        "28 size=18446744073709551615\n",
        "29 size=18446744073709551616\n",
        "11 size=-1\n",
        "9 size=\n",
        "99 size=1\n",
        "x",
    ] {
        let mut bytes = wrapped(b"abc");
        let mut header = file_header(EXTENSION_NAME, EntryType::XHeader).unwrap();
        header.set_size(record.len() as u64);
        header.set_cksum();
        bytes[..512].copy_from_slice(header.as_bytes());
        bytes[512..1024].fill(0);
        bytes[512..512 + record.len()].copy_from_slice(record.as_bytes());
        let error = unwrap(blob(bytes)).unwrap_err();
        assert!(matches!(error, StorageError::Damaged { .. }), "{record:?}: {error}");
    }
    let mut header = file_header(EXTENSION_NAME, EntryType::XHeader).unwrap();
    header.set_size(u64::MAX);
    header.set_cksum();
    let mut bytes = wrapped(b"abc");
    bytes[..512].copy_from_slice(header.as_bytes());
    assert!(matches!(unwrap(blob(bytes)), Err(StorageError::Unsupported { .. })));
}

proptest! {
    #[test]
    fn what_is_wrapped_is_unwrapped(payload in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let inside = unwrap(blob(wrapped(&payload))).unwrap();
        prop_assert_eq!(all_of(&*inside), payload);
    }

    #[test]
    fn the_size_record_counts_itself(size in any::<u64>()) {
        let record = size_record(size);
        let length: usize = record.split_once(' ').unwrap().0.parse().unwrap();
        prop_assert_eq!(length, record.len());
        prop_assert_eq!(extended_size(record.as_bytes()), Ok(Some(size)));
    }
}

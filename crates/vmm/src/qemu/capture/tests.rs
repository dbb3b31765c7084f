use super::*;
use std::path::PathBuf;

fn mapping(addresses: Range<u64>, path: &str) -> FileMapping {
    FileMapping { addresses, offset: 0, private: true, writable: true, path: PathBuf::from(path) }
}

#[test]
fn runs_are_split_into_batches_that_fit() {
    assert!(batches(&[]).is_empty());
    let runs = [0..4096, 8192..8192 + BATCH_BYTES + 4096];
    let split = batches(&runs);
    assert_eq!(split.len(), 2);
    assert_eq!(split[0], [0..4096, 8192..8192 + BATCH_BYTES - 4096]);
    assert_eq!(
        split[1].as_slice(),
        std::slice::from_ref(&(8192 + BATCH_BYTES - 4096..8192 + BATCH_BYTES + 4096))
    );
}

#[test]
fn guest_memory_is_the_file_that_covers_it() {
    let shared = FileMapping { private: false, ..mapping(0..8192, "/shared") };
    let all =
        vec![mapping(0..4096, "/small"), shared, mapping(0..4096, "/memory"), mapping(4096..8192, "/memory")];
    let found = guest_memory(all.clone(), 8192).unwrap();
    assert_eq!(found, all[2..]);
    assert!(guest_memory(all, 16384).is_err());
}

#[test]
fn zero_pages_become_holes_in_a_whole_image_and_data_among_changes() {
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(&[9; 5 * 4096], 0).unwrap();
    let mut content = vec![0; 4 * 4096];
    content[4096] = 1;
    let mut counts = Counts::default();
    write_run(&image, 4096, &content, Zeros::Punch, &mut counts).unwrap();
    assert_eq!(counts, Counts { changed_pages: 4, zero_pages: 3 });
    assert_eq!(data_extents(&image).unwrap(), [0..4096, 8192..12288]);
    let mut got = vec![0; 4 * 4096];
    image.read_exact_at(&mut got, 4096).unwrap();
    assert_eq!(got, content);

    let changes = tempfile::tempfile().unwrap();
    changes.set_len(8 * 4096).unwrap();
    write_run(&changes, 4096, &content, Zeros::Write, &mut counts).unwrap();
    assert_eq!(data_extents(&changes).unwrap(), vec![4096_u64..5 * 4096]);
}

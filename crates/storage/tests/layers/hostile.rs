//! Files that lie: every field with every value that may hurt, every truncation. Nothing may panic, hang or be believed.

use crate::model::*;
use aenv_storage::StorageError;
use aenv_storage::chain::LayerChain;
use aenv_storage::layer::Layer;

const ALL: u64 = SECTORS * SECTOR as u64;
/// Values that are near something: nothing, a sector, a header, powers of two, the end of numbers.
const VALUES: [u64; 30] = [
    0,
    1,
    7,
    8,
    15,
    16,
    255,
    256,
    257,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    8192,
    999_999,
    1_000_000,
    1_000_001,
    1 << 32,
    (1 << 50) - 1,
    1 << 50,
    (1 << 55) - 8,
    (1 << 55) - 1,
    1 << 55,
    1 << 59,
    1 << 60,
    1 << 63,
    u64::MAX - 511,
    u64::MAX,
];

fn operations() -> Vec<Operation> {
    [(0, 8, Some(1)), (16, 24, Some(2)), (20, 8, None), (600, 90, Some(3)), (640, 8, None), (9, 1, Some(4))]
        .map(|(start, length, data)| Operation { start, length, data })
        .to_vec()
}

/// Reads all that can be read; says whether it was taken for a layer. Errors must be of the kinds for bad content.
fn read(opened: Result<std::sync::Arc<Layer>, StorageError>) -> bool {
    let is_typed = |error: &StorageError| {
        let name_is_told = error.to_string().contains("layer");
        name_is_told && matches!(error, StorageError::Damaged { .. } | StorageError::Unsupported { .. })
    };
    let layer = match opened {
        Ok(layer) => layer,
        Err(error) => {
            assert!(is_typed(&error), "{error:?}");
            return false;
        }
    };
    layer.verify(|_| ()).unwrap();
    match LayerChain::new(vec![layer]) {
        // What has a giant virtual size is read where something is.
        Ok(chain) => {
            use aenv_storage::Image;
            let mut position = 0;
            let mut buffer = vec![0; 1 << 20];
            while let Some(run) = chain.next_data(position).unwrap() {
                let length = (run.end - run.start).min(buffer.len() as u64);
                chain.read_at(&mut buffer[..length as usize], run.start).unwrap();
                position = run.end;
            }
        }
        Err(error) => assert!(is_typed(&error), "{error:?}"),
    }
    true
}

fn with(bytes: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    changed[at..at + value.len()].copy_from_slice(value);
    changed
}

#[test]
fn every_truncation_of_a_sealed_layer_is_refused() {
    for file in [committed(&operations(), ALL), sealed_in_place(&operations(), ALL)] {
        assert!(read(open_bytes(file.clone())));
        let near = |length: usize| [length.saturating_sub(1), length, length + 1];
        for length in (0..file.len()).step_by(512).flat_map(near).filter(|length| *length < file.len()) {
            assert!(!read(open_bytes(file[..length].to_vec())), "{length} of {} bytes", file.len());
        }
    }
}

#[test]
fn no_field_of_a_header_hurts() {
    let good = committed(&operations(), ALL);
    let trailer = good.len() - 4096;
    for start in [0, trailer] {
        for at in (0..24).map(|at| start + at) {
            assert!(!read(open_bytes(with(&good, at, &[good[at] ^ 0x20]))), "byte {at}");
        }
        for field in [32, 40, 48] {
            for value in VALUES {
                read(open_bytes(with(&good, start + field, &value.to_le_bytes())));
            }
        }
        for bit in 0..32 {
            let flags = u32::from_le_bytes(good[start + 28..start + 32].try_into().unwrap()) ^ (1 << bit);
            let accepted = read(open_bytes(with(&good, start + 28, &flags.to_le_bytes())));
            // In the header only the first flag counts; in the trailer the first three.
            assert_eq!(accepted, bit > if start == 0 { 0 } else { 2 }, "bit {bit} at {start}");
        }
        for at in 24..390 {
            for value in [0, 1, b'0', b'G', 0x7f, 0x80, 0xff] {
                read(open_bytes(with(&good, start + at, &[value])));
            }
        }
    }
}

#[test]
fn an_index_that_is_not_where_it_can_be_is_refused() {
    let good = committed(&operations(), ALL);
    let trailer = (good.len() - 4096) as u64;
    let index = trailer - 16 * 512;
    let place = |offset: u64, entries: u64| {
        let field = [offset.to_le_bytes(), entries.to_le_bytes()].concat();
        read(open_bytes(with(&good, trailer as usize + 32, &field)))
    };
    assert!(place(index, 512) || place(index + 16 * 256, 256), "the test knows where the index is");
    for offset in [0, 8, 4095, trailer + 1, trailer + 4096, u64::MAX, u64::MAX - 15, 1 << 63] {
        assert!(!place(offset, 1), "{offset}");
    }
    for entries in [513, 1024, 1_000_001, 1 << 32, 1 << 60, u64::MAX / 16, u64::MAX] {
        assert!(!place(index, entries), "{entries}");
    }
    for size in [1, 511, (1 << 59) + 1, 1 << 60, u64::MAX] {
        assert!(!read(open_bytes(with(&good, trailer as usize + 48, &u64::to_le_bytes(size)))), "{size}");
    }
}

/// A layer with these entries over two sectors of data.
fn with_entries(entries: &[[u64; 2]]) -> Vec<u8> {
    let mut file = header(7, 0, 0, ALL);
    file.extend([1; 1024]);
    file.extend(entry_bytes(entries));
    file.extend(header(6, 4096 + 1024, entries.len() as u64, ALL));
    file
}

#[test]
fn entries_that_contradict_the_file_or_one_another_are_refused() {
    let first = entry(10, 2, 8, false, 0);
    let accepted = [
        vec![],
        vec![first],
        vec![first, [(1 << 50) - 1, 0], entry(12, 2, 8, false, 9)],
        // Zeros have no place in the file.
        vec![entry(0, 16383, 1 << 54, true, 0)],
        // Behind the end of the disk: never shown.
        vec![entry((1 << 50) - 3, 2, 8, false, 0)],
    ];
    for entries in accepted {
        assert!(read(open_bytes(with_entries(&entries))), "{entries:x?}");
    }
    let refused = [
        entry(10, 1, 8, false, 0),
        entry(11, 1, 8, false, 0),
        entry(9, 1, 8, false, 0),
        entry(0, 12, 8, false, 0),
        entry(12, 0, 8, false, 0),
        entry(20, 1, 7, false, 0),
        entry(20, 1, 0, false, 0),
        entry(20, 2, 9, false, 0),
        entry(20, 1, 10, false, 0),
        entry(20, 3, 8, false, 0),
        entry(20, 1, (1 << 55) - 1, false, 0),
        entry(20, 16383, (1 << 55) - 1, false, 0),
        entry((1 << 50) - 1, 1, 8, false, 0),
        entry((1 << 50) - 2, 2, 8, false, 0),
    ];
    for second in refused {
        assert!(!read(open_bytes(with_entries(&[first, second]))), "{second:x?}");
    }
}

#[test]
fn no_field_of_an_entry_hurts() {
    let good = sealed_in_place(&operations(), ALL);
    let trailer = good.len() - 4096;
    let index = u64::from_le_bytes(good[trailer + 32..trailer + 40].try_into().unwrap()) as usize;
    for word in (index..trailer - 8).step_by(8) {
        let old = u64::from_le_bytes(good[word..word + 8].try_into().unwrap());
        for value in VALUES.into_iter().chain((0..64).map(|bit| old ^ (1 << bit))) {
            read(open_bytes(with(&good, word, &value.to_le_bytes())));
        }
    }
}

#[test]
fn no_part_of_a_log_pair_hurts() {
    let (data, index) = log_pair(&operations(), ALL);
    let open =
        |data: &[u8], index: &[u8]| read(Layer::from_log(blob(data.to_vec()), blob(index.to_vec()).as_ref()));
    assert!(open(&data, &index));
    for length in 0..index.len() {
        // Less than a header is none; less than an entry is a torn write.
        assert_eq!(open(&data, &index[..length]), length >= 4096, "{length}");
    }
    for length in (0..data.len()).step_by(512) {
        assert_eq!(open(&data[..length], &index), length >= 4096, "{length}");
    }
    for word in (0..384).chain(4096..index.len() - 8).step_by(8) {
        for value in VALUES {
            open(&data, &with(&index, word, &value.to_le_bytes()));
            open(&with(&data, word.min(384), &value.to_le_bytes()), &index);
        }
    }
    for bit in 0..32 {
        assert!(!open(&with(&data, 28, &(3_u32 ^ (1 << bit)).to_le_bytes()), &index), "bit {bit}");
        assert!(!open(&data, &with(&index, 28, &(1_u32 ^ (1 << bit)).to_le_bytes())), "bit {bit}");
    }
    assert!(!open(&data, &with(&index, 60, b"0")), "the index of other data");
    assert!(!open(&data, &with(&index, 4096 + 8, &7_u64.to_le_bytes())), "data in the header");
}

#[test]
fn as_many_entries_as_allowed_open_and_one_more_does_not() {
    let entries = |count: u64| {
        (0..count).map(|number| entry(number * 2, 1, 8 + number % 2, false, 0)).collect::<Vec<_>>()
    };
    let layer = open_bytes(with_entries(&entries(1_000_000))).unwrap();
    assert_eq!(layer.index().len(), 1_000_000);
    let chain = LayerChain::new(vec![layer.clone(), layer]).unwrap();
    assert_eq!(chain.mappings(), SECTORS as usize / 2);
    let error = open_bytes(with_entries(&entries(1_000_001))).unwrap_err();
    assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
}

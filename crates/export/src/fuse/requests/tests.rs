//! Requests with any content get an answer and never a panic.

use super::*;
use crate::{Content, Export};
use aenv_storage::{BlockDevice, Image};
use aenv_sys::fuse::abi::{DirectoryEntry, ReadIn};
use proptest::prelude::*;
use std::ops::Range;

/// Fails when it is asked for what it does not have.
#[derive(Debug)]
struct Strict(u64);

impl Strict {
    fn check(&self, offset: u64, length: u64) -> std::result::Result<(), StorageError> {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.0), "{offset} {length}");
        Ok(())
    }
}

impl BlockDevice for Strict {
    fn size(&self) -> u64 {
        self.0
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::result::Result<(), StorageError> {
        self.check(offset, buffer.len() as u64)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> std::result::Result<(), StorageError> {
        self.check(offset, data.len() as u64)
    }

    fn discard(&self, offset: u64, length: u64) -> std::result::Result<(), StorageError> {
        assert!(offset.is_multiple_of(4096) && length.is_multiple_of(4096) && length > 0);
        self.check(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> std::result::Result<(), StorageError> {
        assert!(length > 0);
        self.check(offset, length)
    }

    fn flush(&self) -> std::result::Result<(), StorageError> {
        Ok(())
    }
}

impl Image for Strict {
    fn size(&self) -> u64 {
        self.0
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::result::Result<(), StorageError> {
        self.check(offset, buffer.len() as u64)
    }

    fn next_data(&self, offset: u64) -> std::result::Result<Option<Range<u64>>, StorageError> {
        assert!(offset < self.0);
        Ok(Some(offset..self.0))
    }
}

const SIZE: u64 = 3 * 4096;

fn files() -> Files {
    let files = Files::default();
    let export = |number: u32, name: &str| Export { number, name: name.to_owned(), owner: 0 };
    files.add(&export(1, "disk"), Content::Disk(Arc::new(Strict(SIZE)))).unwrap();
    files.add(&export(2, "image"), Content::Image(Arc::new(Strict(SIZE)))).unwrap();
    files
}

fn header(opcode: u32, node: u64, length: usize) -> RequestHeader {
    let length = u32::try_from(length).unwrap();
    RequestHeader { length, opcode, unique: 2, node, user: 0, group: 0, pid: 0, extensions: 0, padding: 0 }
}

/// Numbers near what the code compares with.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..20_u64, SIZE - 2..SIZE + 2, 4000..9000_u64, Just(1 << 20), any::<u64>(), Just(u64::MAX)]
}

proptest! {
    #[test]
    fn every_request_gets_an_answer(
        opcode in 0..60_u32,
        node in 0..5_u64,
        user in 0..2_u32,
        words in prop::collection::vec(number(), 0..14),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let files = files();
        let mut body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        body.extend(&tail);
        let header = RequestHeader { user, ..header(opcode, node, 40 + body.len()) };
        let mut reply = vec![0; 1 << 20];
        let answer = answer_to(&files, &Request { header, body: &body }, &mut reply);
        if let Answer::Body(size) = answer {
            prop_assert!(size <= reply.len());
        }
        prop_assert_eq!(matches!(answer, Answer::Silence), matches!(opcode, 2 | 36 | 42));
    }

    #[test]
    fn listings_of_any_room_go_on_where_they_ended(room in 24..400_u32, count in 0..40_u32, plus: bool) {
        let files = Files::default();
        for number in 1..=count {
            let name = "x".repeat(number as usize % 7 + 1) + &number.to_string();
            files.add(&Export { number, name, owner: 0 }, Content::Image(Arc::new(Strict(1)))).unwrap();
        }
        let code = if plus { opcode::READDIRPLUS } else { opcode::READDIR };
        let (mut offset, mut inodes, mut reply) = (0, Vec::new(), vec![0; 4096]);
        loop {
            let arguments =
                ReadIn { handle: 0, offset, size: room, read_flags: 0, lock_owner: 0, flags: 0, padding: 0 };
            let request = Request { header: header(code, 1, 80), body: arguments.as_bytes() };
            let Answer::Body(size) = answer_to(&files, &request, &mut reply) else { panic!("no listing") };
            prop_assert!(size <= room as usize);
            let mut at = 0;
            while at < size {
                at += if plus { 128 } else { 0 };
                let (entry, _) = DirectoryEntry::read_from_prefix(&reply[at..]).unwrap();
                at += (24 + entry.name_length as usize).next_multiple_of(8);
                offset = entry.offset;
                inodes.push(entry.inode);
            }
            if size == 0 {
                break;
            }
        }
        // With too little room for one entry there is none.
        let longest = 24 + 16 + if plus { 128 } else { 0 };
        if room >= longest {
            let expected: Vec<u64> = [1, 1].into_iter().chain((1..=count).map(|number| u64::from(number) + 1)).collect();
            prop_assert_eq!(inodes, expected);
        }
    }
}

#[test]
fn a_request_that_is_longer_than_its_memory_is_none() {
    let mut area = header(opcode::READ, 2, 100).as_bytes().to_vec();
    area.resize(99, 0);
    assert!(Request::parse(&area).is_none());
    area.resize(100, 0);
    assert_eq!(Request::parse(&area).unwrap().body.len(), 60);
    assert!(Request::parse(&[0; 40]).is_none());
    assert!(Request::parse(&[0; 39]).is_none());
}

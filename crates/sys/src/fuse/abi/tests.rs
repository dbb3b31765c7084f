//! Bytes as the kernel sends them.

use super::*;

#[test]
fn a_recorded_read_is_decoded() {
    let mut raw = Vec::new();
    for word in [80_u32, opcode::READ] {
        raw.extend(word.to_ne_bytes());
    }
    raw.extend(6_u64.to_ne_bytes());
    raw.extend(2_u64.to_ne_bytes());
    for word in [1000_u32, 1001, 4242, 0] {
        raw.extend(word.to_ne_bytes());
    }
    raw.extend(9_u64.to_ne_bytes());
    raw.extend(8192_u64.to_ne_bytes());
    raw.extend(4096_u32.to_ne_bytes());
    raw.extend([0; 20]);
    let (header, rest) = RequestHeader::read_from_prefix(&raw).unwrap();
    assert_eq!((header.length as usize, header.opcode, header.unique, header.node), (raw.len(), 15, 6, 2));
    assert_eq!((header.user, header.group, header.pid), (1000, 1001, 4242));
    let read = ReadIn::read_from_bytes(rest).unwrap();
    assert_eq!((read.handle, read.offset, read.size), (9, 8192, 4096));
}

#[test]
fn an_error_is_encoded() {
    let header = ReplyHeader { length: 16, error: -5, unique: 6 };
    assert_eq!(header.as_bytes(), [16, 0, 0, 0, 251, 255, 255, 255, 6, 0, 0, 0, 0, 0, 0, 0]);
}

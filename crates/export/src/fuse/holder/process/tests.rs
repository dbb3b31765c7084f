//! What is agreed upon with kernels of any age.

use super::*;

const HEADER: RequestHeader = RequestHeader {
    length: 104,
    opcode: opcode::INIT,
    unique: 2,
    node: 0,
    user: 0,
    group: 0,
    pid: 0,
    extensions: 0,
    padding: 0,
};

fn offer(minor: u32, flags: u64) -> InitIn {
    InitIn {
        major: 7,
        minor,
        max_readahead: 131_072,
        flags: flags as u32,
        flags2: (flags >> 32) as u32,
        unused: [0; 11],
    }
}

#[test]
fn nothing_is_agreed_that_was_not_offered() {
    let out = answer_init(&HEADER, &offer(37, NEEDED | init_flags::INIT_EXT)).unwrap();
    let agreed = u64::from(out.flags) | u64::from(out.flags2) << 32;
    assert_eq!(agreed, NEEDED | init_flags::INIT_EXT);
    assert_eq!((out.max_write, out.max_pages, out.max_readahead), (1 << 20, 256, 131_072));
}

#[test]
fn a_write_back_cache_or_locks_are_never_agreed() {
    let out = answer_init(&HEADER, &offer(44, u64::MAX)).unwrap();
    let (writeback_cache, posix_locks, flock_locks, atomic_truncate) = (1 << 16, 1 << 1, 1 << 10, 1 << 3);
    assert_eq!(out.flags & (writeback_cache | posix_locks | flock_locks | atomic_truncate), 0);
}

#[test]
fn kernels_that_cannot_do_it_are_refused_with_the_reason() {
    for (minor, flags, text) in [(30, WANTED, "7.30"), (37, init_flags::BIG_WRITES, "is needed")] {
        let error = answer_init(&HEADER, &offer(minor, flags)).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let other = RequestHeader { opcode: opcode::LOOKUP, ..HEADER };
    assert!(answer_init(&other, &offer(37, WANTED)).unwrap_err().to_string().contains("not with INIT"));
}

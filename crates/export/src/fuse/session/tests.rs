//! What the next daemon does with each state a slot can be found in. Its descriptor is a pipe, so that answers are seen.

use super::*;
use crate::{Content, Export};
use aenv_storage::{BlockDevice, StorageError};
use aenv_sys::fuse::abi::{FallocateIn, WriteIn};
use aenv_sys::fuse::slots;
use zerocopy::FromBytes;

/// Counts what is done to it.
#[derive(Debug, Default)]
struct Counter {
    changes: Mutex<Vec<(u64, usize)>>,
    full: bool,
}

impl Counter {
    fn change(&self, offset: u64, length: usize) -> Result<(), StorageError> {
        if self.full {
            return Err(StorageError::NoSpace { path: PathBuf::from("disk") });
        }
        self.changes.lock().unwrap().push((offset, length));
        Ok(())
    }
}

impl BlockDevice for Counter {
    fn size(&self) -> u64 {
        1 << 20
    }

    fn read_at(&self, buffer: &mut [u8], _: u64) -> Result<(), StorageError> {
        buffer.fill(3);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.change(offset, data.len())
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.change(offset, usize::try_from(length).unwrap())
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.change(offset, usize::try_from(length).unwrap())
    }

    fn flush(&self) -> Result<(), StorageError> {
        Ok(())
    }
}

/// A slot with a request, as an earlier daemon left it.
fn leave(slot: &mut Slot, state: u32, code: u32, body: &[u8]) {
    let length = u32::try_from(40 + body.len()).unwrap();
    let header = RequestHeader {
        length,
        opcode: code,
        unique: 88,
        node: 2,
        user: 0,
        group: 0,
        pid: 0,
        extensions: 0,
        padding: 0,
    };
    let area = slot.request_mut();
    area[..40].copy_from_slice(header.as_bytes());
    area[40..40 + body.len()].copy_from_slice(body);
    slot.set_state(state);
}

fn write_of(offset: u64, data: &[u8]) -> Vec<u8> {
    let size = u32::try_from(data.len()).unwrap();
    let arguments = WriteIn { handle: 1, offset, size, write_flags: 0, lock_owner: 0, flags: 0, padding: 0 };
    [arguments.as_bytes(), data].concat()
}

/// What was done to the disk, and the answer: its error and body.
struct Seen {
    changes: Vec<(u64, usize)>,
    answer: Option<(i32, Vec<u8>)>,
    parked: u32,
    state: u32,
}

fn resume(full: bool, prepare: impl FnOnce(&mut Slot)) -> Seen {
    let memory = slots::create(1).unwrap();
    let mut all = slots::map(memory, 1).unwrap();
    prepare(&mut all[0]);
    let (answers, device) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    let files = Arc::new(Files::default());
    let disk = Arc::new(Counter { full, ..Counter::default() });
    let export = Export { number: 1, name: "disk".to_owned(), owner: 0 };
    files.recover(&export, Content::Disk(Arc::<Counter>::clone(&disk))).unwrap();
    let parked = Arc::new(Parked::new(1 << 20));
    let left = sort_slots(all, &parked, 1);
    let shared = Shared {
        devices: vec![device],
        files,
        parked,
        left: Mutex::new(Vec::new()),
        stopping: AtomicBool::new(false),
        warned: AtomicBool::new(false),
    };
    let mut reply = Reply::new().unwrap();
    let mut state = None;
    for slot in left {
        let handled = shared.resume(&slot, &mut reply);
        state = Some(slot.state());
        if let Handled::NoRoom(reason) = handled {
            shared.parked.park_again(slot, reason);
        }
    }
    let mut raw = vec![0; 65536];
    let answer = rustix::io::read(&answers, &mut raw[..]).ok().map(|length| {
        let (header, body) = ReplyHeader::read_from_prefix(&raw[..length]).unwrap();
        assert_eq!((header.length as usize, header.unique), (length, 88));
        (header.error, body.to_vec())
    });
    let changes = disk.changes.lock().unwrap().clone();
    let parked = shared.parked.stalled().iter().map(|stall| stall.requests).sum();
    Seen { changes, answer, parked, state: state.unwrap_or(FREE) }
}

#[test]
fn a_write_that_was_not_answered_is_done_and_answered() {
    for state in [READING, EXECUTING] {
        let seen = resume(false, |slot| leave(slot, state, opcode::WRITE, &write_of(512, &[7; 1000])));
        assert_eq!(seen.changes, [(512, 1000)]);
        assert_eq!(seen.answer, Some((0, WriteOut { size: 1000, padding: 0 }.as_bytes().to_vec())));
        assert_eq!(seen.state, FREE);
    }
}

#[test]
fn a_write_that_may_have_been_answered_is_never_done_again() {
    for (error, size, expected) in
        [(0, 1000, (0, WriteOut { size: 1000, padding: 0 }.as_bytes().to_vec())), (28, 0, (-28, Vec::new()))]
    {
        let seen = resume(false, |slot| {
            leave(slot, ANSWERING, opcode::WRITE, &write_of(512, &[7; 1000]));
            slot.set_word(OUTCOME_ERROR, error);
            slot.set_word(OUTCOME_SIZE, size);
        });
        assert_eq!(seen.changes, []);
        assert_eq!(seen.answer, Some(expected));
        assert_eq!(seen.state, FREE);
    }
    let punch = FallocateIn { handle: 1, offset: 0, length: 8192, mode: 3, padding: 0 };
    let seen = resume(false, |slot| leave(slot, ANSWERING, opcode::FALLOCATE, punch.as_bytes()));
    assert_eq!((seen.changes, seen.answer), (Vec::new(), Some((0, Vec::new()))));
}

#[test]
fn a_read_is_done_again_in_any_state() {
    let arguments = write_of(0, &[]);
    for state in [READING, EXECUTING, ANSWERING] {
        let seen = resume(false, |slot| {
            let mut body = arguments.clone();
            body[16..20].copy_from_slice(&100_u32.to_ne_bytes());
            leave(slot, state, opcode::READ, &body);
        });
        assert_eq!(seen.answer, Some((0, vec![3; 100])));
    }
}

#[test]
fn what_found_no_room_goes_on_waiting() {
    for state in [EXECUTING, PARKED] {
        let seen = resume(true, |slot| leave(slot, state, opcode::WRITE, &write_of(512, &[7; 1000])));
        assert_eq!((seen.changes, seen.answer, seen.parked), (Vec::new(), None, 1));
    }
}

#[test]
fn slots_without_a_request_are_free() {
    for prepare in [
        // A worker waited for a request.
        (|slot: &mut Slot| slot.set_state(READING)) as fn(&mut Slot),
        |slot| leave(slot, FREE, opcode::WRITE, &write_of(0, &[7; 100])),
        // Damaged: no such descriptor, a length that cannot be, no such state.
        |slot| {
            leave(slot, EXECUTING, opcode::WRITE, &write_of(0, &[7; 100]));
            slot.set_word(DEVICE, 9);
        },
        |slot| {
            leave(slot, EXECUTING, opcode::WRITE, &write_of(0, &[7; 100]));
            slot.request_mut()[..4].fill(0xff);
        },
        |slot| leave(slot, 77, opcode::WRITE, &write_of(0, &[7; 100])),
    ] {
        let seen = resume(false, prepare);
        assert_eq!((seen.changes, seen.answer, seen.parked), (Vec::new(), None, 0));
    }
}

/// Not a test: what a child does.
#[test]
#[ignore = "the part of a child, run by another test"]
fn serve_what_cannot_be_read() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let (_other, unreadable) = rustix::pipe::pipe().unwrap();
    let (socket, _holder) = std::os::unix::net::UnixStream::pair().unwrap();
    let slots = slots::map(slots::create(1).unwrap(), 1).unwrap();
    let parked = Arc::new(Parked::new(1 << 20));
    let _session =
        Session::serve(vec![unreadable], socket.into(), slots, Arc::new(Files::default()), parked).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

const CHILD: &str = "AENV_TEST_SESSION_CHILD";

#[test]
fn a_daemon_that_cannot_read_requests_ends() {
    use std::os::unix::process::ExitStatusExt as _;
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "fuse::session::tests::serve_what_cannot_be_read", "--ignored"]);
    let output = command.env(CHILD, "1").output().unwrap();
    assert_eq!(output.status.signal(), Some(6), "it lives on and answers nothing: {output:?}");
}

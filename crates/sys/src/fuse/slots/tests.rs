//! Slots are separate, survive being unmapped, and wrong memory is refused.

use super::*;

#[test]
fn what_is_written_is_found_by_the_next_mapping() {
    let memory = create(3).unwrap();
    {
        let mut slots = map(memory.try_clone().unwrap(), 3).unwrap();
        for (slot, byte) in slots.iter_mut().zip(1_u8..) {
            slot.request_mut().fill(byte);
            slot.set_word(2, u32::from(byte) * 10);
            slot.set_state(u32::from(byte));
        }
    }
    for (slot, byte) in map(memory.try_clone().unwrap(), 3).unwrap().iter().zip(1_u8..) {
        assert_eq!(slot.state(), u32::from(byte));
        assert_eq!((slot.word(0), slot.word(1), slot.word(2)), (0, 0, u32::from(byte) * 10));
        assert_eq!(slot.request().len(), DATA_BYTES + PREFIX_BYTES);
        assert!(slot.request().iter().all(|found| *found == byte));
    }
}

#[test]
fn data_of_a_write_is_page_aligned() {
    let memory = create(2).unwrap();
    for slot in map(memory.try_clone().unwrap(), 2).unwrap() {
        assert_eq!(slot.request()[PREFIX_BYTES..].as_ptr() as usize % PAGE_BYTES, 0);
    }
}

#[test]
fn memory_that_is_given_back_reads_as_zeros_and_is_not_stored() {
    let memory = create(2).unwrap();
    let mut slots = map(memory.try_clone().unwrap(), 2).unwrap();
    let stored = || rustix::fs::fstat(&memory).unwrap().st_blocks * 512;
    for (length, pages) in
        [(0, 1), (PREFIX_BYTES, 1), (PREFIX_BYTES + 1, 2), (PREFIX_BYTES + 8192, 3), (usize::MAX, 257)]
    {
        let slot = &mut slots[1];
        slot.lock().unwrap();
        slot.request_mut().fill(1);
        slot.keep_only(length).unwrap();
        assert_eq!(stored(), pages * 4096, "{length}");
        let kept = length.min(slot.request().len());
        assert!(slot.request()[..kept].iter().all(|byte| *byte == 1), "{length}");
        let behind = usize::try_from((pages - 1) * 4096).unwrap() + PREFIX_BYTES;
        assert!(slot.request()[behind..].iter().all(|byte| *byte == 0), "{length}");
    }
}

#[test]
fn memory_of_another_kind_is_refused() {
    let memory = create(2).unwrap();
    assert_eq!(map(memory.try_clone().unwrap(), 3).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(create(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(create(MAX_SLOTS + 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    let open_ended =
        rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open_ended, SLOT_BYTES as u64).unwrap();
    assert_eq!(map(open_ended, 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

//! Who waits, for how much, and that nothing is lost.

use super::*;
use aenv_sys::fuse::slots;
use std::sync::Arc;
use std::sync::mpsc;

fn parked(limit: usize, count: u32) -> Parked {
    let parked = Parked::new(limit);
    for slot in slots::map(slots::create(count).unwrap(), count).unwrap() {
        parked.release(slot);
    }
    parked
}

fn reason(number: u32, bytes: usize) -> Reason {
    Reason { number, text: format!("reason {number}"), bytes }
}

#[test]
fn stalls_are_told_by_export_oldest_first() {
    let parked = parked(1000, 4);
    for number in [5, 3, 5] {
        let slot = parked.take_slot().unwrap();
        parked.park(slot, reason(number, 10));
    }
    let seen: Vec<_> = parked.stalled().iter().map(|stall| (stall.number, stall.requests)).collect();
    assert_eq!(seen, [(5, 2), (3, 1)]);
    let due = parked.take_due().unwrap();
    // Still told while they are tried.
    assert_eq!(parked.stalled().len(), 2);
    for (id, number, slot) in due {
        if number == 5 {
            parked.done(id, slot);
        } else {
            parked.still(id, slot, Some("again".to_owned()));
        }
    }
    let stall = parked.stalled().remove(0);
    assert_eq!((stall.number, stall.requests, stall.reason.as_str()), (3, 1, "again"));
}

#[test]
fn above_the_limit_all_but_the_last_worker_wait() {
    let parked = Arc::new(parked(100, 8));
    let (first, second) = (parked.take_slot().unwrap(), parked.take_slot().unwrap());
    parked.park(first, reason(1, 101));
    let (send, receive) = mpsc::channel();
    let waiter = Arc::clone(&parked);
    let thread = std::thread::spawn(move || {
        let slot = waiter.take_slot();
        send.send(()).unwrap();
        slot
    });
    // The second one works, so the first one has to wait.
    assert!(receive.recv_timeout(Duration::from_millis(100)).is_err());
    // Now nobody works: one goes on, though there is more than the limit.
    parked.park(second, reason(1, 50));
    receive.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(thread.join().unwrap().is_some());
}

#[test]
fn the_end_wakes_everyone() {
    let parked = Arc::new(parked(100, 1));
    let slot = parked.take_slot().unwrap();
    let (worker, retrier) = (Arc::clone(&parked), Arc::clone(&parked));
    let worker = std::thread::spawn(move || worker.take_slot().is_none());
    let retrier = std::thread::spawn(move || retrier.take_due().is_none());
    parked.end();
    assert!(worker.join().unwrap() && retrier.join().unwrap());
    parked.leave(slot);
    parked.clear();
    assert_eq!(parked.stalled(), []);
}

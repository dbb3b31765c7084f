//! Daemons that are killed: whoever uses a disk waits and never sees an error, and nothing is done twice that must not be.

use crate::roles::DISK_BYTES;
use crate::stage::{PATIENCE, Process, Stage, start, wait_until};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

fn start_daemon(stage: &Stage) -> Process {
    let _ = std::fs::remove_file(stage.path("serving"));
    let daemon = start("daemon", stage.directory.path());
    wait_until("the daemon serves", || stage.path("serving").exists());
    daemon
}

fn kill(daemon: &mut Process) {
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
}

fn progress(stage: &Stage) -> u64 {
    let text = std::fs::read_to_string(stage.path("progress")).unwrap_or_default();
    text.parse().unwrap_or(0)
}

#[test]
fn writers_only_wait_while_the_daemon_is_killed_again_and_again() {
    let stage = Stage::new();
    let mut daemon = start_daemon(&stage);
    let mut writer = start("writer", stage.directory.path());
    for round in 0..8 {
        let before = progress(&stage);
        wait_until("the writer goes on", || {
            assert!(writer.0.try_wait().unwrap().is_none(), "the writer has ended");
            progress(&stage) > before + 20
        });
        kill(&mut daemon);
        // Sometimes at once, sometimes so that everything has to wait.
        std::thread::sleep(Duration::from_millis(40 * (round % 3)));
        daemon = start_daemon(&stage);
    }
    std::fs::write(stage.path("enough"), "").unwrap();
    wait_until("the writer has verified all", || writer.0.try_wait().unwrap().is_some());
    assert!(writer.0.wait().unwrap().success());
    assert!(stage.path("verified").exists());
    println!("{} writes while the daemon was killed 8 times", progress(&stage));
    drop(daemon);
}

#[test]
fn a_request_in_the_middle_of_which_the_daemon_is_killed_is_done_again() {
    let stage = Stage::new();
    std::fs::write(stage.path("slow"), "").unwrap();
    let mut daemon = start_daemon(&stage);
    let path = stage.mount("disk-1");
    let writer = std::thread::spawn(move || {
        let file = File::options().read(true).write(true).open(path).unwrap();
        file.write_all_at(&[9; 100_000], 12345).unwrap();
        let mut back = vec![0; 100_000];
        file.read_exact_at(&mut back, 12345).unwrap();
        back
    });
    std::thread::sleep(Duration::from_millis(300));
    kill(&mut daemon);
    assert!(!writer.is_finished());
    std::fs::remove_file(stage.path("slow")).unwrap();
    let daemon = start_daemon(&stage);
    wait_until("the write is done", || writer.is_finished());
    assert_eq!(writer.join().unwrap(), [9; 100_000]);
    drop(daemon);
}

#[test]
fn requests_that_wait_for_room_go_on_waiting_in_the_next_daemon() {
    let stage = Stage::new();
    std::fs::write(stage.path("full"), "").unwrap();
    let mut daemon = start_daemon(&stage);
    let mut writer = start("stuck", stage.directory.path());
    wait_until("it writes", || stage.path("writing").exists());
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..2 {
        kill(&mut daemon);
        daemon = start_daemon(&stage);
    }
    assert!(writer.0.try_wait().unwrap().is_none());
    std::fs::remove_file(stage.path("full")).unwrap();
    wait_until("it has written", || writer.0.try_wait().unwrap().is_some());
    assert!(writer.0.wait().unwrap().success());
    let mut back = vec![0; usize::try_from(DISK_BYTES).unwrap()];
    File::open(stage.path("content")).unwrap().read_exact_at(&mut back, 0).unwrap();
    assert!(back[..8192].iter().all(|byte| *byte == 5) && back[8192..].iter().all(|byte| *byte == 0));
}

#[test]
fn whoever_opens_a_file_while_no_daemon_runs_waits() {
    let stage = Stage::new();
    let mut daemon = start_daemon(&stage);
    kill(&mut daemon);
    let path = stage.mount("disk-1");
    let opener = std::thread::spawn(move || File::open(path).unwrap().metadata().unwrap().len());
    std::thread::sleep(Duration::from_millis(200));
    assert!(!opener.is_finished());
    let daemon = start_daemon(&stage);
    let deadline = std::time::Instant::now() + PATIENCE;
    while !opener.is_finished() && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(opener.join().unwrap(), DISK_BYTES);
    drop(daemon);
}

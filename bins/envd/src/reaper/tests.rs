//! The reaper waits for *all* children of its process, so these tests rely on each having a process of its own
//! (cargo-nextest); under one shared process they would still pass, as every entry is handed over by any reaper run.

use super::*;
use aenv_sys::guest::StandardInput;

fn shell(script: &str) -> Program {
    Program {
        command: "sh".into(),
        arguments: vec!["-c".into(), script.into()],
        environment: vec![("PATH".into(), "/usr/bin:/bin".into())],
        directory: "/".into(),
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: Vec::new(),
        oom_score_adjustment: 100,
        control_group: None,
        input: StandardInput::Null,
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[tokio::test]
async fn statuses_reach_the_starters_even_of_programs_that_end_at_once() {
    if !is_root() {
        return;
    }
    let reaper = Reaper::default();
    tokio::spawn(reaper.clone().run());
    let mut waiting = Vec::new();
    for code in 0..50 {
        let started = reaper.start(shell(&format!("exit {code}"))).await.expect("starts");
        waiting.push((code, started));
    }
    for (code, started) in waiting {
        assert_eq!(started.ending.await, Ok(Ending::Exited(code)));
    }
    assert!(reaper.table.lock().await.is_empty());
}

#[tokio::test]
async fn a_failed_start_is_an_error_and_leaves_no_child() {
    let reaper = Reaper::default();
    tokio::spawn(reaper.clone().run());
    let mut program = shell("");
    program.command = "/no/such/program".into();
    assert!(reaper.start(program).await.is_err());
    assert!(reaper.table.lock().await.is_empty());
}

#[tokio::test]
async fn a_signal_reaches_the_group_and_never_an_ended_process() {
    if !is_root() {
        return;
    }
    let reaper = Reaper::default();
    tokio::spawn(reaper.clone().run());
    let started = reaper.start(shell("sleep 1000 & wait")).await.expect("starts");
    let pid = started.process.pid;
    reaper.signal(pid, Signal::KILL, true).await.expect("is sent");
    assert_eq!(started.ending.await, Ok(Ending::Killed(9)));
    let refused = reaper.signal(pid, Signal::KILL, true).await.expect_err("has ended");
    assert!(matches!(refused, SignalError::Ended(ended) if ended == pid));
    let mut rest =
        tokio::net::unix::pipe::Receiver::from_owned_fd(started.process.output).expect("is a pipe");
    let mut text = Vec::new();
    // The pipe ends only when the background child is dead too.
    tokio::io::AsyncReadExt::read_to_end(&mut rest, &mut text).await.expect("reads");
}

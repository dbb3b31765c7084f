//! Against programs and listeners that stand for a block service.

use super::*;
use crate::arguments::{Arguments, Task};
use aenv_daemon::LogFormat;
use aenv_storage::block_service::{CacheView, ExportView, Status};
use clap::Parser as _;
use std::fs::File;
use std::path::Path;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

fn instance(directory: &Path, program: &str) -> Instance {
    let data = directory.join("data");
    let run = directory.join("run");
    let arguments = Arguments::parse_from([
        "aenv-node",
        "purge",
        "--data-dir",
        data.to_str().unwrap(),
        "--run-dir",
        run.to_str().unwrap(),
        "--stored",
        program,
    ]);
    std::fs::create_dir_all(&data).unwrap();
    let Task::Purge(instance) = arguments.task else { panic!("purge was asked for") };
    instance
}

/// A program that is this script.
fn script(directory: &Path, text: &str) -> PathBuf {
    let program = directory.join("script");
    std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    program
}

/// Listens as the block service of process `pid` does, and says how it is whatever it is asked.
async fn answer(directory: &Path, pid: u32) {
    let view = || ExportView { way: "FUSE".to_owned(), reason: String::new() };
    let status = Status {
        version: "1".to_owned(),
        pid,
        disks_by: view(),
        images_by: view(),
        cache: CacheView { hits: 0, misses: 0, bytes: 0, capacity: 0 },
        disks: 0,
        images: 0,
        open_layers: 0,
        failed: Vec::new(),
        stalled: Vec::new(),
    };
    let body = serde_json::to_string(&status).unwrap();
    let run = directory.join("run");
    std::fs::create_dir_all(&run).unwrap();
    let listener = UnixListener::bind(run.join("stored.sock")).unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut seen = Vec::new();
        while !seen.windows(4).any(|window| window == b"\r\n\r\n")
            && stream.read_buf(&mut seen).await.unwrap() > 0
        {}
        let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all((head + &body).as_bytes()).await.unwrap();
    }
}

async fn read_number(path: &Path) -> u32 {
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        match text.strip_suffix('\n').map(str::parse) {
            Some(Ok(number)) => return number,
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

#[tokio::test]
async fn a_service_that_cannot_start_is_told_with_its_last_words() {
    let directory = tempfile::tempdir().unwrap();
    let program = script(directory.path(), "echo \"I cannot\"\nexit 1");
    let service = Service::of(&instance(directory.path(), program.to_str().unwrap()));
    std::fs::write(service.data_dir.join("stored.log"), "words of an earlier one\n").unwrap();
    let error = format!("{:#}", service.find_or_start().await.unwrap_err());
    assert!(error.contains("I cannot") && error.contains("ended at once"), "{error}");
    assert!(!error.contains("earlier"), "{error}");
    let missing = Service::of(&instance(directory.path(), "/no-such-program"));
    let error = format!("{:#}", missing.find_or_start().await.unwrap_err());
    assert!(error.contains("/no-such-program"), "{error}");
}

#[tokio::test]
async fn the_service_is_told_what_the_node_was_told() {
    let directory = tempfile::tempdir().unwrap();
    let program = script(directory.path(), "echo \"told: $*\"\nexit 1");
    let mut service = Service::of(&instance(directory.path(), program.to_str().unwrap()));
    service.options.export = Some("fuse".to_owned());
    service.options.cache_bytes = Some(1 << 30);
    service.options.compaction_seconds = Some(7);
    service.log = Some(LogOptions { log: LogFormat::Json, log_filter: "debug,hyper=off".to_owned() });
    let error = format!("{:#}", service.find_or_start().await.unwrap_err());
    for told in [
        "told: serve --data-dir ",
        "--export fuse",
        "--cache-bytes 1073741824",
        "--compaction-seconds 7",
        "--log json",
        "--log-filter debug,hyper=off",
    ] {
        assert!(error.contains(told), "{error}");
    }
}

#[tokio::test]
async fn a_service_that_recovers_for_long_is_waited_for_and_not_ended() {
    let directory = tempfile::tempdir().unwrap();
    let pid_file = directory.path().join("pid");
    let program = script(directory.path(), &format!("echo $$ > {}; exec sleep 600", pid_file.display()));
    let mut service = Service::of(&instance(directory.path(), program.to_str().unwrap()));
    service.client_patience = Duration::from_millis(20);
    let starting = tokio::spawn(async move { service.find_or_start().await });
    let pid = read_number(&pid_file).await;
    let process = PidFd::open(pid, None).unwrap();
    // Many times its patience.
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(!starting.is_finished() && !process.has_exited().unwrap());
    let place = directory.path().to_owned();
    let answering = tokio::spawn(async move { answer(&place, pid).await });
    let found = starting.await.unwrap().unwrap();
    assert_eq!(found.pid(), pid);
    assert!(!process.has_exited().unwrap());
    answering.abort();
    process.kill().unwrap();
    process.exited().await.unwrap();
    process.reap().unwrap();
}

#[tokio::test]
async fn whoever_stops_waiting_leaves_the_service_to_its_recovery() {
    let directory = tempfile::tempdir().unwrap();
    let pid_file = directory.path().join("pid");
    let program = script(directory.path(), &format!("echo $$ > {}; exec sleep 600", pid_file.display()));
    let service = Service::of(&instance(directory.path(), program.to_str().unwrap()));
    let starting = tokio::spawn(async move { service.find_or_start().await });
    let process = PidFd::open(read_number(&pid_file).await, None).unwrap();
    starting.abort();
    assert!(starting.await.unwrap_err().is_cancelled());
    assert!(!process.has_exited().unwrap());
    process.kill().unwrap();
    process.exited().await.unwrap();
    process.reap().unwrap();
}

#[tokio::test]
async fn another_service_that_holds_the_data_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let runs = directory.path().join("runs");
    let program = script(directory.path(), &format!("echo run >> {}; exit 1", runs.display()));
    let service = Service::of(&instance(directory.path(), program.to_str().unwrap()));
    let storage = service.data_dir.join("storage");
    std::fs::create_dir_all(&storage).unwrap();
    let lock = File::create(storage.join("lock")).unwrap();
    lock.try_lock().unwrap();
    let starting = tokio::spawn(async move { service.find_or_start().await });
    while !runs.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(!starting.is_finished());
    let (place, own) = (directory.path().to_owned(), std::process::id());
    let answering = tokio::spawn(async move { answer(&place, own).await });
    assert_eq!(starting.await.unwrap().unwrap().pid(), own);
    answering.abort();
    assert_eq!(std::fs::read_to_string(&runs).unwrap().lines().count(), 1);
}

#[tokio::test]
async fn when_the_other_one_lets_go_the_service_is_started_again() {
    let directory = tempfile::tempdir().unwrap();
    let runs = directory.path().join("runs");
    let text = format!("echo run >> {0}; echo \"run $(wc -l < {0})\"; exit 1", runs.display());
    let program = script(directory.path(), &text);
    let service = Service::of(&instance(directory.path(), program.to_str().unwrap()));
    let storage = service.data_dir.join("storage");
    std::fs::create_dir_all(&storage).unwrap();
    let lock = File::create(storage.join("lock")).unwrap();
    lock.try_lock().unwrap();
    let starting = tokio::spawn(async move { service.find_or_start().await });
    while !runs.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(lock);
    // The second run fails with nobody to wait for.
    let error = format!("{:#}", starting.await.unwrap().unwrap_err());
    assert!(error.contains("run 2") && !error.contains("run 1"), "{error}");
}

#[tokio::test]
async fn where_no_service_was_there_is_nothing_to_purge_and_its_disks_are_not_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let instance = instance(directory.path(), "/no-such-program");
    assert!(purge(&instance).await.unwrap().is_empty());
    refuse_leftovers(&instance).unwrap();
    std::fs::create_dir_all(instance.data_dir.join("storage/disks/ix")).unwrap();
    let error = refuse_leftovers(&instance).unwrap_err().to_string();
    assert!(error.contains("AENV_DISKS=service"), "{error}");
    let error = format!("{:#}", purge(&instance).await.unwrap_err());
    assert!(error.contains("/no-such-program"), "{error}");
}

use super::*;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

fn spawn(directory: &Path, arg0: &str, script: &str, inherit: &[BorrowedFd<'_>]) -> PidFd {
    let args = ["-c".to_owned(), script.to_owned()];
    let log = File::create(directory.join("log")).unwrap();
    let program = Path::new("/bin/sh");
    let oom_score_adj = Some(500);
    let isolation = Isolation::default();
    Detached {
        program,
        arg0,
        args: &args,
        directory,
        netns: None,
        log,
        inherit,
        oom_score_adj,
        huge_pages: false,
        cgroup: None,
        isolation,
    }
    .spawn()
    .unwrap()
}

#[test]
fn start_time_is_found_behind_a_hostile_name() {
    let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
    let stat = format!("1234 (a) b) S {}", fields.join(" "));
    assert_eq!(parse_start_time(&stat), Some(22));
    assert_eq!(parse_start_time("1234 (short) S 1"), None);
}

#[test]
fn argument_lists_are_split() {
    assert_eq!(split_args(b"a\0-b c\0\0"), ["a", "-b c", ""]);
    assert!(split_args(b"").is_empty());
}

#[tokio::test]
async fn spawned_process_is_detached_and_reports_its_exit() {
    let directory = tempfile::tempdir().unwrap();
    let process = spawn(
        directory.path(),
        "sh",
        "pwd; cat /proc/self/oom_score_adj; grep THP_enabled /proc/self/status; exit 7",
        &[],
    );
    process.exited().await.unwrap();
    assert!(process.has_exited().unwrap());
    assert_eq!(process.reap().unwrap(), Some(Ended::Exited(7)));
    assert_eq!(process.reap().unwrap(), None);
    process.kill().unwrap();
    let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
    assert_eq!(log, format!("{}\n500\nTHP_enabled:\t0\n", directory.path().display()));
}

#[tokio::test]
async fn only_named_descriptors_are_inherited() {
    let directory = tempfile::tempdir().unwrap();
    let file = File::create(directory.path().join("given")).unwrap();
    let other = File::open("/dev/null").unwrap();
    let script = format!("ls -l /proc/self/fd; echo hello >&{}", file.as_raw_fd());
    let process = spawn(directory.path(), "sh", &script, &[file.as_fd()]);
    process.exited().await.unwrap();
    assert_eq!(process.reap().unwrap(), Some(Ended::Exited(0)));
    assert_eq!(std::fs::read_to_string(directory.path().join("given")).unwrap(), "hello\n");
    assert!(other.metadata().unwrap().mode() != 0);
    // Standard streams, the given file, and what `ls` itself opens.
    let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
    assert!(!log.contains(&format!(" {} -> /dev/null", other.as_raw_fd())), "{log}");
}

#[tokio::test]
async fn a_process_is_found_by_name_killed_and_never_mistaken() {
    let directory = tempfile::tempdir().unwrap();
    let name = format!("aenv-test-{}", std::process::id());
    let process = spawn(directory.path(), &name, "sleep 100 & wait", &[]);
    let started = start_time(process.pid()).unwrap();
    // Between fork and exec a child still shows the arguments of its parent: so ours may be missing at first, and the
    // shell's may show twice.
    let found = loop {
        let found = find(|args| args[0] == name).unwrap();
        if let Some(found) = found.into_iter().find(|found| found.pid == process.pid()) {
            break found;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!((found.start_time, &found.args[1..2]), (started, &["-c".to_owned()][..]));
    assert!(PidFd::open(process.pid(), Some(started + 1)).is_err());
    let again = PidFd::open(process.pid(), Some(started)).unwrap();
    assert_eq!(again.reap().unwrap(), None);
    rustix::process::kill_process_group(to_pid(process.pid()).unwrap(), Signal::KILL).unwrap();
    again.exited().await.unwrap();
    assert_eq!(process.reap().unwrap(), Some(Ended::Signalled(9)));
    assert!(PidFd::open(process.pid(), Some(started)).is_err());
}

#[test]
fn a_thread_that_waits_with_sigkill_is_told_from_others() {
    assert!(has_kill_pending("Name:\tx\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"));
    assert!(!has_kill_pending("SigPnd:\t0000000000000200\nShdPnd:\t0000000000000100\n"));
    assert!(!has_kill_pending("SigPnd:\tnothing\n"));
    assert!(is_exiting("7 (a) b) D 1 7 7 0 -1 4194564 0 0"));
    assert!(!is_exiting("7 (a) b) Z 1 7 7 0 -1 4194564 0 0"));
    assert!(!is_exiting("7 (a) b) D 1 7 7 0 -1 4194560 0 0"));
    assert!(!is_being_killed(std::process::id()));
    assert!(!is_being_killed(0));
}

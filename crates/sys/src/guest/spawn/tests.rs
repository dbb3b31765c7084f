//! Starts real programs; needs root for the change of user.

use super::*;
use std::fs::File;
use std::io::Read as _;

fn program(command: &str, arguments: &[&str]) -> Program {
    Program {
        command: command.into(),
        arguments: arguments.iter().map(Into::into).collect(),
        environment: vec![("PATH".into(), "/usr/bin:/bin".into())],
        directory: "/".into(),
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        oom_score_adjustment: 100,
        control_group: None,
        input: StandardInput::Null,
    }
}

fn run(program: &Program) -> String {
    let spawned = spawn(program).expect("starts");
    let mut text = String::new();
    File::from(spawned.output).read_to_string(&mut text).expect("reads");
    let pid = rustix::process::Pid::from_raw(spawned.pid);
    rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).expect("reaps");
    text
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn a_program_gets_user_groups_directory_and_environment() {
    if !is_root() {
        return;
    }
    let mut wanted =
        program("sh", &["-c", "id -u; id -g; id -G; pwd; echo $X; umask; cat /proc/self/oom_score_adj"]);
    wanted.environment.push(("X".into(), "y z".into()));
    wanted.uid = 65534;
    wanted.gid = 65533;
    wanted.groups = vec![65533, 7];
    wanted.directory = "/tmp".into();
    assert_eq!(run(&wanted), "65534\n65533\n65533 7\n/tmp\ny z\n0022\n100\n");
}

#[test]
fn a_program_leads_a_session_and_has_no_foreign_descriptors() {
    if !is_root() {
        return;
    }
    let kept = File::open("/proc/version").expect("opens");
    let text = run(&program(
        "sh",
        &[
            "-c",
            "cut -d' ' -f1,5,6 /proc/$$/stat; echo $$ $$ $$; for f in /proc/$$/fd/*; do readlink $f; done",
        ],
    ));
    drop(kept);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], lines[1], "pid, process group and session are one");
    assert!(!lines.contains(&"/proc/version"), "{text}");
}

#[test]
fn a_program_that_cannot_run_is_an_error() {
    if !is_root() {
        return;
    }
    let missing = spawn(&program("no-such-program", &[])).expect_err("is missing");
    assert!(matches!(missing, SpawnError::Kernel(error) if error.kind() == io::ErrorKind::NotFound));
    let mut denied = program("true", &[]);
    denied.uid = 65534;
    denied.directory = "/root".into();
    if std::fs::metadata("/root")
        .is_ok_and(|m| std::os::unix::fs::PermissionsExt::mode(&m.permissions()) & 1 == 0)
    {
        let error = spawn(&denied).expect_err("may not enter");
        assert!(
            matches!(error, SpawnError::Kernel(error) if error.kind() == io::ErrorKind::PermissionDenied)
        );
    }
}

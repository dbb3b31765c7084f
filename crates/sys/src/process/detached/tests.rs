use super::super::{Access, DeviceKind, Ended, JailStep, Resource};
use super::*;

/// Runs a shell script as the process and returns what it printed. `shell` is looked up in the root it gets.
async fn printed(shell: &str, script: &str, isolation: Isolation) -> (String, Option<Ended>) {
    let directory = tempfile::tempdir().unwrap();
    let log_path = directory.path().join("log");
    let args = ["-c".to_owned(), script.to_owned()];
    let process = Detached {
        program: Path::new(shell),
        arg0: "sh",
        args: &args,
        directory: Path::new("/"),
        netns: None,
        log: File::create(&log_path).unwrap(),
        inherit: &[],
        oom_score_adj: None,
        huge_pages: true,
        cgroup: None,
        isolation,
    };
    let process = process.spawn().unwrap();
    process.exited().await.unwrap();
    let ended = process.reap().unwrap();
    (std::fs::read_to_string(log_path).unwrap(), ended)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[tokio::test]
async fn a_process_of_a_namespace_of_its_own_is_still_a_child_whose_status_is_known() {
    if !is_root() {
        return;
    }
    let isolation = Isolation { pid_namespace: true, ..Isolation::default() };
    let (text, ended) = printed("sh", "echo $$; exit 9", isolation).await;
    assert_eq!((text.as_str(), ended), ("1\n", Some(Ended::Exited(9))));
}

#[tokio::test]
async fn a_user_without_rights_has_none_and_cannot_raise_its_limits() {
    if !is_root() {
        return;
    }
    let isolation = Isolation {
        user: Some(712_345_678),
        no_new_privileges: true,
        limits: vec![(Resource::Nofile, 33), (Resource::Core, 0)],
        ..Isolation::default()
    };
    let script = "grep -E '^(Uid|Gid|Groups|CapPrm|CapEff|CapAmb|NoNewPrivs)' /proc/self/status; ulimit -n; ulimit -Hn 100";
    let (text, _) = printed("sh", script, isolation).await;
    for line in [
        "Uid:\t712345678\t712345678\t712345678\t712345678\n",
        "Gid:\t712345678\t712345678\t712345678\t712345678\n",
        "Groups:\t \n",
        "CapPrm:\t0000000000000000\n",
        "CapEff:\t0000000000000000\n",
        "CapAmb:\t0000000000000000\n",
        "NoNewPrivs:\t1\n",
        "\n33\n",
    ] {
        assert!(text.contains(line), "{line:?} is not in {text}");
    }
    assert!(text.to_lowercase().contains("error") || text.contains("not permitted"), "{text}");
}

#[tokio::test]
async fn a_jail_shows_what_it_was_given_and_leaves_no_mount_on_the_host() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    for name in ["usr", "dev", "given", "writable"] {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    for name in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name)).unwrap();
    }
    std::fs::write(directory.path().join("secret"), "secret").unwrap();
    let (given, writable) = (directory.path().join("one"), directory.path().join("two"));
    for path in [&given, &writable] {
        std::fs::create_dir(path).unwrap();
        std::os::unix::fs::chown(path, Some(712_345_678), None).unwrap();
    }
    let bind = |source: &Path, name: &str, access| JailStep::Bind {
        source: source.to_owned(),
        target: root.join(name),
        access,
    };
    let isolation = Isolation {
        steps: vec![
            bind(Path::new("/usr"), "usr", Access::ReadOnly),
            bind(&given, "given", Access::ReadOnly),
            bind(&writable, "writable", Access::ReadWrite),
            JailStep::Memory { target: root.join("dev"), bytes: 4096 },
            JailStep::Directory(root.join("dev/net")),
            JailStep::Device {
                path: root.join("dev/net/zero"),
                kind: DeviceKind::Character,
                major: 1,
                minor: 5,
                owner: 712_345_678,
            },
        ],
        root: Some(root.clone()),
        user: Some(712_345_678),
        ..Isolation::default()
    };
    let script = "ls /; echo x >/given/x; echo x >/writable/x; echo x >/x; head -c 3 /dev/net/zero | wc -c; \
                  ls /proc /.. /etc /root; mknod /writable/null c 1 3; cd /..; pwd";
    let mounts = || std::fs::read_to_string("/proc/self/mounts").unwrap();
    let before = mounts();
    let (text, _) = printed("/usr/bin/sh", script, isolation).await;
    assert!(text.starts_with("bin\ndev\ngiven\nlib\nlib64\nusr\nwritable\n"), "{text}");
    assert!(writable.join("x").exists() && !given.join("x").exists() && !root.join("x").exists(), "{text}");
    assert!(
        text.contains("\n3\n") && text.contains("/proc': No such file") && text.contains("/etc': No such"),
        "{text}"
    );
    assert!(!writable.join("null").exists() && text.ends_with("/\n"), "{text}");
    assert_eq!(mounts(), before);
    assert_eq!(std::fs::read_dir(root.join("dev")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_failed_start_says_which_step_failed_and_leaves_no_process() {
    let directory = tempfile::tempdir().unwrap();
    let start = |program: &str, isolation| {
        let what = Detached {
            program: Path::new(program),
            arg0: "never",
            args: &[],
            directory: directory.path(),
            netns: None,
            log: File::create(directory.path().join("log")).unwrap(),
            inherit: &[],
            oom_score_adj: None,
            huge_pages: true,
            cgroup: None,
            isolation,
        };
        what.spawn().unwrap_err()
    };
    let error = start("/no/such/program", Isolation::default());
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert!(error.to_string().contains("execute the program: /no/such/program"), "{error}");
    let error = start("no-such-program", Isolation::default());
    assert!(error.to_string().contains("is not in /usr/local/sbin"), "{error}");
    if is_root() {
        let root = Some(directory.path().join("missing"));
        let error = start("/bin/true", Isolation { root, ..Isolation::default() });
        assert!(error.to_string().contains("jail's mounts"), "{error}");
    }
    let error = rustix::process::waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    assert_eq!(error.unwrap_err(), Errno::CHILD);
}

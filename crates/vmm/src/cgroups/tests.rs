//! Names, formats, and the life of groups, on a tree of made-up control files.

use super::*;
use aenv_sys::cgroup::Hierarchy;
use std::fs;
use tempfile::TempDir;

fn prepared(controllers: &str) -> (TempDir, Cgroups) {
    let tree = tempfile::tempdir().unwrap();
    for group in ["", "aenv-a"] {
        let path = tree.path().join(group);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("cgroup.controllers"), controllers).unwrap();
        fs::write(path.join("cgroup.subtree_control"), controllers).unwrap();
    }
    let host = Host {
        hierarchy: Some(Hierarchy { mount: tree.path().to_owned(), hybrid: false }),
        own: Some("".into()),
        systemd: false,
        kernel: "6.12".to_owned(),
        pid: 7,
        is_delegated: |_| Ok(false),
    };
    match Cgroups::prepare_on(&host, "a", None).unwrap() {
        Outcome::Usable(cgroups) => (tree, cgroups),
        Outcome::Unusable { reason, .. } => panic!("{reason}"),
    }
}

#[test]
fn limits_are_written_as_the_kernel_wants_them() {
    let mut limits = Limits::for_machine(2, 512, 128);
    let io = IoLimit { major: 259, minor: 3, rbps: Some(1 << 20), wbps: None, riops: None, wiops: Some(100) };
    limits.io = vec![io];
    let expected = [
        ("memory.max", "671088640"),
        ("memory.swap.max", "0"),
        ("memory.oom.group", "1"),
        ("cpu.max", "200000 100000"),
        ("pids.max", "130"),
        ("io.max", "259:3 rbps=1048576 wbps=max riops=max wiops=100"),
    ];
    assert_eq!(limits.settings(), expected.map(|(file, value)| (file, value.to_owned())));
    let quota = |cpu_max| {
        let settings = Limits { cpu_max, ..limits.clone() }.settings();
        settings.into_iter().find(|(file, _)| *file == "cpu.max").unwrap().1
    };
    assert_eq!(quota(None), "max 100000");
    assert_eq!(quota(Some(1500)), "150000 100000");
    assert_eq!(quota(Some(0)), "1000 100000");
    assert_eq!(Limits::for_machine(1, u64::MAX, 1).memory_max, u64::MAX);
}

#[test]
fn a_death_is_blamed_on_memory_only_when_memory_killed() {
    let events = |oom, oom_kill, max| MemoryEvents { oom, oom_kill, max, high: 0 };
    assert_eq!(events(0, 0, 0).out_of_memory(), None);
    assert_eq!(events(3, 0, 900).out_of_memory(), None, "reclaim helped: somebody else sent the signal");
    assert_eq!(events(1, 1, 5).out_of_memory(), Some(OutOfMemory::OwnLimit));
    assert_eq!(events(0, 2, 5).out_of_memory(), Some(OutOfMemory::Elsewhere));
}

#[test]
fn a_name_cannot_reach_elsewhere() {
    let (_tree, cgroups) = prepared("cpu memory pids");
    for name in ["", "..", "a/b", "memory.max", "/x", "a b", "ü"] {
        let made = cgroups.make(name, &Limits::for_machine(1, 1, 1));
        assert!(matches!(made, Err(CgroupsError::Name(_))), "{name}");
        assert!(matches!(cgroups.open(name), Err(CgroupsError::Name(_))), "{name}");
    }
    assert!(cgroups.open("aenv-a-1").unwrap().is_none());
}

#[test]
fn nothing_stays_of_a_group_whose_limits_are_refused() {
    let (_tree, cgroups) = prepared("cpu memory pids");
    // A directory that is no control group gets no control files.
    let error = cgroups.make("aenv-a-1", &Limits::for_machine(1, 64, 64)).unwrap_err();
    assert!(error.to_string().contains("memory.max"), "{error}");
    assert!(!cgroups.parent().join("aenv-a-1").exists());
    let io = IoLimit { major: 8, minor: 0, rbps: None, wbps: None, riops: None, wiops: None };
    let limits = Limits { io: vec![io], ..Limits::for_machine(1, 64, 64) };
    assert!(matches!(cgroups.make("aenv-a-1", &limits), Err(CgroupsError::NoIo { .. })));
}

#[test]
fn an_old_group_is_not_taken_for_a_new_one() {
    let (_tree, cgroups) = prepared("cpu memory pids");
    fs::create_dir(cgroups.parent().join("aenv-a-1")).unwrap();
    let error = cgroups.make("aenv-a-1", &Limits::for_machine(1, 64, 64)).unwrap_err();
    assert!(matches!(&error, CgroupsError::Kernel(kernel) if kernel.kind() == io::ErrorKind::AlreadyExists));
    assert!(cgroups.open("aenv-a-1").unwrap().is_some(), "and it is left alone");
}

#[test]
fn what_happened_is_read_from_the_group() {
    let (_tree, cgroups) = prepared("cpu memory pids");
    let path = cgroups.parent().join("aenv-a-1");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("memory.events"), "low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\noom_group_kill 1\n")
        .unwrap();
    fs::write(path.join("pids.events"), "max 5\n").unwrap();
    fs::write(path.join("cpu.stat"), "usage_usec 9\nnr_periods 8\nnr_throttled 7\nthrottled_usec 6\n")
        .unwrap();
    let group = cgroups.open("aenv-a-1").unwrap().unwrap();
    assert_eq!(group.events().unwrap(), MemoryEvents { oom: 3, oom_kill: 4, max: 2, high: 1 });
    assert_eq!(group.refused_processes().unwrap(), 5);
    assert_eq!(group.throttling().unwrap(), Throttling { periods: 7, microseconds: 6 });
    assert_eq!(group.memory_peak().unwrap(), None);
    fs::write(path.join("memory.peak"), "4096\n").unwrap();
    assert_eq!(group.memory_peak().unwrap(), Some(4096));
    assert!(Group::at(&path).unwrap().is_some() && Group::at(&path.join("x")).unwrap().is_none());
}

#[tokio::test]
async fn a_sweep_says_what_it_could_not_end_and_spares_others() {
    let (_tree, cgroups) = prepared("cpu memory pids");
    for name in ["aenv-a-1", "aenv-a-2", "aenv-b-1"] {
        fs::create_dir(cgroups.parent().join(name)).unwrap();
    }
    // Without a file cgroup.kill nothing can be killed, and what lives is not removed.
    let error = cgroups.sweep("aenv-a-", &["aenv-a-2".to_owned()]).await.unwrap_err();
    assert!(error.to_string().contains("aenv-a-1/cgroup.kill"), "{error}");
    assert_eq!(cgroups.sweep("aenv-c-", &[]).await.unwrap(), Vec::<String>::new());
    assert!(cgroups.parent().join("aenv-b-1").exists());
}

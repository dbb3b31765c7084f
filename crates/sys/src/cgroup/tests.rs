//! Parsing, and the file logic on a tree of made-up control files.

use super::hierarchy::{parse_group, parse_mounts};
use super::*;

#[test]
fn the_mount_is_found_in_each_layout() {
    let v2 = "25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    let v1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
    let named = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n";
    let unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    let odd = "41 31 0:38 / /my\\040groups\\134x rw master:1 shared:2 - cgroup2 none rw\n";
    let find = |parts: &[&str]| parse_mounts(parts.concat().as_bytes());
    let found = |mount: &str, hybrid| Some(Hierarchy { mount: mount.into(), hybrid });
    assert_eq!(find(&["23 1 0:1 / / rw - ext4 /dev/vda rw\n", v2]), found("/sys/fs/cgroup", false));
    assert_eq!(find(&[v1, named, unified]), found("/sys/fs/cgroup/unified", true));
    assert_eq!(find(&[named, unified]), found("/sys/fs/cgroup/unified", false));
    assert_eq!(find(&[odd, v2]), found("/sys/fs/cgroup", false));
    assert_eq!(find(&[odd]), found("/my groups\\x", false));
    assert_eq!(find(&[v1, named]), None);
    assert_eq!(find(&["nonsense"]), None);
}

#[test]
fn the_group_of_a_process_is_below_the_mount() {
    assert_eq!(parse_group(b"9:name=systemd:/\n0::/a/b c\n"), Some("a/b c".into()));
    assert_eq!(parse_group(b"0::/\n"), Some("".into()));
    assert_eq!(parse_group(b"0::/../other\n"), None);
    assert_eq!(parse_group(b"0::/..\n"), None);
    assert_eq!(parse_group(b"1:cpu:/x\n"), None);
    group_of(std::process::id()).unwrap();
    assert_eq!(group_of(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn counters_are_read_by_their_names() {
    let events = "low 0\nhigh 3\nmax 12\noom 2\noom_kill 1\n";
    assert_eq!(parse_counters(events, ["oom_kill", "max", "oom_group_kill"]), Some([1, 12, 0]));
    assert_eq!(parse_counters("", ["max"]), Some([0]));
    assert_eq!(parse_counters("max many\n", ["max"]), None);
    assert_eq!(parse_counters("max\n", ["max"]), None);
}

#[test]
fn only_absent_controllers_are_enabled() {
    let tree = tempfile::tempdir().unwrap();
    let control = tree.path().join("cgroup.subtree_control");
    let group = Directory::open(tree.path()).unwrap();
    for (enabled, written) in [("cpu\n", "+memory +pids"), ("memory cpu pids io\n", "memory cpu pids io\n")] {
        std::fs::write(&control, enabled).unwrap();
        group.enable(&["cpu", "memory", "pids"]).unwrap();
        assert!(std::fs::read_to_string(&control).unwrap().starts_with(written), "{enabled}");
    }
}

#[test]
fn an_error_names_file_value_and_remedy() {
    let tree = tempfile::tempdir().unwrap();
    let group = Directory::open(tree.path()).unwrap();
    let error = group.write("memory.max", "7").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    let text = error.to_string();
    assert!(text.contains("memory.max") && text.contains("\"7\"") && text.contains("controller"), "{text}");
    let text = group.kill().unwrap_err().to_string();
    assert!(text.contains("5.14"), "{text}");
    std::fs::write(tree.path().join("memory.peak"), "max\n").unwrap();
    assert_eq!(group.number("memory.peak").unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert!(!tree.path().join("memory.max").exists(), "a control file is never made");
}

#[tokio::test]
async fn groups_are_made_listed_and_removed() {
    let tree = tempfile::tempdir().unwrap();
    let root = Directory::open(tree.path()).unwrap();
    std::fs::write(tree.path().join("cgroup.procs"), "1\n0\n").unwrap();
    assert_eq!(root.processes().unwrap(), [1, 0]);
    let first = Directory::create(&tree.path().join("b")).unwrap();
    Directory::ensure(&tree.path().join("a")).unwrap();
    Directory::ensure(&tree.path().join("a")).unwrap();
    let error = Directory::create(&tree.path().join("a")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(root.children().unwrap(), ["a", "b"]);
    first.remove().await.unwrap();
    first.remove().await.unwrap();
    first.remove_empty().unwrap();
    assert_eq!(root.children().unwrap(), ["a"]);
    assert_eq!(Directory::open(first.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
}

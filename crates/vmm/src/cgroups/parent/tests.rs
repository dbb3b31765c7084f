//! The choice on trees of made-up control files.

use super::*;
use std::fs;
use tempfile::TempDir;

const ALL: &str = "cpuset cpu io memory pids";

/// A hierarchy whose root looks like a real one.
struct Tree {
    directory: TempDir,
}

impl Tree {
    fn new(controllers: &str) -> Self {
        let tree = Self { directory: tempfile::tempdir().unwrap() };
        tree.group("", controllers, "1 2 3");
        tree
    }

    fn group(&self, path: &str, controllers: &str, processes: &str) {
        let group = self.directory.path().join(path);
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("cgroup.controllers"), controllers).unwrap();
        fs::write(group.join("cgroup.subtree_control"), "").unwrap();
        fs::write(group.join("cgroup.procs"), processes).unwrap();
        if !path.is_empty() {
            self.mark(path, "cgroup.type");
        }
    }

    /// Instead of the attribute that systemd sets, a file.
    fn mark(&self, path: &str, file: &str) {
        fs::write(self.directory.path().join(path).join(file), "").unwrap();
    }

    fn host(&self, own: &str, systemd: bool) -> Host {
        Host {
            hierarchy: Some(Hierarchy { mount: self.directory.path().to_owned(), hybrid: false }),
            own: Some(own.into()),
            systemd,
            kernel: "6.12.1-cloud".to_owned(),
            pid: 7,
            is_delegated: |group| group.has("delegated"),
        }
    }

    /// All directories and the content of all files.
    fn snapshot(&self) -> Vec<(PathBuf, Option<String>)> {
        let mut found = Vec::new();
        let mut left = vec![self.directory.path().to_owned()];
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            let text = fs::read_to_string(&path).ok();
            found.push((path, text));
        }
        found.sort();
        found
    }
}

fn usable(host: &Host, explicit: Option<&str>) -> Plan {
    match host.plan("a", explicit.map(Path::new)).unwrap() {
        Outcome::Usable(plan) => plan,
        Outcome::Unusable { reason, .. } => panic!("{reason}"),
    }
}

fn refused(host: &Host) -> String {
    match host.plan("a", None).unwrap() {
        Outcome::Unusable { reason, advice } => format!("{reason}; {advice}"),
        Outcome::Usable(plan) => panic!("{plan:?}"),
    }
}

/// Parent and whether this process leaves its group.
fn summary(plan: &Plan) -> (&Path, bool) {
    (plan.below_mount(), plan.move_out)
}

#[test]
fn a_delegated_group_is_used_with_systemd_and_without() {
    let unit = "system.slice/aenv.service";
    for systemd in [true, false] {
        let tree = Tree::new(ALL);
        tree.group(unit, "cpu io memory pids", "7");
        tree.mark(unit, "delegated");
        let before = tree.snapshot();
        let plan = usable(&tree.host(unit, systemd), None);
        assert_eq!(summary(&plan), (Path::new("system.slice/aenv.service/vms"), true));
        assert_eq!(plan.controllers(), ["cpu", "memory", "pids", "io"]);
        assert_eq!(tree.snapshot(), before, "looking changes nothing");
    }
}

#[test]
fn a_restarted_node_finds_the_groups_of_its_predecessor() {
    let unit = "system.slice/aenv.service";
    let tree = Tree::new(ALL);
    tree.group(unit, ALL, "");
    tree.mark(unit, "delegated");
    tree.group("system.slice/aenv.service/node", "", "7");
    tree.group("system.slice/aenv.service/vms", ALL, "");
    tree.group("system.slice/aenv.service/vms/aenv-a-1", ALL, "40");
    // Started in `node` by the unit, or prepared for a second time.
    let plan = usable(&tree.host("system.slice/aenv.service/node", true), None);
    assert_eq!(summary(&plan), (Path::new("system.slice/aenv.service/vms"), false));
    let parent = plan.carry_out(7).unwrap();
    assert_eq!(parent.children().unwrap(), ["aenv-a-1"]);
    // Started in the unit's own group, where systemd managed to put it there.
    tree.group(unit, ALL, "7");
    let plan = usable(&tree.host(unit, true), None);
    assert_eq!(summary(&plan), (Path::new("system.slice/aenv.service/vms"), true));
    plan.carry_out(7).unwrap();
    let moved = fs::read_to_string(tree.directory.path().join("system.slice/aenv.service/node/cgroup.procs"));
    assert_eq!(moved.unwrap(), "7");
}

#[test]
fn a_group_called_node_is_nothing_special_without_delegation() {
    let tree = Tree::new(ALL);
    tree.group("x/node", ALL, "7");
    tree.group("x", ALL, "");
    assert!(refused(&tree.host("x/node", true)).contains("delegated none"));
    tree.mark("x/node", "delegated");
    assert_eq!(summary(&usable(&tree.host("x/node", true), None)), (Path::new("x/node/vms"), true));
}

#[test]
fn a_delegated_group_must_be_ours_alone_and_complete() {
    let tree = Tree::new(ALL);
    tree.group("unit", ALL, "7 8");
    tree.mark("unit", "delegated");
    assert!(refused(&tree.host("unit", true)).contains("other processes"));
    tree.group("unit", ALL, "0 7");
    assert!(refused(&tree.host("unit", true)).contains("other processes"));
    tree.group("unit", "cpu pids", "7");
    let refusal = refused(&tree.host("unit", true));
    assert!(refusal.contains("memory") && refusal.contains("Delegate="), "{refusal}");
}

#[test]
fn without_systemd_the_root_is_used() {
    let tree = Tree::new(ALL);
    tree.group("elsewhere", ALL, "7");
    for own in ["", "elsewhere"] {
        let plan = usable(&tree.host(own, false), None);
        assert_eq!(summary(&plan), (Path::new("aenv-a"), false), "a true root may hold processes");
        assert_eq!(plan.parent(), tree.directory.path().join("aenv-a"));
    }
    let unseen = Host { own: None, ..tree.host("", false) };
    assert_eq!(summary(&usable(&unseen, None)), (Path::new("aenv-a"), false));
    assert!(matches!(tree.host("", false).plan("a/b", None), Err(CgroupsError::Name(_))));
    assert!(refused(&tree.host("", true)).contains("systemd-run"));
    assert!(refused(&Host { systemd: true, ..unseen }).contains("systemd-run"));
}

#[test]
fn the_root_of_a_container_holds_no_processes() {
    let tree = Tree::new(ALL);
    tree.mark("", "cgroup.type");
    assert!(refused(&tree.host("", false)).contains("other processes"));
    tree.group("", ALL, "7");
    assert_eq!(summary(&usable(&tree.host("", false), None)), (Path::new("aenv-a"), true));
    tree.group("", ALL, "");
    tree.group("node", ALL, "7");
    assert_eq!(summary(&usable(&tree.host("node", false), None)), (Path::new("aenv-a"), false));
    // A path that counts from elsewhere than our mount does.
    assert_eq!(summary(&usable(&tree.host("docker/123", false), None)), (Path::new("aenv-a"), false));
}

#[test]
fn io_is_optional_and_the_others_are_not() {
    let tree = Tree::new("cpu memory pids");
    assert_eq!(usable(&tree.host("", false), None).controllers(), ["cpu", "memory", "pids"]);
    for offered in ["", "cpu memory io", "hugetlb"] {
        let tree = Tree::new(offered);
        let mut host = tree.host("", false);
        assert!(refused(&host).contains("pids"), "{offered}");
        host.hierarchy = Some(Hierarchy { mount: tree.directory.path().to_owned(), hybrid: true });
        for systemd in [true, false] {
            host.systemd = systemd;
            let refusal = refused(&host);
            assert!(refusal.contains("version 1") && refusal.contains("cgroup_no_v1"), "{refusal}");
        }
        let error = host.plan("a", Some(Path::new("mine"))).unwrap_err();
        assert!(matches!(error, CgroupsError::Explicit { .. }), "{error}");
    }
}

#[test]
fn a_host_without_version_2_or_too_old_is_refused() {
    let tree = Tree::new(ALL);
    let none = Host { hierarchy: None, ..tree.host("", false) };
    assert!(refused(&none).contains("version 2"));
    assert!(none.plan("a", Some(Path::new("mine"))).is_err(), "an operator's wish is never dropped silently");
    assert!(refused(&Host { kernel: "5.10.0-28-amd64".to_owned(), ..tree.host("", false) }).contains("5.14"));
    for (release, fit) in [("5.14", true), ("5.13.9", false), ("6.1-rc1", true), ("10.0", true), ("x", true)]
    {
        assert_eq!(has_group_kill(release), fit, "{release}");
    }
}

#[test]
fn an_operator_names_the_group() {
    let tree = Tree::new(ALL);
    tree.group("unit", ALL, "7");
    tree.mark("unit", "delegated");
    let host = tree.host("unit", true);
    let absolute = tree.directory.path().join("top/vms");
    for name in ["top/vms", "/top/vms", absolute.to_str().unwrap()] {
        let plan = usable(&host, Some(name));
        assert_eq!(summary(&plan), (Path::new("top/vms"), false), "{name}");
        assert_eq!(plan.controllers(), ["cpu", "memory", "pids", "io"]);
    }
    for name in ["", "/", "../x", "a/../b", "unit"] {
        let error = host.plan("a", Some(Path::new(name))).unwrap_err();
        assert!(matches!(error, CgroupsError::Explicit { .. }), "{name}: {error}");
    }
}

#[test]
fn io_is_not_enabled_in_the_groups_of_others() {
    let tree = Tree::new(ALL);
    tree.group("theirs", ALL, "");
    let host = tree.host("", true);
    assert_eq!(usable(&host, Some("theirs/mine")).controllers(), ["cpu", "memory", "pids"]);
    fs::write(tree.directory.path().join("theirs/cgroup.subtree_control"), "io").unwrap();
    assert_eq!(usable(&host, Some("theirs/mine")).controllers(), ["cpu", "memory", "pids", "io"]);
    assert_eq!(usable(&host, Some("theirs")).controllers(), ["cpu", "memory", "pids", "io"]);
}

#[test]
fn all_groups_on_the_way_are_enabled() {
    let tree = Tree::new(ALL);
    tree.group("top", ALL, "");
    tree.group("top/vms", ALL, "");
    usable(&tree.host("", true), Some("top/vms")).carry_out(7).unwrap();
    for group in ["", "top", "top/vms"] {
        let control = tree.directory.path().join(group).join("cgroup.subtree_control");
        assert_eq!(fs::read_to_string(control).unwrap(), "+cpu +memory +pids +io", "{group:?}");
    }
    assert!(!tree.directory.path().join("node").exists());
}

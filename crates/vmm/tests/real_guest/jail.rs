//! What a VMM process can see and do: asked of the kernel from outside, and tried from inside as its user.
//!
//! Owns nothing. `/proc/<pid>/root` is the file system as that process sees it, mounts included.

use aenv_sys::netns::NetworkNamespace;
use std::collections::BTreeSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A process in a jail.
pub(crate) struct Jailed {
    pub(crate) pid: u32,
    pub(crate) user: u32,
}

impl Jailed {
    fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.pid))
    }

    fn status(&self, field: &str) -> String {
        let status = std::fs::read_to_string(self.proc("status")).unwrap();
        let prefix = format!("{field}:");
        let line = status.lines().find(|line| line.starts_with(&prefix)).unwrap();
        line[prefix.len()..].split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Every path the process could open, with what it could do with it.
    fn visible(&self) -> Vec<(PathBuf, std::fs::Metadata)> {
        let root = self.proc("root");
        let mut found = vec![(PathBuf::from("/"), std::fs::metadata(&root).unwrap())];
        let mut directories = vec![root.clone()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(&directory).unwrap() {
                let path = entry.unwrap().path();
                let metadata = std::fs::symlink_metadata(&path).unwrap();
                if metadata.is_dir() {
                    directories.push(path.clone());
                }
                found.push((Path::new("/").join(path.strip_prefix(&root).unwrap()), metadata));
            }
        }
        found
    }

    /// No right, no way to get one, no process to see, a filter on its system calls.
    pub(crate) fn has_no_privilege(&self) {
        let ids = [self.user; 4].map(|id| id.to_string()).join(" ");
        assert_eq!(self.status("Uid"), ids);
        assert_eq!(self.status("Gid"), ids);
        assert_eq!(self.status("Groups"), "");
        for set in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
            assert_eq!(self.status(set), "0000000000000000", "{set}");
        }
        assert_eq!(self.status("NoNewPrivs"), "1");
        assert_eq!(self.status("Seccomp"), "2");
        assert_eq!(self.status("NSpid"), format!("{} 1", self.pid));
        for namespace in ["mnt", "pid", "net", "ipc"] {
            let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
            assert_ne!(of(&self.pid.to_string()), of("self"), "{namespace}");
        }
    }

    /// Its root holds `may_write` (in any case beneath it) and programs it cannot change; no process list, no `/sys`.
    pub(crate) fn sees_only(&self, may_write: &[&str], allowed: &[&str]) {
        let visible = self.visible();
        assert!(visible.len() < 400, "{} files in a jail", visible.len());
        for (path, metadata) in &visible {
            let text = path.to_str().unwrap();
            assert!(
                text == "/"
                    || allowed
                        .iter()
                        .any(|prefix| text == *prefix || text.starts_with(&format!("{prefix}/"))),
                "{text}"
            );
            let own = metadata.uid() == self.user && metadata.mode() & 0o200 != 0;
            let anyone = metadata.mode() & 0o002 != 0 && !metadata.is_symlink();
            let device = metadata.file_type().is_char_device();
            // But for its own disk no block device is there at all.
            assert!(!metadata.file_type().is_block_device() || may_write.contains(&text), "{text}");
            if (own || anyone) && !device {
                assert!(may_write.contains(&text), "{text} can be written: mode {:o}", metadata.mode());
            }
        }
        let names: BTreeSet<&str> = visible.iter().filter_map(|(path, _)| path.to_str()).collect();
        for host in ["/etc", "/proc", "/sys", "/root", "/home", "/tmp", "/run/netns", "/var", "/usr/bin/sh"] {
            assert!(!names.contains(host), "{host} is in the jail");
        }
    }

    /// `node` in its root is the device `disk` of the host, for its own user only.
    pub(crate) fn sees_device(&self, node: &str, disk: &Path) {
        let inside = std::fs::metadata(self.proc("root").join(&node[1..])).unwrap();
        assert!(inside.file_type().is_block_device());
        assert_eq!(inside.rdev(), std::fs::metadata(disk).unwrap().rdev());
        assert_eq!((inside.uid(), inside.mode() & 0o777), (self.user, 0o600));
        let (_, others): (Vec<_>, Vec<_>) =
            self.visible().into_iter().partition(|(path, _)| path == Path::new(node));
        assert!(others.iter().all(|(_, metadata)| !metadata.file_type().is_block_device()));
    }

    /// Nothing of the host's or another VM's is mounted for it.
    pub(crate) fn mounts_nothing_of(&self, foreign: &[&Path]) {
        let mounts = std::fs::read_to_string(self.proc("mountinfo")).unwrap();
        for path in foreign {
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(!mounts.contains(name), "{name} is mounted: {mounts}");
        }
    }

    /// Limits it could raise only with a capability it does not have.
    pub(crate) fn is_limited(&self) {
        let limits = std::fs::read_to_string(self.proc("limits")).unwrap();
        let hard = |name: &str| {
            let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..].split_whitespace().nth(1).unwrap().to_owned()
        };
        assert_eq!(hard("Max core file size"), "0");
        assert!(hard("Max open files").parse::<u64>().unwrap() <= 4096);
        assert_ne!(hard("Max file size"), "unlimited");
    }

    /// Tries to reach the host as its user, inside its namespaces: from there only the guest can be reached.
    pub(crate) fn reaches_no_host(&self, namespace: &NetworkNamespace) {
        let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let addresses = Command::new("hostname").arg("-I").output().unwrap();
        let mut targets: Vec<String> =
            String::from_utf8_lossy(&addresses.stdout).split_whitespace().map(str::to_owned).collect();
        targets.push("127.0.0.1".to_owned());
        namespace
            .run(|| {
                for target in targets.iter().filter(|target| !target.contains(':')) {
                    let address = format!("{target}:{port}").parse().unwrap();
                    let limit = std::time::Duration::from_millis(500);
                    let reached = std::net::TcpStream::connect_timeout(&address, limit);
                    assert!(reached.is_err(), "{target} is reached from a VMM's namespace");
                }
            })
            .unwrap();
        let inside = std::fs::metadata(self.proc("ns/net")).unwrap().ino();
        let of_slot = namespace.run(|| std::fs::metadata("/proc/thread-self/ns/net").unwrap().ino()).unwrap();
        assert_eq!(inside, of_slot);
    }
}

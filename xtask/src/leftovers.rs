//! What instances of the node have on this host: processes, namespaces, links, mounts, loop devices, firewall tables.
//! Only looks; owns no state. Everything of ours carries `aenv` or the checkout's path in its name, so it can be told.

use crate::process::output_of;
use crate::project::Project;
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Everything found, as lines for people. Things of the instance `except` are left out: they come and go with its sandboxes.
pub(crate) fn look(project: &Project, except: &str) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for name in names_in(Path::new("/run/netns"))?.into_iter().filter(|name| name.starts_with("aenv-")) {
        if !name.starts_with(&format!("aenv-{except}-")) {
            found.insert(format!("network namespace {name}"));
        }
    }
    for name in names_in(Path::new("/sys/class/net"))? {
        if is_our_link(&name) && !name.starts_with(&format!("ae{except}v")) {
            found.insert(format!("link {name}"));
        }
    }
    for (pid, name) in vmm_processes()? {
        if !name.starts_with(&format!("aenv-{except}-")) {
            found.insert(format!("process {pid} {name}"));
        }
    }
    let test_dir = project.test_dir().display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mounts").context("cannot read the list of mounts")?;
    let exports_of_up = format!(" /run/aenv/{except}/");
    for line in mounts.lines().filter(|line| {
        line.contains(&test_dir)
            || line.contains("/run/aenv-t")
            || (line.contains(" /run/aenv/") && !line.contains(&exports_of_up))
    }) {
        found.insert(format!("mount {line}"));
    }
    let loops = output_of(Command::new("losetup").args(["--noheadings", "--output", "NAME,BACK-FILE"]))?;
    for line in loops.lines().filter(|line| line.contains(&test_dir)) {
        found.insert(format!("loop device {line}"));
    }
    let tables = output_of(Command::new("nft").args(["list", "tables"]))?;
    for line in
        tables.lines().filter(|line| line.contains(" aenv_") && !line.ends_with(&format!(" aenv_{except}")))
    {
        found.insert(format!("firewall {line}"));
    }
    Ok(found)
}

/// How much of each kind one instance has now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    /// VMMs and block services.
    pub(crate) processes: usize,
    /// Of its sandboxes and of slots that wait for one; each holds one tap.
    pub(crate) namespaces: usize,
    /// Host ends of their links.
    pub(crate) links: usize,
    /// Exports of the block service.
    pub(crate) mounts: usize,
}

/// Counts what an instance has.
pub(crate) fn count(instance: &str) -> Result<Counts> {
    let (named, link) = (format!("aenv-{instance}-"), format!("ae{instance}v"));
    let starting =
        |names: Vec<String>, prefix: &str| names.into_iter().filter(|name| name.starts_with(prefix)).count();
    let mounts = std::fs::read_to_string("/proc/self/mounts").context("cannot read the list of mounts")?;
    let exports = format!(" /run/aenv/{instance}/");
    Ok(Counts {
        processes: vmm_processes()?.into_iter().filter(|(_, name)| name.starts_with(&named)).count(),
        namespaces: starting(names_in(Path::new("/run/netns"))?, &named),
        links: starting(names_in(Path::new("/sys/class/net"))?, &link),
        mounts: mounts.lines().filter(|line| line.contains(&exports)).count(),
    })
}

/// Whether an instance has network namespaces; each of its VMs and standbys has one.
pub(crate) fn has_namespace(instance: &str) -> Result<bool> {
    let prefix = format!("aenv-{instance}-");
    Ok(names_in(Path::new("/run/netns"))?.iter().any(|name| name.starts_with(&prefix)))
}

/// Host ends of veth pairs: `ae<instance>v<number>`.
fn is_our_link(name: &str) -> bool {
    name.strip_prefix("ae").and_then(|rest| rest.rsplit_once('v')).is_some_and(|(instance, number)| {
        (1..=4).contains(&instance.len()) && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
    })
}

/// Processes of VMs, by the name they are given on their command line.
fn vmm_processes() -> Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    for name in names_in(Path::new("/proc"))? {
        let Ok(pid) = name.parse::<u32>() else { continue };
        // A process may end while the list is read.
        let Ok(command_line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let arguments: Vec<_> = command_line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        if let Some(name) = vm_name(&arguments) {
            found.push((pid, name));
        }
    }
    Ok(found)
}

/// The name behind QEMU's `-name`, or behind `--id` of Firecracker or its jailer, if it is one that we give; a block service by
/// its instance.
fn vm_name(arguments: &[impl AsRef<str>]) -> Option<String> {
    let program = arguments.first()?.as_ref();
    if program.ends_with("aenv-stored") {
        let at = arguments.iter().position(|argument| argument.as_ref() == "--instance")?;
        return Some(format!("aenv-{}-block-service", arguments.get(at + 1)?.as_ref()));
    }
    if program.ends_with("firecracker") || program.ends_with("jailer") {
        let at = arguments.iter().position(|argument| argument.as_ref() == "--id")?;
        return Some(format!("aenv-{}", arguments.get(at + 1)?.as_ref()));
    }
    let at = arguments.iter().position(|argument| argument.as_ref() == "-name")?;
    let value = arguments.get(at + 1)?.as_ref();
    value.split([',', '=']).find(|part| part.starts_with("aenv-")).map(str::to_owned)
}

fn names_in(directory: &Path) -> Result<Vec<String>> {
    match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot list {}", directory.display())),
        Ok(entries) => {
            Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ours_are_told_from_others() {
        assert!(is_our_link("aetv12") && is_our_link("aeav0"));
        for other in ["eth0", "aev", "aetv", "aetvx", "aelongnamev1", "veth1"] {
            assert!(!is_our_link(other), "{other}");
        }
        let qemu = ["qemu", "-name", "guest=aenv-t-i1,process=aenv-t-i1"];
        assert_eq!(vm_name(&qemu).as_deref(), Some("aenv-t-i1"));
        assert_eq!(vm_name(&["qemu", "-name", "other"]), None);
        assert_eq!(vm_name(&["/firecracker", "--id", "t-i1"]).as_deref(), Some("aenv-t-i1"));
        assert_eq!(vm_name(&["docker", "--id", "t-i1"]), None);
        let served = ["aenv-stored", "serve", "--instance", "t"];
        assert_eq!(vm_name(&served).as_deref(), Some("aenv-t-block-service"));
    }
}

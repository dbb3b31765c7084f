//! What one instance of the node has on this host, counted, so that before and after can be compared. Only looks.

use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// Counts of one instance's things.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources {
    /// Process ids of VMMs.
    pub processes: Vec<u32>,
    /// Network namespaces.
    pub namespaces: Vec<String>,
    /// Host ends of veth pairs.
    pub links: Vec<String>,
    /// Firewall tables on the host.
    pub tables: Vec<String>,
    /// Mounts and loop devices that mention the data directory, other than the one it lies on.
    pub mounts: Vec<String>,
    /// Processes of the block service, and mounts below its run directory.
    pub block_service: Vec<String>,
    /// Version 2 control groups of VMs, and their parent.
    pub groups: Vec<String>,
    /// Directories of sandboxes.
    pub sandbox_directories: Vec<String>,
}

impl Resources {
    /// Looks for everything of `instance`, whose node keeps its data in `data_dir`.
    ///
    /// # Errors
    /// When a list of the system cannot be read.
    pub fn of(instance: &str, data_dir: &Path) -> Result<Self> {
        let table = format!(" aenv_{instance}");
        let tables = Command::new("nft").args(["list", "tables"]).output().context("cannot run nft")?;
        let mounts =
            std::fs::read_to_string("/proc/self/mounts").context("cannot read the list of mounts")?;
        let data_dir_text = format!("{}/", data_dir.display());
        let lines_with = |text: &str, wanted: &str| -> Vec<String> {
            text.lines().filter(|line| line.contains(wanted)).map(str::to_owned).collect()
        };
        Ok(Self {
            processes: vmm_processes(&format!("aenv-{instance}-"))?,
            namespaces: names(Path::new("/run/netns"), &format!("aenv-{instance}-"))?,
            links: names(Path::new("/sys/class/net"), &format!("ae{instance}v"))?,
            tables: lines_with(&String::from_utf8_lossy(&tables.stdout), &table)
                .into_iter()
                .filter(|line| line.ends_with(&table))
                .collect(),
            mounts: lines_with(&mounts, &data_dir_text),
            block_service: block_service(instance)?
                .into_iter()
                .map(|pid| format!("process {pid}"))
                .chain(lines_with(&mounts, &format!(" /run/aenv/{instance}/")))
                .collect(),
            groups: groups(instance)?,
            sandbox_directories: names(&data_dir.join("sandboxes"), "")?,
        })
    }

    /// Whether the instance has nothing at all on this host.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// Number of open file descriptors of a process.
///
/// # Errors
/// When the process does not exist.
pub fn open_descriptors(pid: u32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd")).with_context(|| format!("process {pid}"))?.count())
}

/// The VMM process of one sandbox.
///
/// # Errors
/// When there is none.
pub fn vmm_of(instance: &str, sandbox: &str) -> Result<u32> {
    let name = format!("aenv-{instance}-{sandbox}");
    vmm_processes(&name)?.first().copied().with_context(|| format!("no process {name}"))
}

/// What the block service of a data directory stores: layer files, disks and images by their names.
///
/// # Errors
/// When a directory cannot be listed.
pub fn stored_things(data_dir: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for directory in ["layers", "disks", "images"] {
        let things = names(&data_dir.join("storage").join(directory), "")?;
        found.extend(things.into_iter().map(|name| format!("{directory}/{name}")));
    }
    Ok(found)
}

/// The group that is named after the instance, and those of VMs in whatever group of the first levels.
fn groups(instance: &str) -> Result<Vec<String>> {
    let root = Path::new("/sys/fs/cgroup");
    if !root.join("cgroup.controllers").exists() {
        return Ok(Vec::new());
    }
    let (parent, prefix) = (format!("aenv-{instance}"), format!("{instance}-"));
    let mut found = Vec::new();
    let mut directories = vec![(root.to_owned(), 0)];
    while let Some((directory, depth)) = directories.pop() {
        for name in names(&directory, "")? {
            let path = directory.join(&name);
            if !path.is_dir() {
                continue;
            }
            if name == parent || name.starts_with(&prefix) {
                found.push(path.display().to_string());
            }
            if depth < 3 {
                directories.push((path, depth + 1));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Processes whose command line names a VM that starts so: QEMU's by `process=`, Firecracker's and its jailer's by `--id`.
fn vmm_processes(prefix: &str) -> Result<Vec<u32>> {
    let qemu = format!("process={prefix}");
    let firecracker = format!("--id\0{}", prefix.trim_start_matches("aenv-"));
    processes(|command_line| command_line.contains(&qemu) || command_line.contains(&firecracker))
}

/// Processes whose command line, its words ended by NUL, is wanted.
fn processes(wanted: impl Fn(&str) -> bool) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for name in names(Path::new("/proc"), "")? {
        let Ok(pid) = name.parse::<u32>() else { continue };
        // Processes end while they are looked at; then they are not there.
        let command_line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if wanted(&String::from_utf8_lossy(&command_line)) {
            found.push(pid);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Processes of an instance's block service: the server and the holder of its mount.
fn block_service(instance: &str) -> Result<Vec<u32>> {
    processes(|command_line| {
        command_line.split('\0').next().is_some_and(|program| program.ends_with("aenv-stored"))
            && (command_line.contains(&format!("--instance\0{instance}\0"))
                || command_line.contains(&format!("/run/aenv/{instance}/")))
    })
}

/// The process of an instance's block service that answers requests.
///
/// # Errors
/// When there is none.
pub fn block_server_of(instance: &str) -> Result<u32> {
    let server = processes(|command_line| {
        command_line.split('\0').next().is_some_and(|program| program.ends_with("aenv-stored"))
            && command_line.contains("\0serve\0")
            && command_line.contains(&format!("--instance\0{instance}\0"))
    })?;
    server.first().copied().with_context(|| format!("instance {instance} has no block service"))
}

fn names(directory: &Path, prefix: &str) -> Result<Vec<String>> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let entries =
        std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut found: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(prefix))
        .collect();
    found.sort();
    Ok(found)
}

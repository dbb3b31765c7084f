//! A root directory that holds QEMU and what it needs to run, and nothing else of the host: made once per version of the
//! program and its libraries, then bound read-only as the root of every VMM process.
//!
//! ```text
//! <directory>/qemu-<key>/          key: path, size and time of every file, so an upgrade makes a new tree
//!     usr/bin/qemu-system-x86_64, usr/lib/…         what a started QEMU has mapped executable
//!     usr/share/qemu/                               firmware
//!     bin lib lib64                                 links, as on the host
//!     dev/ vm/                                      mount points
//! <directory>/qemu-<key>.unfinished-<pid>/
//! ```
//!
//! Which libraries a program needs is asked of a running one: what it has mapped. That covers what it loads by itself
//! after its start, such as its accelerator. Owns the directory's content; changes nothing else.

use super::jail::{MOUNT_DIRECTORIES, MOUNT_POINTS};
use crate::probe::Accelerator;
use crate::process::{PROBE_NAME, process_name};
use rustix::event::{PollFd, PollFlags, Timespec};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::io::{self, BufRead as _, BufReader, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Where firmware lies in the tree; told to QEMU by `-L`.
pub(super) const FIRMWARE_DIRECTORY: &str = "/usr/share/qemu";
/// What a microVM may load, as QEMU's sources name it; what a version does not have, it does not need.
const FIRMWARE: [&str; 7] = [
    "bios-microvm.bin",
    "qboot.rom",
    "linuxboot.bin",
    "linuxboot_dma.bin",
    "multiboot_dma.bin",
    "pvh.bin",
    "kvmvapic.bin",
];
/// The loader's path in every dynamic program for x86-64 (System V ABI, AMD64 supplement).
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
/// What the extension of an unfinished tree begins with.
const UNFINISHED: &str = "unfinished-";
/// Longest time to the greeting of a QEMU without a guest.
const GREETING_LIMIT: Duration = Duration::from_secs(30);
/// Links at the top of a distribution with merged `/usr`.
const TOP_LINKS: [&str; 5] = ["bin", "sbin", "lib", "lib32", "lib64"];

/// A finished tree.
#[derive(Debug)]
pub(super) struct ProgramTree {
    directory: PathBuf,
    program: PathBuf,
}

impl ProgramTree {
    /// Finds the tree of `program` below `directory`, or makes it. Blocks: some 100 ms, a second when it is made.
    pub(super) fn prepare(program: &Path, accelerator: Accelerator, directory: &Path) -> io::Result<Self> {
        let (program, files) = mapped_files(program, accelerator)?;
        let firmware = firmware(&program)?;
        let tree = directory.join(format!("qemu-{}", key(files.iter().chain(&firmware))?));
        if !tree.exists() {
            std::fs::create_dir_all(directory)?;
            remove_unfinished(directory)?;
            let unfinished = tree.with_extension(format!("{UNFINISHED}{}", std::process::id()));
            fill(&unfinished, &files, &firmware)?;
            // After a power cut a tree is there with all its content or not at all.
            rustix::fs::syncfs(std::fs::File::open(&unfinished)?)?;
            match std::fs::rename(&unfinished, &tree) {
                // Another start of the same node made it meanwhile.
                Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
                    std::fs::remove_dir_all(&unfinished)?;
                }
                renamed => renamed?,
            }
        }
        Ok(Self { directory: tree, program })
    }

    /// The tree on the host.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The program, inside.
    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    /// Where a path inside lies on the host.
    pub(super) fn inside(&self, path: &str) -> PathBuf {
        below(&self.directory, Path::new(path))
    }
}

/// What nodes that were killed left half-made. Only one node uses the directory at a time.
fn remove_unfinished(directory: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension.to_string_lossy().starts_with(UNFINISHED)) {
            std::fs::remove_dir_all(path)?;
        }
    }
    Ok(())
}

fn below(tree: &Path, path: &Path) -> PathBuf {
    tree.join(path.strip_prefix("/").unwrap_or(path))
}

/// Starts the program without a guest and looks at what it has mapped executable, itself first.
fn mapped_files(program: &Path, accelerator: Accelerator) -> io::Result<(PathBuf, BTreeSet<PathBuf>)> {
    let mut child = Probe::start(program, accelerator)?;
    let mut greeting = String::new();
    // QEMU greets when it has set itself up.
    if let Some(output) = child.0.stdout.take() {
        let mut poll = [PollFd::new(&output, PollFlags::IN)];
        let limit = Timespec { tv_sec: GREETING_LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
        if rustix::event::poll(&mut poll, Some(&limit))? == 0 {
            let what = format!("{} does not greet within {GREETING_LIMIT:?}", program.display());
            return Err(io::Error::new(ErrorKind::TimedOut, what));
        }
        BufReader::new(output).read_line(&mut greeting)?;
    }
    if !greeting.contains("QMP") {
        let mut words = String::new();
        if let Some(mut errors) = child.0.stderr.take() {
            io::Read::read_to_string(&mut errors, &mut words)?;
        }
        return Err(io::Error::other(format!("{} does not start: {}", program.display(), words.trim())));
    }
    let process = PathBuf::from(format!("/proc/{}", child.0.id()));
    let program = std::fs::read_link(process.join("exe"))?;
    let maps = std::fs::read_to_string(process.join("maps"))?;
    let mut files: BTreeSet<PathBuf> = maps.lines().filter_map(executable_file).collect();
    files.insert(program.clone());
    Ok((program, files))
}

/// The file of a line of `/proc/PID/maps`, if its content can be executed.
fn executable_file(line: &str) -> Option<PathBuf> {
    let mut fields = line.splitn(6, ' ');
    let permissions = fields.nth(1)?;
    let path = fields.nth(3)?.trim_start();
    (permissions.contains('x') && path.starts_with('/')).then(|| PathBuf::from(path))
}

/// A QEMU without a guest; ended when dropped.
struct Probe(Child);

impl Probe {
    fn start(program: &Path, accelerator: Accelerator) -> io::Result<Self> {
        let child = Command::new(program)
            // A name by which a purge finds it, if this process is killed meanwhile.
            .arg0(process_name(PROBE_NAME))
            .args(["-machine", "microvm", "-accel", accelerator.name(), "-m", "16M", "-S", "-nodefaults"])
            .args(["-no-user-config", "-display", "none", "-qmp", "stdio"])
            .args(["-sandbox", "on"])
            .env_clear()
            .env("PATH", aenv_sys::process::SEARCH_PATH)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Self(child))
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            tracing::warn!(%error, "cannot end the QEMU that was started to look at its libraries");
        }
    }
}

/// The firmware files that this installation has, from the directories it searches.
fn firmware(program: &Path) -> io::Result<Vec<PathBuf>> {
    let output = Command::new(program).args(["-L", "help"]).env_clear().output()?;
    let directories: Vec<PathBuf> =
        String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect();
    let find =
        |name: &&str| directories.iter().map(|directory| directory.join(name)).find(|path| path.exists());
    let found: Vec<PathBuf> = FIRMWARE.iter().filter_map(find).collect();
    if found.is_empty() {
        return Err(io::Error::new(
            ErrorKind::NotFound,
            format!(
                "{} finds no firmware in {directories:?}: install the package seabios",
                program.display()
            ),
        ));
    }
    Ok(found)
}

fn key<'a>(files: impl Iterator<Item = &'a PathBuf>) -> io::Result<String> {
    let mut digest = Sha256::new();
    // Raised when trees of earlier versions lack something.
    digest.update(b"1");
    digest.update(MOUNT_POINTS.join(" "));
    for file in files {
        let metadata = std::fs::metadata(file)?;
        let line = format!(
            "{}\0{}\0{}.{}\0",
            file.display(),
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec()
        );
        digest.update(line);
    }
    Ok(hex::encode(&digest.finalize()[..8]))
}

fn fill(tree: &Path, files: &BTreeSet<PathBuf>, firmware: &[PathBuf]) -> io::Result<()> {
    std::fs::create_dir_all(tree)?;
    for name in TOP_LINKS {
        let host = Path::new("/").join(name);
        if host.is_symlink() {
            symlink(std::fs::read_link(&host)?, tree.join(name))?;
        }
    }
    for file in files {
        copy(file, &below(tree, file))?;
        for link in links_to(file)? {
            symlink(file.file_name().ok_or(ErrorKind::InvalidInput)?, below(tree, &link))?;
        }
    }
    let loader = Path::new(LOADER);
    let inside = below(tree, loader);
    std::fs::create_dir_all(below(tree, &parent(loader).canonicalize()?))?;
    if !inside.exists() && !inside.is_symlink() {
        symlink(loader.canonicalize()?, inside)?;
    }
    for file in firmware {
        let name = file.file_name().ok_or(ErrorKind::InvalidInput)?;
        copy(file, &below(tree, Path::new(FIRMWARE_DIRECTORY)).join(name))?;
    }
    for directory in MOUNT_DIRECTORIES {
        std::fs::create_dir_all(below(tree, Path::new(directory)))?;
    }
    for path in MOUNT_POINTS {
        let path = below(tree, Path::new(path));
        std::fs::create_dir_all(parent(&path))?;
        std::fs::File::create(path)?;
    }
    open_directories(tree)
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if from.components().any(|component| component == Component::ParentDir) {
        return Err(io::Error::new(ErrorKind::InvalidInput, format!("{} is no plain path", from.display())));
    }
    std::fs::create_dir_all(parent(to))?;
    std::fs::copy(from, to)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot copy {}: {error}", from.display())))?;
    std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o555))
}

/// Whatever the umask of this process: VMMs walk through the tree as users without any right.
fn open_directories(directory: &Path) -> io::Result<()> {
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755))?;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_directories(&entry.path())?;
        }
    }
    Ok(())
}

/// Names beside a library under which the loader looks for it.
fn links_to(file: &Path) -> io::Result<Vec<PathBuf>> {
    let mut links = Vec::new();
    for entry in std::fs::read_dir(parent(file))? {
        let path = entry?.path();
        if path.is_symlink() && path.canonicalize().is_ok_and(|target| target == file) {
            links.push(path);
        }
    }
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_files_are_found_among_the_mappings() {
        let lines = [
            "7f00-7f10 r-xp 00000000 08:01 42                         /usr/lib/one.so (2).so",
            "7f00-7f10 r--p 00000000 08:01 42                         /usr/lib/locale-archive",
            "7f00-7f10 rwxp 00000000 00:00 0 ",
            "7f00-7f10 r-xp 00000000 00:00 0                          [vdso]",
            "garbage",
        ];
        let found: Vec<_> = lines.into_iter().filter_map(executable_file).collect();
        assert_eq!(found, [Path::new("/usr/lib/one.so (2).so")]);
    }

    #[test]
    fn a_program_that_does_not_start_is_an_error_with_its_words() {
        let directory = tempfile::tempdir().unwrap();
        let error =
            ProgramTree::prepare(Path::new("/bin/ls"), Accelerator::Tcg, directory.path()).unwrap_err();
        assert!(error.to_string().contains("/bin/ls does not start"), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

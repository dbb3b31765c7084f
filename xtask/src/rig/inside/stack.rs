//! Proves the rig itself: stock Firecracker under stock jailer boots the project's guest kernel and initramfs on KVM, with a
//! user, a network namespace and cgroup v2 limits of its own. Owns what it makes below the data area, and the namespace.

use crate::process::{output_of, tail};
use crate::project::Project;
use crate::stages::{say, seconds};
use crate::test_node::AREA;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Gid, Uid, chown};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the VM, its namespace and its cgroup.
const NAME: &str = "stack";
const PARENT_CGROUP: &str = "aenv-stack";
/// User and group of the VM.
const USER: u32 = 700_001;
const MEMORY_MAX: &str = "402653184";
/// What the guest daemon prints when it has left the initramfs.
const SIGN: &str = "root disk entered";
/// A guest in an emulated machine that emulates virtualisation.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);

/// The VM's files.
struct Jail {
    base: PathBuf,
    root: PathBuf,
    console: PathBuf,
}

/// Boots, looks, ends.
pub(super) fn run(project: &Project) -> Result<()> {
    let area = Path::new(AREA);
    let base = area.join("jail");
    let jail =
        Jail { root: base.join("firecracker").join(NAME).join("root"), base, console: area.join("console") };
    jail.fill(project)?;
    output_of(Command::new("ip").args(["netns", "add", NAME]))?;
    let user = USER.to_string();
    output_of(Command::new("ip").args(["-n", NAME, "tuntap", "add", "tap0", "mode", "tap", "user", &user]))?;
    let started = Instant::now();
    let mut jailer = jail.start()?;
    let result = jail.wait_for_guest(&mut jailer, started).and_then(|()| jail.inspect());
    end(&mut jailer, &jail)?;
    output_of(Command::new("ip").args(["netns", "del", NAME]))?;
    std::fs::remove_dir_all(&jail.base).context("cannot remove the jail")?;
    result
}

impl Jail {
    fn fill(&self, project: &Project) -> Result<()> {
        std::fs::create_dir_all(&self.root)
            .with_context(|| format!("cannot make {}", self.root.display()))?;
        let guest = project.guest_dir();
        for (from, to) in [("kernel/vmlinux", "vmlinux"), ("initramfs.cpio", "initramfs")] {
            let from = guest.join(from);
            std::fs::copy(&from, self.root.join(to))
                .with_context(|| format!("cannot copy {}", from.display()))?;
        }
        // As little of a root filesystem as the guest daemon needs to enter it.
        let tree = self.base.join("tree");
        for directory in ["dev", "proc", "sys", "run", "etc", "tmp"] {
            std::fs::create_dir_all(tree.join(directory)).context("cannot make the guest's directories")?;
        }
        let disk = self.root.join("disk");
        File::create(&disk)
            .and_then(|file| file.set_len(64 << 20))
            .context("cannot make the guest's disk")?;
        output_of(Command::new("mke2fs").args(["-q", "-t", "ext4", "-F", "-d"]).arg(&tree).arg(&disk))?;
        chown(&disk, Some(Uid::from_raw(USER)), Some(Gid::from_raw(USER)))
            .context("cannot give the disk away")?;
        let config = json!({
            "boot-source": {
                "kernel_image_path": "vmlinux",
                "initrd_path": "initramfs",
                "boot_args": "console=ttyS0 reboot=k panic=1 pci=off no_timer_check",
            },
            "drives": [{
                "drive_id": "root", "path_on_host": "disk", "is_root_device": false, "is_read_only": false,
                "cache_type": "Writeback",
            }],
            "machine-config": { "vcpu_count": 1, "mem_size_mib": 256 },
            "network-interfaces": [{
                "iface_id": "eth0", "guest_mac": "52:54:00:12:34:56", "host_dev_name": "tap0",
            }],
        });
        std::fs::write(self.root.join("config.json"), config.to_string())
            .context("cannot write the configuration")
    }

    fn start(&self) -> Result<Child> {
        let console = File::create(&self.console).context("cannot make the console's file")?;
        let errors = console.try_clone().context("cannot duplicate the console's handle")?;
        let user = USER.to_string();
        Command::new("jailer")
            .args(["--id", NAME, "--exec-file", "/usr/local/bin/firecracker", "--uid", &user, "--gid", &user])
            .args(["--netns", &format!("/run/netns/{NAME}"), "--new-pid-ns"])
            .args(["--cgroup-version", "2", "--parent-cgroup", PARENT_CGROUP])
            .args(["--cgroup", &format!("memory.max={MEMORY_MAX}"), "--cgroup", "pids.max=32"])
            .arg("--chroot-base-dir")
            .arg(&self.base)
            .args(["--", "--no-api", "--config-file", "config.json"])
            .stdin(Stdio::null())
            .stdout(console)
            .stderr(errors)
            .spawn()
            .context("cannot start the jailer")
    }

    fn wait_for_guest(&self, jailer: &mut Child, started: Instant) -> Result<()> {
        let mut steps = ["Linux version", "Run /init", SIGN].iter();
        let mut awaited = steps.next();
        while let Some(text) = awaited {
            let console = std::fs::read(&self.console).context("cannot read the guest's console")?;
            if String::from_utf8_lossy(&console).contains(text) {
                say(&format!("guest: `{text}` after {}", seconds(started.elapsed())));
                awaited = steps.next();
                continue;
            }
            if started.elapsed() > BOOT_LIMIT {
                bail!("no `{text}` within {BOOT_LIMIT:?}:\n{}", tail(&self.console, 4000));
            }
            // With a process namespace of its own the VM is not our child: the jailer ends at once.
            if let Some(status) = jailer.try_wait().context("cannot wait for the jailer")?
                && !(status.success() && self.pid().is_ok())
            {
                bail!("the jailer ended with {status}:\n{}", tail(&self.console, 4000));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// The VM's process id, which the jailer leaves in a file.
    fn pid(&self) -> Result<u32> {
        let path = self.root.join("firecracker.pid");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        text.trim().parse().with_context(|| format!("{} holds no number", path.display()))
    }

    /// Whether the VM is what it should be.
    fn inspect(&self) -> Result<()> {
        let pid = self.pid()?;
        let proc = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
        };
        let status = proc("status")?;
        let user = format!("{USER}\t{USER}\t{USER}\t{USER}");
        for (field, wanted) in [("Uid", user.as_str()), ("CapEff", "0000000000000000"), ("Seccomp", "2")] {
            let found = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t"));
            ensure!(found == Some(wanted), "the VM has {field} {found:?}, not {wanted:?}");
        }
        let cgroup = format!("/{PARENT_CGROUP}/{NAME}");
        ensure!(
            proc("cgroup")?.trim() == format!("0::{cgroup}"),
            "the VM is in another cgroup: {}",
            proc("cgroup")?
        );
        let limit = std::fs::read_to_string(format!("/sys/fs/cgroup{cgroup}/memory.max"))?;
        ensure!(limit.trim() == MEMORY_MAX, "memory.max is {limit}");
        let namespace = |path: &str| std::fs::read_link(path).with_context(|| format!("cannot read {path}"));
        for kind in ["net", "mnt", "pid"] {
            let (its, ours) =
                (namespace(&format!("/proc/{pid}/ns/{kind}"))?, namespace(&format!("/proc/self/ns/{kind}"))?);
            ensure!(its != ours, "the VM shares our {kind} namespace");
        }
        say(
            "VM: own user, no capabilities, seccomp filter, cgroup v2 limits, own net, mnt and pid namespaces",
        );
        Ok(())
    }
}

/// Kills the VM and waits until its cgroup is empty.
fn end(jailer: &mut Child, jail: &Jail) -> Result<()> {
    if let Ok(pid) = jail.pid() {
        output_of(Command::new("kill").args(["-KILL", &pid.to_string()]))?;
    }
    // Already ended is what is wanted.
    let _already_ended = jailer.kill();
    jailer.wait().context("cannot wait for the jailer")?;
    let cgroup = Path::new("/sys/fs/cgroup").join(PARENT_CGROUP).join(NAME);
    let asked = Instant::now();
    while cgroup.exists() && std::fs::remove_dir(&cgroup).is_err() {
        ensure!(asked.elapsed() < Duration::from_secs(10), "{} does not become empty", cgroup.display());
        std::thread::sleep(POLL);
    }
    Ok(())
}

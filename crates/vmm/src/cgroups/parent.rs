//! Where the parent of all VM groups is: the choice, which only looks, and its carrying out.
//!
//! Owns no state. [`Host::plan`] changes nothing; [`Plan::carry_out`] makes directories, enables controllers, and may move
//! this process.

use super::{CgroupsError, Outcome, checked_name};
use aenv_sys::cgroup::{CgroupError, Directory, Hierarchy};
use std::io;
use std::path::{Component, Path, PathBuf};

/// Without one of these there are no limits worth the name.
const REQUIRED: [&str; 3] = ["cpu", "memory", "pids"];
/// Wanted, but a host may do without.
pub(super) const IO: &str = "io";
/// Our own group within a delegated one; also the value of the unit's `DelegateSubgroup=`.
const NODE: &str = "node";
/// The parent of VM groups within a delegated one.
const VMS: &str = "vms";

/// What the choice depends on.
#[derive(Debug, Clone)]
pub(super) struct Host {
    pub(super) hierarchy: Option<Hierarchy>,
    /// This process's group below the mount; absent when it is outside of what we see.
    pub(super) own: Option<PathBuf>,
    /// systemd is the init system, and so the owner of the hierarchy.
    pub(super) systemd: bool,
    /// `uname -r`.
    pub(super) kernel: String,
    pub(super) pid: u32,
    /// How a delegated group is told.
    pub(super) is_delegated: fn(&Directory) -> Result<bool, CgroupError>,
}

/// Where the groups of VMs are to be, and what has to be done for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    mount: PathBuf,
    /// An existing group, from which the way to the parent starts.
    base: PathBuf,
    /// The parent of VM groups, below the mount.
    parent: PathBuf,
    /// This process sits in `base` and has to leave it.
    move_out: bool,
    controllers: Vec<String>,
}

impl Plan {
    /// The directory in which the groups of VMs are made.
    #[must_use]
    pub fn parent(&self) -> PathBuf {
        self.mount.join(&self.parent)
    }

    /// The same as a path below the mount point.
    #[must_use]
    pub fn below_mount(&self) -> &Path {
        &self.parent
    }

    /// Controllers of VM groups.
    #[must_use]
    pub fn controllers(&self) -> &[String] {
        &self.controllers
    }

    /// Makes it so. Each step is left out when it is done already.
    pub(super) fn carry_out(&self, pid: u32) -> Result<Directory, CgroupsError> {
        if self.move_out {
            Directory::ensure(&self.mount.join(&self.base).join(NODE))?.add(pid)?;
        }
        let mut path = self.mount.join(&self.base);
        let mut group = Directory::open(&path)?;
        let way = self.parent.strip_prefix(&self.base).unwrap_or(&self.parent);
        for level in way.components() {
            group.enable(&self.controllers)?;
            path.push(level);
            group = Directory::ensure(&path)?;
        }
        group.enable(&self.controllers)?;
        Ok(group)
    }
}

impl Host {
    /// Looks at this host and this process.
    pub(super) fn look() -> Result<Self, CgroupsError> {
        let pid = std::process::id();
        Ok(Self {
            hierarchy: Hierarchy::find()?,
            own: aenv_sys::cgroup::group_of(pid)?,
            systemd: Path::new("/run/systemd/system").exists(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            pid,
            is_delegated: Directory::is_delegated,
        })
    }

    /// Chooses. Reads control files and changes nothing.
    pub(super) fn plan(
        &self,
        instance: &str,
        explicit: Option<&Path>,
    ) -> Result<Outcome<Plan>, CgroupsError> {
        let outcome = match (self.usable_hierarchy(), explicit) {
            (Err(unusable), _) => unusable,
            (Ok(hierarchy), Some(group)) => self.plan_explicit(hierarchy, group)?,
            (Ok(hierarchy), None) => self.plan_automatic(hierarchy, instance)?,
        };
        match (outcome, explicit) {
            (Outcome::Unusable { reason, advice }, Some(group)) => {
                Err(CgroupsError::Explicit { group: group.to_owned(), reason, advice })
            }
            (outcome, _) => Ok(outcome),
        }
    }

    fn usable_hierarchy(&self) -> Result<&Hierarchy, Outcome<Plan>> {
        let Some(hierarchy) = &self.hierarchy else {
            return Err(unusable(
                "no cgroup hierarchy of version 2 is mounted",
                "mount one: `mount -t cgroup2 none /sys/fs/cgroup`, or boot with systemd.unified_cgroup_hierarchy=1",
            ));
        };
        if !has_group_kill(&self.kernel) {
            return Err(unusable(
                format!("Linux {} cannot kill a cgroup as a whole", self.kernel),
                "use Linux 5.14 or newer",
            ));
        }
        Ok(hierarchy)
    }

    fn plan_explicit(&self, hierarchy: &Hierarchy, group: &Path) -> Result<Outcome<Plan>, CgroupsError> {
        let below =
            group.strip_prefix(&hierarchy.mount).or_else(|_| group.strip_prefix("/")).unwrap_or(group);
        let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
        if below.as_os_str().is_empty() || !plain {
            let advice = "name a group below the mount point, for example `aenv`";
            return Ok(unusable("it is not a path below the mount point without . and ..", advice));
        }
        let existing =
            below.ancestors().find(|part| hierarchy.mount.join(part).is_dir()).unwrap_or(Path::new(""));
        let nearest = Directory::open(&hierarchy.mount.join(existing))?;
        // What the nearest existing group lacks, the groups above it are asked to enable; the root has all there is.
        let root = Directory::open(&hierarchy.mount)?;
        if let Some(lacking) = lacking(hierarchy, &root.controllers()?) {
            return Ok(lacking);
        }
        if self.own.as_deref() == Some(below) {
            let advice = "name another group, for example a child of it";
            return Ok(unusable("this process is in it, and a group of groups holds no processes", advice));
        }
        if let Err(error) = nearest.check_writable() {
            return Ok(unusable(error.to_string(), "let the node write there, or name another group"));
        }
        // In groups that others made, only what limits cannot do without is enabled; io is taken where it is on already.
        let offered = match existing {
            group if group == below || group.as_os_str().is_empty() => nearest.controllers()?,
            _ => nearest.enabled()?,
        };
        Ok(Outcome::Usable(Plan {
            mount: hierarchy.mount.clone(),
            base: PathBuf::new(),
            parent: below.to_owned(),
            move_out: false,
            controllers: wanted(&offered),
        }))
    }

    fn plan_automatic(&self, hierarchy: &Hierarchy, instance: &str) -> Result<Outcome<Plan>, CgroupsError> {
        if let Some(base) = self.delegated_group(hierarchy)? {
            return self.plan_below(hierarchy, base, VMS);
        }
        let own_name = format!("aenv-{}", checked_name(instance)?);
        if !self.systemd {
            return self.plan_below(hierarchy, PathBuf::new(), &own_name);
        }
        let root = Directory::open(&hierarchy.mount)?;
        let advice = "start the node by its systemd unit, or by `systemd-run --scope -p Delegate=yes`, or name a group for it";
        Ok(lacking(hierarchy, &root.controllers()?).unwrap_or_else(|| {
            unusable("systemd owns the cgroups of this host and delegated none to this process", advice)
        }))
    }

    /// The group that was delegated to us: our own, or the one above when we are in its `node` already.
    fn delegated_group(&self, hierarchy: &Hierarchy) -> Result<Option<PathBuf>, CgroupsError> {
        let Some(own) = &self.own else { return Ok(None) };
        let above = own.parent().filter(|_| own.ends_with(NODE));
        for group in [above, Some(own.as_path())].into_iter().flatten() {
            match Directory::open(&hierarchy.mount.join(group)) {
                Ok(directory) if (self.is_delegated)(&directory)? => return Ok(Some(group.to_owned())),
                Ok(_) => {}
                // Only a part of the hierarchy is mounted, and ours is not in it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// The parent `name` directly below `base`, which is ours to configure.
    fn plan_below(
        &self,
        hierarchy: &Hierarchy,
        base: PathBuf,
        name: &str,
    ) -> Result<Outcome<Plan>, CgroupsError> {
        let group = Directory::open(&hierarchy.mount.join(&base))?;
        let offered = group.controllers()?;
        if let Some(lacking) = lacking(hierarchy, &offered) {
            return Ok(lacking);
        }
        if let Err(error) = group.check_writable() {
            let advice = "run the node as root, on a writable cgroup mount, or under its systemd unit";
            return Ok(unusable(error.to_string(), advice));
        }
        // Only the true root may hold processes beside groups, and only it has no type.
        let may_hold_processes = !group.has("cgroup.type")?;
        let inside = if may_hold_processes { Vec::new() } else { group.processes()? };
        if inside.iter().any(|pid| *pid != self.pid) {
            let reason =
                format!("other processes than this one are in the cgroup {}", group.path().display());
            let advice = "start the node alone in its group, for example by `systemd-run --scope -p Delegate=yes aenv-node serve`, \
                          or move them into a child group";
            return Ok(unusable(reason, advice));
        }
        Ok(Outcome::Usable(Plan {
            mount: hierarchy.mount.clone(),
            parent: base.join(name),
            base,
            move_out: !inside.is_empty(),
            controllers: wanted(&offered),
        }))
    }
}

fn unusable(reason: impl Into<String>, advice: impl Into<String>) -> Outcome<Plan> {
    Outcome::Unusable { reason: reason.into(), advice: advice.into() }
}

fn wanted(offered: &[String]) -> Vec<String> {
    let io = offered.iter().any(|name| name == IO).then_some(IO);
    REQUIRED.into_iter().chain(io).map(str::to_owned).collect()
}

/// The reason why `offered` is not enough, if it is not.
fn lacking(hierarchy: &Hierarchy, offered: &[String]) -> Option<Outcome<Plan>> {
    let absent: Vec<&str> =
        REQUIRED.into_iter().filter(|name| !offered.iter().any(|known| known == name)).collect();
    if absent.is_empty() {
        return None;
    }
    let absent = absent.join(" ");
    Some(match hierarchy.hybrid {
        true => unusable(
            format!("cgroup version 2 lacks {absent} on this host, which version 1 holds"),
            "boot with cgroup_no_v1=all, under systemd also with systemd.unified_cgroup_hierarchy=1",
        ),
        false => unusable(
            format!("the cgroup offers no {absent}"),
            "enable them in the groups above; in a systemd unit: Delegate=cpu memory pids io",
        ),
    })
}

/// `cgroup.kill` came with Linux 5.14. A release that cannot be read is taken for a new one: the kernel will tell.
fn has_group_kill(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (5, 14),
        _ => true,
    }
}

#[cfg(test)]
mod tests;

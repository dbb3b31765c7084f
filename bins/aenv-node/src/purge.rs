//! `purge`: nothing of this instance stays on the host. Templates and their captures do.

use crate::arguments::Instance;
use crate::instance_lock::InstanceLock;
use crate::stored;
use crate::vmm;
use aenv_daemon::say;
use aenv_network::settings::FORWARDING_RECORD;
use aenv_orchestrator::{HeldDataDir, hold_data_dir};
use aenv_vmm::cgroups::{Cgroups, Outcome};
use anyhow::{Context as _, Result};
use std::io::ErrorKind;
use std::path::Path;

/// There where systemd is the init system.
const SYSTEMD: &str = "/run/systemd/system";

/// Ends and removes; says what there was, one line each.
pub(crate) async fn purge(options: &Instance) -> Result<()> {
    // Both held to the end, so that no node starts in between.
    let _lock = InstanceLock::take(&options.instance, &options.data_dir)?;
    let held: Option<HeldDataDir> = match options.data_dir.exists() {
        true => Some(hold_data_dir(&options.data_dir)?),
        false => None,
    };
    let prefix = format!("{}-", options.instance);
    let vms = aenv_vmm::end_strays(&prefix, &[]).await;
    let service = stored::purge(options).await?;
    let mut ended = match vms {
        Ok(ended) => ended,
        // A VMM that waits for its disk while there is no block service ends only now, when its requests have failed.
        Err(error) => {
            say(&format!("the disks of VMs that waited for them ({error})"))?;
            aenv_vmm::end_strays(&prefix, &[]).await.context("cannot end the VMs")?
        }
    };
    ended.extend(aenv_vmm::end_strays(aenv_vmm::PROBE_NAME, &[]).await.context("cannot end a probe")?);
    for name in ended {
        say(&format!("VM {name}"))?;
    }
    for line in service {
        say(&line)?;
    }
    remove_tree(&vmm::program_trees(&options.data_dir))?;
    let record = Path::new(FORWARDING_RECORD);
    let purged =
        aenv_network::purge(&options.instance, record).await.context("cannot remove the networks")?;
    if !purged.slots.is_empty() {
        say(&format!("network namespaces: {}", purged.slots.len()))?;
    }
    if !purged.veths.is_empty() {
        say(&format!("network links left over: {}", purged.veths.len()))?;
    }
    if purged.policy {
        say("firewall rules on the host")?;
    }
    if purged.forwarding {
        say("IPv4 forwarding, which was off before")?;
    }
    if let Some(held) = held {
        let sandboxes = held.forget_sandboxes()?;
        if sandboxes > 0 {
            say(&format!("sandboxes and standbys: {sandboxes}"))?;
        }
    }
    remove_groups(options, &prefix).await
}

/// The roots of QEMU's jails; no VM uses them any more.
fn remove_tree(directory: &Path) -> Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}

/// The control groups of the VMs, and their parent, which is empty then unless others use it too.
async fn remove_groups(options: &Instance, prefix: &str) -> Result<()> {
    let (name, explicit) = (options.instance.to_string(), options.vmm.cgroup.as_deref());
    let inspected = Cgroups::inspect(&name, explicit).context("cannot look at the control groups")?;
    let parent = match inspected {
        Outcome::Usable(plan) if plan.parent().exists() => plan.parent(),
        Outcome::Usable(_) => return Ok(()),
        Outcome::Unusable { reason, .. } if Path::new(SYSTEMD).exists() => {
            return Ok(say(&format!(
                "not looked for: control groups of a node under systemd, which removes them with its unit ({reason})"
            ))?);
        }
        Outcome::Unusable { .. } => return Ok(()),
    };
    if let Outcome::Usable(cgroups) = Cgroups::prepare(&name, explicit)? {
        cgroups.sweep(prefix, &[]).await.context("cannot remove the control groups of VMs")?;
    }
    match std::fs::remove_dir(&parent) {
        Err(error) if matches!(error.kind(), ErrorKind::ResourceBusy | ErrorKind::DirectoryNotEmpty) => {
            Ok(say(&format!("control group {} stays: others use it too", parent.display()))?)
        }
        removed => removed.with_context(|| format!("cannot remove the control group {}", parent.display())),
    }
}

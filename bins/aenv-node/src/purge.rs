//! `purge`: nothing of this instance stays on the host. Templates and their captures do.

use crate::arguments::Instance;
use crate::instance_lock::InstanceLock;
use crate::output::say;
use crate::serve::driver;
use aenv_network::settings::FORWARDING_RECORD;
use aenv_orchestrator::{HeldDataDir, hold_data_dir};
use aenv_vmm::Vmm as _;
use anyhow::{Context as _, Result};
use std::path::Path;

/// Ends and removes; says what there was, one line each.
pub(crate) async fn purge(options: &Instance) -> Result<()> {
    // Both held to the end, so that no node starts in between.
    let _lock = InstanceLock::take(&options.instance, &options.data_dir)?;
    let held: Option<HeldDataDir> = match options.data_dir.exists() {
        true => Some(hold_data_dir(&options.data_dir)?),
        false => None,
    };
    let vmm = driver(options).await?;
    let ended =
        vmm.reap_strays(&format!("{}-", options.instance), &[]).await.context("cannot end the VMs")?;
    for name in ended {
        say(&format!("VM {name}"))?;
    }
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
    Ok(())
}

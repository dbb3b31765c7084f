//! What an instance changes on the host itself, and undoing it: its nftables table and IPv4 forwarding.
//!
//! Owns a record on disk: *forwarding was off before us*. It is written before forwarding is turned on, and forwarding is
//! turned off again by the purge that finds no instance left. Nobody else's rules or settings are touched.

use crate::construct::{self, blocking};
use crate::links::with_links;
use crate::nftables;
use crate::policy;
use crate::settings::{InstanceName, PIN_DIRECTORY, SlotSettings};
use crate::slot::{NetworkError, SlotName};
use aenv_sys::netns;
use std::io;
use std::path::Path;

const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
/// Stands for the slot in errors about the host.
const HOST: &str = "host";

/// What a purge removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Purged {
    /// Slots whose namespace was still pinned.
    pub slots: Vec<SlotName>,
    /// Host ends of veth pairs without a pinned namespace.
    pub veths: Vec<String>,
    /// The instance's rules on the host were there.
    pub policy: bool,
    /// IPv4 forwarding was turned off again, as it was before the first instance.
    pub forwarding: bool,
}

/// Puts the instance's rules into force, or replaces those of an earlier process, and turns IPv4 forwarding on.
pub(crate) async fn prepare(settings: &SlotSettings) -> Result<(), NetworkError> {
    let table = policy::on_host(&settings.instance, settings.subnet, &settings.blocked);
    // Rules first: with forwarding on, nothing may pass without them.
    blocking("set the rules", HOST, move || nftables::replace(&table)).await?;
    let record = settings.forwarding_record.clone();
    blocking("turn IPv4 forwarding on", HOST, move || turn_forwarding_on(&record)).await
}

fn turn_forwarding_on(record: &Path) -> io::Result<()> {
    if std::fs::read_to_string(FORWARDING)?.trim() != "0" {
        return Ok(());
    }
    if let Some(folder) = record.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(record, "0\n")?;
    std::fs::write(FORWARDING, "1")?;
    tracing::info!(record = %record.display(), "turned IPv4 forwarding of the host on; a purge turns it off again");
    Ok(())
}

/// True when forwarding was turned off.
fn restore_forwarding(record: &Path) -> io::Result<bool> {
    match std::fs::read_to_string(record) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        recorded => recorded?,
    };
    if nftables::list()?.iter().any(|table| table.starts_with("aenv_")) {
        // Another instance needs it; the last one restores.
        return Ok(false);
    }
    std::fs::write(FORWARDING, "0")?;
    std::fs::remove_file(record)?;
    Ok(true)
}

/// Asks the kernel for its nftables tables, which fails where it has none: for reports on this host.
///
/// # Errors
/// The kernel's answer.
pub async fn probe_firewall() -> Result<(), NetworkError> {
    blocking("list nftables tables", HOST, || nftables::list().map(drop)).await
}

/// Slots of the instance whose pin exists, half-made ones included.
pub(crate) async fn pinned_slots(instance: &InstanceName) -> Result<Vec<SlotName>, NetworkError> {
    let prefix = instance.pin_prefix();
    let pins = blocking("list the namespaces", HOST, move || {
        Ok((netns::list_pinned(Path::new(PIN_DIRECTORY), &prefix)?, prefix))
    });
    let (pins, prefix) = pins.await?;
    Ok(pins
        .iter()
        .filter_map(|pin| pin.strip_prefix(&prefix))
        .map(|slot| SlotName(slot.to_owned()))
        .collect())
}

/// Numbers of the instance's veth pairs.
pub(crate) async fn veth_numbers(instance: &InstanceName) -> Result<Vec<u32>, NetworkError> {
    let names =
        blocking("list the interfaces", HOST, || with_links(async |links| links.names().await)).await?;
    Ok(names.iter().filter_map(|name| instance.index_of_veth(name)).collect())
}

/// Removes a veth pair of which the namespace's pin is gone.
pub(crate) async fn remove_veth(veth: &str) -> Result<(), NetworkError> {
    let name = veth.to_owned();
    let removed =
        blocking("remove the veth pair", veth, move || with_links(async |links| links.remove(&name).await));
    removed.await.map(drop)
}

/// Removes everything of an instance, slots in use included, whether or not a node of it was ever shut down. No node of
/// the instance may run. Needs a tokio runtime.
///
/// # Errors
/// The first thing that could not be removed; calling again continues.
pub async fn purge(instance: &InstanceName, forwarding_record: &Path) -> Result<Purged, NetworkError> {
    let slots = pinned_slots(instance).await?;
    for slot in &slots {
        construct::remove(slot, instance.pin(slot), instance.veth_of_slot(slot)).await?;
    }
    let mut veths = Vec::new();
    for number in veth_numbers(instance).await? {
        let veth = instance.veth(number);
        remove_veth(&veth).await?;
        veths.push(veth);
    }
    let table = instance.table();
    let policy = blocking("remove the rules", HOST, move || nftables::remove(&table)).await?;
    let record = forwarding_record.to_owned();
    let forwarding = blocking("restore IPv4 forwarding", HOST, move || restore_forwarding(&record)).await?;
    Ok(Purged { slots, veths, policy, forwarding })
}

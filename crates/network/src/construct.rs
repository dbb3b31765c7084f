//! Makes and removes one slot.
//!
//! Owns nothing: what it makes lives in the kernel under the names of a [`SlotPlan`]. A slot that cannot be completed is
//! undone before the error goes out. Rules are in place before the first device inside is switched on, and a device has
//! its hardware address before its neighbour, because a change of the address would flush the neighbour.

use crate::links::Links;
use crate::nftables;
use crate::policy::{GUEST_ADDRESS, TAP, Table, UPLINK};
use crate::settings::PAIR_PREFIX;
use crate::slot::{NetworkError, SlotName};
use aenv_sys::netns::{self, NetworkNamespace};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Hardware address of every tap: guests restored from one image remember their gateway's.
const TAP_HARDWARE_ADDRESS: [u8; 6] = [0x02, 0xfc, 0, 0, 0, 0x01];
/// Hardware address of every guest's interface.
const GUEST_HARDWARE_ADDRESS: [u8; 6] = [0x02, 0xfc, 0, 0, 0, 0x02];
/// The guest's gateway: the namespace's end of the tap.
const TAP_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// Prefix of the network that consists of the guest and its gateway.
const TAP_PREFIX: u8 = 30;

/// Everything a slot is made of.
#[derive(Debug, Clone)]
pub(crate) struct SlotPlan {
    pub(crate) name: SlotName,
    pub(crate) pin: PathBuf,
    pub(crate) veth: String,
    pub(crate) host_end: Ipv4Addr,
    pub(crate) inner_end: Ipv4Addr,
    pub(crate) policy: Table,
}

/// Makes a slot; `links` are the host's.
///
/// # Errors
/// When a step fails; nothing of the slot stays, unless that fails too, which is logged.
pub(crate) async fn build(links: &Links, plan: &SlotPlan) -> Result<(), NetworkError> {
    let built = build_steps(links, plan).await;
    if built.is_err()
        && let Err(error) = remove(links, &plan.name, &plan.pin, Some(&plan.veth)).await
    {
        tracing::warn!(slot = plan.name.0, %error, "a half-made network slot stays until the next sweep");
    }
    built
}

async fn build_steps(links: &Links, plan: &SlotPlan) -> Result<(), NetworkError> {
    let slot = &plan.name.0;
    let pin = plan.pin.clone();
    let namespace =
        blocking("make the namespace", slot, move || NetworkNamespace::create_pinned(&pin)).await?;
    links
        .add_veth(&plan.veth, UPLINK, namespace.as_fd())
        .await
        .map_err(|error| kernel("make the veth pair", slot, &error))?;
    disable_ipv6(&plan.veth).map_err(|error| kernel("switch off IPv6 of the veth", slot, &error))?;
    address_veth(links, plan).await.map_err(|error| kernel("address the veth", slot, &error))?;

    let plan = plan.clone();
    blocking("furnish the namespace", slot.as_str(), move || namespace.run(|| furnish(&plan))?).await
}

async fn address_veth(links: &Links, plan: &SlotPlan) -> io::Result<()> {
    let index = links.existing(&plan.veth).await?;
    links.add_address(index, plan.host_end, PAIR_PREFIX).await?;
    links.set_up(index).await
}

/// The part that is done by a thread inside the new namespace.
fn furnish(plan: &SlotPlan) -> io::Result<()> {
    disable_ipv6("all")?;
    disable_ipv6("default")?;
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
    nftables::replace(&plan.policy)?;
    aenv_sys::tap::create_persistent(TAP, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(connect_devices(plan))
}

async fn connect_devices(plan: &SlotPlan) -> io::Result<()> {
    let links = Links::open()?;
    links.set_up(links.existing("lo").await?).await?;

    let tap = links.existing(TAP).await?;
    links.set_hardware_address(tap, TAP_HARDWARE_ADDRESS).await?;
    links.add_address(tap, TAP_ADDRESS, TAP_PREFIX).await?;
    links.set_up(tap).await?;
    links.add_neighbour(tap, GUEST_ADDRESS, GUEST_HARDWARE_ADDRESS).await?;

    let uplink = links.existing(UPLINK).await?;
    links.add_address(uplink, plan.inner_end, PAIR_PREFIX).await?;
    links.set_up(uplink).await?;
    links.add_default_route(plan.host_end).await
}

/// For an interface, or `all`, or those to come (`default`), in the calling thread's namespace.
fn disable_ipv6(interface: &str) -> io::Result<()> {
    let settings = Path::new("/proc/sys/net/ipv6/conf");
    match std::fs::write(settings.join(interface).join("disable_ipv6"), "1") {
        // A kernel without IPv6 has nothing to switch off.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !settings.exists() => Ok(()),
        written => written,
    }
}

/// Is the slot complete? `links` are the host's.
///
/// # Errors
/// When that cannot be found out.
pub(crate) async fn exists(links: &Links, plan: &SlotPlan) -> Result<bool, NetworkError> {
    let slot = &plan.name.0;
    let outside = links.index(&plan.veth).await.map_err(|error| kernel("look for the veth", slot, &error))?;
    let pin = plan.pin.clone();
    let inside = blocking("look into the namespace", slot, move || {
        let looked = NetworkNamespace::open(&pin).and_then(|namespace| {
            namespace.run(|| {
                [TAP, UPLINK].iter().try_for_each(|device| netns::interface_index(device).map(|_| ()))
            })?
        });
        match looked {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    })
    .await?;
    Ok(inside && outside.is_some())
}

/// Replaces the rules inside the namespace.
///
/// # Errors
/// [`NetworkError::NotFound`] when the slot is gone; the kernel's answer otherwise.
pub(crate) async fn replace_policy(plan: &SlotPlan) -> Result<(), NetworkError> {
    let (pin, policy) = (plan.pin.clone(), plan.policy.clone());
    let namespace =
        blocking("open the namespace", &plan.name.0, move || match NetworkNamespace::open(&pin) {
            Ok(namespace) => Ok(Some(namespace)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        })
        .await?
        .ok_or_else(|| NetworkError::NotFound(plan.name.0.clone()))?;
    blocking("change the rules", &plan.name.0, move || namespace.run(|| nftables::replace(&policy))?).await
}

/// Removes what there is of a slot, on the host's side at once: the veth pair goes explicitly, as a process that is still
/// inside would keep it. Gone already is no error. `links` are the host's.
///
/// # Errors
/// The first thing that could not be removed; the rest was tried.
pub(crate) async fn remove(
    links: &Links,
    name: &SlotName,
    pin: &Path,
    veth: Option<&str>,
) -> Result<(), NetworkError> {
    let veth_removed = match veth {
        Some(veth) => {
            links.remove(veth).await.map_err(|error| kernel("remove the veth pair", &name.0, &error))
        }
        None => Ok(false),
    };
    let pin = pin.to_owned();
    let pin_removed = blocking("remove the namespace", &name.0, move || netns::remove_pinned(&pin)).await;
    veth_removed?;
    pin_removed
}

/// Runs `work`, which waits for the kernel, where it keeps no task from running.
///
/// # Errors
/// Those of `work`, told with what was being done for which slot.
pub(crate) async fn blocking<T: Send + 'static>(
    action: &'static str,
    slot: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, NetworkError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
    done.map_err(|error| kernel(action, slot, &error))
}

/// The kernel's answer, with what was being done for which slot.
pub(crate) fn kernel(action: &'static str, slot: &str, error: &io::Error) -> NetworkError {
    NetworkError::Kernel { action, slot: slot.to_owned(), reason: error.to_string() }
}

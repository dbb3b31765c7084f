//! Makes and removes one slot.
//!
//! Owns nothing: what it makes lives in the kernel under the names of a [`SlotPlan`]. A slot that cannot be completed is
//! undone before the error goes out. Rules are in place before the first device inside is switched on, and a device has
//! its hardware address before its neighbour, because a change of the address would flush the neighbour.

use crate::links::{Links, with_links};
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
    pub(crate) user: u32,
    pub(crate) policy: Table,
}

/// Makes a slot.
///
/// # Errors
/// When a step fails; nothing of the slot stays, unless that fails too, which is logged.
pub(crate) async fn build(plan: SlotPlan) -> Result<(), NetworkError> {
    let slot = plan.name.0.clone();
    blocking("make the slot", &slot, move || {
        let namespace = NetworkNamespace::create_pinned(&plan.pin).map_err(during("namespace"))?;
        let pair = with_links(async |links| links.add_veth(&plan.veth, UPLINK, namespace.as_fd()).await);
        let made = pair.is_ok();
        let built = pair.and_then(|()| connect_host_end(&plan)).map_err(during("veth pair")).and_then(|()| {
            // Errors from inside name their part.
            namespace.run(|| furnish(&plan)).flatten()
        });
        // A veth that was there already belongs to someone else.
        if built.is_err()
            && let Err(error) = remove_steps(&plan.pin, made.then_some(plan.veth.as_str()))
        {
            tracing::warn!(slot = plan.name.0, %error, "a half-made network slot stays until the next sweep");
        }
        built
    })
    .await
}

fn connect_host_end(plan: &SlotPlan) -> io::Result<()> {
    disable_ipv6(&plan.veth)?;
    with_links(async |links| {
        let index = links.existing(&plan.veth).await?;
        links.add_address(index, plan.host_end, PAIR_PREFIX).await?;
        links.set_up(index).await
    })
}

/// The part that is done by a thread inside the new namespace.
fn furnish(plan: &SlotPlan) -> io::Result<()> {
    disable_ipv6("all").map_err(during("IPv6 switch"))?;
    disable_ipv6("default").map_err(during("IPv6 switch"))?;
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(during("forwarding switch"))?;
    nftables::create(&plan.policy).map_err(during("rules"))?;
    aenv_sys::tap::create_persistent(TAP, Some(plan.user)).map_err(during(aenv_sys::tap::CONTROL_DEVICE))?;
    with_links(async |links| connect_devices(links, plan).await).map_err(during("devices inside"))
}

/// Says which part of a slot an error is about.
fn during(part: &'static str) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{part}: {error}"))
}

async fn connect_devices(links: &Links, plan: &SlotPlan) -> io::Result<()> {
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

/// Is the slot complete?
///
/// # Errors
/// When that cannot be found out.
pub(crate) async fn exists(plan: SlotPlan) -> Result<bool, NetworkError> {
    let slot = plan.name.0.clone();
    blocking("look for the slot", &slot, move || {
        let looked = NetworkNamespace::open(&plan.pin).and_then(|namespace| {
            netns::interface_index(&plan.veth)?;
            namespace.run(|| {
                netns::interface_index(TAP)?;
                netns::interface_index(UPLINK)
            })?
        });
        match looked {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    })
    .await
}

/// Replaces the rules inside the namespace.
///
/// # Errors
/// [`NetworkError::NotFound`] when the slot is gone; the kernel's answer otherwise.
pub(crate) async fn replace_policy(plan: SlotPlan) -> Result<(), NetworkError> {
    let slot = plan.name.0.clone();
    let replaced = blocking("change the rules", &slot, move || match NetworkNamespace::open(&plan.pin) {
        Ok(namespace) => namespace.run(|| nftables::replace(&plan.policy)).flatten().map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    });
    replaced.await?.ok_or(NetworkError::NotFound(slot))
}

/// Removes what there is of a slot. Gone already is no error.
///
/// # Errors
/// The first thing that could not be removed; the rest was tried.
pub(crate) async fn remove(name: &SlotName, pin: PathBuf, veth: Option<String>) -> Result<(), NetworkError> {
    blocking("remove the slot", &name.0, move || remove_steps(&pin, veth.as_deref())).await
}

/// On the host's side all is gone when this returns: the veth pair is removed explicitly, as a process that is still
/// inside would keep it.
fn remove_steps(pin: &Path, veth: Option<&str>) -> io::Result<()> {
    let veth_removed = match veth {
        Some(veth) => with_links(async |links| links.remove(veth).await).map_err(during("veth pair")),
        None => Ok(false),
    };
    let pin_removed = netns::remove_pinned(pin).map_err(during("namespace"));
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
    done.map_err(|error| NetworkError::Kernel { action, slot: slot.to_owned(), reason: error.to_string() })
}

//! The guest's side of its network. Addresses are the same in every guest: the node's network slots differ outside.

use anyhow::{Context as _, bail};
use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};
use std::net::{IpAddr, Ipv4Addr};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
const PREFIX_BITS: u8 = 30;
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);

/// Brings up the loopback and, when the machine has a network card, its address and the way out.
///
/// # Errors
/// When the kernel refuses.
pub(crate) async fn bring_up() -> anyhow::Result<()> {
    let (connection, handle, _) = rtnetlink::new_connection().context("cannot speak to the network stack")?;
    let carrying = tokio::spawn(connection);
    let done = configure(&handle).await;
    carrying.abort();
    done
}

async fn configure(handle: &Handle) -> anyhow::Result<()> {
    let Some(loopback) = find(handle, "lo").await? else { bail!("the machine has no loopback") };
    up(handle, loopback).await.context("cannot bring up the loopback")?;
    let Some(card) = find(handle, "eth0").await? else {
        tracing::warn!("the machine has no eth0: the guest has no network");
        return Ok(());
    };
    let index = card.header.index;
    let added = handle.address().add(index, IpAddr::V4(ADDRESS), PREFIX_BITS).execute().await;
    added.context("cannot give eth0 its address")?;
    up(handle, card).await.context("cannot bring up eth0")?;
    let route = RouteMessageBuilder::<Ipv4Addr>::new().gateway(GATEWAY).output_interface(index).build();
    handle.route().add(route).execute().await.context("cannot add the default route")
}

async fn find(handle: &Handle, name: &str) -> anyhow::Result<Option<LinkMessage>> {
    match handle.link().get().match_name(name.to_owned()).execute().try_next().await {
        Ok(link) => Ok(link),
        Err(rtnetlink::Error::NetlinkError(error))
            if error.raw_code() == -rustix::io::Errno::NODEV.raw_os_error() =>
        {
            Ok(None)
        }
        Err(error) => Err(error).with_context(|| format!("cannot look for {name}")),
    }
}

async fn up(handle: &Handle, link: LinkMessage) -> Result<(), rtnetlink::Error> {
    handle.link().set(LinkUnspec::new_with_index(link.header.index).up().build()).execute().await
}

//! Interfaces, addresses, routes and neighbours of one network namespace, over route netlink.
//!
//! Owns a netlink socket for the length of one call of [`with_links`].

use futures_util::TryStreamExt;
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute};
use rtnetlink::{Error, Handle, LinkUnspec, LinkVeth, RouteMessageBuilder};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A connection to the kernel's route subsystem.
pub(crate) struct Links {
    handle: Handle,
}

/// Runs `work` with a connection that acts in the calling thread's namespace. Blocks: the kernel makes a request wait for
/// its one lock on network configuration before the send returns, which may take tens of milliseconds.
///
/// # Errors
/// Those of `work`, or the system's error when there is no connection. Panics on a thread that runs async tasks.
pub(crate) fn with_links<T>(work: impl AsyncFnOnce(&Links) -> io::Result<T>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        // Ends with the runtime.
        tokio::spawn(connection);
        work(&Links { handle }).await
    })
}

impl Links {
    /// Number of an interface, none when there is no such interface.
    pub(crate) async fn index(&self, name: &str) -> io::Result<Option<u32>> {
        let found = self.handle.link().get().match_name(name.to_owned()).execute().try_next().await;
        match found.map_err(to_io) {
            Ok(link) => Ok(link.map(|link| link.header.index)),
            Err(error) if is_no_device(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Number of an interface that must exist.
    pub(crate) async fn existing(&self, name: &str) -> io::Result<u32> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("no network interface {name}"));
        self.index(name).await?.ok_or_else(missing)
    }

    /// Names of all interfaces.
    pub(crate) async fn names(&self) -> io::Result<Vec<String>> {
        let mut links = self.handle.link().get().execute();
        let mut names = Vec::new();
        while let Some(link) = links.try_next().await.map_err(to_io)? {
            names.extend(link.attributes.into_iter().find_map(|attribute| match attribute {
                LinkAttribute::IfName(name) => Some(name),
                _ => None,
            }));
        }
        Ok(names)
    }

    /// Makes a veth pair: `name` here, `peer_name` in another namespace.
    pub(crate) async fn add_veth(
        &self,
        name: &str,
        peer_name: &str,
        peer_namespace: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let peer = LinkUnspec::new_with_name(peer_name).setns_by_fd(peer_namespace.as_raw_fd()).build();
        let pair = LinkVeth::new(name, peer_name).set_info_data(InfoData::Veth(InfoVeth::Peer(peer))).build();
        self.handle.link().add(pair).execute().await.map_err(to_io)
    }

    /// Switches an interface on.
    pub(crate) async fn set_up(&self, index: u32) -> io::Result<()> {
        self.handle.link().set(LinkUnspec::new_with_index(index).up().build()).execute().await.map_err(to_io)
    }

    /// Sets the hardware address. Forgets the neighbours of the interface.
    pub(crate) async fn set_hardware_address(&self, index: u32, address: [u8; 6]) -> io::Result<()> {
        let change = LinkUnspec::new_with_index(index).address(address.to_vec()).build();
        self.handle.link().set(change).execute().await.map_err(to_io)
    }

    /// Gives an interface an address.
    pub(crate) async fn add_address(&self, index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        self.handle.address().add(index, address.into(), prefix).execute().await.map_err(to_io)
    }

    /// Sends what no other route takes to `gateway`.
    pub(crate) async fn add_default_route(&self, gateway: Ipv4Addr) -> io::Result<()> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new().gateway(gateway).build();
        self.handle.route().add(route).execute().await.map_err(to_io)
    }

    /// Says once and for all who has `address`.
    pub(crate) async fn add_neighbour(
        &self,
        index: u32,
        address: Ipv4Addr,
        hardware: [u8; 6],
    ) -> io::Result<()> {
        let neighbour = self.handle.neighbours().add(index, address.into()).link_layer_address(&hardware);
        neighbour.execute().await.map_err(to_io)
    }

    /// Removes an interface and waits until it is gone; false when there was none.
    pub(crate) async fn remove(&self, name: &str) -> io::Result<bool> {
        let Some(index) = self.index(name).await? else { return Ok(false) };
        match self.handle.link().del(index).execute().await.map_err(to_io) {
            Ok(()) => Ok(true),
            // Its namespace ended in between.
            Err(error) if is_no_device(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The kernel's answer as an error of the system.
fn to_io(error: Error) -> io::Error {
    match error {
        Error::NetlinkError(answer) => answer.to_io(),
        other => io::Error::other(other),
    }
}

/// Linux's number for "no such device", which the standard library does not name.
const NO_SUCH_DEVICE: i32 = 19;

fn is_no_device(error: &io::Error) -> bool {
    error.raw_os_error() == Some(NO_SUCH_DEVICE)
}

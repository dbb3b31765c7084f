//! What an instance is told about its networks, and the names and addresses that follow from it.
//!
//! Owns no state. Everything that an instance makes on the host carries its name, so that several can live on one host
//! and a sweep can tell whose a thing is:
//!
//! | thing | name |
//! |---|---|
//! | slot | `<n>-<random>`: `n` numbers its addresses and is used again later, the whole name is not |
//! | namespace | `/run/netns/aenv-<instance>-<slot>` |
//! | host end of the veth pair | `ae<instance>v<n>` |
//! | nftables table, on the host and inside | `inet aenv_<instance>` |

use crate::slot::{NetworkError, SlotName};
use ipnet::Ipv4Net;
use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where namespaces are pinned; the place iproute2 looks at.
pub const PIN_DIRECTORY: &str = "/run/netns";

/// Where it is recorded that forwarding was off before the first instance of this host turned it on.
pub const FORWARDING_RECORD: &str = "/run/aenv/ip_forward-was-off";

/// What an instance of the node is told about its networks.
#[derive(Debug, Clone)]
pub struct SlotSettings {
    /// Name of the instance.
    pub instance: InstanceName,
    /// Network of the veth pairs, two addresses a slot: a prefix of 16 to 30 bits that nothing else on the host uses,
    /// other instances included.
    pub subnet: Ipv4Net,
    /// How many fresh slots to keep ready.
    pub pool_size: usize,
    /// Destinations no guest may reach, besides the host itself and other slots.
    pub blocked: Vec<Ipv4Net>,
    /// Where to record that forwarding was off before the first instance turned it on; the same for all instances of a
    /// host, and in a place that a reboot empties, as it resets forwarding too.
    pub forwarding_record: PathBuf,
}

impl SlotSettings {
    /// Settings with the given name and network, [`blocked_by_default`] and a pool of four.
    #[must_use]
    pub fn new(instance: InstanceName, subnet: Ipv4Net) -> Self {
        Self {
            instance,
            subnet,
            pool_size: 4,
            blocked: blocked_by_default(),
            forwarding_record: PathBuf::from(FORWARDING_RECORD),
        }
    }
}

/// All destinations that are not somewhere on the public internet: private, shared, link-local (cloud metadata),
/// loopback, multicast and reserved networks.
#[must_use]
pub fn blocked_by_default() -> Vec<Ipv4Net> {
    const BLOCKED: [([u8; 4], u8); 10] = [
        ([0, 0, 0, 0], 8),
        ([10, 0, 0, 0], 8),
        ([100, 64, 0, 0], 10),
        ([127, 0, 0, 0], 8),
        ([169, 254, 0, 0], 16),
        ([172, 16, 0, 0], 12),
        ([192, 0, 0, 0], 24),
        ([192, 168, 0, 0], 16),
        ([224, 0, 0, 0], 4),
        ([240, 0, 0, 0], 4),
    ];
    BLOCKED.iter().map(|(address, prefix)| Ipv4Net::new_assert(Ipv4Addr::from(*address), *prefix)).collect()
}

/// Settings that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The name of the instance.
    #[error("instance name {0:?}: 1 to 4 characters of a-z and 0-9 are needed")]
    InstanceName(String),
    /// The network of the veth pairs.
    #[error("subnet {subnet}: {reason}")]
    Subnet {
        /// As given.
        subnet: Ipv4Net,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The pool does not fit into the network.
    #[error("a pool of {pool_size} slots does not fit into {subnet}, which has room for {capacity}")]
    PoolSize {
        /// As given.
        pool_size: usize,
        /// As given.
        subnet: Ipv4Net,
        /// How many slots the subnet can number.
        capacity: usize,
    },
}

/// Name of a node instance: 1 to 4 characters of a-z and 0-9.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InstanceName(String);

impl FromStr for InstanceName {
    type Err = SettingsError;

    fn from_str(name: &str) -> Result<Self, SettingsError> {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        if (1..=4).contains(&name.len()) && name.bytes().all(allowed) {
            Ok(Self(name.to_owned()))
        } else {
            Err(SettingsError::InstanceName(name.to_owned()))
        }
    }
}

impl fmt::Display for InstanceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl InstanceName {
    /// Name of the instance's nftables tables.
    pub(crate) fn table(&self) -> String {
        format!("aenv_{self}")
    }

    /// What the names of the instance's pins begin with.
    pub(crate) fn pin_prefix(&self) -> String {
        format!("aenv-{self}-")
    }

    /// What the names of the instance's veth host ends begin with; a number follows.
    pub(crate) fn veth_prefix(&self) -> String {
        format!("ae{self}v")
    }

    /// Name of the host end of the veth pair of slot number `index`: at most 12 of the 15 bytes allowed.
    pub(crate) fn veth(&self, index: u32) -> String {
        format!("{}{index}", self.veth_prefix())
    }

    /// Name of the host end of a slot's veth pair; none for the name of a stray that no slot can have.
    pub(crate) fn veth_of_slot(&self, slot: &SlotName) -> Option<String> {
        index_of_slot(slot).ok().map(|index| self.veth(index))
    }

    /// The number in the name of a veth host end, if it is one of this instance.
    pub(crate) fn index_of_veth(&self, interface: &str) -> Option<u32> {
        let number = interface.strip_prefix(&self.veth_prefix())?;
        let index = number.parse().ok()?;
        // Not `+1` or `01`, which also parse.
        (self.veth(index) == interface).then_some(index)
    }

    /// Where the namespace of a slot is pinned.
    pub(crate) fn pin(&self, slot: &SlotName) -> PathBuf {
        Path::new(PIN_DIRECTORY).join(format!("{}{}", self.pin_prefix(), slot.0))
    }
}

/// The number that a slot name begins with.
///
/// # Errors
/// [`NetworkError::NotFound`] for a name that no slot can have, so that a damaged journal names no file elsewhere.
pub(crate) fn index_of_slot(name: &SlotName) -> Result<u32, NetworkError> {
    let unknown = || NetworkError::NotFound(name.0.clone());
    let (number, random) = name.0.split_once('-').ok_or_else(unknown)?;
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if !plain(number) || !plain(random) {
        return Err(unknown());
    }
    number.parse().map_err(|_| unknown())
}

/// Which two addresses each slot's veth pair has: neighbours, so that a 31-bit prefix spans the pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddressPlan {
    subnet: Ipv4Net,
}

/// Prefix of the network between the two ends of a veth pair.
pub(crate) const PAIR_PREFIX: u8 = 31;

impl AddressPlan {
    pub(crate) fn new(settings: &SlotSettings) -> Result<Self, SettingsError> {
        let subnet = settings.subnet;
        let bad = |reason| Err(SettingsError::Subnet { subnet, reason });
        if subnet.addr() != subnet.network() {
            return bad("has bits set beyond its prefix");
        }
        if !(16..=30).contains(&subnet.prefix_len()) {
            return bad("a prefix of 16 to 30 bits is needed");
        }
        let address = subnet.addr();
        if address.is_loopback()
            || address.is_multicast()
            || address.is_unspecified()
            || address.is_link_local()
        {
            return bad("not a network whose addresses interfaces can have here");
        }
        let plan = Self { subnet };
        let capacity = plan.capacity() as usize;
        if settings.pool_size > capacity {
            return Err(SettingsError::PoolSize { pool_size: settings.pool_size, subnet, capacity });
        }
        Ok(plan)
    }

    /// How many slots there can be at once.
    pub(crate) fn capacity(&self) -> u32 {
        1 << (31 - self.subnet.prefix_len())
    }

    /// Address of the host end of pair `index`.
    pub(crate) fn host_end(&self, index: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.subnet.network().to_bits() + 2 * index)
    }

    /// User id that goes with pair `index`: half the address of its host end. Addresses of pairs are neighbours of their own
    /// and no two slots of a host share one, whatever their instance, so neither do they share a user; and it stays
    /// below 2^31, where some programs take ids for negative. For 100.64.0.0/10 the ids lie above 841 million, beyond the
    /// ranges that distributions give to accounts and their sub-ids.
    pub(crate) fn user(&self, index: u32) -> u32 {
        self.host_end(index).to_bits() >> 1
    }

    /// Address of the end inside of pair `index`.
    pub(crate) fn inner_end(&self, index: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.subnet.network().to_bits() + 2 * index + 1)
    }
}

#[cfg(test)]
mod tests;

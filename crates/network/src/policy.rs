//! Who may talk to whom, as data: the tables inside each namespace and on the host.
//!
//! Owns no state and does no I/O; `nftables` puts a [`Table`] into the kernel. A table is always replaced as a whole, so
//! what is written here is what applies.
//!
//! ```text
//!  inside    from guest                    to guest                       else
//!  input     replies to us                 -                              drop   (no service of the namespace, no ping)
//!  forward   to uplink, own address only,  replies and related            drop   (IPv6, spoofed, blocked networks)
//!            not to blocked networks
//!  output    -                             to the guest's address         drop
//!
//!  on the host, for the instance's veths only; everything else is left alone
//!  input     drop, always: every service and address of the host, IPv4 and IPv6
//!  forward   out: IPv4 from the subnet, not to blocked networks, not into a veth of the instance; in: replies only
//! ```
//!
//! The host's tables of two instances need not know one another: each refuses new connections into its own veths.

use crate::settings::InstanceName;
use ipnet::Ipv4Net;
use std::net::Ipv4Addr;

/// The interface of the guest, in every namespace.
pub(crate) const TAP: &str = "tap0";
/// The inner end of the veth pair, in every namespace.
pub(crate) const UPLINK: &str = "uplink";
/// Address of every guest.
pub(crate) const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);

/// A table of the `inet` family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) name: String,
    pub(crate) chains: Vec<Chain>,
}

/// A base chain; a packet that no rule decides meets `otherwise`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) hook: Hook,
    pub(crate) otherwise: Verdict,
    pub(crate) rules: Vec<Rule>,
}

/// Where a chain sees packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    Input,
    Forward,
    Output,
    /// Address translation of what leaves.
    Postrouting,
}

/// Applies to packets for which all conditions hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) conditions: Vec<Condition>,
    pub(crate) verdict: Verdict,
}

/// What can be asked about a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Came in through an interface.
    From(Interface),
    /// Goes out through an interface.
    To(Interface),
    /// Does not go out through an interface.
    NotTo(Interface),
    /// Is IPv6.
    Ipv6,
    /// Is IPv4 from this network.
    Source(Ipv4Net),
    /// Is IPv4, and not from this network.
    NotSource(Ipv4Net),
    /// Is IPv4 to this network.
    Destination(Ipv4Net),
    /// Belongs to a connection known already, or is an error about one.
    Reply,
    /// As [`Condition::Reply`], or begins a connection.
    NewOrReply,
}

/// An interface, or all whose names begin alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Interface {
    Named(String),
    BeginningWith(String),
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Accept,
    Drop,
    /// Leaves with the address of the interface it leaves through.
    Masquerade,
}

/// May a guest reach the world?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Egress {
    /// Yes, except the blocked networks.
    Open,
    /// No; connections that exist are cut too.
    Denied,
}

/// The table inside a namespace.
pub(crate) fn inside(instance: &InstanceName, blocked: &[Ipv4Net], egress: Egress) -> Table {
    use Condition::{Destination, From, NewOrReply, Reply, Source, To};
    let tap = || Interface::Named(TAP.to_owned());
    let uplink = || Interface::Named(UPLINK.to_owned());
    let guest = Ipv4Net::from(GUEST_ADDRESS);

    let mut forward = Vec::new();
    if egress == Egress::Open {
        forward.push(accept([From(uplink()), To(tap()), Reply]));
        forward.extend(blocked.iter().map(|net| drop_packet([From(tap()), Destination(*net)])));
        forward.push(accept([From(tap()), To(uplink()), Source(guest), NewOrReply]));
    }
    Table {
        name: instance.table(),
        chains: vec![
            chain(Hook::Input, Verdict::Drop, vec![accept([From(tap()), Source(guest), Reply])]),
            chain(Hook::Forward, Verdict::Drop, forward),
            chain(Hook::Output, Verdict::Drop, vec![accept([To(tap()), Destination(guest)])]),
            chain(Hook::Postrouting, Verdict::Accept, vec![masquerade([To(uplink()), Source(guest)])]),
        ],
    }
}

/// The table of an instance on the host.
pub(crate) fn on_host(instance: &InstanceName, subnet: Ipv4Net, blocked: &[Ipv4Net]) -> Table {
    use Condition::{Destination, From, Ipv6, NotSource, NotTo, Reply, Source, To};
    let veths = || Interface::BeginningWith(instance.veth_prefix());

    let mut forward = vec![
        drop_packet([From(veths()), Ipv6]),
        drop_packet([From(veths()), NotSource(subnet)]),
        drop_packet([From(veths()), To(veths())]),
    ];
    forward.extend(blocked.iter().map(|net| drop_packet([From(veths()), Destination(*net)])));
    forward.push(accept([To(veths()), Reply]));
    forward.push(drop_packet([To(veths())]));
    Table {
        name: instance.table(),
        chains: vec![
            chain(Hook::Input, Verdict::Accept, vec![drop_packet([From(veths())])]),
            chain(Hook::Forward, Verdict::Accept, forward),
            chain(Hook::Postrouting, Verdict::Accept, vec![masquerade([Source(subnet), NotTo(veths())])]),
        ],
    }
}

fn chain(hook: Hook, otherwise: Verdict, rules: Vec<Rule>) -> Chain {
    Chain { hook, otherwise, rules }
}

fn accept(conditions: impl Into<Vec<Condition>>) -> Rule {
    Rule { conditions: conditions.into(), verdict: Verdict::Accept }
}

fn drop_packet(conditions: impl Into<Vec<Condition>>) -> Rule {
    Rule { conditions: conditions.into(), verdict: Verdict::Drop }
}

fn masquerade(conditions: impl Into<Vec<Condition>>) -> Rule {
    Rule { conditions: conditions.into(), verdict: Verdict::Masquerade }
}

#[cfg(test)]
mod tests;

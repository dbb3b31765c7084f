//! Puts a policy into the kernel: one netlink transaction that replaces the whole table, so there is no moment without
//! rules and none with half of them.
//!
//! Owns nothing; each call opens a socket in the calling thread's network namespace and acts there. It blocks for as long
//! as the kernel takes.

use crate::policy::{self, Condition, Hook, Interface, Verdict};
use ipnet::Ipv4Net;
use nftnl::expr::{
    Bitwise, Cmp, CmpOp, Conntrack, InterfaceName, Masquerade, Meta, Payload, Verdict as Decision,
};
use nftnl::expr::{Ipv4HeaderField, NetworkHeaderField, ct::States};
use nftnl::{Batch, Chain, ChainType, FinalizedBatch, MsgType, Policy, ProtoFamily, Rule, Table};
use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::io;

/// Makes a table where there is none of this name, as in a new namespace. Much faster than [`replace`], which has to wait
/// until no packet meets the old rules any more.
///
/// # Errors
/// The kernel's answer; then nothing has changed.
pub(crate) fn create(table: &policy::Table) -> io::Result<()> {
    let kernel_table = inet_table(&table.name)?;
    let mut batch = Batch::new();
    batch.add(&kernel_table, MsgType::Add);
    add_chains(&mut batch, &kernel_table, table)?;
    commit(&batch.finalize())
}

/// Makes a table, in place of one of this name. Connections stay known.
///
/// # Errors
/// The kernel's answer; then nothing has changed.
pub(crate) fn replace(table: &policy::Table) -> io::Result<()> {
    let kernel_table = inet_table(&table.name)?;
    let mut batch = Batch::new();
    // The first line makes the second one valid where there is no table yet.
    batch.add(&kernel_table, MsgType::Add);
    batch.add(&kernel_table, MsgType::Del);
    batch.add(&kernel_table, MsgType::Add);
    add_chains(&mut batch, &kernel_table, table)?;
    commit(&batch.finalize())
}

/// Removes the table; true when there was one.
///
/// # Errors
/// The kernel's answer.
pub(crate) fn remove(name: &str) -> io::Result<bool> {
    let mut batch = Batch::new();
    batch.add(&inet_table(name)?, MsgType::Del);
    match commit(&batch.finalize()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Names of all tables, of every family.
///
/// # Errors
/// The kernel's answer.
pub(crate) fn list() -> io::Result<HashSet<String>> {
    let socket = mnl::Socket::new(mnl::Bus::Netfilter)?;
    socket.send(&nftnl::table::get_tables_nlmsg(LIST_SEQUENCE))?;
    let mut names = HashSet::new();
    let mut buffer = Buffer::new();
    loop {
        for message in socket.recv(&mut buffer.0)? {
            let callback = nftnl::table::get_tables_cb;
            match mnl::cb_run2(message?, LIST_SEQUENCE, socket.portid(), callback, &mut names)? {
                mnl::CbResult::Ok => {}
                mnl::CbResult::Stop => {
                    return Ok(names.iter().map(|name| name.to_string_lossy().into_owned()).collect());
                }
            }
        }
    }
}

const LIST_SEQUENCE: u32 = 1;

fn inet_table(name: &str) -> io::Result<Table> {
    Ok(Table::new(c_name(name)?, ProtoFamily::Inet))
}

fn add_chains(batch: &mut Batch, kernel_table: &Table, table: &policy::Table) -> io::Result<()> {
    table.chains.iter().try_for_each(|chain| add_chain(batch, kernel_table, chain))
}

fn add_chain(batch: &mut Batch, table: &Table, chain: &policy::Chain) -> io::Result<()> {
    let mut kernel_chain = Chain::new(chain_name(chain.hook), table);
    let (hook, kind, priority) = match chain.hook {
        Hook::Input => (nftnl::Hook::In, ChainType::Filter, FILTER_PRIORITY),
        Hook::Forward => (nftnl::Hook::Forward, ChainType::Filter, FILTER_PRIORITY),
        Hook::Output => (nftnl::Hook::Out, ChainType::Filter, FILTER_PRIORITY),
        Hook::Postrouting => (nftnl::Hook::PostRouting, ChainType::Nat, SOURCE_NAT_PRIORITY),
    };
    kernel_chain.set_hook(hook, priority);
    kernel_chain.set_type(kind);
    kernel_chain.set_policy(match chain.otherwise {
        Verdict::Drop => Policy::Drop,
        Verdict::Accept | Verdict::Masquerade => Policy::Accept,
    });
    batch.add(&kernel_chain, MsgType::Add);
    for rule in &chain.rules {
        let mut kernel_rule = Rule::new(&kernel_chain);
        for condition in &rule.conditions {
            add_condition(&mut kernel_rule, condition)?;
        }
        match rule.verdict {
            Verdict::Accept => kernel_rule.add_expr(&Decision::Accept),
            Verdict::Drop => kernel_rule.add_expr(&Decision::Drop),
            Verdict::Masquerade => kernel_rule.add_expr(&Masquerade),
        }
        batch.add(&kernel_rule, MsgType::Add);
    }
    Ok(())
}

/// Before the rules that firewalls of the host usually have; a drop is final in any order.
const FILTER_PRIORITY: nftnl::Priority = -10;
/// The kernel's own place for source address translation.
const SOURCE_NAT_PRIORITY: nftnl::Priority = 100;

fn chain_name(hook: Hook) -> &'static CStr {
    match hook {
        Hook::Input => c"input",
        Hook::Forward => c"forward",
        Hook::Output => c"output",
        Hook::Postrouting => c"postrouting",
    }
}

fn add_condition(rule: &mut Rule<'_>, condition: &Condition) -> io::Result<()> {
    match condition {
        Condition::From(interface) => {
            rule.add_expr(&Meta::IifName);
            rule.add_expr(&Cmp::new(CmpOp::Eq, interface_name(interface)?));
        }
        Condition::To(interface) => {
            rule.add_expr(&Meta::OifName);
            rule.add_expr(&Cmp::new(CmpOp::Eq, interface_name(interface)?));
        }
        Condition::NotTo(interface) => {
            rule.add_expr(&Meta::OifName);
            rule.add_expr(&Cmp::new(CmpOp::Neq, interface_name(interface)?));
        }
        Condition::Ipv6 => family_is(rule, ProtoFamily::Ipv6)?,
        Condition::Source(net) => address_in(rule, Ipv4HeaderField::Saddr, CmpOp::Eq, *net)?,
        Condition::NotSource(net) => address_in(rule, Ipv4HeaderField::Saddr, CmpOp::Neq, *net)?,
        Condition::Destination(net) => address_in(rule, Ipv4HeaderField::Daddr, CmpOp::Eq, *net)?,
        Condition::Reply => connection_is(rule, States::ESTABLISHED | States::RELATED),
        Condition::NewOrReply => connection_is(rule, States::NEW | States::ESTABLISHED | States::RELATED),
    }
    Ok(())
}

fn interface_name(interface: &Interface) -> io::Result<InterfaceName> {
    Ok(match interface {
        Interface::Named(name) => InterfaceName::Exact(c_name(name)?),
        Interface::BeginningWith(prefix) => InterfaceName::StartingWith(c_name(prefix)?),
    })
}

fn family_is(rule: &mut Rule<'_>, family: ProtoFamily) -> io::Result<()> {
    let number = u8::try_from(family as u16).map_err(io::Error::other)?;
    rule.add_expr(&Meta::NfProto);
    rule.add_expr(&Cmp::new(CmpOp::Eq, number));
    Ok(())
}

/// An `inet` chain sees IPv6 packets too, whose bytes at this place are no IPv4 address.
fn address_in(rule: &mut Rule<'_>, field: Ipv4HeaderField, operator: CmpOp, net: Ipv4Net) -> io::Result<()> {
    family_is(rule, ProtoFamily::Ipv4)?;
    rule.add_expr(&Payload::Network(NetworkHeaderField::Ipv4(field)));
    rule.add_expr(&Bitwise::new(net.netmask(), 0_u32));
    rule.add_expr(&Cmp::new(operator, net.network()));
    Ok(())
}

fn connection_is(rule: &mut Rule<'_>, states: States) {
    rule.add_expr(&Conntrack::State);
    rule.add_expr(&Bitwise::new(states.bits(), 0_u32));
    rule.add_expr(&Cmp::new(CmpOp::Neq, 0_u32));
}

fn c_name(name: &str) -> io::Result<CString> {
    CString::new(name).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// Answers of the kernel, aligned as netlink messages are.
#[repr(align(8))]
struct Buffer([u8; 16 * 1024]);

impl Buffer {
    fn new() -> Box<Self> {
        Box::new(Self([0; 16 * 1024]))
    }
}

fn commit(batch: &FinalizedBatch) -> io::Result<()> {
    // The kernel takes one transaction per message, so it must not be sent in pieces.
    let mut pieces = batch.iter();
    let (Some(transaction), None) = (pieces.next(), pieces.next()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the table has too many rules for one transaction",
        ));
    };
    let socket = mnl::Socket::new(mnl::Bus::Netfilter)?;
    socket.send(transaction)?;
    let mut expected = batch.sequence_numbers();
    let mut buffer = Buffer::new();
    while !expected.is_empty() {
        for message in socket.recv(&mut buffer.0)? {
            let sequence =
                expected.next().ok_or_else(|| io::Error::other("an answer to nothing that was asked"))?;
            mnl::cb_run(message?, sequence, socket.portid())?;
        }
    }
    Ok(())
}

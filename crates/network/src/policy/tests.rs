//! Decides packets by the tables as the kernel would; the kernel itself is asked in tests/isolation.rs.

use super::{Chain, Condition, Egress, GUEST_ADDRESS, Hook, Interface, Table, Verdict, inside, on_host};
use crate::settings::{InstanceName, blocked_by_default};
use proptest::prelude::{ProptestConfig, Strategy, any, prop_oneof, proptest};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[derive(Debug, Clone)]
struct Packet {
    from: &'static str,
    to: &'static str,
    source: IpAddr,
    destination: IpAddr,
    reply: bool,
}

fn instance() -> InstanceName {
    "a".parse().unwrap()
}

fn inside_table(egress: Egress) -> Table {
    inside(&instance(), &blocked_by_default(), egress)
}

fn host_table() -> Table {
    on_host(&instance(), "100.64.0.0/16".parse().unwrap(), &blocked_by_default())
}

fn is(interface: &Interface, name: &str) -> bool {
    match interface {
        Interface::Named(expected) => expected == name,
        Interface::BeginningWith(prefix) => name.starts_with(prefix),
    }
}

fn holds(condition: &Condition, packet: &Packet) -> bool {
    let in_net =
        |net: &ipnet::Ipv4Net, address: IpAddr| matches!(address, IpAddr::V4(v4) if net.contains(&v4));
    match condition {
        Condition::From(interface) => is(interface, packet.from),
        Condition::To(interface) => is(interface, packet.to),
        Condition::NotTo(interface) => !is(interface, packet.to),
        Condition::Ipv6 => packet.source.is_ipv6(),
        Condition::Source(net) => in_net(net, packet.source),
        Condition::NotSource(net) => packet.source.is_ipv4() && !in_net(net, packet.source),
        Condition::Destination(net) => in_net(net, packet.destination),
        Condition::Reply => packet.reply,
        Condition::NewOrReply => true,
    }
}

fn decide(table: &Table, hook: Hook, packet: &Packet) -> Verdict {
    let Some(Chain { otherwise, rules, .. }) = table.chains.iter().find(|chain| chain.hook == hook) else {
        return Verdict::Accept;
    };
    let decided = rules.iter().find(|rule| rule.conditions.iter().all(|condition| holds(condition, packet)));
    decided.map_or(*otherwise, |rule| rule.verdict)
}

fn guest() -> IpAddr {
    GUEST_ADDRESS.into()
}

fn public() -> IpAddr {
    Ipv4Addr::new(8, 8, 8, 8).into()
}

fn outward(destination: IpAddr) -> Packet {
    Packet { from: "tap0", to: "uplink", source: guest(), destination, reply: false }
}

/// Source and destination, of one family as in every packet; often the guest's and a blocked one.
fn endpoints() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    let v4 = || {
        let near = proptest::sample::select(vec![
            GUEST_ADDRESS,
            Ipv4Addr::new(169, 254, 169, 254),
            Ipv4Addr::new(10, 0, 0, 1),
            Ipv4Addr::new(100, 64, 0, 3),
        ]);
        prop_oneof![near, any::<u32>().prop_map(Ipv4Addr::from_bits)].prop_map(IpAddr::from)
    };
    let v6 = || any::<u128>().prop_map(|bits| IpAddr::from(Ipv6Addr::from_bits(bits)));
    prop_oneof![3 => (v4(), v4()), 1 => (v6(), v6())]
}

fn interface() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec!["tap0", "uplink", "lo"])
}

#[test]
fn a_guest_may_ask_the_public_internet_and_be_answered() {
    let table = inside_table(Egress::Open);
    assert_eq!(decide(&table, Hook::Forward, &outward(public())), Verdict::Accept);
    let answer = Packet { from: "uplink", to: "tap0", source: public(), destination: guest(), reply: true };
    assert_eq!(decide(&table, Hook::Forward, &answer), Verdict::Accept);
    assert_eq!(decide(&table, Hook::Forward, &Packet { reply: false, ..answer }), Verdict::Drop);
    let leaving = Packet { from: "", ..outward(public()) };
    assert_eq!(decide(&table, Hook::Postrouting, &leaving), Verdict::Masquerade);
}

#[test]
fn the_host_may_ask_a_guest_and_be_answered_whatever_its_egress() {
    for egress in [Egress::Open, Egress::Denied] {
        let table = inside_table(egress);
        let gateway = IpAddr::from([169, 254, 0, 22]);
        let question = Packet { from: "", to: "tap0", source: gateway, destination: guest(), reply: false };
        assert_eq!(decide(&table, Hook::Output, &question), Verdict::Accept);
        let answer = Packet { from: "tap0", to: "", source: guest(), destination: gateway, reply: true };
        assert_eq!(decide(&table, Hook::Input, &answer), Verdict::Accept);
        assert_eq!(decide(&table, Hook::Input, &Packet { reply: false, ..answer }), Verdict::Drop);
    }
}

#[test]
fn others_on_the_host_are_left_alone() {
    let table = host_table();
    for (from, to) in [("eth0", "docker0"), ("docker0", "eth0"), ("aebv3", "eth0"), ("ae0", "eth0")] {
        let packet = Packet {
            from,
            to,
            source: [10, 0, 0, 1].into(),
            destination: [10, 0, 0, 2].into(),
            reply: false,
        };
        assert_eq!(decide(&table, Hook::Forward, &packet), Verdict::Accept, "{from} to {to}");
        assert_eq!(decide(&table, Hook::Input, &packet), Verdict::Accept, "{from}");
        assert_eq!(decide(&table, Hook::Postrouting, &packet), Verdict::Accept, "{from} to {to}");
    }
}

#[test]
fn nobody_begins_a_connection_into_a_veth() {
    let table = host_table();
    for from in ["eth0", "aebv1", "aeav2", "docker0"] {
        let packet =
            Packet { from, to: "aeav1", source: public(), destination: [100, 64, 0, 3].into(), reply: false };
        assert_eq!(decide(&table, Hook::Forward, &packet), Verdict::Drop, "{from}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_leaves_a_namespace_comes_from_the_guest_and_goes_to_no_blocked_network(
        from in interface(), to in interface(), (source, destination) in endpoints(), reply: bool,
    ) {
        let packet = Packet { from, to, source, destination, reply };
        let verdict = decide(&inside_table(Egress::Open), Hook::Forward, &packet);
        if verdict == Verdict::Accept && to == "uplink" {
            assert_eq!((from, source), ("tap0", guest()));
            let blocked = blocked_by_default();
            assert!(matches!(destination, IpAddr::V4(v4) if !blocked.iter().any(|net| net.contains(&v4))));
        }
        let denied = decide(&inside_table(Egress::Denied), Hook::Forward, &packet);
        assert_eq!(denied, Verdict::Drop);
    }

    #[test]
    fn either_side_alone_decides_the_same_about_a_destination((_, destination) in endpoints()) {
        let same_family = |v4: IpAddr| if destination.is_ipv4() { v4 } else { Ipv6Addr::LOCALHOST.into() };
        let inner = Packet { source: same_family(guest()), ..outward(destination) };
        let inner_verdict = decide(&inside_table(Egress::Open), Hook::Forward, &inner);
        let outer =
            Packet { from: "aeav1", to: "eth0", source: same_family([100, 64, 0, 3].into()), ..inner };
        assert_eq!(inner_verdict, decide(&host_table(), Hook::Forward, &outer));
    }

    #[test]
    fn the_host_hears_nothing_from_a_veth((source, destination) in endpoints(), reply: bool) {
        let packet = Packet { from: "aeav7", to: "", source, destination, reply };
        assert_eq!(decide(&host_table(), Hook::Input, &packet), Verdict::Drop);
        let spoofed = !matches!(source, IpAddr::V4(v4) if v4.octets()[..2] == [100, 64]);
        let through = decide(&host_table(), Hook::Forward, &Packet { to: "eth0", ..packet });
        assert!(!spoofed || through == Verdict::Drop);
    }
}

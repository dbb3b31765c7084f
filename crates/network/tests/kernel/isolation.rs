//! Who reaches whom through the real kernel: guests, the host, the world behind it, other slots. What must not get through
//! is always shown to be reachable from somewhere else, so that a silent server cannot pass for a wall.

use crate::testbed::{
    BLOCKED, HOST, HOST_ELSEWHERE, HOST_IPV6, Host, PORT, WORLD, exchange, inside, ip, output,
};
use aenv_network::{LinuxSlots, Slot, Slots};
use std::io::ErrorKind;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn two_slots(slots: &LinuxSlots) -> (Slot, Slot) {
    (slots.acquire().await.unwrap(), slots.acquire().await.unwrap())
}

fn guest_server(slot: &Slot) -> SocketAddr {
    SocketAddr::from((slot.guest_address, PORT))
}

/// Opens a connection from the host into a guest and has it answer once.
async fn answers(slot: &Slot) -> std::io::Result<tokio::net::TcpStream> {
    let mut stream = slot.dialer.connect(guest_server(slot)).await?;
    stream.write_all(b"?").await?;
    stream.read_exact(&mut [0]).await?;
    Ok(stream)
}

/// The address of a slot's end of an interface, in text.
fn address_of(interface: &str) -> String {
    let shown = output("ip", &format!("-o -4 address show dev {interface}"));
    let address = shown.split_whitespace().nth(3).unwrap();
    address.split('/').next().unwrap().to_owned()
}

#[test]
fn a_guest_reaches_the_world_and_nothing_near() {
    Host::run("t1", async |host| {
        let _world = host.connect_world();
        let slots = host.slots().await;
        let (slot, other) = two_slots(&slots).await;
        let guest = host.guest(&slot, "guest");
        let _other_guest = host.guest(&other, "other");

        assert!(guest.reaches(WORLD, PORT), "the world, through both address translations");

        for address in [HOST, HOST_ELSEWHERE] {
            assert!(crate::testbed::connect(address, PORT).is_ok(), "the host's server answers on {address}");
            assert!(!guest.reaches(address, PORT), "the host's {address}");
        }
        for address in BLOCKED {
            assert!(
                crate::testbed::connect(address, PORT).is_ok(),
                "the world answers the host on {address}"
            );
            assert!(!guest.reaches(address, PORT), "{address} of the world");
        }
        let host_end = address_of(&format!("aet1v{}", slot.name.0.split('-').next().unwrap()));
        assert!(crate::testbed::connect(&host_end, PORT).is_ok(), "the host's server answers on {host_end}");
        assert!(!guest.reaches(&host_end, PORT), "the host's end of the veth");
        let other_end = inside(&other, || address_of("uplink"));
        inside(&other, || crate::testbed::serve(9009));
        inside(&slot, || crate::testbed::serve(9009));
        for address in [other_end.as_str(), "169.254.0.22"] {
            assert!(!guest.reaches(address, 9009), "{address} of a namespace");
        }
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn ipv6_leads_nowhere() {
    Host::run("t2", async |host| {
        let world = host.connect_world();
        world.ip("address add 2001:db8::2/64 dev host0 nodad");
        let slots = host.slots().await;
        let slot = slots.acquire().await.unwrap();
        let guest = host.guest(&slot, "guest");
        guest.ip("address add 2001:db8:1::21/64 dev eth0 nodad");
        guest.ip("-6 route add default dev eth0");
        for address in [HOST_IPV6, "2001:db8::2"] {
            // As if the other side took part in neighbour discovery.
            guest.ip(&format!("-6 neighbour add {address} lladdr 02:fc:00:00:00:01 dev eth0"));
            assert!(!guest.reaches(address, PORT), "{address}");
        }
        assert!(world.reaches(HOST_IPV6, PORT), "the host's server answers over IPv6");
        let inside_addresses = inside(&slot, || output("ip", "-o -6 address show"));
        assert_eq!(inside_addresses, "", "no IPv6 address inside");
        let veth = format!("aet2v{}", slot.name.0.split('-').next().unwrap());
        assert_eq!(
            output("ip", &format!("-o -6 address show dev {veth}")),
            "",
            "no link-local address on the host's end"
        );
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn nobody_reaches_a_guest_but_the_host_through_the_slot() {
    Host::run("t3", async |host| {
        let world = host.connect_world();
        let slots = host.slots().await;
        let (slot, other) = two_slots(&slots).await;
        let _guest = host.guest(&slot, "guest");
        let other_guest = host.guest(&other, "other");

        answers(&slot).await.unwrap();
        assert!(world.reaches(HOST, PORT), "the world reaches the host");
        let uplink = inside(&slot, || address_of("uplink"));
        inside(&slot, || crate::testbed::serve(9009));
        for port in [PORT, 9009] {
            assert!(!world.reaches(&uplink, port), "the world, port {port}");
            assert!(!other_guest.reaches(&uplink, port), "another guest, port {port}");
            assert!(crate::testbed::connect(&uplink, port).is_err(), "the host from outside, port {port}");
        }
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn a_guest_cannot_pretend_to_be_someone_else() {
    Host::run("t4", async |host| {
        let world = host.connect_world();
        let slots = host.slots().await;
        let slot = slots.acquire().await.unwrap();
        let guest = host.guest(&slot, "guest");
        assert!(guest.reaches(WORLD, PORT));
        // Route the replies back, so that only the rules stand in the way.
        world.ip("route add 192.0.2.77/32 via 198.51.100.1");
        guest.ip("address add 192.0.2.77/32 dev eth0");
        guest.ip("route replace default via 169.254.0.22 src 192.0.2.77");
        inside(&slot, || ip("route add 192.0.2.77/32 dev tap0"));
        assert!(!guest.reaches(WORLD, PORT), "with another source address");
        guest.ip("route replace default via 169.254.0.22 src 169.254.0.21");
        assert!(guest.reaches(WORLD, PORT), "with its own again");

        let uplink = inside(&slot, || address_of("uplink"));
        ip(&format!("route add 192.0.2.77/32 via {uplink}"));
        inside(&slot, || output("nft", "flush ruleset"));
        output("nft", "flush ruleset");
        guest.ip("route replace default via 169.254.0.22 src 192.0.2.77");
        assert!(guest.reaches(WORLD, PORT), "only the rules stood in the way");
        slots.shutdown().await.unwrap();
    });
}

/// What still stands when the rules inside are gone, as after an escape from a VMM with rights in its namespace.
#[test]
fn the_rules_on_the_host_hold_alone() {
    Host::run("t5", async |host| {
        let _world = host.connect_world();
        let slots = host.slots().await;
        let (slot, other) = two_slots(&slots).await;
        inside(&other, || {
            output("nft", "flush ruleset");
            crate::testbed::serve(PORT);
        });
        let other_end = inside(&other, || address_of("uplink"));
        inside(&slot, || {
            output("nft", "flush ruleset");
            assert!(crate::testbed::connect(WORLD, PORT).is_ok(), "the world");
            for address in [HOST, HOST_ELSEWHERE, &other_end].into_iter().chain(BLOCKED) {
                assert!(crate::testbed::connect(address, PORT).is_err(), "{address}");
            }
            ip("address add 198.51.100.77/32 dev uplink");
            ip("route replace 198.51.100.0/24 dev uplink src 198.51.100.77");
        });
        assert!(
            inside(&slot, || crate::testbed::connect(WORLD, PORT)).is_err(),
            "with a foreign source address"
        );
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn denying_egress_cuts_what_exists_and_leaves_the_host_its_way_in() {
    Host::run("t6", async |host| {
        let _world = host.connect_world();
        let slots = host.slots().await;
        let (slot, other) = two_slots(&slots).await;
        let guest = host.guest(&slot, "guest");
        let other_guest = host.guest(&other, "other");
        let mut from_host = answers(&slot).await.unwrap();
        let mut to_world = guest.connect(WORLD, PORT).unwrap();
        exchange(&mut to_world).unwrap();

        slots.deny_egress(&slot.name).await.unwrap();

        let error = exchange(&mut to_world).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
        assert!(!guest.reaches(WORLD, PORT), "a new connection");
        from_host.write_all(b"?").await.unwrap();
        from_host.read_exact(&mut [0]).await.unwrap();
        answers(&slot).await.unwrap();
        assert!(other_guest.reaches(WORLD, PORT), "another guest");
        // Again, and after a restart of the node, it is still so.
        slots.deny_egress(&slot.name).await.unwrap();
        drop(slots);
        let successor = host.slots().await;
        successor.adopt(&slot.name).await.unwrap();
        assert!(!guest.reaches(WORLD, PORT), "after an adoption");
        successor.shutdown().await.unwrap();
    });
}

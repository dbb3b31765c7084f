//! Life of slots in the real kernel: made, pooled, taken, adopted, released, swept, purged; and what is left each time.

use crate::testbed::{Host, inside, interfaces, ip, output};
use aenv_network::{
    LinuxSlots, NetworkError, Purged, SettingsError, SlotName, SlotSettings, Slots, StartError, purge,
};
use aenv_sys::netns::NetworkNamespace;
use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";

fn number(name: &SlotName) -> &str {
    name.0.split('-').next().unwrap()
}

/// Waits for what the pool does in the background.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{what}");
}

#[test]
fn a_slot_has_what_a_vmm_needs() {
    Host::run("s1", async |host| {
        let slots = host.slots().await;
        let slot = slots.acquire().await.unwrap();
        assert_eq!(slot.netns, Path::new(&format!("/run/netns/aenv-s1-{}", slot.name.0)));
        assert!(interfaces().contains(&format!("aes1v{}", number(&slot.name))));
        inside(&slot, || {
            let devices: HashSet<String> = interfaces().into_iter().collect();
            assert_eq!(devices, ["lo", "tap0", "uplink"].map(str::to_owned).into());
            let tap = output("ip", "-d -o link show dev tap0");
            for part in ["02:fc:00:00:00:01", "type tap", "pi off", "vnet_hdr on", "persist on", ",UP"] {
                assert!(tap.contains(part), "{part} is missing in {tap}");
            }
            assert!(output("ip", "-o -4 address show dev tap0").contains("169.254.0.22/30"));
            let neighbours = output("ip", "neighbour show dev tap0");
            assert!(neighbours.contains("169.254.0.21 lladdr 02:fc:00:00:00:02 PERMANENT"), "{neighbours}");
            assert!(output("ip", "route show default").contains("dev uplink"));
            for (file, value) in [("ipv4/ip_forward", "1"), ("ipv6/conf/all/disable_ipv6", "1")] {
                let read = std::fs::read_to_string(format!("/proc/sys/net/{file}")).unwrap();
                assert_eq!(read.trim(), value, "{file}");
            }
            drop(aenv_sys::tap::attach(&slot.tap).unwrap());
        });
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn the_worker_threads_stay_where_they_are() {
    Host::run("s2", async |host| {
        let home = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let slots = host.slots().await;
        let slot = slots.acquire().await.unwrap();
        let _refused = slot.dialer.connect("[::1]:9".parse().unwrap()).await.unwrap_err();
        slots.deny_egress(&slot.name).await.unwrap();
        let mut seen = 0;
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            let task = task.unwrap().path();
            let name = std::fs::read_to_string(task.join("comm")).unwrap();
            if name.starts_with("tokio") {
                assert_eq!(std::fs::read_link(task.join("ns/net")).unwrap(), home, "{name}");
                seen += 1;
            }
        }
        assert!(seen >= 2, "no worker found");
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn many_at_once_all_differ_and_release_leaves_nothing() {
    Host::run("s3", async |host| {
        let slots = Arc::new(host.slots().await);
        let before = host.inventory();
        let callers: Vec<_> = (0..20)
            .map(|_| {
                let slots = Arc::clone(&slots);
                tokio::spawn(async move { slots.acquire().await.unwrap() })
            })
            .collect();
        let mut taken = Vec::new();
        for caller in callers {
            taken.push(caller.await.unwrap());
        }
        let names: HashSet<_> = taken.iter().map(|slot| slot.name.clone()).collect();
        let numbers: HashSet<_> = taken.iter().map(|slot| number(&slot.name).to_owned()).collect();
        assert_eq!((names.len(), numbers.len()), (20, 20));
        assert_eq!(host.pins().len(), 20);
        for slot in &taken {
            slots.release(&slot.name).await.unwrap();
            slots.release(&slot.name).await.unwrap();
        }
        assert_eq!(host.inventory(), before);
        let again = slots.acquire().await.unwrap();
        assert!(!names.contains(&again.name), "a name is not used twice");
        let gone = taken[0].dialer.connect("169.254.0.21:1".parse().unwrap()).await.unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::NotFound);
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn the_pool_fills_gives_refills_and_goes_at_shutdown() {
    Host::run("s4", async |host| {
        let slots = LinuxSlots::start(SlotSettings { pool_size: 3, ..host.settings() }).await.unwrap();
        until("the pool is filled", || slots.pooled() == 3).await;
        let taken = slots.acquire().await.unwrap();
        until("the pool is filled again", || slots.pooled() == 3).await;
        assert_eq!(host.pins().len(), 4);
        slots.shutdown().await.unwrap();
        assert_eq!(host.pins(), [format!("aenv-s4-{}", taken.name.0)]);
        assert!(output("nft", "list tables").contains("aenv_s4"), "the rules stay for the slot in use");
        assert!(matches!(slots.acquire().await, Err(NetworkError::ShuttingDown)));
    });
}

#[test]
fn a_caller_that_goes_away_leaves_a_whole_slot_in_the_pool() {
    Host::run("s5", async |host| {
        let slots = host.slots().await;
        {
            let acquire = slots.acquire();
            let nothing_yet = tokio::time::timeout(Duration::ZERO, acquire).await;
            assert!(nothing_yet.is_err(), "the future is dropped while the slot is being made");
        }
        until("the slot is in the pool", || slots.pooled() == 1).await;
        let slot = slots.acquire().await.unwrap();
        inside(&slot, || assert!(interfaces().contains(&"tap0".to_owned())));
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn a_range_that_is_used_up_is_told_and_recovers() {
    Host::run("s6", async |host| {
        let tiny = SlotSettings { subnet: "100.126.0.0/30".parse().unwrap(), ..host.settings() };
        let slots = LinuxSlots::start(tiny).await.unwrap();
        let first = slots.acquire().await.unwrap();
        let _second = slots.acquire().await.unwrap();
        assert!(matches!(slots.acquire().await, Err(NetworkError::Exhausted(2))));
        slots.release(&first.name).await.unwrap();
        slots.acquire().await.unwrap();
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn after_a_crash_slots_are_adopted_and_the_rest_is_swept() {
    Host::run("s7", async |host| {
        let slots = LinuxSlots::start(SlotSettings { pool_size: 2, ..host.settings() }).await.unwrap();
        until("the pool is filled", || slots.pooled() == 2).await;
        let kept = slots.acquire().await.unwrap();
        let lost = slots.acquire().await.unwrap();
        // Half-made ones: a pin with nothing on it, a namespace with nothing inside, a veth pair whose pin is gone.
        std::fs::write("/run/netns/aenv-s7-200-half", "").unwrap();
        NetworkNamespace::create_pinned(Path::new("/run/netns/aenv-s7-201-half")).unwrap();
        ip("link add aes7v99 type veth peer name peer99");
        drop(slots);

        let successor = host.slots().await;
        let adopted = successor.adopt(&kept.name).await.unwrap();
        assert_eq!((&adopted.name, &adopted.netns), (&kept.name, &kept.netns));
        let fresh = successor.acquire().await.unwrap();
        assert_ne!(number(&fresh.name), number(&kept.name), "numbers in use are known after a restart");
        for half in ["200-half", "201-half", "202-none", "../../etc/passwd"] {
            let refused = successor.adopt(&SlotName(half.to_owned())).await;
            assert!(matches!(refused, Err(NetworkError::NotFound(_))), "{half}");
        }

        let keep = [kept.name.clone(), fresh.name.clone()];
        let removed = successor.sweep(&keep).await.unwrap();
        assert!(removed.contains(&lost.name) && removed.contains(&SlotName("99".to_owned())), "{removed:?}");
        assert!(!removed.contains(&kept.name));
        let left: HashSet<String> = host.pins().into_iter().collect();
        assert_eq!(left, keep.iter().map(|name| format!("aenv-s7-{}", name.0)).collect());
        let veths = interfaces().iter().filter(|name| name.starts_with("aes7v")).count();
        assert_eq!(veths, 2);
        assert_eq!(successor.sweep(&keep).await.unwrap(), []);
        successor.shutdown().await.unwrap();
    });
}

#[test]
fn a_sweep_spares_the_pool_and_what_is_being_made() {
    Host::run("s8", async |host| {
        let slots =
            Arc::new(LinuxSlots::start(SlotSettings { pool_size: 3, ..host.settings() }).await.unwrap());
        // Sweeps run while the pool is filled and slots are taken.
        let taking = tokio::spawn({
            let slots = Arc::clone(&slots);
            async move {
                let mut taken = Vec::new();
                for _ in 0..10 {
                    taken.push(slots.acquire().await.unwrap());
                }
                taken
            }
        });
        let mut swept = Vec::new();
        while !taking.is_finished() {
            // Pooled and half-made slots are nobody's business but ours: with no slot handed out before, none is a stray.
            swept.extend(slots.sweep(&[]).await.unwrap());
            tokio::task::yield_now().await;
        }
        let taken = taking.await.unwrap();
        until("the pool is filled", || slots.pooled() == 3).await;
        let alive = host.pins().len();
        assert_eq!(alive + swept.len(), taken.len() + 3, "swept {swept:?}");
        let names: HashSet<_> = taken.iter().map(|slot| &slot.name).collect();
        assert!(swept.iter().all(|name| names.contains(name)), "only what was handed out: {swept:?}");
        slots.shutdown().await.unwrap();
    });
}

#[test]
fn a_purge_leaves_nothing_and_restores_forwarding() {
    Host::run("s9", async |host| {
        std::fs::write(FORWARDING, "0").unwrap();
        let before = host.inventory();
        let settings = host.settings();
        let slots = LinuxSlots::start(SlotSettings { pool_size: 2, ..settings.clone() }).await.unwrap();
        let taken = slots.acquire().await.unwrap();
        // A process in the namespace, such as a VMM, keeps it alive without its pin.
        let inside = NetworkNamespace::open(&taken.netns).unwrap();
        slots.shutdown().await.unwrap();
        ip("link add aes9v77 type veth peer name peer77");
        assert_eq!(std::fs::read_to_string(FORWARDING).unwrap().trim(), "1");

        let purged = purge(&settings.instance, &settings.forwarding_record).await.unwrap();
        assert_eq!(
            purged,
            Purged {
                slots: vec![taken.name],
                veths: vec!["aes9v77".to_owned()],
                policy: true,
                forwarding: true
            }
        );
        assert_eq!(host.inventory(), before);
        assert_eq!(std::fs::read_to_string(FORWARDING).unwrap().trim(), "0");
        drop(inside);
        let again = purge(&settings.instance, &settings.forwarding_record).await.unwrap();
        assert_eq!(again, Purged { slots: vec![], veths: vec![], policy: false, forwarding: false });
    });
}

#[test]
fn forwarding_stays_on_for_another_instance_and_if_it_was_on() {
    Host::run("sa", async |host| {
        std::fs::write(FORWARDING, "0").unwrap();
        let settings = host.settings();
        let other = SlotSettings {
            instance: "sb".parse().unwrap(),
            subnet: "100.126.1.0/24".parse().unwrap(),
            ..settings.clone()
        };
        drop(LinuxSlots::start(settings.clone()).await.unwrap());
        drop(LinuxSlots::start(other.clone()).await.unwrap());
        let first = purge(&settings.instance, &settings.forwarding_record).await.unwrap();
        assert!(first.policy && !first.forwarding, "the other one needs it");
        assert!(purge(&other.instance, &other.forwarding_record).await.unwrap().forwarding);

        std::fs::write(FORWARDING, "1").unwrap();
        drop(LinuxSlots::start(settings.clone()).await.unwrap());
        assert!(!purge(&settings.instance, &settings.forwarding_record).await.unwrap().forwarding);
        assert_eq!(std::fs::read_to_string(FORWARDING).unwrap().trim(), "1");
    });
}

#[test]
fn settings_that_cannot_work_are_told_before_anything_is_done() {
    Host::run("sc", async |host| {
        let before = host.inventory();
        let settings = SlotSettings { subnet: "127.0.0.0/24".parse().unwrap(), ..host.settings() };
        let refused = LinuxSlots::start(settings).await;
        assert!(matches!(refused, Err(StartError::Settings(SettingsError::Subnet { .. }))));
        assert_eq!(host.inventory(), before);
    });
}

#[test]
fn a_slot_that_cannot_be_completed_leaves_nothing() {
    Host::run("sd", async |host| {
        let slots = host.slots().await;
        // Takes the name of the first veth, unknown to the slots that have started already.
        ip("link add aesdv0 type veth peer name foreign0");
        let before = host.inventory();
        let error = slots.acquire().await.err().unwrap();
        assert!(matches!(&error, NetworkError::Kernel { reason, .. } if reason.contains("veth")), "{error}");
        assert_eq!(host.inventory(), before, "and what was there stays");
        slots.acquire().await.unwrap();
        slots.shutdown().await.unwrap();
    });
}

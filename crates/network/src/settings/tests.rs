//! Names and addresses.

use super::{AddressPlan, InstanceName, SettingsError, SlotSettings, blocked_by_default, index_of_slot};
use crate::slot::{NetworkError, SlotName};
use std::collections::HashSet;
use std::net::Ipv4Addr;

fn settings(subnet: &str) -> SlotSettings {
    SlotSettings::new("a".parse().unwrap(), subnet.parse().unwrap())
}

#[test]
fn instance_names_are_short_and_plain() {
    for name in ["a", "t1", "9999"] {
        assert_eq!(name.parse::<InstanceName>().unwrap().to_string(), name);
    }
    for name in ["", "fives", "A", "a-", "a v", "ä", "../"] {
        assert_eq!(name.parse::<InstanceName>(), Err(SettingsError::InstanceName(name.to_owned())));
    }
}

#[test]
fn subnets_that_cannot_work_are_refused() {
    for subnet in
        ["100.64.0.1/16", "100.64.0.0/15", "100.64.0.0/31", "127.0.0.0/16", "224.0.0.0/16", "169.254.0.0/16"]
    {
        let refused = AddressPlan::new(&settings(subnet));
        assert!(matches!(refused, Err(SettingsError::Subnet { .. })), "{subnet}: {refused:?}");
    }
    let mut too_large = settings("100.64.0.0/30");
    too_large.pool_size = 3;
    let refused = AddressPlan::new(&too_large);
    assert!(matches!(refused, Err(SettingsError::PoolSize { capacity: 2, .. })), "{refused:?}");
}

#[test]
fn every_slot_has_two_addresses_of_its_own_inside_the_subnet() {
    let settings = SlotSettings { pool_size: 0, ..settings("100.64.8.0/24") };
    let plan = AddressPlan::new(&settings).unwrap();
    assert_eq!(plan.capacity(), 128);
    let mut seen = HashSet::new();
    for index in 0..plan.capacity() {
        for address in [plan.host_end(index), plan.inner_end(index)] {
            assert!(settings.subnet.contains(&address));
            assert!(seen.insert(address));
        }
    }
    let largest = AddressPlan::new(&super::tests::settings("100.64.0.0/16")).unwrap();
    assert_eq!(largest.inner_end(largest.capacity() - 1), Ipv4Addr::new(100, 64, 255, 255));
}

#[test]
fn interface_names_fit_and_are_told_apart_from_those_of_other_instances() {
    let instance: InstanceName = "zzzz".parse().unwrap();
    let longest = instance.veth(32_767);
    assert!(longest.len() <= 15);
    assert_eq!(instance.index_of_veth(&longest), Some(32_767));
    let other: InstanceName = "zzz".parse().unwrap();
    for foreign in [longest.as_str(), "aezzzv", "aezzzvx", "aezzzv01", "aezzzv+1", "eth0"] {
        assert_eq!(other.index_of_veth(foreign), None, "{foreign}");
    }
}

#[test]
fn names_from_a_damaged_journal_name_no_slot() {
    assert_eq!(index_of_slot(&SlotName("17-3fa9".to_owned())).unwrap(), 17);
    for name in ["", "17", "17-", "-3fa9", "17-../x", "17-a/b", "x-3fa9", "99999999999-a"] {
        let refused = index_of_slot(&SlotName(name.to_owned()));
        assert!(matches!(refused, Err(NetworkError::NotFound(_))), "{name}");
    }
}

#[test]
fn metadata_and_private_addresses_are_blocked_and_public_ones_are_not() {
    let blocked = blocked_by_default();
    let is_blocked =
        |address: &str| blocked.iter().any(|net| net.contains(&address.parse::<Ipv4Addr>().unwrap()));
    for address in [
        "169.254.169.254",
        "10.1.2.3",
        "172.31.255.255",
        "192.168.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "0.0.0.0",
        "255.255.255.255",
    ] {
        assert!(is_blocked(address), "{address}");
    }
    for address in ["8.8.8.8", "1.1.1.1", "172.32.0.1", "198.51.100.7", "100.128.0.1"] {
        assert!(!is_blocked(address), "{address}");
    }
}

#[test]
fn every_slot_has_a_user_of_its_own_that_is_no_account() {
    let mut users = std::collections::BTreeSet::new();
    for subnet in ["100.64.0.0/20", "100.64.16.0/20", "100.127.240.0/20", "10.0.0.0/24", "192.168.255.0/24"] {
        let plan = AddressPlan::new(&settings(subnet)).unwrap();
        for index in 0..plan.capacity() {
            let user = plan.user(index);
            assert!(user > 1 << 22 && user < 1 << 31, "{subnet} {index}: {user}");
            assert!(users.insert(user), "{subnet} {index}: {user} twice");
        }
    }
}

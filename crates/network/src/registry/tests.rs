//! The registry by itself, and against a model of its promises.

use super::{Purpose, Registry};
use crate::slot::SlotName;
use proptest::prelude::{Strategy, any, prop_oneof, proptest};
use std::collections::{HashMap, HashSet};

fn number(name: &SlotName) -> u32 {
    name.0.split('-').next().unwrap().parse().unwrap()
}

#[test]
fn numbers_rest_before_they_are_used_again() {
    let mut registry = Registry::new(3, [1]);
    let first = registry.reserve(Purpose::Caller, 1).unwrap();
    registry.forget(&first);
    let second = registry.reserve(Purpose::Caller, 2).unwrap();
    assert_eq!((number(&first), number(&second)), (0, 2));
    let third = registry.reserve(Purpose::Caller, 3).unwrap();
    assert_eq!(number(&third), 0);
    assert_eq!(registry.reserve(Purpose::Caller, 4), None);
    registry.forget_number(1);
    assert!(registry.reserve(Purpose::Caller, 5).is_some());
}

#[test]
fn the_pool_wants_no_more_than_is_not_yet_on_its_way() {
    let mut registry = Registry::new(10, []);
    assert!(!registry.pool_wants(0));
    let name = registry.reserve(Purpose::Pool, 1).unwrap();
    assert!(!registry.pool_wants(1));
    registry.reserve(Purpose::Caller, 2).unwrap();
    assert!(registry.pool_wants(2), "slots for callers do not count");
    registry.forget(&name);
    assert!(registry.pool_wants(1), "one that failed is wanted again");
}

#[test]
fn what_was_handed_out_during_a_sweep_is_safe_from_it_and_not_from_the_next() {
    let mut registry = Registry::new(10, []);
    let early = registry.reserve(Purpose::Pool, 1).unwrap();
    registry.pool(early.clone());
    let held = registry.reserve(Purpose::Caller, 2).unwrap();
    registry.hold(&held);
    let kept = SlotName("7-0000000000000007".to_owned());
    let unknown = SlotName("8-0000000000000008".to_owned());

    let sweep = registry.begin_sweep();
    let found = vec![early.clone(), held.clone(), kept.clone(), unknown.clone()];
    let taken = registry.take().unwrap();
    let (strays, numbers) =
        registry.strays(sweep, std::slice::from_ref(&kept), found.clone(), vec![0, 1, 7, 8, 9]);
    assert_eq!(taken, early);
    assert_eq!(strays, [held.clone(), unknown]);
    assert_eq!(numbers, [9], "the other numbers stay or go with their slots");

    let next = registry.begin_sweep();
    let (strays, _) = registry.strays(next, &[], found, vec![]);
    assert!(strays.contains(&early));
}

#[derive(Debug, Clone)]
enum Step {
    Reserve(bool),
    Build,
    Fail,
    Take,
    Release,
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    let plain = |step: Step| proptest::strategy::Just(step);
    prop_oneof![
        any::<bool>().prop_map(Step::Reserve),
        plain(Step::Build),
        plain(Step::Fail),
        plain(Step::Take),
        plain(Step::Release),
        plain(Step::Sweep),
    ]
}

proptest! {
    #[test]
    fn no_number_is_given_twice_and_no_slot_taken_twice(steps in proptest::collection::vec(step(), 0..200)) {
        let mut registry = Registry::new(8, [3]);
        let (mut building, mut held) = (Vec::new(), Vec::new());
        let mut in_use = HashMap::from([(3, SlotName("3-stray".to_owned()))]);
        let mut ever_taken = HashSet::new();
        for (random, step) in (0_u64..).zip(steps) {
            match step {
                Step::Reserve(for_pool) => {
                    let purpose = if for_pool { Purpose::Pool } else { Purpose::Caller };
                    let reserved = registry.reserve(purpose, random);
                    assert_eq!(reserved.is_none(), in_use.len() == 8);
                    if let Some(name) = reserved {
                        assert!(in_use.insert(number(&name), name.clone()).is_none());
                        building.push(name);
                    }
                }
                Step::Build => building.pop().into_iter().for_each(|name| registry.pool(name)),
                Step::Fail => {
                    if let Some(name) = building.pop() {
                        registry.forget(&name);
                        in_use.remove(&number(&name));
                    }
                }
                Step::Take => {
                    if let Some(name) = registry.take() {
                        assert!(ever_taken.insert(name.clone()));
                        held.push(name);
                    }
                }
                Step::Release => {
                    if let Some(name) = held.pop() {
                        registry.forget(&name);
                        in_use.remove(&number(&name));
                    }
                }
                Step::Sweep => {
                    let sweep = registry.begin_sweep();
                    let found: Vec<_> = in_use.values().cloned().collect();
                    let (strays, _) = registry.strays(sweep, &held, found, vec![]);
                    assert!(strays.iter().all(|stray| stray.0 == "3-stray"), "{strays:?}");
                }
            }
        }
    }
}

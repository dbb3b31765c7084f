//! Which saves are needed, what is done for them next, and what a power cut leaves of them.

use super::*;

impl MemoryBinding {
    /// What memories of tests are made with.
    pub(crate) fn of_tests() -> Self {
        Self {
            vmm: Identity {
                driver: "fake".to_owned(),
                version: "1".to_owned(),
                accelerator: "tcg".to_owned(),
                cpu_model: "fake".to_owned(),
            },
            kernel_sha256: "k".to_owned(),
            initramfs_sha256: "i".to_owned(),
        }
    }
}

fn save(number: u64, durability: Durability, over: Option<u64>) -> Save {
    let chain = MemoryChain { image: Some(PathBuf::from(format!("m{number}"))), layers: Vec::new() };
    Save {
        number,
        saved_at: jiff::Timestamp::UNIX_EPOCH,
        mode: PauseMode::Full,
        durability,
        binding: MemoryBinding::of_tests(),
        disk: Base::File(PathBuf::from("disk")),
        disk_bytes: None,
        start: Start::default(),
        over,
        memory: (durability >= Durability::Local).then_some(MemoryLayer { chain, stored_bytes: 1 }),
        report: None,
        stopped: Duration::ZERO,
        flushed: true,
        claims: Vec::new(),
    }
}

fn kept(saves: &Saves) -> Vec<u64> {
    saves.kept.iter().map(|save| save.number).collect()
}

fn of(saves: Vec<Save>) -> Saves {
    let last_number = saves.last().map_or(0, |save| save.number);
    Saves { kept: saves, last_number, ..Saves::default() }
}

#[test]
fn the_last_local_one_stays_until_a_later_one_is() {
    use Durability::{Local, Process};
    let mut saves = of(vec![save(1, Local, None), save(2, Process, None), save(3, Process, None)]);
    saves.drop_unneeded(&Present::default());
    assert_eq!((kept(&saves), saves.dropped.as_slice()), (vec![1, 3], &[2][..]));
    assert_eq!(saves.next_step(None), Some(Step::StoreMemory(3)));
    assert_eq!(saves.next_step(Some(&Step::StoreMemory(3))), Some(Step::Forget(vec![2])));
    assert_eq!(saves.next_step(Some(&Step::Forget(vec![2]))), Some(Step::StoreMemory(3)));
    saves.dropped.clear();
    assert_eq!(saves.next_step(Some(&Step::StoreMemory(3))), Some(Step::StoreMemory(3)));
    saves.get_mut(3).unwrap().memory = save(3, Local, None).memory;
    assert_eq!(saves.next_step(None), Some(Step::MakeLocal(3)));
    saves.get_mut(3).unwrap().durability = Local;
    saves.drop_unneeded(&Present::default());
    assert_eq!((kept(&saves), saves.dropped.as_slice()), (vec![3], &[1][..]));
    saves.dropped.clear();
    assert_eq!(saves.next_step(None), None);
}

#[test]
fn what_is_claimed_is_local_before_it_is_handed_over() {
    use Durability::{Local, Process};
    let claimed = |number, durability| {
        let memory = save(number, Local, None).memory;
        let claims = vec![format!("s{number}").parse().unwrap()];
        Save { memory, claims, ..save(number, durability, None) }
    };
    let mut saves = of(vec![save(1, Local, None), claimed(2, Process), save(3, Process, None)]);
    assert_eq!(saves.next_step(None), Some(Step::StoreMemory(3)));
    saves.get_mut(3).unwrap().memory = save(3, Local, None).memory;
    assert_eq!(saves.next_step(None), Some(Step::MakeLocal(2)));
    let hand_over = Step::HandOver(2, "s2".parse().unwrap());
    assert_eq!(
        saves.next_claim(),
        Some(hand_over.clone()),
        "nobody goes back to a save of a sandbox that ends"
    );
    saves.get_mut(2).unwrap().durability = Local;
    assert_eq!(saves.next_step(None), Some(hand_over));
    // After a power cut.
    let mut saves = of(vec![claimed(1, Local), claimed(2, Process)]);
    saves.drop_claims_not_local();
    assert_eq!(saves.claims().map(ToString::to_string).collect::<Vec<_>>(), ["s1"]);
}

#[test]
fn a_step_that_fails_is_in_the_way_of_what_needs_it() {
    use Durability::{Local, Process};
    let claimed = |number, durability| {
        let claims = ["a", "b"].map(|letter| format!("s{letter}{number}").parse().unwrap()).to_vec();
        Save { claims, ..save(number, durability, None) }
    };
    let saves = of(vec![claimed(1, Local), claimed(2, Process), claimed(3, Process)]);
    let behind = |step| saves.claims_behind(&step).iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(behind(Step::StoreMemory(2)), ["sa2", "sb2", "sa3", "sb3"]);
    assert_eq!(behind(Step::MakeLocal(1)), ["sa1", "sb1"]);
    assert_eq!(behind(Step::HandOver(1, "sb1".parse().unwrap())), ["sb1"]);
    assert!(behind(Step::Forget(vec![1])).is_empty());
}

#[test]
fn what_is_laid_over_others_keeps_them_until_it_is_stored() {
    use Durability::Process;
    let mut saves = of(vec![save(1, Process, None), save(2, Process, Some(1)), save(3, Process, Some(2))]);
    saves.drop_unneeded(&Present::default());
    assert_eq!(kept(&saves), [1, 2, 3]);
    assert_eq!(saves.next_step(None), Some(Step::StoreMemory(1)), "the lowest first");
    for number in [1, 2] {
        saves.get_mut(number).unwrap().memory = save(number, Durability::Local, None).memory;
    }
    saves.drop_unneeded(&Present::default());
    assert_eq!(kept(&saves), [2, 3]);
}

#[test]
fn what_a_layer_may_lie_on_stays_until_it_is_stored() {
    use Durability::{Local, Process};
    // The second one is stored, but not durable yet; the third lies over what the VMM was started from.
    let mut second = save(2, Process, None);
    second.memory = save(2, Local, None).memory;
    let mut saves = of(vec![save(1, Local, None), second, save(3, Process, None)]);
    saves.drop_unneeded(&Present::default());
    assert_eq!(kept(&saves), [1, 2, 3]);
    saves.get_mut(3).unwrap().memory = save(3, Local, None).memory;
    saves.drop_unneeded(&Present::default());
    assert_eq!(kept(&saves), [1, 3]);
}

#[test]
fn a_layer_is_used_by_whoever_lies_on_it() {
    use Durability::{Local, Process};
    let layers = |numbers: &[u64]| {
        let layers = numbers.iter().map(|number| PathBuf::from(format!("l{number}"))).collect();
        MemoryChain { image: Some(PathBuf::from("flat")), layers }
    };
    let mut stored = save(4, Local, None);
    stored.memory.as_mut().unwrap().chain = layers(&[2, 4]);
    let mut pending = save(5, Process, None);
    pending.start = Start { chain: layers(&[1]), save: Some(1), snapshot: None };
    let saves = of(vec![stored, pending]);
    let present =
        Present { start: Some(Start { chain: layers(&[3]), save: Some(3), snapshot: None }), captured: None };
    let used = |present| saves.used_layers(present).into_iter().collect::<Vec<_>>();
    assert_eq!(used(&present), ["l1", "l2", "l3", "l4"].map(PathBuf::from));
    assert_eq!(used(&Present::default()), ["l1", "l2", "l4"].map(PathBuf::from));

    // Those that are removed but for their layer are removed as a whole with the sandbox.
    let mut saves = saves;
    saves.dropped = vec![2, 3];
    saves.forgotten(&[2], vec![1, 2]);
    assert_eq!((saves.dropped.as_slice(), saves.numbers()), (&[3][..], vec![4, 5, 3, 1, 2]));
}

#[test]
fn what_is_not_stored_does_not_grow_for_ever() {
    let changed = |number, pages| {
        let report = CaptureReport {
            base: CaptureBase::PreviousCapture,
            changed_pages: pages,
            ..CaptureReport::default()
        };
        Save { report: Some(report), ..save(number, Durability::Process, Some(number - 1)) }
    };
    let memory = 100 * PAGE_BYTES;
    let few = of(vec![save(1, Durability::Local, None), changed(2, 60), changed(3, 40)]);
    assert_eq!((few.is_backlog_full(memory), few.unstored_bytes()), (false, memory));
    assert!(of(vec![changed(2, 60), changed(3, 41)]).is_backlog_full(memory));
    assert!(of((2..18).map(|number| changed(number, 0)).collect()).is_backlog_full(memory));
    // One that is whole sets all of them free.
    let mut saves = of(vec![changed(2, 60), changed(3, 41), save(4, Durability::Process, None)]);
    saves.drop_unneeded(&Present::default());
    assert_eq!((kept(&saves), saves.dropped.len()), (vec![4], 2));
}

#[test]
fn what_a_vmm_was_started_from_stays() {
    use Durability::Local;
    let mut saves = of(vec![save(1, Local, None), save(2, Local, None)]);
    let start = Start { save: Some(1), ..Start::default() };
    let present = Present { start: Some(start), captured: None };
    saves.drop_unneeded(&present);
    assert_eq!(kept(&saves), [1, 2]);
    saves.drop_unneeded(&Present::default());
    assert_eq!(kept(&saves), [2]);
}

#[test]
fn a_number_is_dropped_until_it_is_kept_and_never_used_twice() {
    let mut saves = Saves::default();
    assert_eq!((saves.begin(), saves.numbers()), (1, vec![1]));
    assert_eq!(saves.next_step(None), Some(Step::Forget(vec![1])));
    saves.dropped.clear();
    assert_eq!(saves.begin(), 2);
    saves.keep(save(2, Durability::Process, None));
    assert_eq!((kept(&saves), saves.dropped.len()), (vec![2], 0));
}

#[test]
fn a_fallback_drops_what_came_later() {
    use Durability::{Local, Process};
    let mut saves = of(vec![save(1, Local, None), save(2, Process, None)]);
    assert!(!saves.clone().fall_back(LossCause::HostRestarted, |_| false));
    assert!(saves.fall_back(LossCause::HostRestarted, Save::is_local));
    assert_eq!((kept(&saves), saves.dropped.as_slice()), (vec![1], &[2][..]));
    assert_eq!(saves.fallback, Some(LossCause::HostRestarted));
    assert_eq!(saves.begin(), 3);
    saves.keep(save(3, Process, None));
    assert_eq!(saves.fallback, None);
}

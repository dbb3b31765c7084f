//! The queue on its own, under random requests, and with those who really wait.

use super::queue::{Demand, Lack, Limits, Purpose, Queue, Ticket};
use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const SOON: Duration = Duration::from_secs(20);
const LIMITS: Limits = Limits { places: 2, bytes: 10, waiting: 4 };

fn admission(places: usize, bytes: u64, queue_limit: Duration) -> Admission {
    Admission::new(Limits { places, bytes, waiting: 100 }, queue_limit, 0)
}

fn shortage_of(refused: Result<Permit, Failure>) -> Shortage {
    match refused.err().map(|failure| failure.cause) {
        Some(Cause::NoCapacity(shortage)) => shortage,
        other => panic!("not a shortage: {other:?}"),
    }
}

#[tokio::test]
async fn a_full_house_refuses_after_the_limit() {
    let admission = admission(1, 10, Duration::from_millis(50));
    let first = admission.for_caller(4).await.unwrap();
    let places = shortage_of(admission.for_caller(4).await);
    assert!(matches!(places, Shortage::Places { starting: 1, most: 1, waiting: 1, .. }), "{places:?}");
    // It runs: its place is free, its memory is not.
    let Permit { place, memory } = first;
    drop(place);
    let second = admission.for_caller(6).await.unwrap();
    drop(second.place);
    let short = shortage_of(admission.for_caller(1).await);
    let expected = (1, 10, 10);
    assert!(
        matches!(short, Shortage::Memory { needed_bytes, committed_bytes, limit_bytes, .. }
            if (needed_bytes, committed_bytes, limit_bytes) == expected),
        "{short:?}"
    );
    // Whatever is counted already needs a place only.
    assert!(admission.for_caller(0).await.is_ok());
    drop(memory);
    assert!(admission.for_caller(4).await.is_ok());
    assert_eq!(admission.figures().1, Taken { starting: 0, bytes: 6, waiting: 0 });
}

#[tokio::test]
async fn what_can_never_be_had_and_a_full_queue_are_refused_at_once() {
    let admission = Admission::new(Limits { places: 1, bytes: 10, waiting: 1 }, SOON, 0);
    let never = shortage_of(admission.for_caller(11).await);
    assert!(matches!(never, Shortage::Memory { needed_bytes: 11, waited: Duration::ZERO, .. }), "{never:?}");
    assert!(admission.for_background(Purpose::Standby, 11).await.is_err());
    let running = admission.for_caller(1).await.unwrap();
    let mut waiting = Box::pin(admission.for_caller(1));
    assert!(tokio::time::timeout(Duration::from_millis(20), &mut waiting).await.is_err());
    let full = shortage_of(admission.for_caller(1).await);
    assert!(matches!(full, Shortage::Places { waiting: 1, waited: Duration::ZERO, .. }), "{full:?}");
    drop(running);
    assert!(waiting.await.is_ok());
}

#[tokio::test]
async fn background_work_lets_waiting_callers_go_first() {
    let admission = Arc::new(admission(1, 100, SOON));
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let running = admission.for_caller(1).await.unwrap();
    let spawn = |name: &'static str, background: bool| {
        let (admission, order) = (Arc::clone(&admission), Arc::clone(&order));
        tokio::spawn(async move {
            let permit = match background {
                true => admission.for_background(Purpose::Standby, 1).await,
                false => admission.for_caller(1).await,
            };
            order.lock().unwrap().push(name);
            drop(permit);
        })
    };
    let caller = spawn("caller", false);
    tokio::task::yield_now().await;
    let background = spawn("background", true);
    let second = spawn("second caller", false);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(order.lock().unwrap().is_empty());
    drop(running);
    for task in [caller, second, background] {
        task.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), ["caller", "second caller", "background"]);
}

#[tokio::test]
async fn one_who_wants_to_be_alone_waits_for_all_and_lets_nobody_in() {
    let limit = Duration::from_millis(50);
    let admission = admission(2, 10, limit);
    let running = admission.for_caller(1).await.unwrap();
    assert!(tokio::time::timeout(limit, admission.for_nobody_else()).await.is_err());
    assert!(admission.for_caller(1).await.is_ok(), "one who gave up holds nothing");
    drop(running);
    let alone = admission.for_nobody_else().await.unwrap();
    assert!(admission.for_caller(0).await.is_err());
    drop(alone);
    assert!(admission.for_caller(0).await.is_ok());
}

#[tokio::test]
async fn a_host_with_little_memory_makes_no_standbys_but_serves_callers() {
    let admission = admission(2, 10, SOON);
    admission.set_low(true);
    let standby = admission.for_background(Purpose::Standby, 1);
    assert!(tokio::time::timeout(Duration::from_millis(30), standby).await.is_err());
    assert!(admission.for_caller(1).await.is_ok());
    assert!(admission.for_background(Purpose::Preparation, 1).await.is_ok());
    admission.set_low(false);
    assert!(admission.for_background(Purpose::Standby, 1).await.is_ok());
}

#[tokio::test]
async fn a_lack_of_memory_is_told_and_how_much_it_is() {
    let admission = admission(2, 10, Duration::from_millis(300));
    let adopted = admission.adopt(12);
    assert_eq!(admission.lacking(), 2, "more than there may be was found");
    let (waiting, told) = tokio::join!(admission.for_caller(3), async {
        admission.until_lacking().await;
        let lacking = admission.lacking();
        drop(adopted);
        lacking
    });
    assert_eq!(told, 5);
    assert!(waiting.is_ok());
    assert_eq!(admission.lacking(), 0);
}

/// Whoever waits goes away at any moment, let in or not: nobody behind waits for ever, and nothing stays taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_wakeup_is_lost_when_those_who_wait_go_away() {
    for round in 0..40_u64 {
        let admission = Arc::new(Admission::new(Limits { places: 2, bytes: 4, waiting: 1000 }, SOON, 0));
        let mut impatient = Vec::new();
        let mut patient = Vec::new();
        for number in 0..60_u64 {
            let admission = Arc::clone(&admission);
            let bytes = 1 + (number + round) % 4;
            let task = async move {
                let permit = admission.for_caller(bytes).await.unwrap();
                tokio::task::yield_now().await;
                drop(permit.place);
                tokio::task::yield_now().await;
                drop(permit.memory);
            };
            match number % 3 {
                0 => patient.push(tokio::spawn(task)),
                _ => impatient.push(tokio::spawn(task)),
            }
        }
        for (number, task) in impatient.iter().enumerate() {
            if (number as u64 + round).is_multiple_of(2) {
                tokio::task::yield_now().await;
            }
            task.abort();
        }
        for task in patient {
            tokio::time::timeout(SOON, task).await.expect("one waits for ever").unwrap();
        }
        for task in impatient {
            let _aborted = task.await;
        }
        assert_eq!(admission.figures().1, Taken { starting: 0, bytes: 0, waiting: 0 });
    }
}

#[test]
fn a_full_disk_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = DataDir::open(temporary.path()).unwrap();
    let error = Admission::new(LIMITS, Duration::ZERO, u64::MAX).check_room(&dir).unwrap_err();
    assert!(error.to_string().contains(dir.root().to_str().unwrap()), "{error}");
    assert!(Admission::new(LIMITS, Duration::ZERO, 1).check_room(&dir).is_ok());
}

/// What can happen to a queue.
#[derive(Debug, Clone)]
enum Happening {
    Enter(Purpose, u64),
    /// One of those who wait.
    Leave(prop::sample::Index),
    /// One of those that start runs now.
    Started(prop::sample::Index),
    /// One of those that hold memory is gone.
    Ended(prop::sample::Index),
}

fn any_happening() -> impl Strategy<Value = Happening> {
    let purpose = prop::sample::select(vec![
        Purpose::Caller,
        Purpose::Caller,
        Purpose::Standby,
        Purpose::Preparation,
        Purpose::Alone,
    ]);
    prop_oneof![
        4 => (purpose, 0_u64..12).prop_map(|(purpose, bytes)| Happening::Enter(
            purpose,
            if purpose == Purpose::Alone { 0 } else { bytes }
        )),
        1 => any::<prop::sample::Index>().prop_map(Happening::Leave),
        3 => any::<prop::sample::Index>().prop_map(Happening::Started),
        3 => any::<prop::sample::Index>().prop_map(Happening::Ended),
    ]
}

/// A queue, and what must be true of it.
struct Model {
    queue: Queue,
    callers: VecDeque<(Ticket, u64)>,
    others: Vec<Ticket>,
    starting: Vec<Purpose>,
    holding: Vec<u64>,
}

impl Model {
    fn happen(&mut self, happening: &Happening) -> Result<(), TestCaseError> {
        match happening {
            Happening::Enter(purpose, bytes) => self.enter(*purpose, *bytes)?,
            Happening::Leave(index) if !self.callers.is_empty() || !self.others.is_empty() => {
                let index = index.index(self.callers.len() + self.others.len());
                let ticket = match index.checked_sub(self.callers.len()) {
                    None => self.callers.remove(index).unwrap().0,
                    Some(index) => self.others.remove(index),
                };
                self.queue.leave(ticket);
            }
            Happening::Started(index) if !self.starting.is_empty() => {
                self.queue.end_start(self.starting.remove(index.index(self.starting.len())));
            }
            Happening::Ended(index) if !self.holding.is_empty() => {
                self.queue.free(self.holding.remove(index.index(self.holding.len())));
            }
            Happening::Leave(_) | Happening::Started(_) | Happening::Ended(_) => {}
        }
        self.settle()
    }

    fn enter(&mut self, purpose: Purpose, bytes: u64) -> Result<(), TestCaseError> {
        match self.queue.enter(Demand { purpose, bytes }) {
            Ok(ticket) if purpose == Purpose::Caller => self.callers.push_back((ticket, bytes)),
            Ok(ticket) => self.others.push(ticket),
            Err(lack) => {
                let full = purpose == Purpose::Caller && self.callers.len() >= LIMITS.waiting;
                let never = bytes > LIMITS.bytes;
                prop_assert!(full || never, "refused for {lack:?}");
                prop_assert!(lack == Lack::Memory || full);
            }
        }
        Ok(())
    }

    /// Lets in whoever can be, and checks who that is.
    fn settle(&mut self) -> Result<(), TestCaseError> {
        while let Some((ticket, demand)) = self.queue.grant() {
            let alone = demand.purpose == Purpose::Alone;
            prop_assert!(!self.starting.contains(&Purpose::Alone), "one is alone");
            prop_assert!(!alone || self.starting.is_empty(), "it is not alone");
            match demand.purpose {
                Purpose::Caller => {
                    let first = self.callers.pop_front();
                    prop_assert_eq!(first, Some((ticket, demand.bytes)), "not the first who came");
                }
                _ => {
                    prop_assert!(alone || self.callers.is_empty(), "a caller waits");
                    self.others.retain(|other| *other != ticket);
                }
            }
            let background = |purpose: &&Purpose| matches!(purpose, Purpose::Standby | Purpose::Preparation);
            self.starting.push(demand.purpose);
            prop_assert!(self.starting.iter().filter(background).count() <= 1);
            if demand.bytes > 0 {
                self.holding.push(demand.bytes);
            }
        }
        let taken = self.queue.taken();
        prop_assert!(self.starting.len() <= LIMITS.places);
        prop_assert!(self.holding.iter().sum::<u64>() <= LIMITS.bytes, "more than the limit");
        prop_assert_eq!(taken.bytes, self.holding.iter().sum::<u64>());
        prop_assert_eq!(taken.waiting, self.callers.len());
        prop_assert!(self.callers.len() <= LIMITS.waiting);
        Ok(())
    }
}

proptest! {
    /// Never above the limits, first come, first served, and in the end everybody was let in.
    #[test]
    fn what_is_let_in_fits_and_nobody_is_forgotten(happenings in prop::collection::vec(any_happening(), 0..120)) {
        let mut model = Model {
            queue: Queue::new(LIMITS),
            callers: VecDeque::new(),
            others: Vec::new(),
            starting: Vec::new(),
            holding: Vec::new(),
        };
        for happening in happenings {
            model.happen(&happening)?;
        }
        let mut rounds = 0;
        while !(model.callers.is_empty() && model.others.is_empty()) {
            for purpose in std::mem::take(&mut model.starting) {
                model.queue.end_start(purpose);
            }
            for bytes in std::mem::take(&mut model.holding) {
                model.queue.free(bytes);
            }
            model.settle()?;
            rounds += 1;
            prop_assert!(rounds < 1000, "{} callers and {} others wait for ever", model.callers.len(), model.others.len());
        }
    }
}

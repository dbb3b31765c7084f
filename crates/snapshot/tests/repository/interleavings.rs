//! Every order in which the requests of publishers, collectors and somebody who deletes can reach the store.
//!
//! Each actor is stopped before each request that touches what they share; one of them is let go at a time, until it stands
//! before its next. A schedule is the list of choices; the next one differs in the last choice that has another way left.
//! With more than a few thousand orders, those are taken in which actors take turns at most so many times: errors of this
//! kind need few turns.

use crate::hooked::{Hook, Hooked, Verdict};
use crate::sample::{Files, SMALL, all_dead, at_once, check_whole, name, publish, small_draft};
use aenv_snapshot::{Alias, CollectOptions, Content, Draft, Repository, RepositoryError};
use aenv_storage::remote::RemoteStore;
use async_trait::async_trait;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, TryStreamExt as _};
use object_store::ObjectStore as _;
use object_store::memory::InMemory;
use object_store::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Mutex, mpsc, oneshot};

enum Event {
    /// The actor stands before a request.
    Parked(usize, oneshot::Sender<()>),
    Ended,
}

/// Stops one actor before its requests.
#[derive(Debug)]
struct Gate {
    actor: usize,
    events: mpsc::UnboundedSender<Event>,
    /// Where requests are stopped; others go through.
    kinds: &'static [&'static str],
    /// One request of an actor at a time, so that each stop is one choice.
    turn: Arc<Mutex<()>>,
}

#[async_trait]
impl Hook for Gate {
    async fn verdict(&self, _: &'static str, key: &Path) -> Verdict {
        if !self.kinds.iter().any(|kind| key.as_ref().starts_with(kind)) {
            return Verdict::Make(None);
        }
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let (go, gone) = oneshot::channel();
        self.events.send(Event::Parked(self.actor, go)).unwrap();
        gone.await.unwrap();
        Verdict::Make(Some(turn))
    }
}

/// What publishers and collectors share.
const BLOBS: &[&str] = &["blobs", "condemned", "publications", "manifests"];

/// What an actor does with the repository.
type Actor = Box<dyn Fn(Repository) -> BoxFuture<'static, ()>>;

/// The choices of one run, and how many ways each of them had.
#[derive(Debug, Default)]
struct Schedule {
    choices: Vec<(usize, usize)>,
    at: usize,
}

impl Schedule {
    /// One of `ways`: as before, then the first.
    fn choose(&mut self, ways: usize) -> usize {
        if self.at == self.choices.len() {
            self.choices.push((0, ways));
        }
        let (choice, before) = self.choices[self.at];
        assert_eq!(before, ways, "a run is not the same as the one before up to its last choice");
        self.at += 1;
        choice
    }

    /// The next run. False when there is none.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((choice, ways)) = self.choices.pop() {
            if choice + 1 < ways {
                self.choices.push((choice + 1, ways));
                return true;
            }
        }
        false
    }
}

/// Lets the actors go in the order of `schedule`, with at most `turns` changes from one that could go on to another.
async fn run(
    memory: &Arc<InMemory>,
    kinds: &'static [&'static str],
    actors: &[Actor],
    schedule: &mut Schedule,
    turns: usize,
) {
    let (events, mut arrivals) = mpsc::unbounded_channel();
    let mut tasks = Vec::new();
    for (number, actor) in actors.iter().enumerate() {
        let gate = Gate { actor: number, events: events.clone(), kinds, turn: Arc::default() };
        let hooked = Hooked { inner: Arc::clone(memory), hook: Arc::new(gate) };
        let acting = actor(Repository::new(RemoteStore::new(Arc::new(hooked), None, None)));
        let ended = events.clone();
        tasks.push(tokio::spawn(async move {
            acting.await;
            ended.send(Event::Ended).unwrap();
        }));
    }
    let mut parked: Vec<Option<oneshot::Sender<()>>> = actors.iter().map(|_| None).collect();
    let mut awaited = actors.len();
    let (mut current, mut left) = (0, turns);
    loop {
        while awaited > 0 {
            match arrivals.recv().await.unwrap() {
                Event::Parked(actor, go) => parked[actor] = Some(go),
                Event::Ended => {}
            }
            awaited -= 1;
        }
        let ready: Vec<usize> = (0..actors.len()).filter(|actor| parked[*actor].is_some()).collect();
        if ready.is_empty() {
            break;
        }
        let goes_on = ready.contains(&current);
        let chosen = if goes_on && left == 0 {
            current
        } else {
            // The current one first, so that the first run has no turns.
            let mut ways = ready;
            ways.sort_by_key(|actor| *actor != current);
            ways[schedule.choose(ways.len())]
        };
        if goes_on && chosen != current {
            left -= 1;
        }
        current = chosen;
        if let Some(go) = parked[chosen].take() {
            go.send(()).unwrap();
            awaited = 1;
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
}

/// What is there before: a published snapshot `old` of the content, then whatever `prepare` does with it.
#[derive(Debug, Clone, Copy)]
enum Before {
    Published,
    Deleted,
    Condemned,
}

struct Scenario {
    before: Before,
    publishers: usize,
    collections: usize,
    collect: CollectOptions,
    deletes: bool,
    turns: usize,
}

async fn prepare(files: &Files, before: Before) -> Arc<InMemory> {
    let memory = Arc::new(InMemory::new());
    let repository = plain(&memory);
    publish(&repository, &draft(files, "old")).await.unwrap();
    if !matches!(before, Before::Published) {
        repository.delete(&name("old")).await.unwrap();
    }
    if matches!(before, Before::Condemned) {
        repository
            .collect(&CollectOptions { keep_tombstones: std::time::Duration::MAX, ..at_once() })
            .await
            .unwrap();
    }
    memory
}

fn plain(memory: &Arc<InMemory>) -> Repository {
    Repository::new(RemoteStore::new(memory.clone(), None, None))
}

fn draft(files: &Files, id: &str) -> Draft {
    small_draft(id, Content::File(files.path("content")))
}

/// Goes through all schedules of a scenario: how many.
async fn explore(scenario: Scenario) -> usize {
    let files = Files::new();
    files.write("content", 1, SMALL);
    let mut actors: Vec<Actor> = Vec::new();
    for publisher in 0..scenario.publishers {
        let draft = draft(&files, &format!("new-{publisher}"));
        actors.push(Box::new(move |repository| {
            let draft = draft.clone();
            async move {
                match publish(&repository, &draft).await {
                    // Taken for dead, although it lives: allowed, if it then is no snapshot.
                    Ok(_) | Err(RepositoryError::Expired { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            .boxed()
        }));
    }
    let (collections, options) = (scenario.collections, scenario.collect.clone());
    actors.push(Box::new(move |repository| {
        let options = options.clone();
        async move {
            for _ in 0..collections {
                repository.collect(&options).await.unwrap();
            }
        }
        .boxed()
    }));
    if scenario.deletes {
        actors.push(Box::new(|repository| {
            async move {
                assert!(repository.delete(&name("old")).await.unwrap());
            }
            .boxed()
        }));
    }
    let mut schedule = Schedule::default();
    let mut runs = 0;
    loop {
        let memory = prepare(&files, scenario.before).await;
        run(&memory, BLOBS, &actors, &mut schedule, scenario.turns).await;
        check(&memory, &files, &scenario).await;
        runs += 1;
        if !schedule.advance() {
            return runs;
        }
    }
}

/// Whatever is published by now is whole, and stays whole; nothing else stays.
async fn check(memory: &Arc<InMemory>, files: &Files, scenario: &Scenario) {
    let repository = plain(memory);
    for publisher in 0..scenario.publishers {
        let draft = draft(files, &format!("new-{publisher}"));
        // One that was taken for dead is published by the next call.
        let manifest = publish(&repository, &draft).await.unwrap();
        check_whole(&repository, &manifest).await;
    }
    for _ in 0..3 {
        repository.collect(&all_dead()).await.unwrap();
    }
    let page = repository.list(None, 10).await.unwrap();
    let stays = usize::from(matches!(scenario.before, Before::Published) && !scenario.deletes);
    assert_eq!(page.snapshots.len(), scenario.publishers + stays);
    for manifest in &page.snapshots {
        check_whole(&repository, manifest).await;
    }
}

fn all_orders() -> usize {
    usize::MAX
}

/// Publishers that are slow are taken for dead, but nobody forgets that they were.
fn hasty() -> CollectOptions {
    CollectOptions { keep_tombstones: std::time::Duration::MAX, ..all_dead() }
}

fn patient() -> CollectOptions {
    CollectOptions { keep_tombstones: std::time::Duration::MAX, ..at_once() }
}

#[tokio::test]
async fn a_publisher_takes_a_blob_that_is_being_removed() {
    let scenario = Scenario {
        before: Before::Condemned,
        publishers: 1,
        collections: 1,
        collect: patient(),
        deletes: false,
        turns: all_orders(),
    };
    let runs = explore(scenario).await;
    assert!(runs > 1000, "{runs}");
}

#[tokio::test]
async fn a_publisher_takes_a_blob_that_is_being_condemned_and_removed() {
    let scenario = Scenario {
        before: Before::Deleted,
        publishers: 1,
        collections: 2,
        collect: patient(),
        deletes: false,
        turns: 4,
    };
    let runs = explore(scenario).await;
    assert!(runs > 1000, "{runs}");
}

#[tokio::test]
async fn a_publisher_takes_a_blob_whose_only_snapshot_is_being_deleted() {
    let scenario = Scenario {
        before: Before::Published,
        publishers: 1,
        collections: 2,
        collect: patient(),
        deletes: true,
        turns: 3,
    };
    let runs = explore(scenario).await;
    assert!(runs > 1000, "{runs}");
}

#[tokio::test]
async fn a_publisher_that_is_taken_for_dead_publishes_nothing_that_is_not_there() {
    for before in [Before::Deleted, Before::Condemned] {
        let scenario =
            Scenario { before, publishers: 1, collections: 2, collect: hasty(), deletes: false, turns: 4 };
        let runs = explore(scenario).await;
        assert!(runs > 1000, "{runs}");
    }
}

#[tokio::test]
async fn two_publishers_and_a_collector() {
    let scenario = Scenario {
        before: Before::Condemned,
        publishers: 2,
        collections: 2,
        collect: patient(),
        deletes: false,
        turns: 3,
    };
    let runs = explore(scenario).await;
    assert!(runs > 1000, "{runs}");
}

/// Goes through all orders of movers of one alias, each of which makes its moves one after the other. A move takes place
/// exactly if it is told so: the count of changes is that of successes.
async fn explore_moves(movers: &'static [&'static [(&'static str, &'static str)]], turns: usize) -> usize {
    let alias = Alias { name: name("main"), tag: name("default") };
    let won = Arc::new(AtomicU64::new(0));
    let actors: Vec<Actor> = movers
        .iter()
        .map(|moves| {
            let (won, alias) = (Arc::clone(&won), alias.clone());
            let actor: Actor = Box::new(move |repository| {
                let (won, alias) = (Arc::clone(&won), alias.clone());
                async move {
                    for (from, to) in *moves {
                        match repository.move_alias(&alias, Some(&name(from)), Some(&name(to))).await {
                            Ok(()) => won.fetch_add(1, Ordering::SeqCst),
                            Err(RepositoryError::Conflict { .. }) => 0,
                            Err(error) => panic!("{error}"),
                        };
                    }
                }
                .boxed()
            });
            actor
        })
        .collect();
    let mut schedule = Schedule::default();
    let mut runs = 0;
    loop {
        let memory = Arc::new(InMemory::new());
        plain(&memory).move_alias(&alias, None, Some(&name("a"))).await.unwrap();
        won.store(0, Ordering::SeqCst);
        run(&memory, &["aliases"], &actors, &mut schedule, turns).await;
        let keys: Vec<_> =
            memory.list(None).map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap();
        let highest = keys.iter().max().unwrap().rsplit_once('/').unwrap().1.trim_end_matches(".json");
        let changes = u64::from_str_radix(highest, 16).unwrap() - 1;
        assert_eq!(changes, won.load(Ordering::SeqCst), "{keys:?}: {:?}", schedule.choices);
        runs += 1;
        if !schedule.advance() {
            return runs;
        }
    }
}

#[tokio::test]
async fn one_of_two_movers_of_an_alias_wins() {
    let runs = explore_moves(&[&[("a", "b")], &[("a", "c")]], all_orders()).await;
    assert!(runs > 100, "{runs}");
}

/// A mover sleeps while the alias is moved on so often that the generation it wants to make was made, and removed.
#[tokio::test]
async fn a_mover_that_slept_has_lost() {
    let movers: &[&[_]] = &[&[("a", "b")], &[("a", "c"), ("c", "a"), ("a", "c"), ("c", "a")]];
    let runs = explore_moves(movers, 3).await;
    assert!(runs > 100, "{runs}");
}

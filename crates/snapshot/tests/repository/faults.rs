//! Every request of every operation fails, loses its answer, or is the last one before the process dies or stalls for ever.
//! Then the same call once more must succeed, and after all the dead have expired nothing may be lost or left over.

use crate::hooked::{Hook, Verdict};
use crate::place::{Kind, Place};
use crate::sample::{
    Files, SMALL, all_dead, at_once, check_whole, collect_all, expected_keys, name, named, options,
    small_draft,
};
use aenv_snapshot::{Alias, Content, Draft, Manifest, Progress, PublishOptions, Repository, RepositoryError};
use async_trait::async_trait;
use object_store::path::Path;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Notify, watch};

/// What happens at one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It is not made; later ones are.
    Fail,
    /// It is made, but nobody hears of it; later ones are made.
    Lose,
    /// The process dies, or stalls for ever, before it is made: when the one before was.
    Die,
}

const FAULTS: [Fault; 3] = [Fault::Fail, Fault::Lose, Fault::Die];

/// Lets one request come to grief.
#[derive(Debug)]
struct Walk {
    at: usize,
    fault: Fault,
    requests: AtomicUsize,
    dead: Notify,
}

#[async_trait]
impl Hook for Walk {
    async fn verdict(&self, _: &'static str, _: &Path) -> Verdict {
        let request = self.requests.fetch_add(1, Ordering::SeqCst);
        match self.fault {
            Fault::Fail if request == self.at => Verdict::Fail,
            Fault::Lose if request == self.at => Verdict::Lose,
            Fault::Die if request == self.at => self.die().await,
            _ => Verdict::Make(None),
        }
    }
}

impl Walk {
    fn new(at: usize, fault: Fault) -> Arc<Self> {
        Arc::new(Self { at, fault, requests: AtomicUsize::new(0), dead: Notify::new() })
    }

    /// Never answers. Whoever waits for the answer is dropped.
    async fn die(&self) -> Verdict {
        self.dead.notify_one();
        std::future::pending().await
    }

    /// Runs `operation` until it ends or dies. False when the fault never came: the walk is over.
    async fn run<T>(&self, operation: impl Future<Output = Result<T, RepositoryError>>) -> bool {
        tokio::select! {
            ended = operation => {
                let came = self.requests.load(Ordering::SeqCst) > self.at;
                if let Err(error) = ended {
                    assert!(came && error.is_passing(), "{:?} at {}: {error}", self.fault, self.at);
                }
                came
            }
            () = self.dead.notified() => true,
        }
    }
}

async fn publish(
    repository: &Repository,
    draft: &Draft,
    notes: PathBuf,
) -> Result<Manifest, RepositoryError> {
    let options = PublishOptions { progress_file: Some(notes), ..options() };
    repository.publish(draft, &options, &watch::Sender::new(Progress::default())).await
}

/// What is there but registers, which keep two objects each.
async fn keys(place: &Place) -> BTreeSet<String> {
    let mut keys = place.keys().await;
    let registers = |key: &String| key.starts_with("aliases/") || key.starts_with("heads/");
    assert!(keys.iter().filter(|key| registers(key)).count() <= 2, "{keys:?}");
    keys.retain(|key| !registers(key));
    keys
}

/// Nothing is there but these snapshots.
async fn check_only(place: &Place, manifests: &[&Manifest], when: &str) {
    let found = keys(place).await;
    let mut expected = expected_keys(manifests);
    for manifest in manifests {
        let prefix = format!("manifests/{}/", manifest.id);
        let own: Vec<_> = found.iter().filter(|key| key.starts_with(&prefix)).cloned().collect();
        assert!(!own.is_empty(), "{when}: {found:?}");
        expected.extend(own);
    }
    assert_eq!(found, expected, "{when}");
}

async fn walk_publish(kind: Kind, fault: Fault) {
    let files = Files::new();
    let draft = named(files.draft("s1", 1), "ready:v1");
    for at in 0.. {
        let place = Place::new(kind).await;
        let walk = Walk::new(at, fault);
        let notes = files.path("notes.json");
        if !walk.run(publish(&place.hooked(walk.clone()), &draft, notes.clone())).await {
            assert!(at > 15, "the walk was over after {at} requests");
            break;
        }
        let when = format!("{fault:?} at {at}");
        let repository = place.repository();
        // A collection in between: what is uploaded already must not be lost to the next call, or be found out to be.
        repository.collect(&at_once()).await.unwrap();
        let manifest = publish(&repository, &draft, notes.clone())
            .await
            .unwrap_or_else(|error| panic!("{when}: {error}"));
        assert!(!notes.exists(), "{when}");
        assert_eq!(repository.resolve("ready:v1").await.unwrap(), manifest, "{when}");
        collect_all(&repository).await;
        check_whole(&repository, &manifest).await;
        check_only(&place, &[&manifest], &when).await;
        if fault == Fault::Fail {
            assert_eq!(place.unnamed(), Vec::<String>::new(), "{when}");
        }
    }
}

async fn walk_delete(kind: Kind, fault: Fault) {
    let files = Files::new();
    let small = |id: &str| small_draft(id, Content::File(files.write(id, 7, SMALL)));
    for at in 0.. {
        let place = Place::new(kind).await;
        let repository = place.repository();
        let deleted = named(small("s1"), "ready:v1");
        publish(&repository, &deleted, files.path("notes.json")).await.unwrap();
        let kept = publish(&repository, &small("s2"), files.path("notes.json")).await.unwrap();
        let walk = Walk::new(at, fault);
        if !walk.run(place.hooked(walk.clone()).delete(&name("s1"))).await {
            assert!(at > 5, "the walk was over after {at} requests");
            break;
        }
        let when = format!("{fault:?} at {at}");
        repository.delete(&name("s1")).await.unwrap();
        assert!(matches!(repository.get(&name("s1")).await, Err(RepositoryError::NotFound { .. })), "{when}");
        assert!(
            matches!(repository.resolve("ready:v1").await, Err(RepositoryError::NotFound { .. })),
            "{when}"
        );
        collect_all(&repository).await;
        check_whole(&repository, &kept).await;
        check_only(&place, &[&kept], &when).await;
    }
}

async fn walk_collect(kind: Kind, fault: Fault) {
    let files = Files::new();
    let small = |id: &str, seed| small_draft(id, Content::File(files.write(id, seed, SMALL)));
    for at in 0.. {
        let place = Place::new(kind).await;
        let repository = place.repository();
        let kept = publish(&repository, &small("s2", 8), files.path("notes.json")).await.unwrap();
        for (id, seed) in [("s1", 7), ("s3", 9)] {
            publish(&repository, &small(id, seed), files.path("notes.json")).await.unwrap();
            repository.delete(&name(id)).await.unwrap();
            if id == "s1" {
                // Its blob is condemned, that of the other one is not yet.
                repository.collect(&at_once()).await.unwrap();
            }
        }
        let walk = Walk::new(at, fault);
        if !walk.run(place.hooked(walk.clone()).collect(&at_once())).await {
            assert!(at > 12, "the walk was over after {at} requests");
            break;
        }
        let when = format!("{fault:?} at {at}");
        check_whole(&repository, &kept).await;
        // What was deleted can be published again in any state of its blob.
        let again = publish(&repository, &small("s4", 7), files.path("notes.json")).await.unwrap();
        check_whole(&repository, &again).await;
        collect_all(&repository).await;
        check_whole(&repository, &again).await;
        check_only(&place, &[&kept, &again], &when).await;
    }
}

async fn walk_alias(kind: Kind, fault: Fault) {
    let moving = Alias { name: name("main"), tag: name("default") };
    let (a, b) = (name("a"), name("b"));
    for at in 0.. {
        let place = Place::new(kind).await;
        let repository = place.repository();
        repository.move_alias(&moving, None, Some(&a)).await.unwrap();
        let walk = Walk::new(at, fault);
        if !walk.run(place.hooked(walk.clone()).move_alias(&moving, Some(&a), Some(&b))).await {
            assert!(at > 2, "the walk was over after {at} requests");
            break;
        }
        let between = repository.alias(&moving).await.unwrap();
        assert!(between == Some(a.clone()) || between == Some(b.clone()), "{fault:?} at {at}: {between:?}");
        repository.move_alias(&moving, Some(&a), Some(&b)).await.unwrap();
        assert_eq!(repository.alias(&moving).await.unwrap(), Some(b.clone()), "{fault:?} at {at}");
        assert_eq!(keys(&place).await, BTreeSet::new());
    }
}

async fn walk_head(kind: Kind, fault: Fault) {
    let sandbox = name("i1");
    for at in 0.. {
        let place = Place::new(kind).await;
        let repository = place.repository();
        let claim = repository.claim(&sandbox, &name("node-a")).await.unwrap();
        let walk = Walk::new(at, fault);
        let hooked = place.hooked(walk.clone());
        let taken_over = async {
            let claim = hooked.claim(&sandbox, &name("node-b")).await?;
            hooked.advance(&sandbox, claim.generation, &name("s2")).await
        };
        if !walk.run(taken_over).await {
            assert!(at > 6, "the walk was over after {at} requests");
            break;
        }
        let now = repository.head(&sandbox).await.unwrap().unwrap();
        let advanced = repository.advance(&sandbox, claim.generation, &name("s1")).await;
        // The old owner goes on exactly as long as the new one's claim does not count.
        assert_eq!(advanced.is_ok(), now.owner == name("node-a"), "{fault:?} at {at}: {now:?}");
        let again = repository.claim(&sandbox, &name("node-b")).await.unwrap();
        repository.advance(&sandbox, again.generation, &name("s2")).await.unwrap();
        assert_eq!(keys(&place).await, BTreeSet::new());
    }
}

macro_rules! walks {
    ($($name:ident: $walk:ident in $kind:ident),* $(,)?) => {
        $(#[tokio::test]
        async fn $name() {
            for fault in FAULTS {
                $walk(Kind::$kind, fault).await;
            }
        })*
    };
}

walks! {
    publish_to_a_directory: walk_publish in Directory,
    publish_to_a_bucket: walk_publish in Bucket,
    delete_in_a_directory: walk_delete in Directory,
    delete_in_a_bucket: walk_delete in Bucket,
    collect_in_a_directory: walk_collect in Directory,
    collect_in_a_bucket: walk_collect in Bucket,
    alias_in_a_directory: walk_alias in Directory,
    alias_in_a_bucket: walk_alias in Bucket,
    head_in_a_directory: walk_head in Directory,
    head_in_a_bucket: walk_head in Bucket,
}

/// The parts that are uploaded stay uploaded when the process dies: the next one sends the rest only.
#[tokio::test]
async fn an_upload_goes_on_where_it_was_interrupted() {
    let files = Files::new();
    let large = files.write("large", 1, 21 << 20);
    let draft = small_draft("s1", Content::File(large));
    let place = Place::new(Kind::Bucket).await;
    let notes = files.path("notes.json");
    // Within the parts, whichever of the two contents, the blob and its chunk list, comes first.
    let walk = Walk::new(9, Fault::Die);
    let one_by_one = PublishOptions { parallel: 1, progress_file: Some(notes.clone()), ..options() };
    let progress = watch::Sender::new(Progress::default());
    let hooked = place.hooked(walk.clone());
    assert!(walk.run(hooked.publish(&draft, &one_by_one, &progress)).await);
    let first = progress.borrow().uploaded_bytes;
    assert!((5 << 20..21 << 20).contains(&first), "{first}");
    assert!(notes.exists());

    let repository = place.repository();
    let manifest = repository.publish(&draft, &one_by_one, &progress).await.unwrap();
    let second = progress.borrow().uploaded_bytes;
    assert!(first + second <= (21 << 20) + 100_000, "{first} + {second}");
    check_whole(&repository, &manifest).await;
    assert_eq!(place.unnamed(), Vec::<String>::new());
    assert!(!notes.exists());
}

/// Its upload was completed and its copy condemned since the notes were written: what is condemned is never named again.
#[tokio::test]
async fn notes_of_an_upload_do_not_bring_a_condemned_copy_back() {
    let files = Files::new();
    let large = files.write("large", 1, 21 << 20);
    let draft = |id: &str| small_draft(id, Content::File(large.clone()));
    let place = Place::new(Kind::Bucket).await;
    let notes = files.path("notes.json");
    let one_by_one = PublishOptions { parallel: 1, progress_file: Some(notes.clone()), ..options() };
    let progress = watch::Sender::new(Progress::default());
    let walk = Walk::new(9, Fault::Die);
    let hooked = place.hooked(walk.clone());
    assert!(walk.run(hooked.publish(&draft("s1"), &one_by_one, &progress)).await);
    let old = std::fs::read(&notes).unwrap();

    let repository = place.repository();
    let first = repository.publish(&draft("s1"), &one_by_one, &progress).await.unwrap();
    assert!(repository.delete(&first.id).await.unwrap());
    assert!(repository.collect(&all_dead()).await.unwrap().condemned > 0);
    std::fs::write(&notes, old).unwrap();
    let second = repository.publish(&draft("s2"), &one_by_one, &progress).await.unwrap();
    let key = |manifest: &Manifest| manifest.disk.layers[0].blob.object.key();
    assert_ne!(key(&first), key(&second));
    collect_all(&repository).await;
    check_whole(&repository, &second).await;
}

/// What a killed writer left in a directory is no object, and no list shows it.
#[tokio::test]
async fn files_without_names_go() {
    let files = Files::new();
    let place = Place::new(Kind::Directory).await;
    let repository = place.repository();
    let manifest = publish(&repository, &files.draft("s1", 1), files.path("notes.json")).await.unwrap();
    let key = place.directory.path().join(manifest.disk.layers[0].blob.object.key().as_ref());
    let unnamed = key.with_file_name("other#3");
    std::fs::write(&unnamed, b"half").unwrap();
    repository.collect(&at_once()).await.unwrap();
    assert!(unnamed.exists(), "it is not old yet");
    collect_all(&repository).await;
    assert!(!unnamed.exists() && key.exists());
    check_whole(&repository, &manifest).await;
}

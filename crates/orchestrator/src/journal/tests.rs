use super::*;
use crate::data_dir::DataDir;
use crate::lifecycle::Phase;
use aenv_vmm::MachineSpec;

fn record(id: &str, role: Role, phase: Phase) -> VmRecord {
    VmRecord {
        id: id.parse().unwrap(),
        role,
        phase,
        template_id: "t1".parse().unwrap(),
        template_name: "base".to_owned(),
        capture_key: Some("k".to_owned()),
        parent: None,
        spec: MachineSpec { vcpus: 2, memory_mib: 512 },
        disk_mib: 10,
        root_bytes: None,
        disk: None,
        slot: None,
        process: None,
        tenancy: None,
        loss: None,
        saves: Saves::default(),
        present: Present::default(),
    }
}

async fn open(dir: &DataDir) -> Result<Journal, StartError> {
    Journal::open(&dir.journal(), dir.lock()?, None).await
}

#[tokio::test]
async fn records_survive_and_the_directory_is_free_after_close() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = DataDir::open(temporary.path()).unwrap();
    let journal = open(&dir).await.unwrap();
    let wanted = record("i1", Role::Sandbox, Phase::Running);
    journal.put(&wanted).await.unwrap();
    journal.put(&record("i2", Role::Standby, Phase::Starting)).await.unwrap();
    journal.remove(&"i2".parse().unwrap()).await.unwrap();
    assert!(matches!(open(&dir).await, Err(StartError::InUse(_))));
    journal.close().await;
    assert!(journal.all().await.is_err(), "a closed journal takes no more");
    let journal = open(&dir).await.unwrap();
    assert_eq!(journal.all().await.unwrap(), vec![wanted]);
}

#[tokio::test]
async fn a_standby_can_be_claimed_once_and_only_when_it_is_whole() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = DataDir::open(temporary.path()).unwrap();
    let journal = open(&dir).await.unwrap();
    let claimed = record("i1", Role::Sandbox, Phase::Starting);
    assert!(!journal.claim(&claimed).await.unwrap(), "no such record");
    journal.put(&record("i1", Role::Standby, Phase::Starting)).await.unwrap();
    assert!(!journal.claim(&claimed).await.unwrap(), "not whole yet");
    journal.put(&record("i1", Role::Standby, Phase::Running)).await.unwrap();
    let attempts = futures_util::future::join_all((0..20).map(|_| journal.claim(&claimed))).await;
    assert_eq!(attempts.into_iter().filter(|attempt| *attempt.as_ref().unwrap()).count(), 1);
    assert_eq!(journal.all().await.unwrap(), vec![claimed]);
}

#[tokio::test]
async fn a_journal_of_another_version_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = DataDir::open(temporary.path()).unwrap();
    open(&dir).await.unwrap().close().await;
    let store = Store::open(&dir.journal()).unwrap();
    store.set_meta("schema_version", "999").unwrap();
    store.close();
    let error = open(&dir).await.err().unwrap();
    assert!(error.to_string().contains("schema version 999"), "{error}");
    assert!(dir.lock().is_ok(), "a refused start frees the directory");
}

#[tokio::test]
async fn a_journal_without_room_says_so_and_where() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = DataDir::open(temporary.path()).unwrap();
    let journal = open(&dir).await.unwrap();
    journal.commit(|store| store.limit_pages(4)).await.unwrap();
    let mut numbers = 0..10_000;
    let error = loop {
        let id = format!("i{}", numbers.next().unwrap());
        if let Err(error) = journal.put(&record(&id, Role::Sandbox, Phase::Starting)).await {
            break error;
        }
    };
    let JournalError::Full { path, .. } = &error else { panic!("{error}") };
    assert_eq!(*path, dir.journal());
    let failure = crate::stage::Failure::new("journal", error).into_error("a test");
    assert!(matches!(failure, crate::error::Error::NoCapacity(_)), "{failure}");
}

#[tokio::test]
async fn the_boot_is_remembered() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = DataDir::open(temporary.path()).unwrap();
    let journal = open(&dir).await.unwrap();
    assert_eq!(journal.replace_boot_id("one").await.unwrap(), None);
    assert_eq!(journal.replace_boot_id("two").await.unwrap(), Some("one".to_owned()));
}

#[tokio::test]
async fn what_is_put_durably_is_there_like_everything_else() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = DataDir::open(temporary.path()).unwrap();
    let journal = open(&dir).await.unwrap();
    let mut wanted = record("i1", Role::Sandbox, Phase::Paused);
    wanted.saves.begin();
    journal.put_durably(&wanted).await.unwrap();
    assert_eq!(journal.all().await.unwrap(), vec![wanted.clone()]);
    journal.put(&record("i2", Role::Standby, Phase::Starting)).await.unwrap();
    journal.close().await;
    let journal = open(&dir).await.unwrap();
    assert_eq!(journal.all().await.unwrap()[0], wanted);
}

#[test]
fn rows_of_versions_without_saves_can_be_read() {
    let mut value = serde_json::to_value(record("i1", Role::Sandbox, Phase::Running)).unwrap();
    let fields = value.as_object_mut().unwrap();
    assert!(fields.remove("saves").is_some() && fields.remove("present").is_some());
    let read: VmRecord = serde_json::from_value(value).unwrap();
    assert_eq!(read, record("i1", Role::Sandbox, Phase::Running));
}

//! Limits as the kernel enforces them. Needs root and a version 2 hierarchy with cpu, memory and pids and no systemd, as in
//! the nested machine; elsewhere each test prints a line and does nothing.
//!
//! Processes under test are this program again, running only [`role`], which waits on its standard input until it is in its
//! group.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

use aenv_sys::cgroup::{Directory, Hierarchy, group_of};
use aenv_sys::process::{Detached, Isolation};
use aenv_vmm::cgroups::{Cgroups, Group, Limits, OutOfMemory, Outcome};
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const ROLE: &str = "AENV_TEST_CGROUP_ROLE";
const MIB: usize = 1 << 20;

/// Not a test: what a child does. Waits for a byte on standard input first.
#[test]
#[ignore = "the part of a child, run by the other tests"]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    std::io::stdin().read_exact(&mut [0]).unwrap();
    let said = match role.as_str() {
        "allocate" => {
            let mut memory = vec![0_u8; 64 * MIB];
            memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            std::hint::black_box(&memory);
            "allocated".to_owned()
        }
        "multiply" => {
            let parked = || std::thread::Builder::new().spawn(std::thread::park);
            format!("threads={}", (0..64).take_while(|_| parked().is_ok()).count())
        }
        "spin" => {
            let until = std::time::Instant::now() + std::time::Duration::from_secs(1);
            while std::time::Instant::now() < until {}
            "spun".to_owned()
        }
        "prepare" => {
            let outcome = Cgroups::prepare("t", None).unwrap();
            let Outcome::Usable(cgroups) = outcome else { panic!("{outcome:?}") };
            let own = group_of(std::process::id()).unwrap().unwrap();
            format!("parent={} own={}", cgroups.parent_below_mount().display(), own.display())
        }
        "sleep" => {
            std::thread::sleep(std::time::Duration::from_secs(600));
            "slept".to_owned()
        }
        other => panic!("no role {other}"),
    };
    println!("<{said}>");
}

/// Not a test: says where the process was when it began.
#[test]
#[ignore = "the part of a child, run by another test"]
fn birthplace() {
    let group = group_of(std::process::id()).unwrap().unwrap_or_default();
    println!("<tbirth: {}>", group.display());
}

/// A child that waits to be let go.
struct Actor(Child);

impl Actor {
    fn new(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    fn within(role: &str, group: &Group) -> Self {
        let actor = Self::new(role);
        group.add(actor.0.id()).unwrap();
        actor
    }

    fn go(&mut self) {
        self.0.stdin.take().unwrap().write_all(b"x").unwrap();
    }

    fn finish(mut self) -> (Output, String) {
        self.go();
        let output = self.0.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let said = text.split_once('<').and_then(|(_, rest)| rest.split_once('>'));
        let said = said.map_or(String::new(), |(said, _)| said.to_owned());
        (output, said)
    }
}

/// The groups of an instance that no other test uses, removed when the test ends well.
struct Stage {
    cgroups: Cgroups,
}

impl Stage {
    fn new(instance: &str) -> Option<Self> {
        // An enclosing delegated group would be shared by all tests, so the root is insisted on.
        let systemd = Path::new("/run/systemd/system").exists();
        match Cgroups::inspect(instance, None) {
            Ok(Outcome::Usable(_)) if !systemd && rustix::process::geteuid().is_root() => {}
            other => {
                // Written past the capture of the test runner, which hides what a passing test prints.
                let line = format!(
                    "SKIPPED, limits are NOT tested: no version 2 hierarchy for this test: {other:?}\n"
                );
                std::io::stderr().write_all(line.as_bytes()).unwrap();
                assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
                return None;
            }
        }
        match Cgroups::prepare(instance, None).unwrap() {
            Outcome::Usable(cgroups) => Some(Self { cgroups }),
            Outcome::Unusable { reason, .. } => panic!("inspect said otherwise: {reason}"),
        }
    }

    async fn end(self) {
        self.cgroups.sweep("", &[]).await.unwrap();
        Directory::open(self.cgroups.parent()).unwrap().remove().await.unwrap();
    }
}

fn limits() -> Limits {
    Limits::for_machine(1, 128, 128)
}

#[tokio::test]
async fn too_much_memory_is_a_death_by_oom_and_said_so() {
    let Some(stage) = Stage::new("tmem") else { return };
    let small = Limits { memory_max: 32 * MIB as u64, ..limits() };
    let group = stage.cgroups.make("aenv-a-1", &small).unwrap();
    let (output, said) = Actor::within("allocate", &group).finish();
    assert_eq!((output.status.signal(), said.as_str()), (Some(9), ""));
    let events = group.events().unwrap();
    assert_eq!(events.out_of_memory(), Some(OutOfMemory::OwnLimit), "{events:?}");
    println!("{events:?}, peak {:?}", group.memory_peak().unwrap());
    assert!(group.memory_peak().unwrap().is_none_or(|peak| peak <= small.memory_max));

    let roomy = stage.cgroups.make("aenv-a-2", &limits()).unwrap();
    let (output, said) = Actor::within("allocate", &roomy).finish();
    assert!(output.status.success() && said == "allocated");
    assert_eq!(roomy.events().unwrap().out_of_memory(), None);
    stage.end().await;
}

#[tokio::test]
async fn the_victim_of_a_group_above_is_told_apart() {
    let Some(stage) = Stage::new("tabove") else { return };
    let group = stage.cgroups.make("aenv-a-1", &limits()).unwrap();
    Directory::open(stage.cgroups.parent()).unwrap().write("memory.max", &(32 * MIB).to_string()).unwrap();
    let (output, _) = Actor::within("allocate", &group).finish();
    assert_eq!(output.status.signal(), Some(9));
    let events = group.events().unwrap();
    assert_eq!(events.out_of_memory(), Some(OutOfMemory::Elsewhere), "{events:?}");
    stage.end().await;
}

#[tokio::test]
async fn a_kill_from_outside_is_not_taken_for_oom() {
    let Some(stage) = Stage::new("tkill") else { return };
    let group = stage.cgroups.make("aenv-a-1", &limits()).unwrap();
    let mut actor = Actor::within("sleep", &group);
    actor.go();
    assert_eq!(group.processes().unwrap(), [actor.0.id()]);
    group.kill().unwrap();
    // Not reaped yet: a zombie does not hold its group.
    group.remove().await.unwrap();
    // Ending what is gone is no error: whoever clears up may come twice.
    group.kill().unwrap();
    group.remove().await.unwrap();
    assert!(!group.path().exists());
    assert_eq!(actor.0.wait().unwrap().signal(), Some(9));

    let group = stage.cgroups.make("aenv-a-1", &limits()).unwrap();
    let actor = Actor::within("sleep", &group);
    group.kill().unwrap();
    let output = actor.0.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(9));
    assert_eq!(group.events().unwrap().out_of_memory(), None);
    stage.end().await;
}

#[tokio::test]
async fn threads_beyond_the_limit_are_refused() {
    let Some(stage) = Stage::new("tpids") else { return };
    let group = stage.cgroups.make("aenv-a-1", &Limits { pids_max: 8, ..limits() }).unwrap();
    let (output, said) = Actor::within("multiply", &group).finish();
    assert!(output.status.success());
    let threads: u32 = said.strip_prefix("threads=").unwrap().parse().unwrap();
    assert!(threads < 8, "{said}");
    assert!(group.refused_processes().unwrap() > 0);
    stage.end().await;
}

#[tokio::test]
async fn processor_time_beyond_the_quota_is_waited_for() {
    let Some(stage) = Stage::new("tcpu") else { return };
    let group = stage.cgroups.make("aenv-a-1", &Limits { cpu_max: Some(200), ..limits() }).unwrap();
    let (_, said) = Actor::within("spin", &group).finish();
    assert_eq!(said, "spun");
    let throttling = group.throttling().unwrap();
    println!("{throttling:?}");
    assert!(throttling.periods > 0 && throttling.microseconds > 0);
    stage.end().await;
}

#[tokio::test]
async fn a_sweep_ends_what_is_not_kept() {
    let Some(stage) = Stage::new("tsweep") else { return };
    let groups =
        ["aenv-a-1", "aenv-a-2", "aenv-b-1"].map(|name| stage.cgroups.make(name, &limits()).unwrap());
    let mut actors = groups.each_ref().map(|group| Actor::within("sleep", group));
    actors.iter_mut().for_each(Actor::go);
    let removed = stage.cgroups.sweep("aenv-a-", &["aenv-a-2".to_owned()]).await.unwrap();
    assert_eq!(removed, ["aenv-a-1"]);
    let alive = actors.each_mut().map(|actor| actor.0.try_wait().unwrap().is_none());
    assert_eq!(alive, [false, true, true]);
    assert!(stage.cgroups.open("aenv-a-1").unwrap().is_none());
    assert_eq!(stage.cgroups.open("aenv-a-2").unwrap().unwrap().processes().unwrap(), [actors[1].0.id()]);
    stage.end().await;
    for mut actor in actors {
        assert_eq!(actor.0.wait().unwrap().signal(), Some(9));
    }
}

#[tokio::test]
async fn a_group_with_processes_is_not_removed() {
    let Some(stage) = Stage::new("tbusy") else { return };
    let group = stage.cgroups.make("aenv-a-1", &limits()).unwrap();
    let mut actor = Actor::within("sleep", &group);
    let error = group.remove().await.unwrap_err();
    assert!(error.to_string().contains("still in it"), "{error}");
    group.kill().unwrap();
    stage.end().await;
    actor.0.wait().unwrap();
}

#[tokio::test]
async fn a_detached_process_is_born_in_the_group() {
    let Some(stage) = Stage::new("tbirth") else { return };
    let group = stage.cgroups.make("aenv-a-1", &limits()).unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let args = ["--exact", "birthplace", "--ignored", "--nocapture"].map(str::to_owned);
    let process = Detached {
        program: &std::env::current_exe().unwrap(),
        arg0: "aenv-test-birth",
        args: &args,
        directory: Path::new("/"),
        netns: None,
        log: log.reopen().unwrap(),
        inherit: &[],
        oom_score_adj: None,
        huge_pages: true,
        cgroup: Some(group.as_fd()),
        isolation: Isolation::default(),
    };
    let process = process.spawn().unwrap();
    process.exited().await.unwrap();
    process.reap().unwrap();
    let said = std::fs::read_to_string(log.path()).unwrap();
    assert!(said.contains("<tbirth: aenv-tbirth/aenv-a-1>"), "{said}");
    stage.end().await;
}

#[tokio::test]
async fn a_delegated_unit_is_prepared_and_found_again() {
    let Some(stage) = Stage::new("tunit") else { return };
    let mount = Hierarchy::find().unwrap().unwrap().mount;
    // The stage's own parent has all controllers for a unit below it.
    let below = stage.cgroups.parent_below_mount().join("unit");
    let unit = Directory::create(&mount.join(&below)).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(unit.path(), "trusted.delegate", b"1", flags).unwrap();
    assert!(unit.is_delegated().unwrap());
    let prepare = |group: &Directory| {
        let actor = Actor::new("prepare");
        group.add(actor.0.id()).unwrap();
        actor.finish().1
    };
    let expected = format!("parent={0}/vms own={0}/node", below.display());
    assert_eq!(prepare(&unit), expected);

    // A VM of the first node runs on; the next node is started in `node`, for the kernel refuses the unit's own group.
    let vm = PathBuf::from(unit.path()).join("vms/aenv-t-1");
    let vm = Directory::create(&vm).unwrap();
    let mut machine = Actor::new("sleep");
    vm.add(machine.0.id()).unwrap();
    let refused = unit.add(machine.0.id()).unwrap_err();
    assert!(refused.to_string().contains("child group"), "{refused}");
    assert_eq!(prepare(&Directory::open(&unit.path().join("node")).unwrap()), expected);
    assert_eq!(vm.processes().unwrap(), [machine.0.id()]);

    vm.kill().unwrap();
    machine.0.wait().unwrap();
    for group in ["vms/aenv-t-1", "vms", "node", ""] {
        Directory::open(&unit.path().join(group)).unwrap().remove().await.unwrap();
    }
    stage.end().await;
}

#[tokio::test]
async fn an_operators_group_is_made_with_its_way() {
    let Some(stage) = Stage::new("tnamed") else { return };
    let named = stage.cgroups.parent_below_mount().join("deep/er");
    let Outcome::Usable(cgroups) = Cgroups::prepare("t", Some(&named)).unwrap() else { panic!() };
    assert_eq!(cgroups.parent_below_mount(), named);
    let group = cgroups.make("aenv-t-1", &limits()).unwrap();
    let settings = Directory::open(group.path()).unwrap();
    for (file, value) in limits().settings() {
        assert_eq!(settings.read(file).unwrap().trim(), value, "{file}");
    }
    assert!(cgroups.make("aenv-t-1", &limits()).is_err());
    group.remove().await.unwrap();
    for group in ["deep/er", "deep"] {
        Directory::open(&stage.cgroups.parent().join(group)).unwrap().remove().await.unwrap();
    }
    stage.end().await;
}

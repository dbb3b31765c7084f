//! What child processes do, and how tests start and end them.

use crate::backing::Backing;
use crate::stage::{Aligned, MIB, PATIENCE, open_direct, pattern};
use aenv_export::ublk::{Settings, UblkExporter};
use aenv_export::{Content, Export, Exporter};
use aenv_sys::ublk::{CharDevice, Control, Queue};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const ROLE: &str = "AENV_TEST_UBLK_ROLE";
/// Size of the disk that the server role has.
pub(crate) const SERVED_BYTES: u64 = 8 * MIB;
const SECTOR: usize = 512;
/// Largest request of the I/O role.
const LARGEST: usize = 64 << 10;

/// A child, killed when dropped.
pub(crate) struct Actor {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Actor {
    pub(crate) fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// A process that serves a device; returns when it does. `how` is `add`, `recover`, or `add-slow`: no read is answered.
    pub(crate) fn server(how: &str, instance: &str, export: &Export, backing: &Path) -> (Self, String) {
        let file = backing.display();
        let mut actor =
            Self::start(&format!("serve {how} {instance} {} {} {file}", export.number, export.name));
        let said = actor.hear("READY");
        (actor, said)
    }

    /// A process that writes, reads and compares until the file `end` is there.
    pub(crate) fn writer(device: &Path, first: u64, bytes: u64, seed: u64, end: &Path) -> Self {
        Self::start(&format!("write {} {first} {bytes} {seed} {}", device.display(), end.display()))
    }

    /// The rest of the line with that word.
    pub(crate) fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the child ended without {word}: {:?}", self.child.wait());
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Whether it ended well.
    pub(crate) fn finish(&mut self) -> bool {
        self.child.wait().unwrap().success()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // One that has ended already is what is wanted.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Does what the role says.
pub(crate) fn play(role: &str) {
    // A test that was killed leaves no servers.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let words: Vec<&str> = role.split(' ').collect();
    match words.as_slice() {
        ["serve", how, instance, number, name, file] => {
            serve(how, instance, number.parse().unwrap(), name, Path::new(file));
        }
        ["seize", what, number, depth] => seize(what, number.parse().unwrap(), depth.parse().unwrap()),
        ["write", device, first, bytes, seed, end] => {
            let number = |word: &str| word.parse::<u64>().unwrap();
            write(Path::new(device), number(first), number(bytes), number(seed), Path::new(end));
        }
        other => panic!("no role {other:?}"),
    }
}

fn serve(how: &str, instance: &str, number: u32, name: &str, file: &Path) {
    let started = Instant::now();
    let exporter = UblkExporter::new(&Settings::new(instance)).unwrap();
    let export = Export { number, name: name.to_owned(), owner: 0 };
    let backing = Backing::open(file, SERVED_BYTES);
    if how == "add-slow" {
        backing.gate.close();
    }
    let content = Content::Disk(Arc::new(backing));
    let path = match how {
        "add" | "add-slow" => exporter.add(&export, content),
        _ => exporter.recover(&export, content),
    };
    exporter.start().unwrap();
    println!("READY {} {}", started.elapsed().as_micros(), path.unwrap().display());
    std::thread::sleep(Duration::from_secs(600));
}

/// Begins to recover a device, and comes no further than `what` says, which is `open` or `map`.
fn seize(what: &str, number: u32, depth: u16) {
    let control = Control::open().unwrap();
    let started = Instant::now();
    while let Err(error) = control.begin_recovery(number, PATIENCE) {
        assert!(started.elapsed() < PATIENCE, "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let device = Arc::new(CharDevice::open(number).unwrap());
    let _mapped = (what == "map").then(|| Queue::map(Arc::clone(&device), 0, depth).unwrap());
    println!("READY");
    std::thread::sleep(Duration::from_secs(600));
}

/// Keeps a model of its part of the device, and ends with the comparison of all of it.
fn write(device: &Path, first: u64, bytes: u64, seed: u64, end: &Path) {
    let file = open_direct(device, true);
    let mut random = StdRng::seed_from_u64(seed);
    let mut model = vec![0; usize::try_from(bytes).unwrap()];
    let mut buffer = Aligned::new(model.len().max(LARGEST));
    // What was there before is part of the model.
    file.read_exact_at(buffer.bytes(), first).unwrap();
    model.copy_from_slice(&buffer.bytes()[..usize::try_from(bytes).unwrap()]);
    println!("BEGUN");
    let (started, mut operations, mut longest) = (Instant::now(), 0_u64, Duration::ZERO);
    while !end.exists() || operations < 30 {
        assert!(started.elapsed() < 3 * PATIENCE, "nobody ended this");
        let length = random.random_range(1..=LARGEST / SECTOR) * SECTOR;
        let at = random.random_range(0..=(model.len() - length) / SECTOR) * SECTOR;
        let (slice, offset) = (&mut buffer.bytes()[..length], first + at as u64);
        let begun = Instant::now();
        match random.random_range(0..8) {
            0..4 => {
                pattern(slice, random.random());
                file.write_all_at(slice, offset).unwrap();
                model[at..at + length].copy_from_slice(slice);
            }
            4..7 => {
                file.read_exact_at(slice, offset).unwrap();
                assert!(slice == &model[at..at + length], "wrong data at {offset}, {length} bytes");
            }
            _ => file.sync_data().unwrap(),
        }
        longest = longest.max(begun.elapsed());
        operations += 1;
    }
    let all = &mut buffer.bytes()[..model.len()];
    file.read_exact_at(all, first).unwrap();
    assert!(all == model.as_slice(), "wrong data at the end");
    println!("DONE {operations} operations, the longest took {} ms", longest.as_millis());
}

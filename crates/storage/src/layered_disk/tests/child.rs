//! A process that writes and is killed in the middle of it, again and again.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

const SIZE: u64 = 64 * BLOCK_BYTES;
const DIRECTORY: &str = "AENV_TEST_WRITER_DIRECTORY";
const ROUND: &str = "AENV_TEST_WRITER_ROUND";
const LIVES: u64 = 12;

fn open(path: &Path) -> LayeredDisk {
    LayeredDisk::open(path, Arc::new(Stripes { size: SIZE }), &BOOT).unwrap()
}

/// Where version `version` goes: spots of different sizes, across the borders of blocks; some lie in one another.
fn spot(version: u64) -> Range<u64> {
    let start = version.wrapping_mul(0x9E37_79B9_7F4A_7C15) % (SIZE - 9000);
    start..start + 16 + version % 8000
}

/// The bytes of a version: its number, again and again.
fn bytes_of(version: u64) -> Vec<u8> {
    let range = spot(version);
    version.to_le_bytes().iter().copied().cycle().take((range.end - range.start) as usize).collect()
}

/// Not a test: what the killed process runs. It tells each version after it was written.
#[test]
#[ignore = "run as a child by `whoever_is_killed_loses_nothing_it_acknowledged`"]
fn writer() {
    let Some(path) = std::env::var_os(DIRECTORY) else { return };
    let first: u64 = std::env::var(ROUND).unwrap().parse().unwrap();
    let disk = open(Path::new(&path));
    for version in first.. {
        disk.write_at(&bytes_of(version), spot(version).start).unwrap();
        writeln!(std::io::stderr(), "done {version}").unwrap();
        if version % 50 == 49 {
            disk.seal().unwrap();
        }
        if version % 120 == 119 {
            disk.compact(3).unwrap();
        }
    }
}

#[test]
fn whoever_is_killed_loses_nothing_it_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let lower = Arc::new(Stripes { size: SIZE });
    let mut model = model_of(&lower, SIZE);
    drop(LayeredDisk::create(&path, lower, SIZE, u64::MAX, &BOOT).unwrap());
    let mut next = 0;
    for life in 0..LIVES {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "layered_disk::tests::child::writer",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(DIRECTORY, &path)
            .env(ROUND, next.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        assert_eq!(first, format!("done {next}"), "the child did not begin");
        std::thread::sleep(Duration::from_millis(5 + life * 7));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut apply = |version| {
            model[spot(version).start as usize..spot(version).end as usize]
                .copy_from_slice(&bytes_of(version));
        };
        apply(next);
        for line in lines.map(Result::unwrap) {
            // The last line may be cut off.
            let version = line.strip_prefix("done ").and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
            if version == next + 1 {
                next = version;
                apply(next);
            }
        }
        next += 1;
        let disk = open(&path);
        assert_eq!(disk.usage().charged_bytes, quota::shown_bytes(&disk));
        let found = content(&disk);
        // The write in flight, if it began.
        let flying = spot(next);
        assert_same(
            &found[..flying.start as usize],
            &model[..flying.start as usize],
            "before the write in flight",
        );
        assert_same(
            &found[flying.end as usize..],
            &model[flying.end as usize..],
            "behind the write in flight",
        );
        let new = bytes_of(next);
        for (index, byte) in found[flying.start as usize..flying.end as usize].iter().enumerate() {
            assert!([new[index], model[flying.start as usize + index]].contains(byte));
        }
        model = found;
    }
    assert!(next > LIVES, "the children wrote");
    drop(open(&path));
    LayeredDisk::remove(&path).unwrap();
}

//! Images: what they hold, where their data is, and that processes that map one share its pages.

use crate::memory::{PatternImage, pattern};
use crate::stage::{Process, Stage, export};
use aenv_export::{Content, Exporter as _};
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

const SIZE: u64 = 16 << 20;

fn holes() -> Vec<Range<u64>> {
    vec![65536..131_072, SIZE - 8192..SIZE]
}

fn image() -> Content {
    Content::Image(Arc::new(PatternImage { size: SIZE, holes: holes() }))
}

#[test]
fn an_image_is_read_only_and_says_where_its_data_is() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let path = exporter.add(&export(7, "image-7"), image()).unwrap();
    let seen = std::fs::metadata(&path).unwrap();
    assert_eq!((seen.len(), seen.ino(), seen.mode() & 0o7777), (SIZE, 8, 0o444));
    let error = File::options().read(true).write(true).open(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    let file = File::open(&path).unwrap();
    let mut content = vec![0; usize::try_from(SIZE).unwrap()];
    file.read_exact_at(&mut content, 0).unwrap();
    for (byte, at) in content.iter().zip(0..) {
        let hole = (65536..131_072).contains(&at) || at >= SIZE - 8192;
        assert_eq!(*byte, if hole { 0 } else { pattern(at) }, "{at}");
    }
    use rustix::fs::{SeekFrom, seek};
    assert_eq!(seek(&file, SeekFrom::Data(0)), Ok(0));
    assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(65536));
    assert_eq!(seek(&file, SeekFrom::Data(65536)), Ok(131_072));
    assert_eq!(seek(&file, SeekFrom::Hole(70000)), Ok(70000));
    assert_eq!(seek(&file, SeekFrom::Hole(131_072)), Ok(SIZE - 8192));
    assert_eq!(seek(&file, SeekFrom::Data(SIZE - 100)), Err(rustix::io::Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Data(SIZE)), Err(rustix::io::Errno::NXIO));
}

/// Maps a file privately and reads a byte of every page, until its standard input is closed.
const MAPPER: &str = "
import mmap, sys
with open(sys.argv[1], 'rb') as file:
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
print(sum(mapping[at] for at in range(0, len(mapping), 4096)), flush=True)
sys.stdin.read()
";

/// Starts a process that maps a file; returns when it has read all of it.
fn map(path: &Path) -> Process {
    let mut child = Command::new("python3")
        .args(["-c", MAPPER])
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut sum = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut sum).unwrap();
    let expected = PatternImage { size: SIZE, holes: holes() };
    let expected: u64 = (0..SIZE).step_by(4096).map(|at| u64::from(expected.byte(at))).sum();
    assert_eq!(sum.trim(), expected.to_string());
    Process(child)
}

#[test]
fn processes_that_map_an_image_share_its_pages() {
    let stage = Stage::new();
    let exporter = stage.serve();
    exporter.add(&export(1, "image-1"), image()).unwrap();
    let mappers: Vec<_> = (0..4).map(|_| map(&stage.mount("image-1"))).collect();
    for mapper in &mappers {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", mapper.0.id())).unwrap();
        let mapping = smaps.split_once("mount/image-1\n").expect("it is mapped").1;
        let value = |name: &str| {
            let line = mapping.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let (rss, pss) = (value("Rss:"), value("Pss:"));
        println!("resident {rss} KiB, of which its share {pss} KiB");
        assert!(rss * 1024 >= SIZE / 2, "{rss}");
        assert!(pss < rss / 2, "{pss} of {rss}");
    }
}

#[test]
fn many_files_are_listed_and_a_listing_goes_on_while_they_change() {
    let stage = Stage::new();
    let exporter = stage.serve();
    for number in 1..=300 {
        exporter.add(&export(number, &format!("image-{number}")), image()).unwrap();
    }
    let mut names = Vec::new();
    for (entry, count) in std::fs::read_dir(exporter.mount()).unwrap().zip(0..) {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().len(), SIZE);
        names.push(entry.file_name().into_string().unwrap());
        if count == 100 {
            exporter.remove(&export(5, "image-5")).unwrap();
            exporter.add(&export(301, "image-301"), image()).unwrap();
        }
    }
    for number in 6..=300 {
        let name = format!("image-{number}");
        assert_eq!(names.iter().filter(|found| **found == name).count(), 1, "{name}");
    }
}

use super::*;
use crate::driver::CaptureFiles;

const PAGE: usize = PAGE_SIZE as usize;
const PAGES: usize = 8;

/// A jail's capture directory, what Firecracker would write into it, and where captures go.
struct Jail {
    directory: tempfile::TempDir,
    captures: Arc<CaptureDirectory>,
}

impl Jail {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name::CAPTURE);
        std::fs::create_dir(&path).unwrap();
        Self { captures: Arc::new(CaptureDirectory::open(&path).unwrap()), directory }
    }

    fn files(&self, name: &str) -> CaptureFiles {
        let path = |kind: &str| self.directory.path().join(format!("{name}.{kind}"));
        CaptureFiles { memory: path("memory"), state: path("state") }
    }

    /// What Firecracker would have written for a capture: these pages.
    fn written(
        &self,
        name: &str,
        (lineage, snapshot, content): (Lineage, Snapshot, Content),
        pages: &[(usize, u8)],
        memory: Result<GuestMemory, &'static str>,
    ) -> Written {
        self.captures.prepare(rustix::process::geteuid().as_raw()).unwrap();
        let file = OpenOptions::new().write(true).open(self.captures.path(name::MEMORY)).unwrap();
        file.set_len((PAGES * PAGE) as u64).unwrap();
        for (page, fill) in pages {
            file.write_all_at(&[*fill; PAGE], (page * PAGE) as u64).unwrap();
        }
        std::fs::write(self.captures.path(name::STATE), b"state").unwrap();
        Written {
            directory: Arc::clone(&self.captures),
            partial: PartialFiles::begin(&self.files(name)).unwrap(),
            run_dir: self.directory.path().to_owned(),
            lineage,
            snapshot,
            whole_because: None,
            content,
            memory,
            memory_bytes: (PAGES * PAGE) as u64,
            written_in: Duration::ZERO,
        }
    }

    /// A capture on a host that does not tell what a process wrote.
    fn capture(
        &self,
        name: &str,
        lineage: Lineage,
        content: Content,
        pages: &[(usize, u8)],
    ) -> CaptureReport {
        let (snapshot, _) = lineage.snapshot(content, false);
        let how = (lineage, snapshot, content);
        let (report, next) = self.written(name, how, pages, Err(NOT_KEPT)).finish().unwrap();
        assert!(matches!(&next, Lineage::Lost(reason) if reason.contains("MEM_SOFT_DIRTY")), "{next:?}");
        report
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The first byte of each page.
    fn pages(&self, name: &str) -> Vec<u8> {
        let image = std::fs::read(self.files(name).memory).unwrap();
        assert_eq!(image.len(), PAGES * PAGE);
        image.iter().step_by(PAGE).copied().collect()
    }
}

fn lost() -> Lineage {
    Lineage::Lost("a test wants it so".into())
}

#[test]
fn the_first_capture_has_what_was_dirtied_and_later_ones_have_all_where_writes_are_not_known() {
    let jail = Jail::new();
    let started = Lineage::Started(None);
    assert_eq!(started.snapshot(Content::Changes, false), (Snapshot::Diff, None));
    let report = jail.capture("c1", started, Content::Changes, &[(0, 1), (1, 1)]);
    assert_eq!((report.base, report.changed_pages, report.state_bytes), (CaptureBase::Start, 2, 5));
    assert_eq!(jail.pages("c1"), [1, 1, 0, 0, 0, 0, 0, 0]);
    let mode = std::fs::metadata(jail.files("c1").memory).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o444);
    // Frames that came meanwhile would be missing in what Firecracker takes for changed.
    let captured = Lineage::Captured { memory: jail.files("c1").memory, confirmed: true };
    assert_eq!(captured.snapshot(Content::Changes, false).0, Snapshot::Full);
    let all: Vec<(usize, u8)> = (0..PAGES).map(|page| (page, 2)).collect();
    for (name, content) in [("c2", Content::Changes), ("w", Content::Whole)] {
        let report = jail.capture(name, lost(), content, &all);
        assert_eq!((report.base, report.changed_pages), (CaptureBase::Nothing, PAGES as u64));
        assert_eq!(jail.pages(name), [2; PAGES]);
    }
}

#[test]
fn all_of_the_memory_is_asked_for_unless_the_capture_before_is_kept() {
    let captured = |confirmed| Lineage::Captured { memory: PathBuf::from("/m"), confirmed };
    let asked = |lineage: Lineage, content, known| lineage.snapshot(content, known);
    assert_eq!(asked(captured(true), Content::Changes, true), (Snapshot::Diff, None));
    for (lineage, content, known, words) in [
        (captured(true), Content::Whole, true, "is wanted"),
        (captured(false), Content::Changes, true, "is kept is not known"),
        (captured(true), Content::Changes, false, "cannot be told"),
        (lost(), Content::Changes, true, "a test wants it so"),
    ] {
        let (snapshot, reason) = lineage.snapshot(content, known);
        assert_eq!(snapshot, Snapshot::Full);
        assert!(reason.as_ref().is_some_and(|reason| reason.contains(words)), "{reason:?}");
    }
}

#[test]
fn a_later_capture_has_what_the_log_lacks_and_the_one_after_begins_anew() {
    let jail = Jail::new();
    let mut guest = aenv_sys::pages::Pages::new(PAGES * PAGE).unwrap();
    guest.fill(1);
    let memory = || Ok(GuestMemory::ours(&guest));
    let first = (Lineage::Started(None), Snapshot::Diff, Content::Changes);
    let all: Vec<(usize, u8)> = (0..PAGES).map(|page| (page, 1)).collect();
    let (_, mut lineage) = jail.written("one", first, &all, memory()).finish().unwrap();
    lineage.confirm(jail.path(), &jail.files("one").memory).unwrap();
    assert!(lineage.snapshot(Content::Changes, true).0 == Snapshot::Diff);
    // The VMM wrote three pages, of which it logged one.
    let mut guest = guest;
    for page in [2, 5, 6] {
        guest[page * PAGE..(page + 1) * PAGE].fill(3);
    }
    let memory = || Ok(GuestMemory::ours(&guest));
    let second = (lineage, Snapshot::Diff, Content::Changes);
    let (report, mut lineage) = jail.written("two", second, &[(5, 3)], memory()).finish().unwrap();
    assert_eq!((report.base, report.whole_because), (CaptureBase::PreviousCapture, None));
    let known = aenv_sys::memory::writes::are_known().unwrap();
    // Without such bits nothing is found, which is why they are asked for before.
    assert_eq!((report.changed_pages, report.unlogged_pages), if known { (3, 2) } else { (1, 0) });
    let expected = if known { [0, 0, 3, 0, 0, 3, 3, 0] } else { [0, 0, 0, 0, 0, 3, 0, 0] };
    assert_eq!(jail.pages("two"), expected);
    lineage.confirm(jail.path(), &jail.files("two").memory).unwrap();
    let third = (lineage, Snapshot::Diff, Content::Changes);
    let (report, _) = jail.written("three", third, &[(0, 1)], memory()).finish().unwrap();
    assert_eq!((report.changed_pages, report.unlogged_pages), (1, 0));
}

#[test]
fn pages_of_another_memory_than_firecrackers_are_not_taken() {
    let jail = Jail::new();
    let guest = aenv_sys::pages::Pages::new(PAGES * PAGE).unwrap();
    let lineage = Lineage::Captured { memory: jail.files("before").memory, confirmed: true };
    let how = (lineage, Snapshot::Diff, Content::Changes);
    let error = jail.written("two", how, &[(5, 3)], Ok(GuestMemory::ours(&guest))).finish().unwrap_err();
    assert!(error.to_string().contains("0x5000"), "{error}");
    assert!(!jail.files("two").memory.exists() && !jail.files("two").state.exists());
}

#[test]
fn a_writer_that_keeps_its_file_open_cannot_change_a_finished_capture() {
    let jail = Jail::new();
    let how = (Lineage::Started(None), Snapshot::Diff, Content::Whole);
    let written = jail.written("c", how, &[(0, 7)], Err(NOT_KEPT));
    let open = |name| OpenOptions::new().write(true).open(jail.captures.path(name)).unwrap();
    let (memory, state) = (open(name::MEMORY), open(name::STATE));
    written.finish().unwrap();
    for file in [&memory, &state] {
        file.write_all_at(&[9; PAGE], 0).unwrap();
        file.set_len(1).unwrap();
    }
    assert_eq!(jail.pages("c"), [7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(std::fs::read(jail.files("c").state).unwrap(), b"state");
}

#[test]
fn files_of_another_size_than_they_can_have_are_refused() {
    let jail = Jail::new();
    for (memory_pages, state_bytes) in [(PAGES as u64 + 1, 5), (PAGES as u64, LONGEST_STATE + 1)] {
        let how = (Lineage::Started(None), Snapshot::Diff, Content::Whole);
        let written = jail.written("wrong", how, &[], Err(NOT_KEPT));
        let open = |name| OpenOptions::new().write(true).open(jail.captures.path(name)).unwrap();
        open(name::MEMORY).set_len(memory_pages * PAGE_SIZE).unwrap();
        open(name::STATE).set_len(state_bytes).unwrap();
        let error = written.finish().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        let files = jail.files("wrong");
        assert!(!files.memory.exists() && !files.state.exists());
    }
}

#[test]
fn a_restored_image_is_the_base() {
    let jail = Jail::new();
    jail.capture("image", Lineage::Started(None), Content::Whole, &[(0, 1), (5, 5)]);
    let base = File::open(jail.files("image").memory).unwrap();
    if !aenv_sys::file::supports_reflink(jail.directory.path()).unwrap() {
        return;
    }
    jail.capture("child", Lineage::Started(Some(base)), Content::Whole, &[(0, 9)]);
    assert_eq!(jail.pages("child"), [9, 0, 0, 0, 0, 5, 0, 0]);
    assert_eq!(jail.pages("image"), [1, 0, 0, 0, 0, 5, 0, 0]);
}

#[test]
fn zeros_in_all_of_the_memory_are_holes() {
    let jail = Jail::new();
    let all: Vec<(usize, u8)> = (0..PAGES).map(|page| (page, u8::from(page == 3))).collect();
    let report = jail.capture("full", lost(), Content::Changes, &all);
    assert_eq!((report.base, report.changed_pages, report.zero_pages), (CaptureBase::Nothing, 8, 7));
    assert_eq!(jail.pages("full"), [0, 0, 0, 1, 0, 0, 0, 0]);
    let image = File::open(jail.files("full").memory).unwrap();
    let extents = data_extents(&image).unwrap();
    assert_eq!((extents.len(), &extents[0]), (1, &(3 * PAGE_SIZE..4 * PAGE_SIZE)));
}

#[test]
fn an_exchanged_directory_is_not_used() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink("/tmp", &link).unwrap();
    assert!(CaptureDirectory::open(&link).is_err());
    if rustix::process::geteuid().is_root() {
        let foreign = directory.path().join("foreign");
        std::fs::create_dir(&foreign).unwrap();
        chown(&foreign, Some(12345), None).unwrap();
        let error = CaptureDirectory::open(&foreign).unwrap_err();
        assert!(error.to_string().contains("not ours"), "{error}");
    }
}

#[test]
fn an_adopted_machine_is_known_as_far_as_its_captures_are() {
    let directory = tempfile::tempdir().unwrap();
    let (path, own) = (directory.path(), std::process::id());
    let adopted = || Lineage::adopted(path, own, u64::MAX).unwrap();
    // No mapping of ours is as large.
    assert!(matches!(adopted(), Lineage::Lost(reason) if reason == NOT_FOUND));
    begun(path).unwrap();
    assert!(matches!(adopted(), Lineage::Lost(_)));
    let (one, two) = (Path::new("/saves/1/changes"), Path::new("/saves/2/changes"));
    finished(path, one).unwrap();
    let mut lineage = adopted();
    assert!(matches!(&lineage, Lineage::Captured { memory, confirmed: false } if memory == one));
    lineage.confirm(path, two).unwrap();
    assert!(matches!(adopted(), Lineage::Captured { confirmed: false, .. }));
    for _ in 0..2 {
        lineage.confirm(path, one).unwrap();
        assert!(matches!(adopted(), Lineage::Captured { memory, confirmed: true } if memory == one));
    }
    // The next one is cut short, then complete, and nobody confirms it.
    begun(path).unwrap();
    assert!(matches!(adopted(), Lineage::Lost(_)));
    finished(path, two).unwrap();
    assert!(matches!(adopted(), Lineage::Captured { memory, confirmed: false } if memory == two));
    for marker in markers(path) {
        std::fs::remove_file(marker).unwrap();
    }
    // Of an earlier version.
    File::create(path.join(CAPTURED)).unwrap();
    assert!(matches!(adopted(), Lineage::Lost(_)));
}

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

    /// A capture for which Firecracker writes these pages.
    fn capture(
        &self,
        name: &str,
        lineage: Lineage,
        content: Content,
        pages: &[(usize, u8)],
    ) -> CaptureReport {
        self.captures.prepare(rustix::process::geteuid().as_raw()).unwrap();
        let memory = OpenOptions::new().write(true).open(self.captures.path(name::MEMORY)).unwrap();
        memory.set_len((PAGES * PAGE) as u64).unwrap();
        for (page, fill) in pages {
            memory.write_all_at(&[*fill; PAGE], (page * PAGE) as u64).unwrap();
        }
        std::fs::write(self.captures.path(name::STATE), b"state").unwrap();
        let partial = PartialFiles::begin(&self.files(name)).unwrap();
        let directory = Arc::clone(&self.captures);
        let written_in = Duration::ZERO;
        let memory_bytes = (PAGES * PAGE) as u64;
        Written { directory, partial, lineage, content, memory_bytes, written_in }.finish().unwrap()
    }

    /// The first byte of each page.
    fn pages(&self, name: &str) -> Vec<u8> {
        let image = std::fs::read(self.files(name).memory).unwrap();
        assert_eq!(image.len(), PAGES * PAGE);
        image.iter().step_by(PAGE).copied().collect()
    }
}

#[test]
fn the_first_capture_has_what_was_dirtied_and_later_ones_have_all() {
    let jail = Jail::new();
    let started = Lineage::Started(None);
    assert_eq!(started.snapshot(), Snapshot::Diff);
    let report = jail.capture("c1", started, Content::Changes, &[(0, 1), (1, 1)]);
    assert_eq!((report.base, report.changed_pages, report.state_bytes), (CaptureBase::Start, 2, 5));
    assert_eq!(jail.pages("c1"), [1, 1, 0, 0, 0, 0, 0, 0]);
    let mode = std::fs::metadata(jail.files("c1").memory).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o444);
    // Frames that came meanwhile would be missing in what Firecracker takes for changed.
    assert_eq!(Lineage::Captured.snapshot(), Snapshot::Full);
    let all: Vec<(usize, u8)> = (0..PAGES).map(|page| (page, 2)).collect();
    for (name, content) in [("c2", Content::Changes), ("w", Content::Whole)] {
        let report = jail.capture(name, Lineage::Captured, content, &all);
        assert_eq!((report.base, report.changed_pages), (CaptureBase::Nothing, PAGES as u64));
        assert_eq!(jail.pages(name), [2; PAGES]);
    }
}

#[test]
fn a_writer_that_keeps_its_file_open_cannot_change_a_finished_capture() {
    let jail = Jail::new();
    jail.captures.prepare(rustix::process::geteuid().as_raw()).unwrap();
    let open = |name| OpenOptions::new().write(true).open(jail.captures.path(name)).unwrap();
    let (memory, state) = (open(name::MEMORY), open(name::STATE));
    memory.set_len((PAGES * PAGE) as u64).unwrap();
    memory.write_all_at(&[7; PAGE], 0).unwrap();
    state.write_all_at(b"state", 0).unwrap();
    let partial = PartialFiles::begin(&jail.files("c")).unwrap();
    let written = Written {
        directory: Arc::clone(&jail.captures),
        partial,
        lineage: Lineage::Started(None),
        content: Content::Whole,
        memory_bytes: (PAGES * PAGE) as u64,
        written_in: Duration::ZERO,
    };
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
        jail.captures.prepare(rustix::process::geteuid().as_raw()).unwrap();
        let open = |name| OpenOptions::new().write(true).open(jail.captures.path(name)).unwrap();
        open(name::MEMORY).set_len(memory_pages * PAGE_SIZE).unwrap();
        open(name::STATE).set_len(state_bytes).unwrap();
        let files = jail.files("wrong");
        let written = Written {
            directory: Arc::clone(&jail.captures),
            partial: PartialFiles::begin(&files).unwrap(),
            lineage: Lineage::Started(None),
            content: Content::Whole,
            memory_bytes: (PAGES * PAGE) as u64,
            written_in: Duration::ZERO,
        };
        let error = written.finish().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
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
    let report = jail.capture("full", Lineage::Captured, Content::Changes, &all);
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
fn an_adopted_machine_knows_its_base_only_before_the_first_capture() {
    let directory = tempfile::tempdir().unwrap();
    let image = tempfile::tempfile().unwrap();
    image.set_len(PAGE_SIZE).unwrap();
    let own = std::process::id();
    let known = Lineage::adopted(directory.path(), own, u64::MAX).unwrap();
    assert!(matches!(known, Lineage::Started(None)), "{known:?}");
    File::create(marker(directory.path())).unwrap();
    assert!(matches!(Lineage::adopted(directory.path(), own, u64::MAX).unwrap(), Lineage::Captured));
}

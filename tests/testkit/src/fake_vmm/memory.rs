//! The memory of a fake guest: a few pages of one value each, in files like those of real captures.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const PAGE: u64 = 4096;
/// Pages that a guest has.
const PAGES: u64 = 16;

/// The pages, and which of them were written since when.
pub(crate) struct FakeMemory {
    /// Of the file that it is captured to; all but a few pages of it are zeros.
    bytes: u64,
    image: Option<PathBuf>,
    pages: BTreeMap<u64, u8>,
    since_start: BTreeSet<u64>,
    /// None before the first capture.
    since_capture: Option<BTreeSet<u64>>,
}

impl FakeMemory {
    /// All zeros, until the image is loaded.
    pub(crate) fn new(mib: u64, image: Option<&Path>) -> Self {
        let image = image.map(Path::to_owned);
        let bytes = (mib << 20).max(PAGES * PAGE);
        Self { bytes, image, pages: BTreeMap::new(), since_start: BTreeSet::new(), since_capture: None }
    }

    pub(crate) fn load(&mut self) -> Result<()> {
        let Some(image) = &self.image else { return Ok(()) };
        let file = File::open(image)?;
        for page in 0..PAGES {
            let mut value = [0];
            // The images of old captures are shorter.
            if file.read_at(&mut value, page * PAGE)? == 1 && value[0] != 0 {
                self.pages.insert(page, value[0]);
            }
        }
        Ok(())
    }

    pub(crate) fn write(&mut self, page: u64, value: u8) {
        assert!(page < PAGES, "a guest has {PAGES} pages");
        self.pages.insert(page, value);
        self.since_start.insert(page);
        if let Some(since) = &mut self.since_capture {
            since.insert(page);
        }
    }

    pub(crate) fn read(&self, page: u64) -> u8 {
        self.pages.get(&page).copied().unwrap_or(0)
    }

    pub(crate) fn was_captured(&self) -> bool {
        self.since_capture.is_some()
    }

    /// Writes all pages.
    pub(crate) fn capture(&mut self, to: &Path) -> Result<u64> {
        self.put(to, &(0..PAGES).collect())
    }

    /// Writes the pages that were written since the start, or since the last capture.
    pub(crate) fn capture_changes(&mut self, to: &Path, since_capture: bool) -> Result<u64> {
        let pages = match &self.since_capture {
            Some(since) if since_capture => since.clone(),
            _ => self.since_start.clone(),
        };
        self.put(to, &pages)
    }

    fn put(&mut self, to: &Path, pages: &BTreeSet<u64>) -> Result<u64> {
        let file = File::create_new(to)?;
        file.set_len(self.bytes)?;
        for page in pages {
            file.write_all_at(&[self.read(*page); PAGE as usize], page * PAGE)?;
        }
        self.since_capture = Some(BTreeSet::new());
        Ok(pages.len() as u64)
    }
}

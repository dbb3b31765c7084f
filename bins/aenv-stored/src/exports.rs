//! The ways to the kernel: disks by ublk or FUSE, images always by FUSE, since they are mapped by VMMs that want a file.
//!
//! Owns the exporters. Remembers nothing: which disk went which way is in its record.

use crate::arguments::ExportChoice;
use crate::directories::Directories;
use crate::failure::Failure;
use crate::holder;
use crate::records::Way;
use aenv_export::fuse::FuseExporter;
use aenv_export::ublk::{Settings as UblkSettings, UblkExporter};
use aenv_export::{Content, Export, ExportError, Exporter};
use aenv_storage::block_service::{ExportView, Name};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// For a holder to be started, or for a daemon that was just killed to be gone.
const HOLDER_PATIENCE: Duration = Duration::from_secs(20);
/// Before a holder is started once more.
const HOLDER_TRY: Duration = Duration::from_secs(2);
const HOLDER_PAUSE: Duration = Duration::from_millis(50);

/// All of them.
#[derive(Debug)]
pub(crate) struct Exports {
    ublk: Result<UblkExporter, String>,
    fuse: Result<FuseExporter, String>,
    disks_by: Way,
    reason: String,
}

/// An export whose requests wait for room on the host.
#[derive(Debug)]
pub(crate) struct Stalled {
    pub(crate) number: u32,
    pub(crate) reason: String,
    pub(crate) for_millis: u64,
}

/// Connects to the holder, and starts one where it is needed. One that was just killed may be in the way of the next, so that is
/// tried again.
fn connect(directories: &Directories, was_held: bool) -> Result<FuseExporter, ExportError> {
    let deadline = Instant::now() + HOLDER_PATIENCE;
    loop {
        let connected = match holder::ensure(directories) {
            // One that was there before lives on, whether or not another one can be started.
            Err(error) if !was_held => return Err(error),
            _ => FuseExporter::connect(&directories.holder_socket(), HOLDER_TRY),
        };
        if connected.is_ok() || Instant::now() >= deadline {
            return connected;
        }
        std::thread::sleep(HOLDER_PAUSE);
    }
}

/// What cannot be connected is no way to export; but where a holder was, its files may be in use: to go on without them would
/// take them from their users, while the next start may reach it.
fn unless_held<T>(connected: Result<T, ExportError>, was_held: bool) -> Result<Result<T, String>, Failure> {
    match connected {
        Err(error) if was_held => Err(Failure::unavailable(format!(
            "what an earlier process exports by FUSE cannot be taken over now: {error}"
        ))),
        connected => Ok(connected.map_err(|error| error.to_string())),
    }
}

impl Exports {
    /// Opens what this machine has. Both ways are opened whatever is chosen: disks of an earlier process may have gone
    /// either. Panics outside of a tokio runtime.
    pub(crate) fn open(
        choice: ExportChoice,
        instance: &Name,
        directories: &Directories,
    ) -> Result<Self, Failure> {
        let ublk = UblkExporter::probe()
            .and_then(|()| UblkExporter::new(&UblkSettings::new(instance.as_str())))
            .map_err(|error| error.to_string());
        let was_held = directories.holder_socket().exists();
        let fuse = unless_held(connect(directories, was_held), was_held)?;
        let (disks_by, reason) = match (choice, &ublk, &fuse) {
            (ExportChoice::Ublk, Ok(_), _) => (Way::Ublk, "it was asked for".to_owned()),
            (ExportChoice::Ublk, Err(reason), _) => return Err(Failure::unavailable(reason)),
            (ExportChoice::Fuse, _, Ok(_)) => (Way::Fuse, "it was asked for".to_owned()),
            (ExportChoice::Auto, Ok(_), _) => (Way::Ublk, "the kernel has it".to_owned()),
            (ExportChoice::Auto, Err(reason), Ok(_)) => (Way::Fuse, reason.clone()),
            (ExportChoice::Fuse | ExportChoice::Auto, _, Err(reason)) => {
                return Err(Failure::unavailable(reason));
            }
        };
        if let Err(reason) = &fuse {
            tracing::warn!(reason, "there will be no images: FUSE cannot be used");
        }
        Ok(Self { ublk, fuse, disks_by, reason })
    }

    /// How new disks are exported.
    pub(crate) fn disks_by(&self) -> Way {
        self.disks_by
    }

    /// Whether the kernel has a block device of this number, which may be another instance's: the numbers of ublk are those of
    /// the whole host.
    pub(crate) fn is_on_host(&self, number: u32) -> bool {
        self.ublk.is_ok() && Path::new(&format!("/dev/ublkc{number}")).exists()
    }

    fn exporter(&self, way: Way) -> Result<&dyn Exporter, Failure> {
        let unavailable = |reason: &String| Failure::unavailable(reason);
        Ok(match way {
            Way::Ublk => self.ublk.as_ref().map_err(unavailable)?,
            Way::Fuse => self.fuse.as_ref().map_err(unavailable)?,
        })
    }

    /// Makes a new export of a disk.
    pub(crate) fn add(&self, way: Way, export: &Export, content: Content) -> Result<PathBuf, Failure> {
        Ok(self.exporter(way)?.add(export, content)?)
    }

    /// Takes over the export of a disk; `None` when the kernel has it no more.
    pub(crate) fn recover(
        &self,
        way: Way,
        export: &Export,
        content: Content,
    ) -> Result<Option<PathBuf>, Failure> {
        let exporter = match self.exporter(way) {
            Ok(exporter) => exporter,
            Err(failure) => {
                // Then nobody can have it open either.
                tracing::warn!(export = export.name, %failure, "the export of an earlier process is lost");
                return Ok(None);
            }
        };
        match exporter.recover(export, content) {
            Ok(path) => Ok(Some(path)),
            Err(ExportError::Lost { name, reason }) => {
                tracing::info!(export = name, reason, "an export is made anew");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Ends the export of a disk.
    pub(crate) fn remove(&self, way: Way, export: &Export) -> Result<(), Failure> {
        match self.exporter(way) {
            Ok(exporter) => Ok(exporter.remove(export)?),
            // What cannot be used exports nothing.
            Err(_unavailable) => Ok(()),
        }
    }

    /// Makes a new export of an image.
    pub(crate) fn add_image(&self, export: &Export, content: Content) -> Result<PathBuf, Failure> {
        self.add(Way::Fuse, export, content)
    }

    /// Takes over the export of an image, or makes it anew.
    pub(crate) fn take_over_image(&self, export: &Export, content: Content) -> Result<PathBuf, Failure> {
        match self.recover(Way::Fuse, export, content.clone())? {
            Some(path) => Ok(path),
            None => self.add_image(export, content),
        }
    }

    /// Ends the export of an image.
    pub(crate) fn remove_image(&self, export: &Export) -> Result<(), Failure> {
        self.remove(Way::Fuse, export)
    }

    /// Begins to answer, after everything was recovered.
    pub(crate) fn start(&self) -> Result<(), Failure> {
        if let Ok(fuse) = &self.fuse {
            fuse.start()?;
        }
        if let Ok(ublk) = &self.ublk {
            ublk.start()?;
        }
        Ok(())
    }

    /// Deletes devices that an earlier process left and that are of no disk. The others are of disks that could not be taken
    /// over: their guests wait for the next start. What cannot be deleted stays; it keeps nobody from being served.
    pub(crate) fn remove_leftovers(&self, is_nobodys: impl Fn(u32) -> bool) {
        let Ok(ublk) = &self.ublk else { return };
        let numbers = ublk.leftovers().unwrap_or_else(|error| {
            tracing::error!(%error, "what an earlier process left is not looked for");
            Vec::new()
        });
        for number in numbers {
            if !is_nobodys(number) {
                tracing::error!(
                    number,
                    "a block device that may be a disk's was not taken over; it stays for the next start"
                );
                continue;
            }
            tracing::warn!(number, "deleting a block device of no disk");
            if let Err(error) = ublk.remove_leftover(number) {
                tracing::error!(number, %error, "a block device of no disk cannot be deleted");
            }
        }
    }

    /// Exports whose requests wait for room on the host.
    pub(crate) fn stalled(&self) -> Vec<Stalled> {
        let stalled = |number, reason, since: SystemTime| {
            // A clock that was set back: it waits for no time yet.
            let waited = since.elapsed().unwrap_or_default();
            Stalled { number, reason, for_millis: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX) }
        };
        let of_ublk = self.ublk.iter().flat_map(UblkExporter::stalled);
        let of_fuse = self.fuse.iter().flat_map(FuseExporter::stalled);
        let of_ublk = of_ublk.map(|stall| stalled(stall.number, stall.reason, stall.since));
        of_ublk.chain(of_fuse.map(|stall| stalled(stall.number, stall.reason, stall.since))).collect()
    }

    /// How disks are exported, to be told.
    pub(crate) fn disks_view(&self) -> ExportView {
        let way = match self.disks_by {
            Way::Ublk => "ublk",
            Way::Fuse => "FUSE",
        };
        ExportView { way: way.to_owned(), reason: self.reason.clone() }
    }

    /// How images are exported, to be told.
    pub(crate) fn images_view(&self) -> ExportView {
        match &self.fuse {
            Ok(fuse) => ExportView {
                way: "FUSE".to_owned(),
                reason: format!("mounted at {}", fuse.mount().display()),
            },
            Err(reason) => ExportView { way: "none".to_owned(), reason: reason.clone() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aenv_storage::block_service::ErrorCode;

    #[test]
    fn a_mount_that_may_be_in_use_is_not_done_without() {
        let failed = || ExportError::Unavailable { way: "FUSE", reason: "for now".to_owned() };
        let failure = unless_held::<()>(Err(failed()), true).unwrap_err();
        assert_eq!(failure.code, ErrorCode::Unavailable);
        assert!(unless_held::<()>(Err(failed()), false).unwrap().unwrap_err().contains("for now"));
        assert_eq!(unless_held(Ok(7), true).unwrap(), Ok(7));
    }
}

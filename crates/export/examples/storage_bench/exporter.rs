//! The way to the kernel that is measured: its exporter, and for FUSE the process that holds the mount.

use aenv_export::fuse::{FuseExporter, holder};
use aenv_export::ublk::{Settings, UblkExporter};
use aenv_export::{ExportError, Exporter};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// Threads that answer.
const WORKERS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Way {
    Fuse,
    Ublk,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fuse => "FUSE",
            Self::Ublk => "ublk",
        }
    }
}

/// An exporter with what it stands on.
#[derive(Debug)]
pub(crate) struct Mounted {
    exporter: Option<Box<dyn Exporter>>,
    holder: Option<(Child, PathBuf)>,
}

impl Mounted {
    pub(crate) fn new(way: Way, directory: &Path) -> Result<Self> {
        if way == Way::Ublk {
            let exporter = UblkExporter::new(&Settings::new("bench"))?;
            return Ok(Self { exporter: Some(Box::new(exporter)), holder: None });
        }
        let directory = directory.join("fuse");
        std::fs::create_dir_all(mount(&directory))?;
        let own = std::env::current_exe().context("cannot find this program")?;
        let process =
            Command::new(own).arg("--hold").arg(&directory).spawn().context("cannot start the holder")?;
        let mut mounted = Self { exporter: None, holder: Some((process, socket(&directory))) };
        mounted.exporter =
            Some(Box::new(FuseExporter::connect(&socket(&directory), Duration::from_secs(10))?));
        Ok(mounted)
    }

    pub(crate) fn exporter(&self) -> &dyn Exporter {
        self.exporter.as_deref().expect("it is there until the drop")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(self.exporter.take());
        if let Some((process, socket)) = &mut self.holder {
            if holder::stop(socket, true).is_err() {
                // It ends with its process then.
                drop(process.kill());
            }
            drop(process.wait());
        }
    }
}

/// Is the holder of a mount below `directory`.
pub(crate) fn hold(directory: &Path) -> Result<(), ExportError> {
    let options =
        holder::HolderOptions { socket: socket(directory), mount: mount(directory), workers: WORKERS };
    holder::run(&options)
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("holder.sock")
}

fn mount(directory: &Path) -> PathBuf {
    directory.join("mount")
}

//! Where things of this checkout lie. Owns no state; makes directories, decides nothing.
//!
//! ```text
//! .aenv/cache/guest/    kernel, guest daemon, initramfs and root filesystem, made once
//! .aenv/cache/vmm/      programs of others that run the guests: Firecracker and its jailer
//! .aenv/cache/rig/      the nested production machine: kernel, initramfs, disks
//! .aenv/data/           data directory of the node (a mount of data.xfs where the checkout cannot reflink)
//! .aenv/log/            one log per stage, and the node's
//! .aenv/run/node.json   the node that `up` started
//! .aenv/env             settings for clients
//! .aenv/test/           everything of `test`; removed at its end
//! .aenv/venv, .aenv/js  installed SDKs
//! ```

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// The checkout this task runner was started in.
#[derive(Debug, Clone)]
pub(crate) struct Project {
    root: PathBuf,
}

impl Project {
    /// Finds the checkout: cargo says where the manifest of the task runner lies, else the working directory counts.
    pub(crate) fn find() -> Result<Self> {
        let start = match std::env::var_os("CARGO_MANIFEST_DIR") {
            Some(manifest_dir) => PathBuf::from(manifest_dir),
            None => std::env::current_dir().context("cannot read the working directory")?,
        };
        let root = start
            .ancestors()
            .find(|directory| directory.join("xtask/Cargo.toml").is_file())
            .with_context(|| format!("{} is not inside a checkout of the project", start.display()))?;
        Ok(Self { root: root.to_owned() })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Everything that tasks make, except the build output.
    pub(crate) fn work_dir(&self) -> PathBuf {
        self.root.join(".aenv")
    }

    /// Kernel, guest daemon, initramfs, root filesystem. Settable, so that several checkouts can share one.
    pub(crate) fn guest_dir(&self) -> PathBuf {
        match std::env::var_os("AENV_GUEST_DIR") {
            Some(path) => PathBuf::from(path),
            None => self.work_dir().join("cache/guest"),
        }
    }

    /// Firecracker and its jailer; beside the guest's files, and shared like them.
    pub(crate) fn vmm_dir(&self) -> PathBuf {
        self.guest_dir().with_file_name("vmm")
    }

    /// What the nested production machine is made of.
    pub(crate) fn rig_dir(&self) -> PathBuf {
        self.work_dir().join("cache/rig")
    }

    pub(crate) fn log_dir(&self) -> PathBuf {
        self.work_dir().join("log")
    }

    /// Settings for clients of the node that `up` started.
    pub(crate) fn env_file(&self) -> PathBuf {
        self.work_dir().join("env")
    }

    pub(crate) fn test_dir(&self) -> PathBuf {
        self.work_dir().join("test")
    }

    /// Where cargo puts what it builds.
    pub(crate) fn target_dir(&self) -> PathBuf {
        match std::env::var_os("CARGO_TARGET_DIR") {
            Some(path) => std::path::absolute(&path).unwrap_or_else(|_| PathBuf::from(path)),
            None => self.root.join("target"),
        }
    }

    /// A program built by this workspace.
    pub(crate) fn binary(&self, name: &str) -> PathBuf {
        self.target_dir().join("release").join(name)
    }
}

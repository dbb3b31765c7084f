//! Brings a root filesystem into a data directory as a template. Blocking, and only while no node runs there, except
//! when there is nothing to do.

use super::file::{TemplateFile, read_all, sha256};
use crate::data_dir::DataDir;
use crate::disk::clone_blocking;
use crate::random;
use crate::settings::{DiskCopies, StartError};
use aenv_protocol::ids::TemplateId;
use std::path::Path;

/// What an import did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Imported {
    /// There was no template of that name.
    New(TemplateId),
    /// There was one with another root filesystem or hardware; its captures will be made anew.
    Replaced(TemplateId),
    /// The template was there already.
    Unchanged(TemplateId),
}

/// Why a template was not imported; the one that was there before is untouched.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The name cannot be used.
    #[error(
        "template name {0:?}: must be 1 to 64 characters of a-z, 0-9, - and _, and begin with a letter or digit"
    )]
    Name(String),
    /// The virtual hardware cannot be built.
    #[error("template needs at least 1 virtual CPU and 64 MiB of memory, not {vcpus} and {memory_mib}")]
    Hardware {
        /// Virtual CPUs wished for.
        vcpus: u32,
        /// Memory wished for.
        memory_mib: u64,
    },
    /// The data directory cannot be used, or a node uses it.
    #[error(transparent)]
    DataDir(#[from] StartError),
    /// A file cannot be read or written.
    #[error("cannot {action} {path}: {reason}")]
    File {
        /// What was being done.
        action: &'static str,
        /// On what.
        path: String,
        /// Why not.
        reason: String,
    },
}

/// Makes `rootfs` the template `name` of the data directory. The same root filesystem and hardware again is no change.
///
/// # Errors
/// Typed; a template that was there before stays as it was.
pub fn import_template(
    data_dir: &Path,
    name: &str,
    vcpus: u32,
    memory_mib: u64,
    rootfs: &Path,
) -> Result<Imported, ImportError> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let first = name.bytes().next().is_some_and(allowed);
    if !first || name.len() > 64 || !name.bytes().all(|byte| allowed(byte) || byte == b'-' || byte == b'_') {
        return Err(ImportError::Name(name.to_owned()));
    }
    if vcpus == 0 || memory_mib < 64 {
        return Err(ImportError::Hardware { vcpus, memory_mib });
    }
    let dir = DataDir::open(data_dir)?;
    let rootfs_sha256 = sha256(rootfs).map_err(|error| failed("read", rootfs, error.to_string()))?;
    let before = read_all(&dir)
        .map_err(|error| failed("read", &dir.templates(), error.to_string()))?
        .into_iter()
        .find(|template| template.name == name);
    if let Some(before) = &before
        && (before.vcpus, before.memory_mib, &before.rootfs_sha256) == (vcpus, memory_mib, &rootfs_sha256)
    {
        return Ok(Imported::Unchanged(before.id.clone()));
    }
    let _lock = dir.lock()?;
    let id = match &before {
        Some(before) => before.id.clone(),
        None => random::template_id().map_err(|error| failed("name", &dir.templates(), error.to_string()))?,
    };
    let file = TemplateFile {
        id: id.clone(),
        name: name.to_owned(),
        vcpus,
        memory_mib,
        rootfs_sha256,
        created_at: jiff::Timestamp::now(),
    };
    store(&dir, &file, rootfs)?;
    Ok(if before.is_some() { Imported::Replaced(id) } else { Imported::New(id) })
}

fn store(dir: &DataDir, file: &TemplateFile, rootfs: &Path) -> Result<(), ImportError> {
    let directory = dir.template(&file.id);
    let at = |action, path: &Path| {
        let path = path.to_owned();
        move |error: std::io::Error| failed(action, &path, error.to_string())
    };
    std::fs::create_dir_all(&directory).map_err(at("make", &directory))?;
    let target = directory.join("rootfs.ext4");
    let incoming = directory.join("rootfs.ext4.new");
    if incoming.exists() {
        std::fs::remove_file(&incoming).map_err(at("remove", &incoming))?;
    }
    // The source often lies on another filesystem: a full copy is what an import means there.
    clone_blocking(rootfs, &incoming, DiskCopies::FullCopyAllowed)
        .map_err(|error| failed("copy to", &incoming, error.to_string()))?;
    std::fs::File::open(&incoming).and_then(|file| file.sync_all()).map_err(at("sync", &incoming))?;
    std::fs::rename(&incoming, &target).map_err(at("rename to", &target))?;
    file.write(&directory).map_err(at("describe", &directory))
}

fn failed(action: &'static str, path: &Path, reason: String) -> ImportError {
    ImportError::File { action, path: path.display().to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn import_is_idempotent_and_replaces_on_change() {
        let temporary = tempfile::tempdir().unwrap();
        let (data, rootfs) = (temporary.path().join("data"), temporary.path().join("rootfs"));
        std::fs::write(&rootfs, vec![1; 8192]).unwrap();
        let Imported::New(id) = import_template(&data, "base", 2, 512, &rootfs).unwrap() else {
            panic!("not new")
        };
        let lock = DataDir::open(&data).unwrap().lock().unwrap();
        assert_eq!(import_template(&data, "base", 2, 512, &rootfs).unwrap(), Imported::Unchanged(id.clone()));
        std::fs::write(&rootfs, vec![2; 8192]).unwrap();
        let error = import_template(&data, "base", 2, 512, &rootfs).unwrap_err();
        assert!(matches!(error, ImportError::DataDir(StartError::InUse(_))), "{error}");
        drop(lock);
        assert_eq!(import_template(&data, "base", 2, 512, &rootfs).unwrap(), Imported::Replaced(id.clone()));
        let stored = DataDir::open(&data).unwrap().template(&id).join("rootfs.ext4");
        assert_eq!(std::fs::read(stored).unwrap(), vec![2; 8192]);
    }

    #[test]
    fn bad_input_is_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let missing = temporary.path().join("missing");
        for name in ["", "../x", "A", "-x", "a:b"] {
            assert!(matches!(
                import_template(temporary.path(), name, 1, 512, &missing),
                Err(ImportError::Name(_))
            ));
        }
        assert!(matches!(
            import_template(temporary.path(), "a", 0, 512, &missing),
            Err(ImportError::Hardware { .. })
        ));
        assert!(matches!(
            import_template(temporary.path(), "a", 1, 512, &missing),
            Err(ImportError::File { .. })
        ));
    }
}

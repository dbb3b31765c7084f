//! Brings a root filesystem into a data directory as a template. Blocking, and only while no node runs there, except
//! when there is nothing to do.

use super::file::{TemplateFile, read_all, sha256};
use super::image::store_image;
use crate::data_dir::DataDir;
use crate::random;
use crate::settings::StartError;
use aenv_protocol::ids::TemplateId;
use std::path::Path;

/// Largest root filesystem: what every disk of the block service has room for.
const MOST_DISK_MIB: u64 = 256 << 10;

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
    /// The root filesystem cannot be given this size.
    #[error(
        "disk size {disk_mib} MiB: must be at least that of the image, {image_mib} MiB, and at most {MOST_DISK_MIB} MiB"
    )]
    Disk {
        /// Size wished for.
        disk_mib: u64,
        /// Size of the image.
        image_mib: u64,
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

/// Makes `rootfs` the template `name` of the data directory. The same root filesystem and hardware again is no change. The
/// root filesystem of its sandboxes is grown to `disk_mib` MiB; without it, it stays as it is.
///
/// # Errors
/// Typed; a template that was there before stays as it was.
pub fn import_template(
    data_dir: &Path,
    name: &str,
    vcpus: u32,
    memory_mib: u64,
    disk_mib: Option<u64>,
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
    let image_bytes =
        std::fs::metadata(rootfs).map_err(|error| failed("read", rootfs, error.to_string()))?.len();
    let image_mib = image_bytes.div_ceil(1 << 20);
    if let Some(disk_mib) = disk_mib.filter(|disk_mib| !(image_mib..=MOST_DISK_MIB).contains(disk_mib)) {
        return Err(ImportError::Disk { disk_mib, image_mib });
    }
    let dir = DataDir::open(data_dir)?;
    let rootfs_sha256 = sha256(rootfs).map_err(|error| failed("read", rootfs, error.to_string()))?;
    let before = read_all(&dir)
        .map_err(|error| failed("read", &dir.templates(), error.to_string()))?
        .into_iter()
        .find(|template| template.name == name);
    if let Some(before) = &before
        && (before.vcpus, before.memory_mib, before.disk_mib) == (vcpus, memory_mib, disk_mib)
        && before.rootfs_sha256 == rootfs_sha256
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
        disk_mib,
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
    store_image(dir, &file.rootfs_sha256, rootfs)
        .map_err(|error| failed("store", rootfs, error.to_string()))?;
    file.write(&directory).map_err(at("describe", &directory))
}

fn failed(action: &'static str, path: &Path, reason: String) -> ImportError {
    ImportError::File { action, path: path.display().to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::{ImageForm, find_image};

    #[test]
    fn import_is_idempotent_and_replaces_on_change() {
        let temporary = tempfile::tempdir().unwrap();
        let (data, rootfs) = (temporary.path().join("data"), temporary.path().join("rootfs"));
        std::fs::write(&rootfs, vec![1; 8192]).unwrap();
        let Imported::New(id) = import_template(&data, "base", 2, 512, None, &rootfs).unwrap() else {
            panic!("not new")
        };
        let lock = DataDir::open(&data).unwrap().lock().unwrap();
        assert_eq!(
            import_template(&data, "base", 2, 512, None, &rootfs).unwrap(),
            Imported::Unchanged(id.clone())
        );
        std::fs::write(&rootfs, vec![2; 8192]).unwrap();
        let error = import_template(&data, "base", 2, 512, None, &rootfs).unwrap_err();
        assert!(matches!(error, ImportError::DataDir(StartError::InUse(_))), "{error}");
        drop(lock);
        assert_eq!(
            import_template(&data, "base", 2, 512, None, &rootfs).unwrap(),
            Imported::Replaced(id.clone())
        );
        let dir = DataDir::open(&data).unwrap();
        let file = read_all(&dir).unwrap().remove(0);
        find_image(&dir, &file, ImageForm::Flat).unwrap();
        assert_eq!(std::fs::read(dir.image(&file.rootfs_sha256)).unwrap(), vec![2; 8192]);
        let larger = import_template(&data, "base", 2, 512, Some(4), &rootfs).unwrap();
        assert_eq!(larger, Imported::Replaced(id));
        assert_eq!(read_all(&dir).unwrap()[0].disk_mib, Some(4));
        for wrong in [0, (256 << 10) + 1] {
            let error = import_template(&data, "base", 2, 512, Some(wrong), &rootfs).unwrap_err();
            assert!(matches!(error, ImportError::Disk { image_mib: 1, .. }), "{error}");
        }
    }

    #[test]
    fn bad_input_is_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let missing = temporary.path().join("missing");
        for name in ["", "../x", "A", "-x", "a:b"] {
            assert!(matches!(
                import_template(temporary.path(), name, 1, 512, None, &missing),
                Err(ImportError::Name(_))
            ));
        }
        assert!(matches!(
            import_template(temporary.path(), "a", 0, 512, None, &missing),
            Err(ImportError::Hardware { .. })
        ));
        assert!(matches!(
            import_template(temporary.path(), "a", 1, 512, None, &missing),
            Err(ImportError::File { .. })
        ));
    }
}

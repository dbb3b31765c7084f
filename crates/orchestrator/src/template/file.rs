//! Templates and captures as files. Blocking; used at start, at import and after a preparation.
//!
//! A capture's key is the SHA-256 over everything its memory image is bound to: the VMM's identity, the kernel, the
//! initramfs, the root filesystem and the virtual hardware. A capture of another key is never restored.

use crate::data_dir::{DataDir, write_durably};
use crate::disks::Base;
use crate::vm::Origin;
use aenv_protocol::ids::TemplateId;
use aenv_vmm::{CaptureFiles, CaptureReport, Identity};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Raised when captures made by earlier versions must not be used any more.
/// Raised too when the machine that a VMM driver builds, or what it tells the guest's kernel, changes: 2 since guests
/// restart by a triple fault; 3 since the root filesystem is grown.
const CAPTURE_VERSION: u32 = 3;

/// `template.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TemplateFile {
    /// Names its directory.
    pub(crate) id: TemplateId,
    /// Unique on this node.
    pub(crate) name: String,
    /// Virtual CPUs of its sandboxes.
    pub(crate) vcpus: u32,
    /// Memory of its sandboxes.
    pub(crate) memory_mib: u64,
    /// Of its image, in hex, by which that is found.
    pub(crate) rootfs_sha256: String,
    /// Size of the root filesystem of its sandboxes; that of the image where it was not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disk_mib: Option<u64>,
    /// When it was imported.
    pub(crate) created_at: jiff::Timestamp,
}

impl TemplateFile {
    /// The template in `dir`; none when it was never finished.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>> {
        match std::fs::read(dir.join("template.json")) {
            Ok(content) => Ok(Some(serde_json::from_slice(&content)?)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        write_durably(&dir.join("template.json"), &serde_json::to_vec_pretty(self)?)
    }
}

/// Every finished template of a data directory.
pub(crate) fn read_all(dir: &DataDir) -> Result<Vec<TemplateFile>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir.templates())? {
        let path = entry?.path();
        let template = TemplateFile::read(&path).map_err(|error| {
            Error::new(error.kind(), format!("{}: {error}", path.join("template.json").display()))
        })?;
        found.extend(template);
    }
    Ok(found)
}

/// `capture.json`: proof that a capture is whole, and what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CaptureFile {
    pub(super) key: String,
    pub(super) vmm: Identity,
    pub(super) disk: Base,
    pub(super) created_at: jiff::Timestamp,
    pub(super) report: CaptureReport,
}

/// A whole capture on disk.
#[derive(Debug, Clone)]
pub(crate) struct Capture {
    /// What it is bound to.
    pub(crate) key: String,
    /// Memory and devices.
    pub(crate) files: CaptureFiles,
    /// The disk as it was at the same moment.
    pub(crate) disk: Base,
}

impl Capture {
    /// What a VM is made of that goes on from it.
    pub(crate) fn origin(&self) -> Origin<'_> {
        Origin::Capture { files: &self.files, disk: &self.disk }
    }

    /// Where the capture of `key` lies or is to lie.
    pub(super) fn directory(template_dir: &Path, key: &str) -> PathBuf {
        template_dir.join("captures").join(key)
    }

    /// Memory and devices of the capture in `directory`.
    pub(super) fn files_in(directory: &Path) -> CaptureFiles {
        CaptureFiles { memory: directory.join("memory"), state: directory.join("state") }
    }

    /// The whole capture of `key` of a template in the data directory `data`, if there is one.
    pub(crate) fn find(data: &Path, template_dir: &Path, key: &str) -> Result<Option<Self>> {
        let directory = Self::directory(template_dir, key);
        match std::fs::read(directory.join("capture.json")) {
            Ok(content) => {
                let file: CaptureFile = serde_json::from_slice(&content)?;
                let (key, files) = (key.to_owned(), Self::files_in(&directory));
                let disk = file.disk.resolve(&directory, data);
                Ok((file.key == key).then_some(Self { key, files, disk }))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes the capture whole, whose disk is kept already: its files first, its description last.
    pub(super) fn finish(directory: &Path, file: &CaptureFile) -> Result<()> {
        let files = Self::files_in(directory);
        for path in [&files.memory, &files.state] {
            File::open(path)?.sync_all()?;
        }
        write_durably(&directory.join("capture.json"), &serde_json::to_vec_pretty(file)?)
    }
}

/// The memory of the capture of `key`.
pub(crate) fn memory_of_capture(template_dir: &Path, key: &str) -> PathBuf {
    Capture::files_in(&Capture::directory(template_dir, key)).memory
}

/// The key of the capture that a file is the memory of, if it is one of a capture.
pub(crate) fn key_of_memory(memory: &Path) -> Option<String> {
    let directory = memory.parent()?;
    let is_of_capture = directory.parent()?.file_name()? == "captures" && memory.file_name()? == "memory";
    is_of_capture.then(|| directory.file_name().map(|key| key.to_string_lossy().into_owned()))?
}

/// Keys of all captures of a template, unfinished ones included.
pub(crate) fn capture_keys(template_dir: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(template_dir.join("captures")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Removes the captures of a template that are neither in `used` nor the present one; returns their keys.
pub(crate) fn remove_stale_captures(
    template_dir: &Path,
    present: &str,
    used: &BTreeSet<String>,
) -> Result<Vec<String>> {
    let mut removed = capture_keys(template_dir)?;
    removed.retain(|key| key != present && !used.contains(key));
    for key in &removed {
        std::fs::remove_dir_all(Capture::directory(template_dir, key))?;
    }
    Ok(removed)
}

/// SHA-256 of a file, in hex.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path)
        .map_err(|error| Error::new(error.kind(), format!("cannot open {}: {error}", path.display())))?;
    let mut digest = Sha256::new();
    std::io::copy(&mut file, &mut digest)?;
    Ok(hex::encode(digest.finalize()))
}

/// What a capture of `template` is bound to on this node.
pub(crate) fn capture_key(
    template: &TemplateFile,
    vmm: &Identity,
    disks: &str,
    kernel_sha256: &str,
    initramfs_sha256: &str,
) -> Result<String> {
    let bound = serde_json::to_vec(&serde_json::json!({
        "version": CAPTURE_VERSION,
        "vmm": vmm,
        "disks": disks,
        "kernel": kernel_sha256,
        "initramfs": initramfs_sha256,
        "rootfs": template.rootfs_sha256,
        "vcpus": template.vcpus,
        "memoryMib": template.memory_mib,
        "diskMib": template.disk_mib,
    }))?;
    Ok(hex::encode(&Sha256::digest(bound)[..16]))
}

/// Bytes the files below `dir` occupy.
pub(super) fn stored_bytes(dir: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        total += if metadata.is_dir() { stored_bytes(&entry.path())? } else { metadata.blocks() * 512 };
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aenv_storage::block_service::LayerRef;
    use aenv_vmm::CaptureBase;

    fn template() -> TemplateFile {
        TemplateFile {
            id: "t1".parse().unwrap(),
            name: "base".to_owned(),
            vcpus: 2,
            memory_mib: 512,
            rootfs_sha256: "r".to_owned(),
            disk_mib: None,
            created_at: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    fn identity() -> Identity {
        Identity {
            driver: "fake".to_owned(),
            version: "1".to_owned(),
            accelerator: "tcg".to_owned(),
            cpu_model: "max".to_owned(),
        }
    }

    #[test]
    fn the_key_changes_with_everything_a_capture_is_bound_to() {
        let key = |template: &TemplateFile, vmm: &Identity, kernel: &str, initramfs: &str| {
            capture_key(template, vmm, "d", kernel, initramfs).unwrap()
        };
        let base = key(&template(), &identity(), "k", "i");
        assert_eq!(
            base,
            key(&TemplateFile { name: "other".to_owned(), ..template() }, &identity(), "k", "i")
        );
        let others = [
            key(&template(), &Identity { cpu_model: "other".to_owned(), ..identity() }, "k", "i"),
            key(&template(), &identity(), "other", "i"),
            key(&template(), &identity(), "k", "other"),
            key(&TemplateFile { vcpus: 4, ..template() }, &identity(), "k", "i"),
            key(&TemplateFile { memory_mib: 4, ..template() }, &identity(), "k", "i"),
            key(&TemplateFile { disk_mib: Some(4), ..template() }, &identity(), "k", "i"),
            capture_key(&template(), &identity(), "other", "k", "i").unwrap(),
            key(&TemplateFile { rootfs_sha256: "other".to_owned(), ..template() }, &identity(), "k", "i"),
        ];
        let all: BTreeSet<_> = others.iter().chain([&base]).collect();
        assert_eq!(all.len(), 9);
    }

    #[test]
    fn only_unused_captures_of_other_keys_are_removed() {
        let temporary = tempfile::tempdir().unwrap();
        for key in ["present", "used", "stale"] {
            std::fs::create_dir_all(Capture::directory(temporary.path(), key)).unwrap();
        }
        let used = BTreeSet::from(["used".to_owned()]);
        assert_eq!(remove_stale_captures(temporary.path(), "present", &used).unwrap(), ["stale"]);
        assert!(Capture::directory(temporary.path(), "used").exists());
        assert_eq!(
            Capture::find(temporary.path(), temporary.path(), "present").unwrap().map(|_| ()),
            None,
            "it has no capture.json"
        );
    }

    #[test]
    fn a_capture_is_found_where_the_data_directory_was_moved_to() {
        let temporary = tempfile::tempdir().unwrap();
        let (old, new) = (temporary.path().join("old"), temporary.path().join("new"));
        let directory = Capture::directory(&old.join("templates/t1"), "k");
        std::fs::create_dir_all(&directory).unwrap();
        let layers = |data: &Path| {
            let top = LayerRef::Top { disk: "ivm".parse().unwrap(), top: "t".parse().unwrap() };
            Base::Layers(vec![LayerRef::Raw { raw: data.join("storage/layers/r.raw") }, top])
        };
        let whole = |disk: Base| CaptureFile {
            key: "k".to_owned(),
            vmm: identity(),
            disk,
            created_at: jiff::Timestamp::UNIX_EPOCH,
            report: CaptureReport { base: CaptureBase::Nothing, ..CaptureReport::default() },
        };
        let write = |file: &CaptureFile| {
            std::fs::write(directory.join("capture.json"), serde_json::to_vec(file).unwrap()).unwrap();
        };
        let found = |data: &Path| Capture::find(data, &data.join("templates/t1"), "k").unwrap().unwrap().disk;
        // As earlier versions wrote it.
        write(&whole(layers(&old)));
        assert_eq!(found(&old), layers(&old));
        write(&whole(layers(&old).relative_to(&directory, &old)));
        assert_eq!(found(&old), layers(&old));
        std::fs::rename(&old, &new).unwrap();
        assert_eq!(found(&new), layers(&new));
    }

    #[test]
    fn the_format_of_template_json_is_pinned() {
        let text = serde_json::to_string(&template()).unwrap();
        assert_eq!(
            text,
            r#"{"id":"t1","name":"base","vcpus":2,"memoryMib":512,"rootfsSha256":"r","createdAt":"1970-01-01T00:00:00Z"}"#
        );
        let sized = TemplateFile { disk_mib: Some(4096), ..template() };
        let text = serde_json::to_string(&sized).unwrap();
        assert!(text.contains(r#""rootfsSha256":"r","diskMib":4096,"#), "{text}");
        assert_eq!(serde_json::from_str::<TemplateFile>(&text).unwrap(), sized);
    }
}

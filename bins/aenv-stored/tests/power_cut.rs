//! What was said to be durable is there after a power cut: on a file system whose device is copied while it is mounted, so that
//! the copy has what was written to the device, and nothing that only the kernel remembers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_storage::block_service::{CreateImage, Name};
use daemon::{Direct, Stored, content, name};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the device.
const BYTES: u64 = 256 << 20;

/// A file system in a file.
struct Host(tempfile::TempDir);

/// Something mounted, unmounted when dropped.
struct Mounted(PathBuf);

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        File::create(host.device()).unwrap().set_len(BYTES).unwrap();
        run("mkfs.ext4", &["-q", host.device().to_str().unwrap()]);
        host
    }

    fn device(&self) -> PathBuf {
        self.0.path().join("device")
    }

    fn mount(&self, device: &Path, place: &str) -> Mounted {
        let place = self.0.path().join(place);
        std::fs::create_dir_all(&place).unwrap();
        // Nothing is written before somebody asks for it, and a renamed file is not taken for one that was.
        let options = "loop,noauto_da_alloc,commit=600";
        run("mount", &["-o", options, device.to_str().unwrap(), place.to_str().unwrap()]);
        Mounted(place)
    }

    /// What the records of a directory would say after a power cut now: the stage of each, if it can be read.
    fn after_power_cut(&self, records: &[&str]) -> Vec<Option<String>> {
        let copy = self.0.path().join("copy");
        run("cp", &["--sparse=always", self.device().to_str().unwrap(), copy.to_str().unwrap()]);
        let mounted = self.mount(&copy, "afterwards");
        let stage = |record: &&str| {
            let bytes = std::fs::read(mounted.0.join("storage").join(record)).ok()?;
            let record: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
            record["stage"].as_str().map(str::to_owned)
        };
        records.iter().map(stage).collect()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.0).status().unwrap();
        assert!(unmounted.success() || std::thread::panicking());
    }
}

/// A disk that was written and sealed, and never flushed by its guest; its layers.
async fn sealed(stored: &Stored, disk: &str) -> Vec<aenv_storage::block_service::LayerRef> {
    let path = stored.disk(disk, &[]).await.path.unwrap();
    Direct::open(&path).write(1, &content(1, 1)).unwrap();
    stored.client.seal_disk(&name(disk), None).await.unwrap().layers
}

fn stages(expected: &[&str]) -> Vec<Option<String>> {
    expected.iter().map(|stage| Some((*stage).to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_to_be_durable_is_found_again_after_a_power_cut() {
    let host = Host::new();
    let mounted = host.mount(&host.device(), "mounted");
    let stored = Stored::start_on(&mounted.0).await;
    let make_durable = async |disk: &Name| stored.client.make_disk_durable(disk).await.unwrap();

    let parent = sealed(&stored, "parent").await;
    stored.disk("child", &parent).await;
    assert_eq!(host.after_power_cut(&["disks/child/record.json"]), [None]);
    stored.client.seal_disk(&name("child"), None).await.unwrap();
    make_durable(&name("child")).await;
    let records = ["disks/child/record.json", "disks/parent/record.json"];
    assert_eq!(host.after_power_cut(&records), stages(&["ready", "ready"]));

    let captured = sealed(&stored, "captured").await;
    let create = CreateImage { name: name("capture"), layers: captured, owner: 0, exported: false };
    stored.client.create_image(&create).await.unwrap();
    let records = ["images/capture.json", "disks/captured/record.json"];
    assert_eq!(host.after_power_cut(&records), stages(&["ready", "ready"]));

    // Nothing of a disk is removed before it is known to be kept.
    stored.client.delete_disk(&name("captured")).await.unwrap();
    stored.client.delete_disk(&name("parent")).await.unwrap();
    let records = ["disks/captured/record.json", "disks/parent/record.json"];
    assert_eq!(host.after_power_cut(&records), stages(&["kept", "kept"]));
    drop(stored);
    drop(mounted);
}

//! A data directory that is somewhere else at the next start.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_storage::block_service::{CollectGarbage, CreateImage, DiskState, LayerRef};
use daemon::{Direct, Stored, content, name};
use std::path::Path;

/// Changes a record by hand.
fn edit(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut record = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut record);
    std::fs::write(path, record.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_directory_is_moved_with_all_that_is_in_it() {
    let place = tempfile::tempdir().unwrap();
    let (old, new) = (place.path().join("old"), place.path().join("new"));
    std::fs::create_dir(&old).unwrap();
    let stored = Stored::start_on(&old).await;
    let layers = [stored.raw_layer("raw"), stored.committed_layer("file")];
    let parent = stored.disk("parent", &layers).await;
    Direct::open(&parent.path.unwrap()).write(1, &content(1, 7)).unwrap();
    let sealed = stored.client.seal_disk(&parent.name, None).await.unwrap().layers;
    stored.disk("child", &sealed).await;
    let image = |exported| CreateImage {
        name: name(if exported { "mapped" } else { "kept" }),
        layers: sealed.clone(),
        owner: 0,
        exported,
    };
    stored.client.create_image(&image(true)).await.unwrap();
    stored.client.create_image(&image(false)).await.unwrap();

    // Once as it is, once with a record of an earlier version, which names everything absolutely.
    for is_old_form in [false, true] {
        stored.kill();
        let (from, to) = if is_old_form { (&new, &old) } else { (&old, &new) };
        std::fs::rename(from, to).unwrap();
        std::fs::remove_file(stored.data()).unwrap();
        std::os::unix::fs::symlink(to, stored.data()).unwrap();
        if is_old_form {
            let data = to.canonicalize().unwrap();
            edit(&stored.disks().join("child/record.json"), |record| {
                record["version"] = 1.into();
                for (layer, form) in [(0, "raw"), (1, "file")] {
                    let relative = record["layers"][layer][form].as_str().unwrap();
                    record["layers"][layer][form] = data.join(relative).to_str().unwrap().into();
                }
            });
        }
        stored.restart();
        assert_eq!(stored.client.status().await.unwrap().failed, []);
        let child = stored.client.disk(&name("child")).await.unwrap();
        let inside = |layer: &LayerRef| match layer {
            LayerRef::Raw { raw: path } | LayerRef::File { file: path } => {
                path.starts_with(to.canonicalize().unwrap())
            }
            LayerRef::Top { .. } => true,
        };
        assert!(child.layers.iter().all(inside), "{:?}", child.layers);
        let mut child = Direct::open(&child.path.unwrap());
        assert_eq!(child.read(1).unwrap(), content(1, 7));
        assert_eq!(child.read(2).unwrap(), content(2, 0));
        for image in ["mapped", "kept"] {
            assert_eq!(stored.client.image(&name(image)).await.unwrap().state, DiskState::Ready);
        }
        // What is needed is known.
        let collected = stored.client.collect_garbage(&CollectGarbage::default()).await.unwrap();
        assert_eq!(collected.layers, 0);
    }
}

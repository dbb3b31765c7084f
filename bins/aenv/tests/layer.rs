//! `aenv layer …` on real files: images that come back byte for byte, layers of overlaybd's tools, and damage.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use fake::{Ended, bare_command, ended, on_terminal};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// SHA-256 of the image of both layers of the samples, 1 GiB.
const MERGED: &str = "9288aabbd5381aae69084df4458806e0899b3c7d87ef4e3f160a51ecfe7bc685";

fn run(arguments: &[&str]) -> Ended {
    ended(bare_command([&["layer"], arguments].concat()).output().unwrap())
}

fn json_of(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/storage/tests/golden/overlaybd").join(name)
}

fn digest(path: &Path) -> String {
    let mut file = File::open(path).unwrap();
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).unwrap() {
            0 => return hex::encode(digest.finalize()),
            count => digest.update(&buffer[..count]),
        }
    }
}

/// A sparse image of 64 MiB with a little text and noise.
fn raw_image(path: &Path) {
    let file = File::create(path).unwrap();
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&b"a text that can be compressed ".repeat(3000), 10_000).unwrap();
    let noise: Vec<u8> =
        (0..200_000_u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    file.write_all_at(&noise, (40 << 20) + 512).unwrap();
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn an_image_comes_back_from_every_form_of_a_layer() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, layer, back) =
        (directory.path().join("raw"), directory.path().join("layer"), directory.path().join("back"));
    raw_image(&raw);
    let expected = digest(&raw);
    for compression in ["none", "lz4", "zstd"] {
        for tar in [false, true] {
            let mut arguments =
                vec!["import", text(&raw), "--output", text(&layer), "--compression", compression];
            arguments.extend(tar.then_some("--tar"));
            let imported = run(&arguments);
            assert_eq!(imported.code, Some(0), "{imported:?}");
            assert_eq!(json_of(&imported)["virtualBytes"], 64 << 20);

            let info = json_of(&run(&["info", text(&layer)]));
            let found = info[0]["compression"]["algorithm"].as_str().unwrap_or("none");
            assert_eq!((found, info[0]["inTar"].as_bool()), (compression, Some(tar)));
            assert_eq!(info[0]["form"], "committed");
            assert_eq!(info[0]["storedBytes"].as_u64(), Some(layer.metadata().unwrap().len()));
            assert!(layer.metadata().unwrap().len() < 1 << 20);

            let verified = run(&["verify", text(&layer)]);
            assert_eq!((verified.code, json_of(&verified)[0]["ok"].as_bool()), (Some(0), Some(true)));
            let exported = run(&["export", "--output", text(&back), text(&layer)]);
            assert_eq!(exported.code, Some(0), "{exported:?}");
            assert_eq!(digest(&back), expected, "{compression} {tar}");
            assert!(back.metadata().unwrap().blocks() * 512 < 1 << 20, "holes are kept");
        }
    }
    assert_eq!(names(directory.path()), ["back", "layer", "raw"]);
}

#[test]
fn a_stack_of_overlaybd_is_exported_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("raw.img");
    let layers = [golden("layer1.zstd64k.zfile"), golden("layer2.overlaybd.commit")];
    let exported = run(&["export", "--output", text(&output), text(&layers[0]), text(&layers[1])]);
    assert_eq!(exported.code, Some(0), "{exported:?}");
    assert_eq!(json_of(&exported)["bytes"], 1 << 30);
    assert_eq!(digest(&output), MERGED);
}

#[test]
fn what_a_layer_says_of_itself_is_a_table_on_a_terminal() {
    let shown = on_terminal(&bare_command(["layer", "info", text(&golden("layer2.overlaybd.commit"))]));
    assert_eq!(shown.code, Some(0), "{shown:?}");
    for expected in ["FILE", "PARENT", "committed, in tar", "lz4 in 4 KiB", "1.00 GiB"] {
        assert!(shown.stdout.contains(expected), "{expected}: {}", shown.stdout);
    }
    let described = json_of(&run(&["info", text(&golden("layer2.lsmt"))]));
    assert_eq!(described[0]["uuid"], "22222222-2222-2222-2222-222222222222");
    assert_eq!(described[0]["parent"], "11111111-1111-1111-1111-111111111111");
}

#[test]
fn damage_is_named_and_leaves_no_output() {
    let directory = tempfile::tempdir().unwrap();
    let (damaged, output) = (directory.path().join("damaged"), directory.path().join("out.img"));
    let mut bytes = std::fs::read(golden("layer1.lz4.zfile")).unwrap();
    bytes[100_000] ^= 1;
    std::fs::write(&damaged, &bytes).unwrap();
    let whole = golden("layer2.lsmt");

    let verified = run(&["verify", text(&whole), text(&damaged)]);
    assert_eq!(verified.code, Some(1), "{verified:?}");
    let judged = json_of(&verified);
    assert_eq!((judged[0]["ok"].as_bool(), judged[1]["ok"].as_bool()), (Some(true), Some(false)));
    let told = judged[1]["error"].as_str().unwrap();
    assert!(told.contains(text(&damaged)) && told.contains("record"), "{told}");

    for before in [None, Some(b"kept")] {
        if let Some(before) = before {
            std::fs::write(&output, before).unwrap();
        }
        let exported = run(&["export", "--output", text(&output), text(&damaged), text(&whole)]);
        assert_eq!(exported.code, Some(1), "{exported:?}");
        assert!(exported.stderr.contains("record") && exported.stderr.contains("damaged"), "{exported:?}");
        assert_eq!(std::fs::read(&output).ok().as_deref(), before.map(|before| &before[..]));
    }
    assert_eq!(names(directory.path()), ["damaged", "out.img"]);
}

#[test]
fn damage_that_a_layer_above_hides_is_found_too() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    raw_image(&at("raw"));
    for name in ["lower", "upper"] {
        let imported = run(&["import", text(&at("raw")), "-o", text(&at(name)), "--compression", "zstd"]);
        assert_eq!(imported.code, Some(0), "{imported:?}");
    }
    let mut bytes = std::fs::read(at("lower")).unwrap();
    bytes[1000] ^= 4;
    std::fs::write(at("lower"), bytes).unwrap();
    let exported = run(&["export", "-o", text(&at("out")), text(&at("lower")), text(&at("upper"))]);
    assert_eq!(exported.code, Some(1), "{exported:?}");
    assert!(!at("out").exists());
}

#[test]
fn layers_that_were_made_in_another_order_are_not_stacked_unasked() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("raw.img");
    let (lower, upper) = (golden("layer1.lz4.zfile"), golden("layer2.lsmt"));
    let wrong = ["export", "--output", text(&output), text(&upper), text(&lower)];
    let refused = run(&wrong);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    for expected in ["layer1.lz4.zfile", "layer2.lsmt", "from the bottom to the top", "--any-order"] {
        assert!(refused.stderr.contains(expected), "{expected}: {refused:?}");
    }
    assert_eq!(names(directory.path()), Vec::<String>::new());
    let done = run(&[&wrong[..], &["--any-order"]].concat());
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_ne!(digest(&output), MERGED);
}

#[test]
fn a_size_that_cannot_be_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    let (layer, output) = (directory.path().join("layer"), directory.path().join("raw.img"));
    std::fs::copy(golden("layer2.lsmt"), &layer).unwrap();
    let file = File::options().write(true).open(&layer).unwrap();
    let trailer = file.metadata().unwrap().len() - 4096;
    for (size, told) in [(4096_u64, "ends at sector 8"), (0, "0 bytes")] {
        file.write_all_at(&size.to_le_bytes(), trailer + 48).unwrap();
        let verified = run(&["verify", text(&layer)]);
        assert_eq!(verified.code, Some(1), "{verified:?}");
        let error = json_of(&verified)[0]["error"].as_str().unwrap().to_owned();
        assert!(error.contains("is damaged") && error.contains(told), "{error}");
        let exported = run(&["export", "-o", text(&output), text(&layer)]);
        assert_eq!((exported.code, output.exists()), (Some(1), false), "{exported:?}");
    }
}

#[test]
fn what_is_read_is_never_written_over() {
    let directory = tempfile::tempdir().unwrap();
    let (layer, link) = (directory.path().join("layer"), directory.path().join("link"));
    std::fs::copy(golden("layer2.lsmt"), &layer).unwrap();
    std::os::unix::fs::symlink(&layer, &link).unwrap();
    let before = digest(&layer);
    let whole = golden("layer1.lz4.zfile");
    for arguments in [
        ["export", "-o", text(&link), text(&whole), text(&layer)].as_slice(),
        &["import", "-o", text(&layer), text(&link)],
    ] {
        let refused = run(arguments);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.stderr.contains("one of the files that are read"), "{refused:?}");
        assert_eq!(digest(&layer), before);
    }
}

#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let refused = run(&["info", text(&pipe)]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("not a regular file"), "{refused:?}");
}

#[test]
fn what_is_no_layer_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let text_file = directory.path().join("notes.txt");
    std::fs::write(&text_file, "no layer").unwrap();
    let whole = golden("layer2.lsmt");
    let missing = directory.path().join("missing");
    let info = run(&["info", text(&text_file), text(&missing), text(&whole)]);
    assert_eq!(info.code, Some(1), "{info:?}");
    assert_eq!(json_of(&info).as_array().map(Vec::len), Some(1), "the good one is shown");
    assert!(info.stderr.contains("notes.txt") && info.stderr.contains("missing"), "{}", info.stderr);
    for file in [&text_file, &missing, directory.path()] as [&Path; 3] {
        assert_eq!(run(&["verify", text(file)]).code, Some(1), "{file:?}");
    }
    let no_directory = run(&["export", "-o", text(&missing.join("raw")), text(&whole)]);
    assert_eq!(no_directory.code, Some(1));
    assert!(no_directory.stderr.contains("make its directory first"), "{}", no_directory.stderr);
    assert_eq!(run(&["export", text(&whole)]).code, Some(2), "an output is needed");
    assert_eq!(names(directory.path()), ["notes.txt"]);
}

//! What only Firecracker does: its guest's console, its templates, its way to end. Needs `AENV_TEST_DRIVER=firecracker` and
//! KVM, as in the nested machine; elsewhere each test prints a line and does nothing.

use super::host::{self, Host, Kind, Slot};
use super::{PATIENCE, booted, captured, killed, milliseconds, restored};
use aenv_vmm::RateLimits;
use aenv_vmm::firecracker::{CpuTemplate, Settings};
use aenv_vmm::{CaptureBase, ExitCause, VmmError};
use std::fs::OpenOptions;
use std::time::{Duration, Instant};

/// In the jail: what the jailed user can write,
pub(crate) const MAY_WRITE: &[&str] = &["/disk", "/api.socket", "/firecracker", "/firecracker.pid"];
/// and all there is.
pub(crate) const SEES: &[&str] = &[
    "/disk",
    "/kernel",
    "/initramfs",
    "/capture",
    "/api.socket",
    "/firecracker",
    "/firecracker.pid",
    "/dev",
    "/run",
];

fn is_chosen() -> bool {
    let chosen = Kind::chosen() == Kind::Firecracker;
    if !chosen {
        assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
        println!("SKIPPED, Firecracker is NOT tested: AENV_TEST_DRIVER is not firecracker");
    }
    chosen
}

fn log_bytes(slot: &Slot) -> u64 {
    let size = |name: &str| {
        std::fs::metadata(slot.placement().run_dir.join(name)).map_or(0, |metadata| metadata.len())
    };
    size("vmm.log") + size("vmm.log.old")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_the_console_that_nobody_reads_stops_nobody() {
    if !is_chosen() {
        return;
    }
    let host = Host::new("o").await;
    let slot = host.slot_with_shell("one");
    let machine = booted(&host, &slot).await;
    let record = machine.record().clone();
    drop(machine);
    // A guest prints slowly where everything is emulated: so the pipe is made to be full soon.
    let pipe = OpenOptions::new().read(true).write(true).open(slot.placement().run_dir.join("console.pipe"));
    let pipe = pipe.unwrap();
    rustix::pipe::fcntl_setpipe_size(&pipe, 4096).unwrap();
    let before = log_bytes(&slot);
    let started = Instant::now();
    let line = "x".repeat(1000);
    let flood = format!("for i in 1 2 3 4 5 6 7 8; do echo {line}; done > /dev/ttyS0; echo finished");
    let said = decoded(&slot.shell(&flood, PATIENCE));
    println!("flood: 8000 characters in {:.0} ms", milliseconds(started));
    assert!(said.contains("finished"), "the guest waits for a reader: {said}");
    assert_eq!(log_bytes(&slot), before, "somebody reads the console");
    drop(pipe);
    let machine = host.driver.adopt(&host.spec, &record, slot.placement()).await.unwrap();
    let started = Instant::now();
    while log_bytes(&slot) == before {
        assert!(started.elapsed() < PATIENCE, "the next reader gets nothing");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(log_bytes(&slot) <= before + 4096, "what did not fit was kept");
    slot.answer(PATIENCE);
    killed(&*machine, &slot).await;
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_of_a_guest_to_go_down_is_told_apart_also_after_an_adoption() {
    if !is_chosen() {
        return;
    }
    let host = Host::new("w").await;
    let slot = host.slot_with_shell("one");
    for (key, expected, words) in [
        ("o", ExitCause::GuestShutdown, "halted"),
        ("b", ExitCause::GuestShutdown, "shut down"),
        ("c", ExitCause::GuestPanic, "Kernel panic - not syncing"),
    ] {
        let machine = host.driver.boot(&host.spec, slot.placement()).await.unwrap();
        let record = machine.record().clone();
        drop(machine);
        slot.answer(PATIENCE);
        let machine = host.driver.adopt(&host.spec, &record, slot.placement()).await.unwrap();
        let script = format!("echo 1 > /proc/sys/kernel/sysrq; echo {key} > /proc/sysrq-trigger");
        slot.shell(&script, Duration::from_secs(1));
        let exit = tokio::time::timeout(PATIENCE, machine.wait()).await.unwrap();
        assert_eq!(exit.cause, expected, "sysrq {key}: {exit:?}");
        assert!(exit.detail.contains(words), "{exit:?}");
        println!("sysrq {key}: {:?}", exit.cause);
        assert_eq!(machine.kill().await.unwrap(), exit);
    }
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_hides_a_feature_and_a_flush_is_offered() {
    if !is_chosen() {
        return;
    }
    let plain = Host::new("u").await;
    let file = plain.path("template.json");
    // Leaf 7, EBX bit 18: rdseed.
    let template = r#"{"cpuid_modifiers": [{"leaf": "0x7", "subleaf": "0x0", "flags": 1, "modifiers":
        [{"register": "ebx", "bitmap": "0bxxxxxxxxxxxxx0xxxxxxxxxxxxxxxxxx"}]}]}"#;
    std::fs::write(&file, template).unwrap();
    let settings = Settings { cpu_template: CpuTemplate::File(file), ..Settings::default() };
    let hidden = Host::with_firecracker("h", settings).await;
    assert_ne!(plain.driver.identity(), hidden.driver.identity());
    let read = "while read -r line; do echo $line; done < /proc/cpuinfo; read cache < /sys/block/vda/queue/write_cache; echo cache=$cache";
    let mut flags = Vec::new();
    for host in [&plain, &hidden] {
        let slot = host.slot_with_shell("one");
        let machine = booted(host, &slot).await;
        flags.push(decoded(&slot.shell(read, PATIENCE)));
        killed(&*machine, &slot).await;
    }
    assert!(flags[0].contains(" rdseed"), "the host has no rdseed: {}", flags[0]);
    assert!(!flags[1].contains(" rdseed"), "{}", flags[1]);
    assert!(flags.iter().all(|said| said.contains("cache=write back")), "{flags:?}");
}

/// The output of a process: the guest daemon sends it as base64 in JSON.
pub(crate) fn decoded(said: &str) -> String {
    use base64::Engine as _;
    let pieces = said.split("\"stdout\":\"").skip(1).filter_map(|piece| piece.split('"').next());
    let decode = |piece| base64::engine::general_purpose::STANDARD.decode(piece).unwrap();
    let bytes: Vec<u8> = pieces.flat_map(decode).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adopted_vm_is_captured_as_what_it_was_started_from_and_what_is_kept_allow() {
    if !is_chosen() {
        return;
    }
    let limits = RateLimits {
        disk_bytes: Some(64 << 20),
        disk_operations: Some(10_000),
        network_bytes: Some(64 << 20),
    };
    let host = Host::with_firecracker("a", Settings { limits, ..Settings::default() }).await;
    let origin = host.slot("origin");
    let machine = booted(&host, &origin).await;
    let image = captured(&host, &*machine, "image").await;
    killed(&*machine, &origin).await;

    let slot = host.slot_with_disk("child", &origin);
    let prepared = host.driver.prepare(&host.spec, &image, slot.placement()).await.unwrap();
    let record = prepared.record().clone();
    let useless = host.driver.adopt(&host.spec, &record, slot.placement()).await.err().unwrap();
    assert!(matches!(useless, VmmError::Command { .. }), "{useless}");
    prepared.load().await.unwrap();
    let twice = prepared.load().await.unwrap_err();
    assert!(twice.to_string().contains("has loaded it"), "{twice}");
    prepared.resume().await.unwrap();
    slot.answer(PATIENCE);
    prepared.stop().await.unwrap();
    drop(prepared);

    // What it was restored from is found again.
    let machine = host.driver.adopt(&host.spec, &record, slot.placement()).await.unwrap();
    let files = host.capture_files("changes");
    let report = machine.capture_changes(&files).await.unwrap();
    assert_eq!(report.base, CaptureBase::Start);
    let composed = host.path("composed");
    host.compose(&[(CaptureBase::Nothing, image), (report.base, files)], &composed);
    drop(machine);

    // Nobody said that the capture is kept, so the next one is whole whatever is asked for.
    let machine = host.driver.adopt(&host.spec, &record, slot.placement()).await.unwrap();
    let again = host.capture_files("again");
    let report = machine.capture_changes(&again).await.unwrap();
    println!("after a second adoption: {report:?}");
    assert_eq!(report.base, CaptureBase::Nothing);
    assert!(report.whole_because.unwrap().contains("is kept is not known"));
    assert_eq!(host.different_pages(&again.memory, &composed), [0; 0]);
    machine.confirm_capture(&again).await.unwrap();
    machine.resume().await.unwrap();
    slot.answer(PATIENCE);
    drop(machine);

    // It is known that this one is kept, and what was written since: also to who comes later.
    let machine = host.driver.adopt(&host.spec, &record, slot.placement()).await.unwrap();
    slot.answer(PATIENCE);
    machine.stop().await.unwrap();
    let files = host.capture_files("later");
    let report = machine.capture_changes(&files).await.unwrap();
    println!("after a third adoption: {report:?}");
    assert_eq!(report.base, CaptureBase::PreviousCapture);
    let composed = host.path("composed-later");
    host.compose(&[(CaptureBase::Nothing, again), (report.base, files)], &composed);
    let whole = captured(&host, &*machine, "whole").await;
    assert_eq!(host.different_pages(&composed, &whole.memory), [0; 0]);
    killed(&*machine, &slot).await;
    assert!(!host::process_exists(record.pid));
    host.leaves_nothing();
}

/// Frames are received while the guest runs, is being stopped and is captured. Firecracker's own whole capture is the judge.
#[tokio::test(flavor = "multi_thread")]
async fn captures_laid_over_one_another_have_every_frame_that_was_received() {
    if !is_chosen() {
        return;
    }
    let host = Host::new("r").await;
    let origin = host.slot("origin");
    let machine = booted(&host, &origin).await;
    let image = captured(&host, &*machine, "image").await;
    killed(&*machine, &origin).await;
    let slot = host.slot_with_disk("child", &origin);
    let machine = restored(&host, &slot, &image).await;
    let sender = slot.send_datagrams();
    let mut chain = vec![(CaptureBase::Nothing, image)];
    let mut unlogged = Vec::new();
    for name in ["one", "two", "three", "four"] {
        slot.answer(PATIENCE);
        machine.stop().await.unwrap();
        let files = host.capture_files(name);
        let report = machine.capture_changes(&files).await.unwrap();
        println!("changes {name}: {report:?}");
        let expected = if name == "one" { CaptureBase::Start } else { CaptureBase::PreviousCapture };
        assert_eq!(report.base, expected, "{report:?}");
        machine.confirm_capture(&files).await.unwrap();
        chain.push((report.base, files));
        unlogged.push(report.unlogged_pages);
        machine.resume().await.unwrap();
    }
    slot.answer(PATIENCE);
    machine.stop().await.unwrap();
    let last = host.capture_files("last");
    let report = machine.capture_changes(&last).await.unwrap();
    println!("changes last: {report:?}");
    unlogged.push(report.unlogged_pages);
    chain.push((report.base, last.clone()));
    assert!(unlogged[0] == 0 && unlogged.iter().any(|pages| *pages > 0), "nothing was found: {unlogged:?}");
    // Still sent to: what stands still takes nothing.
    let whole = captured(&host, &*machine, "whole").await;
    drop(sender);
    let composed = host.capture_files("composed");
    host.compose(&chain, &composed.memory);
    assert_eq!(host.different_pages(&composed.memory, &whole.memory), [0; 0]);
    killed(&*machine, &slot).await;

    std::fs::copy(&last.state, &composed.state).unwrap();
    let next = host.slot_with_disk("next", &slot);
    let machine = restored(&host, &next, &composed).await;
    killed(&*machine, &next).await;
    host.leaves_nothing();
}

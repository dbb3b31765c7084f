//! The drivers with real guests: boot, capture, restore many, capture again, adopt, and every way to end.
//!
//! Needs root, QEMU (or Firecracker, see `host`) and the guest artifacts; a missing artifact fails the test and says what makes it. Times are printed,
//! never judged (`cargo nextest run -p aenv-vmm -E 'binary(real_guest)' --no-capture` shows them).

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and prints its times, in its helping functions too"
)]

mod firecracker;
mod host;
mod jail;

use aenv_vmm::{CaptureBase, CaptureFiles, ExitCause, Machine, MachineSpec, VmmError};
use firecracker::decoded;
use host::{Host, Kind, Slot, memory_kib, process_exists};
use std::time::{Duration, Instant};

/// Far more than anything takes, even on a loaded machine without virtualisation.
const PATIENCE: Duration = Duration::from_secs(120);

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

async fn booted(host: &Host, slot: &Slot) -> Box<dyn Machine> {
    let started = Instant::now();
    let machine = host.driver.boot(&host.spec, slot.placement()).await.unwrap();
    let process = milliseconds(started);
    slot.answer(PATIENCE);
    println!("boot: process {process:.0} ms, first answer after {:.0} ms", milliseconds(started));
    machine
}

async fn captured(host: &Host, machine: &dyn Machine, name: &str) -> CaptureFiles {
    let started = Instant::now();
    machine.stop().await.unwrap();
    let stop = milliseconds(started);
    let files = host.capture_files(name);
    let report = machine.capture(&files).await.unwrap();
    println!("capture {name}: stop {stop:.1} ms, {report:?}");
    assert!(report.changed_pages > report.zero_pages && report.state_bytes > 0);
    assert_eq!(std::fs::metadata(&files.memory).unwrap().len(), host.spec.memory_mib << 20);
    files
}

async fn restored(host: &Host, slot: &Slot, files: &CaptureFiles) -> Box<dyn Machine> {
    let started = Instant::now();
    let machine = host.driver.prepare(&host.spec, files, slot.placement()).await.unwrap();
    let prepare = milliseconds(started);
    let started = Instant::now();
    machine.load().await.unwrap();
    let load = milliseconds(started);
    assert!(!machine.is_running().await.unwrap());
    let started = Instant::now();
    machine.resume().await.unwrap();
    let resume = milliseconds(started);
    let first = slot.answer(PATIENCE);
    let second = slot.answer(PATIENCE);
    machine.stop().await.unwrap();
    let started = Instant::now();
    machine.resume().await.unwrap();
    slot.answer(PATIENCE);
    let standby = milliseconds(started);
    println!(
        "restore: prepare {prepare:.0} ms, load {load:.1}, resume {resume:.1}, answers {first:.1} and {second:.1}, as a standby {standby:.1} ms; {}",
        memory_kib(machine.record().pid)
    );
    machine
}

async fn killed(machine: &dyn Machine, slot: &Slot) {
    let pid = machine.record().pid;
    assert_eq!(machine.kill().await.unwrap().cause, ExitCause::Killed);
    assert!(!process_exists(pid));
    assert_eq!(machine.kill().await.unwrap().cause, ExitCause::Killed);
    assert_eq!(slot.files(), ["vmm.log"]);
    assert!(matches!(machine.resume().await, Err(VmmError::Gone { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_laid_over_what_they_build_on_are_a_whole_capture() {
    let host = Host::new("c").await;
    let origin = host.slot("origin");
    let machine = booted(&host, &origin).await;
    let mut chain = Vec::new();
    for name in ["one", "two"] {
        machine.stop().await.unwrap();
        let files = host.capture_files(name);
        let report = machine.capture_changes(&files).await.unwrap();
        println!("changes {name}: {report:?}");
        machine.confirm_capture(&files).await.unwrap();
        chain.push((report.base, files));
        machine.resume().await.unwrap();
        origin.answer(PATIENCE);
    }
    machine.stop().await.unwrap();
    let last = host.capture_files("three");
    let report = machine.capture_changes(&last).await.unwrap();
    println!("changes three: {report:?}");
    chain.push((report.base, last));
    // Nothing ran in between, so this is the same memory.
    let whole = captured(&host, &*machine, "whole").await;
    let composed = host.capture_files("composed");
    host.compose(&chain, &composed.memory);
    std::fs::copy(&whole.state, &composed.state).unwrap();
    assert_eq!(host.different_pages(&composed.memory, &whole.memory), [0; 0]);
    killed(&*machine, &origin).await;

    let child_slot = host.slot_with_disk("child", &origin);
    let child = restored(&host, &child_slot, &composed).await;
    child.stop().await.unwrap();
    let files = host.capture_files("child");
    let report = child.capture_changes(&files).await.unwrap();
    println!("changes child: {report:?}");
    assert_eq!(report.base, CaptureBase::Start);
    let whole = captured(&host, &*child, "child-whole").await;
    let result = host.path("child-composed");
    host.compose(&[(CaptureBase::Nothing, composed), (report.base, files)], &result);
    assert_eq!(host.different_pages(&result, &whole.memory), [0; 0]);
    killed(&*child, &child_slot).await;
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_captured_and_restored_many_times_over_two_generations() {
    let host = Host::new("g").await;
    let origin = host.slot("origin");
    let machine = booted(&host, &origin).await;
    let running = machine.capture(&host.capture_files("running")).await.unwrap_err();
    assert!(running.to_string().contains("stop it first"), "{running}");
    let first = captured(&host, &*machine, "first").await;
    let again = machine.capture(&first).await.unwrap_err();
    assert!(matches!(again, VmmError::Io { .. }), "{again}");
    // The source goes on after its capture.
    machine.resume().await.unwrap();
    origin.answer(PATIENCE);
    killed(&*machine, &origin).await;
    let image = host.digest(&first.memory);

    let slots = ["one", "two", "three"].map(|name| host.slot_with_disk(name, &origin));
    let mut children = Vec::new();
    for slot in &slots {
        children.push(restored(&host, slot, &first).await);
    }
    for slot in &slots {
        slot.answer(PATIENCE);
    }
    let second = captured(&host, &*children[0], "second").await;
    let grandchild_slot = host.slot_with_disk("grandchild", &slots[0]);
    for (child, slot) in children.iter().zip(&slots) {
        killed(&**child, slot).await;
    }
    assert_eq!(host.digest(&first.memory), image, "a child wrote to the shared image");

    let grandchild = restored(&host, &grandchild_slot, &second).await;
    let third = captured(&host, &*grandchild, "third").await;
    assert_ne!(host.digest(&third.memory), host.digest(&second.memory));
    killed(&*grandchild, &grandchild_slot).await;
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_outlives_its_machine_and_is_adopted() {
    let host = Host::new("d").await;
    let slot = host.slot("one");
    let machine = booted(&host, &slot).await;
    machine.stop().await.unwrap();
    let record = machine.record().clone();
    drop(machine);
    let machine = host.driver.adopt(&host.spec, &record, slot.placement()).await.unwrap();
    assert!(!machine.is_running().await.unwrap());
    machine.resume().await.unwrap();
    slot.answer(PATIENCE);
    captured(&host, &*machine, "adopted").await;
    killed(&*machine, &slot).await;
    let gone = host.driver.adopt(&host.spec, &record, slot.placement()).await.err().unwrap();
    assert!(matches!(gone, VmmError::Gone { .. }), "{gone}");
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_killed_from_outside_is_told_from_our_own_kill() {
    let host = Host::new("k").await;
    let slot = host.slot("one");
    let machine = host.driver.boot(&host.spec, slot.placement()).await.unwrap();
    let waiting = (machine.wait(), machine.wait());
    host::signal(machine.record().pid, "KILL");
    let (exit, same) = tokio::join!(waiting.0, waiting.1);
    assert_eq!(exit, same);
    assert_eq!(exit.cause, ExitCause::VmmKilled, "{exit:?}");
    assert!(matches!(machine.stop().await, Err(VmmError::Gone { .. })));
    // Killing an ended VM tells how it ended and cleans up.
    assert_eq!(machine.kill().await.unwrap().cause, ExitCause::VmmKilled);
    assert_eq!(slot.files(), ["vmm.log"]);

    if host.kind == Kind::Firecracker {
        // As process 1 of its namespace it gets no signal that it does not handle.
        return host.leaves_nothing();
    }
    let machine = host.driver.boot(&host.spec, slot.placement()).await.unwrap();
    host::signal(machine.record().pid, "TERM");
    let exit = machine.wait().await;
    assert_eq!(exit.cause, ExitCause::VmmKilled, "{exit:?}");
    assert!(exit.detail.contains("terminating on signal 15"), "{exit:?}");
    machine.kill().await.unwrap();
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_panic_is_seen_at_once_and_after_an_adoption() {
    let host = Host::new("p").await;
    let slot = host.slot("one");
    // Without a root and without an /init the kernel can only panic.
    let placement = slot.placement_without_initramfs();
    let machine = host.driver.boot(&host.spec, placement.clone()).await.unwrap();
    let exit = tokio::time::timeout(PATIENCE, machine.wait()).await.unwrap();
    assert_eq!(exit.cause, ExitCause::GuestPanic, "{exit:?}");
    assert!(exit.detail.contains("Kernel panic - not syncing"), "{exit:?}");
    assert!(!process_exists(machine.record().pid));
    machine.kill().await.unwrap();

    if host.kind == Kind::Firecracker {
        // It ends with its guest, so there is nothing to adopt.
        return host.leaves_nothing();
    }
    let machine = host.driver.boot(&host.spec, placement.clone()).await.unwrap();
    let record = machine.record().clone();
    drop(machine);
    // Nobody watches while the guest goes down; the VMM keeps the evidence.
    host.until_guest_is_down(&record.control_socket, PATIENCE).await;
    let machine = host.driver.adopt(&host.spec, &record, placement).await.unwrap();
    let exit = tokio::time::timeout(PATIENCE, machine.wait()).await.unwrap();
    assert_eq!(exit.cause, ExitCause::GuestPanic, "{exit:?}");
    machine.kill().await.unwrap();
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jailed_vmm_sees_no_host_file_no_host_network_and_no_other_sandbox() {
    let host = Host::new("j").await;
    let slots = [host.slot("one"), host.slot("two")];
    let mut machines = Vec::new();
    for slot in &slots {
        machines.push(host.driver.boot(&host.spec, slot.placement()).await.unwrap());
    }
    for (index, slot) in slots.iter().enumerate() {
        let (_, user) = slot.disk_and_user();
        let (other_disk, other_user) = slots[1 - index].disk_and_user();
        assert_ne!(user, other_user);
        let jailed = jail::Jailed { pid: machines[index].record().pid, user };
        jailed.has_no_privilege();
        match host.kind {
            Kind::Qemu => jailed.sees_only(
                &["/vm/disk", "/vm/memory", "/vm/state"],
                &["/vm", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"],
            ),
            Kind::Firecracker => jailed.sees_only(firecracker::MAY_WRITE, firecracker::SEES),
        }
        jailed.mounts_nothing_of(&[other_disk]);
        jailed.is_limited();
        jailed.reaches_no_host(slot.namespace());
    }
    // A tap of another sandbox cannot be used, even from inside its namespace.
    let (_, user) = slots[0].disk_and_user();
    let stolen = slots[1].namespace().run(|| host::attach_as(user, "tap0")).unwrap();
    assert_eq!(stolen.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    for (machine, slot) in machines.iter().zip(&slots) {
        killed(&**machine, slot).await;
    }
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_may_be_a_block_device() {
    let host = Host::new("b").await;
    let slot = host.slot_with_shell("one");
    let slot = host.onto_device(slot);
    let machine = booted(&host, &slot).await;
    let (disk, user) = slot.disk_and_user();
    let node = match host.kind {
        Kind::Qemu => "/dev/disk",
        Kind::Firecracker => "/disk",
    };
    let jailed = jail::Jailed { pid: machine.record().pid, user };
    jailed.has_no_privilege();
    jailed.sees_device(node, disk);
    let script = "echo first > /mark && read -r line < /mark && echo \"read $line\"";
    assert!(decoded(&slot.shell(script, PATIENCE)).contains("read first"));
    let files = captured(&host, &*machine, "device").await;
    killed(&*machine, &slot).await;

    // The capture was taken while the guest was stopped, so its disk is as the device is now.
    let machine = restored(&host, &slot, &files).await;
    let script =
        "read -r line < /mark && echo \"again $line\" && echo second > /mark2 && sync && echo synced";
    let said = decoded(&slot.shell(script, PATIENCE));
    assert!(said.contains("again first") && said.contains("synced"), "{said}");
    killed(&*machine, &slot).await;
    assert_eq!(slot.file_on_disk("mark2"), "second\n");
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grown_filesystem_is_whole_after_its_vmm_was_killed_in_the_middle_of_writes() {
    const ROOT_BYTES: u64 = 512 << 20;
    let host = Host::new("w").await;
    let slot = host.slot_with_shell("one");
    let placement = slot.placement_with_growth(1 << 30, ROOT_BYTES);
    let machine = host.driver.boot(&host.spec, placement).await.unwrap();
    slot.answer(PATIENCE);
    let options =
        decoded(&slot.shell("while read -r line; do echo \"$line\"; done < /proc/mounts", PATIENCE));
    let root = options.lines().find(|line| line.starts_with("/dev/vda / ")).unwrap();
    assert!(root.contains("noinit_itable"), "{root}");
    // Says nothing, so it is left alone with its work when so much time has passed.
    let writes = "echo 1 > /w1 && sync; i=1; while :; do i=$((i+1)); echo $i > /w$i; sync; done";
    slot.shell(writes, Duration::from_secs(4));
    host::signal(machine.record().pid, "KILL");
    assert_eq!(machine.wait().await.cause, ExitCause::VmmKilled);
    machine.kill().await.unwrap();
    assert_eq!(slot.file_on_disk("w1"), "1\n");
    assert_eq!(slot.filesystem_bytes(), ROOT_BYTES);
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn strays_are_ended_and_others_kept() {
    let host = Host::new("s").await;
    let slots = [host.slot("keep"), host.slot("stray")];
    let mut machines = Vec::new();
    for slot in &slots {
        machines.push(host.driver.boot(&host.spec, slot.placement()).await.unwrap());
    }
    let pids: Vec<u32> = machines.iter().map(|machine| machine.record().pid).collect();
    drop(machines);
    let keep = [slots[0].name().to_owned()];
    let ended = host.driver.reap_strays(host.prefix(), &keep).await.unwrap();
    assert_eq!(ended, [slots[1].name()]);
    assert!(process_exists(pids[0]) && !process_exists(pids[1]));
    assert_eq!(host.driver.reap_strays(host.prefix(), &[]).await.unwrap(), keep);
    assert!(!process_exists(pids[0]));
    assert!(host.driver.reap_strays(host.prefix(), &[]).await.unwrap().is_empty());
    host.leaves_nothing();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_or_is_given_up_leaves_nothing() {
    let host = Host::new("f").await;
    let slot = host.slot("one");
    let mut placement = slot.placement();
    placement.disk = host.path("no-such-disk");
    let error = host.driver.boot(&host.spec, placement).await.err().unwrap();
    assert!(error.to_string().contains("no-such-disk"), "{error}");
    let mut placement = slot.placement();
    placement.netns = host.path("no-such-namespace");
    let error = host.driver.boot(&host.spec, placement).await.err().unwrap();
    assert!(error.to_string().contains("no-such-namespace"), "{error}");

    let files = host.capture_files("bad");
    std::fs::write(&files.state, "this is no device state").unwrap();
    std::fs::File::create(&files.memory).unwrap().set_len(host.spec.memory_mib << 20).unwrap();
    let started = Instant::now();
    let error = host.driver.restore(&host.spec, &files, slot.placement()).await.err().unwrap();
    println!("bad state is refused after {:.0} ms: {error}", milliseconds(started));
    let small = MachineSpec { memory_mib: host.spec.memory_mib / 2, ..host.spec.clone() };
    let error = host.driver.restore(&small, &files, slot.placement()).await.err().unwrap();
    assert!(error.to_string().contains("memory image has"), "{error}");

    for delay in [0, 1, 5, 20, 60] {
        let boot = host.driver.boot(&host.spec, slot.placement());
        // Whichever is first: what was started by then must go.
        drop(tokio::time::timeout(Duration::from_millis(delay), boot).await.map(|booted| {
            host::signal(booted.unwrap().record().pid, "KILL");
        }));
    }
    host.until_no_process_is_left(PATIENCE).await;
    host.leaves_nothing();
}

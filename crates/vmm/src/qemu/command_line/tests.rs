use super::*;
use crate::driver::BootSource;
use std::path::PathBuf;

fn placement() -> Placement {
    Placement {
        name: "a-one".to_owned(),
        run_dir: PathBuf::from("/run/one"),
        netns: PathBuf::from("/run/netns/one"),
        tap: "tap0".to_owned(),
        disk: PathBuf::from("/data/a,b/disk"),
        boot: BootSource {
            kernel: PathBuf::from("/guest/vmlinuz"),
            initramfs: PathBuf::from("/guest/initramfs"),
            guest_arguments: vec!["a.b=1".to_owned()],
        },
        user: 900_000_001,
    }
}

fn build(accelerator: Accelerator, start: Start, version: Version) -> String {
    let spec = MachineSpec { vcpus: 2, memory_mib: 512 };
    let placement = placement();
    let line = CommandLine {
        version,
        accelerator,
        cpu_model: "model,enforce",
        tsc_khz: (accelerator == Accelerator::Tcg).then_some(2_100_000),
        spec: &spec,
        placement: &placement,
        disk: DiskKind::File,
        limits: &RateLimits::default(),
        process_name: "aenv-a-one",
        monitor_fd: 7,
        start,
    };
    line.build().join(" ").replace(" -", "\n-")
}

const MACHINE: &str = "-name guest=aenv-a-one,process=aenv-a-one
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
-nodefaults
-no-user-config
-L /usr/share/qemu
-display none
-action reboot=shutdown,shutdown=pause
-chardev socket,id=monitor,fd=7,server=on,wait=off
-mon chardev=monitor,mode=control
-accel ACCELERATOR
-machine microvm,rtc=on,memory-backend=memory,auto-kernel-cmdline=off,suppress-vmdesc=on,mem-merge=off,dump-guest-core=off
-cpu model,enforce
-smp 2
-m 512M
-object memory-backend-file,id=memory,size=512M,mem-path=/vm/memory,share=offREADONLY
-global migration.send-configuration=off
-chardev ringbuf,id=console,size=65536
-serial chardev:console
-blockdev driver=file,node-name=disk-file,filename=/vm/disk,discard=unmap
-blockdev driver=raw,node-name=disk,file=disk-file,discard=unmap
-device virtio-blk-device,drive=disk
-netdev tap,id=net0,ifname=tap0,script=no,downscript=no,vhost=off
-device virtio-net-device,netdev=net0,mac=02:fc:00:00:00:02
";

#[test]
fn boot_is_the_machine_and_a_kernel() {
    let machine = MACHINE.replace("READONLY", "");
    let boot = "-kernel /vm/kernel\n-initrd /vm/initramfs\n-append console=ttyS0 quiet panic=-1 reboot=t pci=off a.b=1";
    let expected = machine.replace("ACCELERATOR", "tcg,thread=multi,tb-size=128")
        + boot
        + " no_timer_check tsc=reliable tsc_early_khz=2100000";
    assert_eq!(build(Accelerator::Tcg, Start::Boot, Version(10, 0, 2)), expected);
    let expected = machine.replace("ACCELERATOR", "kvm") + boot;
    assert_eq!(build(Accelerator::Kvm, Start::Boot, Version(7, 2, 0)), expected);
}

#[test]
fn restore_is_the_same_machine_without_a_kernel() {
    let machine = MACHINE.replace("ACCELERATOR", "kvm") + "-incoming defer\n-S";
    let restore = |version| build(Accelerator::Kvm, Start::Restore, version);
    assert_eq!(restore(Version(7, 2, 0)), machine.replace("READONLY", ""));
    assert_eq!(restore(Version(8, 2, 0)), machine.replace("READONLY", ",readonly=on,rom=off"));
}

#[test]
fn a_limited_disk_lies_behind_a_throttle() {
    let limits = RateLimits { disk_bytes: Some(1 << 20), disk_operations: Some(500), network_bytes: None };
    let mut line = Line(Vec::new());
    devices(&placement(), DiskKind::File, &limits, &mut line);
    let line = line.0.join(" ");
    assert!(line.contains("throttle-group,id=disk-limits,x-bps-total=1048576,x-iops-total=500"), "{line}");
    assert!(
        line.contains("driver=throttle,node-name=disk,throttle-group=disk-limits,file=disk-raw"),
        "{line}"
    );
}

#[test]
fn a_guest_is_told_of_errors_of_an_exported_disk_and_waits_for_those_of_a_file() {
    let device = |kind| {
        let mut line = Line(Vec::new());
        devices(&placement(), kind, &RateLimits::default(), &mut line);
        line.0.into_iter().find(|argument| argument.starts_with("virtio-blk-device")).unwrap()
    };
    assert_eq!(device(DiskKind::File), "virtio-blk-device,drive=disk");
    for kind in [DiskKind::ExportedFile, DiskKind::Device { major: 259, minor: 3 }] {
        assert_eq!(device(kind), "virtio-blk-device,drive=disk,werror=report,rerror=report");
    }
}

#[test]
fn an_exported_disk_is_not_cached_by_the_host() {
    let disk = |kind| {
        let mut line = Line(Vec::new());
        devices(&placement(), kind, &RateLimits::default(), &mut line);
        line.0.into_iter().find(|argument| argument.contains("node-name=disk-file")).unwrap()
    };
    let direct = "node-name=disk-file,filename=PATH,discard=unmap,aio=threads,cache.direct=on";
    assert_eq!(disk(DiskKind::ExportedFile), format!("driver=file,{}", direct.replace("PATH", "/vm/disk")));
    assert_eq!(
        disk(DiskKind::Device { major: 259, minor: 3 }),
        format!("driver=host_device,{}", direct.replace("PATH", "/dev/disk"))
    );
}

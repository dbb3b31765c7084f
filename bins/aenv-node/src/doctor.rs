//! `doctor`: the facts of this machine as a report: what was chosen, why, and what to do about it.

use crate::arguments::{DisksChoice, DoctorOptions};
use crate::host_memory::Memory;
use crate::stored;
use crate::vmm;
use aenv_daemon::say;
use aenv_protocol::doctor::{Check, Report, Status};
use aenv_vmm::Confinement;
use aenv_vmm::cgroups::{Cgroups, CgroupsError, Outcome, Plan};
use aenv_vmm::probe::{Accelerator, HostFacts};
use anyhow::{Context as _, Result};
use std::path::Path;

/// Less free space than this is too little for a template and a few sandboxes.
const LOW_DISK_BYTES: u64 = 4 << 30;

/// Prints the report. Succeeds whatever it says.
pub(crate) async fn doctor(options: &DoctorOptions) -> Result<()> {
    let report = examine(options).await?;
    if options.json {
        return Ok(say(&serde_json::to_string_pretty(&report).context("cannot encode the report")?)?);
    }
    for check in &report.checks {
        let status = match check.status {
            Status::Ok => "ok",
            Status::Degraded => "degraded",
            Status::Missing => "MISSING",
        };
        say(&format!("{:<12} {status:<9} {}", check.name, check.found))?;
        if let Some(advice) = &check.advice {
            say(&format!("{:<22} ↳ {advice}", ""))?;
        }
    }
    Ok(())
}

async fn examine(options: &DoctorOptions) -> Result<Report> {
    let data_dir = existing_ancestor(&options.instance.data_dir);
    let facts =
        HostFacts::gather(data_dir).with_context(|| format!("cannot examine {}", data_dir.display()))?;
    let mut checks = vec![
        ok("version", format!("aenv-node {}", env!("CARGO_PKG_VERSION"))),
        ok("kernel", format!("Linux {}", facts.kernel)),
    ];
    checks.extend(vmm_checks(options).await);
    checks.push(match facts.tun {
        true => ok("tun", "/dev/net/tun is there"),
        false => missing("tun", "there is no /dev/net/tun", "load the kernel module tun"),
    });
    checks.push(match aenv_network::probe_firewall().await {
        Ok(()) => ok("nftables", "the kernel answers"),
        Err(error) => missing(
            "nftables",
            error.to_string(),
            "run as root, on a kernel with nf_tables (module nf_tables)",
        ),
    });
    checks.push(cgroups(Cgroups::inspect(
        &options.instance.instance.to_string(),
        options.instance.vmm.cgroup.as_deref(),
    )));
    checks.push(memory(options));
    checks.push(disks(options, &facts).await);
    checks.extend(disk(data_dir, &facts));
    Ok(Report { checks })
}

async fn vmm_checks(options: &DoctorOptions) -> Vec<Check> {
    // Nothing is started, so nothing needs limits.
    let chosen = match vmm::choose(&options.instance, Confinement::unlimited()).await {
        Ok(chosen) => chosen,
        Err(error) => {
            return vec![missing(
                "vmm",
                format!("{error:#}"),
                "install Firecracker and its jailer where there is KVM, or the package qemu-system-x86 (7.2 or newer)",
            )];
        }
    };
    let (choice, identity) = (&chosen.accelerator, chosen.vmm.identity());
    let accelerator = match choice.accelerator {
        Accelerator::Kvm => "KVM",
        Accelerator::Tcg => "emulation (TCG), several times slower than KVM",
    };
    vec![
        Check {
            name: "vmm".to_owned(),
            status: if chosen.advice.is_some() { Status::Degraded } else { Status::Ok },
            found: format!(
                "{} {} ({}): {}",
                chosen.product,
                identity.version,
                chosen.program.display(),
                chosen.reason
            ),
            advice: chosen.advice.clone(),
        },
        Check {
            name: "kvm".to_owned(),
            status: if choice.advice.is_some() { Status::Degraded } else { Status::Ok },
            found: format!("chosen: {accelerator}, because {}", choice.reason),
            advice: choice.advice.clone(),
        },
        ok("cpu", format!("guests see {}", identity.cpu_model.split(',').next().unwrap_or_default())),
    ]
}

/// What a node that is started from where the doctor runs would find.
fn cgroups(inspected: Result<Outcome<Plan>, CgroupsError>) -> Check {
    const UNLIMITED: &str = "limits per sandbox are not enforced";
    match inspected {
        Ok(Outcome::Usable(plan)) => {
            let controllers = plan.controllers().join(" ");
            let found = format!(
                "limits per sandbox are enforced in {}, controllers {controllers}",
                plan.parent().display()
            );
            match plan.controllers().iter().any(|name| name == "io") {
                true => ok("cgroups", found),
                false => {
                    degraded("cgroups", found, "block I/O is not limited: the host offers no controller io")
                }
            }
        }
        Ok(Outcome::Unusable { reason, advice }) => {
            degraded("cgroups", format!("{UNLIMITED}: {reason}"), &advice)
        }
        Err(error) => missing("cgroups", format!("{UNLIMITED}: {error}"), "see the message, and ask again"),
    }
}

/// What guests may have together where nothing else was set.
fn memory(options: &DoctorOptions) -> Check {
    let figures = || -> Result<(u64, u64)> {
        let memory = Memory::of(&options.instance)?;
        Ok((memory.total_bytes()?, memory.limit_bytes(None)?))
    };
    match figures() {
        Ok((total, limit)) => ok(
            "memory",
            format!(
                "{} MiB for all VMs; guests may have {} MiB together, unless AENV_MEMORY_LIMIT_MIB says otherwise",
                total >> 20,
                limit >> 20
            ),
        ),
        Err(error) => {
            degraded("memory", format!("{error:#}"), "set AENV_MEMORY_LIMIT_MIB and AENV_LOW_MEMORY_MIB")
        }
    }
}

/// How disks are stored, and how they are handed to VMMs.
async fn disks(options: &DoctorOptions, facts: &HostFacts) -> Check {
    const NAME: &str = "block export";
    let found = |name: &str, there| format!("{name} {}", if there { "is there" } else { "is not there" });
    let found = format!("{}, {}", found("ublk", facts.ublk), found("FUSE", facts.fuse));
    if options.instance.stored.disks == DisksChoice::Reflink {
        return ok(NAME, format!("{found}; disks are files with shared blocks and need neither"));
    }
    let advice = "install aenv-stored beside aenv-node, or say where it is in AENV_STORED";
    match stored::describe(&options.instance).await {
        Err(error) => missing(NAME, format!("{found}; disks need the block service: {error:#}"), advice),
        Ok(_) if !facts.ublk && !facts.fuse => missing(
            NAME,
            format!("{found}; disks need one of them"),
            "load the kernel module fuse or ublk_drv",
        ),
        Ok(service) => ok(NAME, format!("{found}; {service}")),
    }
}

fn disk(data_dir: &Path, facts: &HostFacts) -> [Check; 2] {
    let path = data_dir.display();
    let gibibytes = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let sharing = match facts.reflink {
        true => ok("disk", format!("{path}: files share blocks (reflink)")),
        false => {
            ok("disk", format!("{path}: files cannot share blocks, so disks are those of the block service"))
        }
    };
    let free = format!("{path}: {:.1} GiB free", gibibytes(facts.free_bytes));
    let room = match facts.free_bytes {
        bytes if bytes < LOW_DISK_BYTES => {
            degraded("free space", free, "make room, or choose another AENV_DATA_DIR")
        }
        _ => ok("free space", free),
    };
    [sharing, room]
}

/// The directory itself, or the nearest one above it that exists: what it will be made in.
fn existing_ancestor(path: &Path) -> &Path {
    path.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"))
}

fn ok(name: &str, found: impl Into<String>) -> Check {
    Check { name: name.to_owned(), status: Status::Ok, found: found.into(), advice: None }
}

fn degraded(name: &str, found: impl Into<String>, advice: &str) -> Check {
    Check {
        name: name.to_owned(),
        status: Status::Degraded,
        found: found.into(),
        advice: Some(advice.to_owned()),
    }
}

fn missing(name: &str, found: impl Into<String>, advice: &str) -> Check {
    Check {
        name: name.to_owned(),
        status: Status::Missing,
        found: found.into(),
        advice: Some(advice.to_owned()),
    }
}

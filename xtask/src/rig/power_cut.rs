//! A job whose machine loses its power: it is ended in the middle, and booted again with the data area as it is then.
//!
//! ```text
//! data area (a copy) ─▶ boot, first command ─"cut"─▶ QEMU killed ─▶ boot, second command ─▶ exit code
//! ```
//! What the machine's kernel had not written to its disk is gone with it. QEMU keeps what it had: that a flush reaches a real disk is
//! for the host's kernel to see to. Owns the copy of the data area, which goes at the end.

use super::image;
use super::machine::Machine;
use super::{Job, image::Image, run_with, transport};
use crate::fetch;
use crate::process::output_of;
use crate::project::Project;
use crate::stages::{Stages, say};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// Runs `job` until it asks for the cut, then `second`, which is the same but for its command, to its end; gives its exit code.
pub(super) fn run(project: &Project, stages: &mut Stages, job: &Job, second: Vec<String>) -> Result<u8> {
    stages.run("Firecracker and its jailer", |voice| fetch::vmm_programs(project, voice))?;
    let image = image::make(project, stages)?;
    let area = tempfile::Builder::new()
        .prefix("kept-area-")
        .tempfile_in(&image.scratch)
        .context("cannot make a data area that is kept")?
        .into_temp_path();
    copy_sparse(&image.area, &area)?;
    let kept = |name: &str, command: Vec<String>| Job {
        name: format!("{}-{name}", job.name),
        command,
        kept_area: Some(area.to_path_buf()),
        ..job.clone()
    };
    until_cut(project, stages, &image, &kept("before", job.command.clone()))?;
    say("the machine's power was cut; booting it again with the same data area");
    let code = run_with(project, stages, &image, &kept("after", second))?;
    area.close().context("cannot remove the kept data area")?;
    Ok(code)
}

fn until_cut(project: &Project, stages: &mut Stages, image: &Image, job: &Job) -> Result<()> {
    let transport = stages.run("files of the job", |_| transport::pack(project, job))?;
    let console = project.log_dir().join(format!("rig-{}.log", job.name));
    let mut machine = Machine::start(image, transport, job, &console)?;
    stages.run("boot of the rig", |voice| machine.boot(voice))?;
    stages.run("until the power is cut", |_| machine.cut())
}

fn copy_sparse(from: &Path, to: &Path) -> Result<()> {
    output_of(Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(from).arg(to)).map(drop)
}

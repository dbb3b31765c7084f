//! `template import`: a root filesystem becomes a template.

use crate::arguments::ImportOptions;
use aenv_daemon::say;
use aenv_orchestrator::{Imported, import_template};
use anyhow::Result;

/// Imports, and says what became of it.
pub(crate) fn import(options: &ImportOptions) -> Result<()> {
    let (vcpus, memory) = (options.vcpus, options.memory_mib);
    let disk = Some(options.disk_mib);
    let imported = import_template(&options.data_dir, &options.name, vcpus, memory, disk, &options.rootfs)?;
    let name = &options.name;
    say(&match imported {
        Imported::New(id) => format!("template {name} ({id}): new"),
        Imported::Replaced(id) => {
            format!("template {name} ({id}): replaced; it is captured anew at the node's next start")
        }
        Imported::Unchanged(id) => format!("template {name} ({id}): unchanged"),
    })?;
    Ok(())
}

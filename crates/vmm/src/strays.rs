//! VMM processes of whichever driver that nobody keeps: found by the name of their VM, and ended.
//!
//! Owns nothing. Every driver ends the strays of all: a node that uses another driver than its predecessor must not leave
//! that one's VMs behind.
//!
//! | driver | program | where the name of the VM is |
//! |---|---|---|
//! | QEMU | `qemu-system-…` | the name it was started under, behind `aenv-` |
//! | Firecracker, or still its jailer | `firecracker…`, `jailer…` | the argument behind `--id` |

use crate::driver::VmmError;
use crate::process::{self, blocking};
use aenv_sys::process::Found;
use std::path::Path;
use std::time::Duration;

/// How long one may take to go: a process in the middle of a disk write ends only after it.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Ends every VMM process whose VM's name starts with `prefix` and is not in `keep`; returns the names of those VMs.
///
/// # Errors
/// When the process list cannot be read, or a process not be ended; all others were.
pub async fn end_strays(prefix: &str, keep: &[String]) -> Result<Vec<String>, VmmError> {
    let find = || aenv_sys::process::find(|args| vm_of_arguments(args).is_some());
    let found = blocking(find, || "cannot list processes".to_owned()).await?;
    let is_stray = |name: &&str| name.starts_with(prefix) && keep.iter().all(|kept| kept != name);
    let strays: Vec<(&str, &Found)> =
        found.iter().filter_map(|process| Some((vm_of(process).filter(is_stray)?, process))).collect();
    // All at once, so that one that does not go keeps no other alive.
    let ending = strays
        .iter()
        .map(|(_, process)| tokio::time::timeout(END_LIMIT, process::end(process.pid, process.start_time)));
    let outcomes = futures_util::future::join_all(ending).await;
    let mut ended = Vec::new();
    let mut failure = None;
    for ((name, process), outcome) in strays.into_iter().zip(outcomes) {
        match outcome.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
            Ok(()) => {
                tracing::info!(vm = name, pid = process.pid, "ended a stray VMM");
                ended.push(name.to_owned());
            }
            Err(source) => {
                let context = format!("cannot end stray VMM {name} (process {})", process.pid);
                failure = failure.or(Some(VmmError::Io { context, source }));
            }
        }
    }
    failure.map_or(Ok(ended), Err)
}

/// The name of the VM, if this is a VMM of ours: by its program file too, since arguments are easily taken.
pub(crate) fn vm_of(process: &Found) -> Option<&str> {
    let program = process.program.to_string_lossy();
    let program = Path::new(program.trim_end_matches(" (deleted)")).file_name()?.to_str()?;
    let is_ours = ["qemu-", "firecracker", "jailer"].iter().any(|known| program.starts_with(known));
    vm_of_arguments(&process.args).filter(|_| is_ours)
}

fn vm_of_arguments(args: &[String]) -> Option<&str> {
    if let Some(name) = args.first().and_then(|name| process::vm_name(name)) {
        return Some(name);
    }
    let position = args.iter().position(|argument| argument == "--id")?;
    args.get(position + 1).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn found(program: &str, args: &[&str]) -> Found {
        let args = args.iter().map(|&argument| argument.to_owned()).collect();
        Found { pid: 1, start_time: 1, program: PathBuf::from(program), args }
    }

    #[test]
    fn vms_of_all_drivers_are_found_by_name_and_nothing_else_is() {
        let qemu = found("/usr/bin/qemu-system-x86_64 (deleted)", &["aenv-a-one", "-name", "x"]);
        assert_eq!(vm_of(&qemu), Some("a-one"));
        assert_eq!(
            vm_of(&found("/firecracker", &["/firecracker", "--id", "a-two", "--api-sock"])),
            Some("a-two")
        );
        assert_eq!(vm_of(&found("/usr/bin/jailer", &["jailer", "--id", "a-two"])), Some("a-two"));
        for (program, args) in [
            ("/usr/bin/bash", &["aenv-a-one"][..]),
            ("/usr/bin/docker", &["docker", "--id", "a-two"]),
            ("/usr/bin/qemu-system-x86_64", &["qemu-system-x86_64", "-name", "other"]),
            ("/firecracker", &["/firecracker", "--id"]),
        ] {
            assert_eq!(vm_of(&found(program, args)), None, "{program}");
        }
    }
}

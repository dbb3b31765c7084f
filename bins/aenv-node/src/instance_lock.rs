//! One process per instance name and host: names of processes, namespaces and rules are made of it, so two nodes with one
//! name would end each other's VMs, each taking the other's for strays.
//!
//! Owns `/run/aenv/<instance>.lock`, whose content says whose it is. The kernel frees the lock with the process.

use aenv_network::InstanceName;
use anyhow::{Context as _, Result, bail};
use std::fs::{File, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;

/// Where locks lie: emptied by a restart of the host, as what they guard.
const DIRECTORY: &str = "/run/aenv";

/// Held for as long as this process works on the instance.
#[derive(Debug)]
pub(crate) struct InstanceLock {
    _file: File,
}

impl InstanceLock {
    /// Takes the name for this process, which keeps its data in `data_dir`.
    pub(crate) fn take(instance: &InstanceName, data_dir: &Path) -> Result<Self> {
        Self::take_in(Path::new(DIRECTORY), instance, data_dir)
    }

    fn take_in(directory: &Path, instance: &InstanceName, data_dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let path = directory.join(format!("{instance}.lock"));
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                file.read_to_string(&mut holder)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                bail!(
                    "another node of this host has the instance name {instance} (data directory {}): stop it, or choose \
                     another name with AENV_INSTANCE and another network with AENV_SUBNET",
                    holder.trim()
                );
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", data_dir.display()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_holder_who_is_named_to_others() {
        let directory = tempfile::tempdir().unwrap();
        let take = |name: &str, data: &str| {
            InstanceLock::take_in(directory.path(), &name.parse().unwrap(), Path::new(data))
        };
        let first = take("a", "/data/one").unwrap();
        let refused = take("a", "/data/two").unwrap_err().to_string();
        assert!(refused.contains("/data/one") && refused.contains("AENV_INSTANCE"), "{refused}");
        let _other = take("b", "/data/two").unwrap();
        drop(first);
        take("a", "/data/two").unwrap();
    }
}

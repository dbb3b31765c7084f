//! What a person can set for `up`, `down` and `bench`, read from the environment once. Owns no state.

use crate::project::Project;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// Settings of one node.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Address the node listens on.
    pub(crate) listen: String,
    /// Its data directory.
    pub(crate) data_dir: PathBuf,
    /// Largest size of the image made for a data directory that cannot share blocks.
    pub(crate) image_bytes: u64,
    /// Its instance name.
    pub(crate) instance: String,
    /// Variables `AENV_…` that are handed to the node as they are.
    pub(crate) passed_on: Vec<(String, String)>,
}

/// Variables of the node that have no meaning here.
const PASSED_ON: &[&str] = &[
    "AENV_ACCELERATOR",
    "AENV_API_KEYS_FILE",
    "AENV_CACHE_BYTES",
    "AENV_CGROUP",
    "AENV_COMPACTION_SECONDS",
    "AENV_CPU_MODEL",
    "AENV_CPU_TEMPLATE",
    "AENV_DISKS",
    "AENV_DISK_BYTES_PER_SECOND",
    "AENV_DISK_OPERATIONS_PER_SECOND",
    "AENV_DOMAIN",
    "AENV_DRIVER",
    "AENV_EXPORT",
    "AENV_FIRECRACKER",
    "AENV_FRESH_AFTER_MIB",
    "AENV_HOT_SECONDS",
    "AENV_IO_READ_BYTES_PER_SECOND",
    "AENV_IO_WRITE_BYTES_PER_SECOND",
    "AENV_JAILER",
    "AENV_LOG",
    "AENV_LOW_MEMORY_MIB",
    "AENV_MAX_STARTING",
    "AENV_START_WAIT_SECONDS",
    "AENV_MAX_TIMEOUT_HOURS",
    "AENV_MAX_WAITING",
    "AENV_MEMORY_LIMIT_MIB",
    "AENV_MIN_FREE_MIB",
    "AENV_NETWORK_BYTES_PER_SECOND",
    "AENV_ON_STOP",
    "AENV_QEMU",
    "AENV_RUN_DIR",
    "AENV_SLOT_POOL",
    "AENV_STANDBYS",
    "AENV_STOP_SECONDS",
    "AENV_STORED",
    "AENV_SUBNET",
    "AENV_TEMPLATE_DISK_MIB",
    "AENV_TEMPLATE_MEMORY_MIB",
    "AENV_TEMPLATE_VCPUS",
    "AENV_WARM",
    "RUST_LOG",
];

impl Settings {
    /// Whether disks are those of the block service, which asks nothing of the data directory's file system.
    pub(crate) fn disks_by_service(&self) -> bool {
        !self.passed_on.iter().any(|(name, value)| name == "AENV_DISKS" && value == "reflink")
    }

    /// What a template is imported with, besides its image.
    pub(crate) fn of_template(&self) -> Vec<&(String, String)> {
        self.passed_on.iter().filter(|(name, _)| name.starts_with("AENV_TEMPLATE_")).collect()
    }

    /// Reads the environment.
    pub(crate) fn load(project: &Project) -> Result<Self> {
        Self::resolve(project, |name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn resolve(project: &Project, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let listen = match (variable("AENV_LISTEN"), variable("AENV_PORT")) {
            (Some(listen), _) => listen,
            (None, port) => {
                let port = port.unwrap_or_else(|| "8000".to_owned());
                let number: u16 = port.parse().with_context(|| format!("AENV_PORT={port} is no port"))?;
                format!("127.0.0.1:{number}")
            }
        };
        let gibibytes = variable("AENV_DATA_SIZE_GIB").unwrap_or_else(|| "40".to_owned());
        let gibibytes: u64 =
            gibibytes.parse().with_context(|| format!("AENV_DATA_SIZE_GIB={gibibytes} is no number"))?;
        let data_dir =
            variable("AENV_DATA_DIR").map_or_else(|| project.work_dir().join("data"), PathBuf::from);
        let data_dir = std::path::absolute(&data_dir).context("AENV_DATA_DIR is no path")?;
        let instance = variable("AENV_INSTANCE").unwrap_or_else(|| "a".to_owned());
        let valid = (1..=4).contains(&instance.len())
            && instance.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if !valid {
            bail!("AENV_INSTANCE={instance} must be 1 to 4 characters of a-z and 0-9");
        }
        let passed_on =
            PASSED_ON.iter().filter_map(|name| Some(((*name).to_owned(), variable(name)?))).collect();
        Ok(Self { listen, data_dir, image_bytes: gibibytes << 30, instance, passed_on })
    }

    /// Has the node find Firecracker and its jailer in `directory`, unless a person named others.
    pub(crate) fn use_vmm_programs(&mut self, directory: &Path) {
        for (variable, program) in [("AENV_FIRECRACKER", "firecracker"), ("AENV_JAILER", "jailer")] {
            if self.passed_on.iter().all(|(name, _)| name != variable) {
                self.passed_on.push((variable.to_owned(), directory.join(program).display().to_string()));
            }
        }
    }

    /// Where clients reach the node: a wildcard address is reached through the loopback.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.reachable())
    }

    /// As `host:port`.
    pub(crate) fn reachable(&self) -> String {
        self.listen.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings> {
        let project = Project::find().unwrap();
        Settings::resolve(&project, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_port_and_the_data_directory_are_settable() {
        let defaults = settings(&[]).unwrap();
        assert_eq!((defaults.url().as_str(), defaults.instance.as_str()), ("http://127.0.0.1:8000", "a"));
        let set =
            settings(&[("AENV_PORT", "9000"), ("AENV_DATA_DIR", "/x"), ("AENV_STANDBYS", "0")]).unwrap();
        assert_eq!(set.listen, "127.0.0.1:9000");
        assert_eq!(set.data_dir, PathBuf::from("/x"));
        assert_eq!(set.passed_on, [("AENV_STANDBYS".to_owned(), "0".to_owned())]);
        assert_eq!(settings(&[("AENV_LISTEN", "0.0.0.0:80")]).unwrap().url(), "http://127.0.0.1:80");
    }

    #[test]
    fn programs_that_a_person_named_are_kept() {
        let mut set = settings(&[("AENV_JAILER", "/mine/jailer")]).unwrap();
        set.use_vmm_programs(Path::new("/cache"));
        let value = |name: &str| {
            set.passed_on.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
        };
        assert_eq!(value("AENV_FIRECRACKER"), Some("/cache/firecracker"));
        assert_eq!(value("AENV_JAILER"), Some("/mine/jailer"));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (name, value) in [("AENV_PORT", "70000"), ("AENV_DATA_SIZE_GIB", "big"), ("AENV_INSTANCE", "a/b")]
        {
            let error = format!("{:#}", settings(&[(name, value)]).unwrap_err());
            assert!(error.contains(name), "{error}");
        }
    }
}

//! How much a VM may move through its devices in a second. Values only; each driver says how it holds a guest to them.

use crate::driver::VmmError;

/// How much a VM may move in a second; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Bytes read from and written to the disk.
    pub disk_bytes: Option<u64>,
    /// Reads and writes of the disk.
    pub disk_operations: Option<u64>,
    /// Bytes through the network card, in each direction.
    pub network_bytes: Option<u64>,
}

impl RateLimits {
    /// Whether the disk is limited.
    pub(crate) fn limit_disk(&self) -> bool {
        self.disk_bytes.is_some() || self.disk_operations.is_some()
    }

    /// Whether the network card is limited.
    pub(crate) fn limit_network(&self) -> bool {
        self.network_bytes.is_some()
    }

    /// Refuses what a driver cannot do.
    pub(crate) fn refuse_network(&self, program: &str) -> Result<(), VmmError> {
        match self.limit_network() {
            false => Ok(()),
            true => Err(VmmError::Start {
                program: program.to_owned(),
                reason:
                    "it cannot limit the bytes through a network card: use Firecracker, or set no such limit"
                        .to_owned(),
            }),
        }
    }
}

//! Which boot of the host something happened in.
//!
//! Owns nothing. What was written but not flushed is there as long as the host's kernel runs, and only then.

use std::fmt;
use std::path::Path;

/// The random number that the kernel draws when it starts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BootId([u8; 16]);

impl BootId {
    /// An id of these bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// That of the running kernel.
    ///
    /// # Errors
    /// When procfs cannot be read, or says something else than an id.
    pub fn of_running_kernel() -> std::io::Result<Self> {
        let text = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"))?;
        Self::parse(text.trim()).ok_or_else(|| std::io::Error::other("the kernel's boot id is not a UUID"))
    }

    /// Reads what [`fmt::Display`] writes, and UUIDs.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        hex::decode_to_slice(text.replace('-', ""), &mut bytes).ok()?;
        Some(Self(bytes))
    }

    pub(crate) fn bytes(&self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for BootId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_has_one_and_it_is_read_back() {
        let boot = BootId::of_running_kernel().unwrap();
        assert_eq!(BootId::parse(&boot.to_string()), Some(boot));
        assert_eq!(BootId::parse("not-an-id"), None);
    }
}

//! Programs of VMMs: where they are, and which version they say they are.
//!
//! Owns nothing. Asks a program only for its version.

use crate::driver::VmmError;
use std::path::Path;

/// A version of a VMM: major, minor, patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) u32, pub(crate) u32, pub(crate) u32);

impl std::fmt::Display for Version {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// An error about a program.
pub(crate) fn unusable(program: &Path, reason: String) -> VmmError {
    VmmError::Start { program: program.display().to_string(), reason }
}

/// Runs `program --version`; the number stands behind `marker`. `advice` says what to install when there is no program.
pub(crate) async fn ask_version(program: &Path, marker: &str, advice: &str) -> Result<Version, VmmError> {
    let output = tokio::process::Command::new(program)
        .arg("--version")
        .env_clear()
        .env("PATH", aenv_sys::process::SEARCH_PATH)
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| unusable(program, format!("{error}; {advice}")))?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse_version(&text, marker)
        .ok_or_else(|| unusable(program, format!("it does not say its version: {}", text.trim())))
}

fn parse_version(text: &str, marker: &str) -> Option<Version> {
    let number = text.split_once(marker)?.1.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    let mut parts = number.split('.').map(str::parse);
    let (major, minor) = (parts.next()?.ok()?, parts.next()?.ok()?);
    Some(Version(major, minor, parts.next().and_then(Result::ok).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared() {
        for (text, marker, version) in [
            (
                "QEMU emulator version 7.2.19 (Debian 1:7.2+dfsg-7)\nCopyright",
                "version ",
                Some(Version(7, 2, 19)),
            ),
            ("QEMU emulator version 10.0.50", "version ", Some(Version(10, 0, 50))),
            ("QEMU emulator version 9.1", "version ", Some(Version(9, 1, 0))),
            (
                "Firecracker v1.12.1\n\nSupported snapshot data format versions: v7.0.0\n",
                " v",
                Some(Version(1, 12, 1)),
            ),
            ("Jailer v1.12.1\n", " v", Some(Version(1, 12, 1))),
            ("Firecracker v1.17.0-dev\n", " v", Some(Version(1, 17, 0))),
            ("bash: not found", " v", None),
        ] {
            assert_eq!(parse_version(text, marker), version, "{text}");
        }
        assert!(Version(10, 0, 2) > Version(7, 2, 0) && Version(1, 9, 9) < Version(1, 12, 0));
    }
}

//! Numbers of exports: none is given to a second export while the kernel may remember the first, which is until the host
//! restarts (a process may have the file of a removed export open for as long as it likes).
//!
//! Owns `<run>/numbers.json`, `{"boot": BOOT ID, "next": NUMBER}`, written before a number is used.

use crate::directories::replace_file;
use crate::failure::Failure;
use crate::locks::lock;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Mutex;

/// Largest number, as ublk numbers its devices with 20 bits. Then the smallest free ones are taken again.
const LAST: u32 = (1 << 20) - 1;

#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    boot: String,
    next: u32,
}

/// Gives numbers away.
#[derive(Debug)]
pub(crate) struct Numbers {
    path: PathBuf,
    boot: String,
    next: Mutex<u32>,
}

impl Numbers {
    /// Goes on where the last process of the boot `boot` was; `used` are the numbers of records. The numbers of a new
    /// `instance` begin where those of others hardly do: two that are made at the same moment must not get the same one.
    pub(crate) fn open(
        path: PathBuf,
        boot: &str,
        instance: &str,
        used: impl Iterator<Item = u32>,
    ) -> Result<Self, Failure> {
        let beyond = used.max().map_or_else(|| first_of(instance), |last| last.saturating_add(1));
        let stored = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            read => match serde_json::from_slice::<Stored>(&read.map_err(Failure::io("read", &path))?) {
                Ok(stored) => Some(stored),
                Err(error) => {
                    // Within one boot the file is never half-written: the power was cut, and the kernel has forgotten.
                    tracing::warn!(path = %path.display(), %error, "export numbers begin anew");
                    None
                }
            },
        };
        let next = match stored.filter(|stored| stored.boot == boot) {
            Some(stored) => stored.next.max(1),
            None => beyond,
        };
        Ok(Self { path, boot: boot.to_owned(), next: Mutex::new(next) })
    }

    /// A number that `in_use` does not know.
    pub(crate) fn take(&self, in_use: impl Fn(u32) -> bool) -> Result<u32, Failure> {
        let mut next = lock(&self.next);
        let mut number = if *next > LAST { 1 } else { *next };
        let first = number;
        while in_use(number) {
            number = if number == LAST { 1 } else { number + 1 };
            if number == first {
                return Err(Failure::unavailable(format!("all {LAST} export numbers are in use")));
            }
        }
        let stored = Stored { boot: self.boot.clone(), next: number + 1 };
        let content = serde_json::to_vec(&stored).map_err(|error| Failure::internal(error.to_string()))?;
        replace_file(&self.path, &content).map_err(Failure::io("write", &self.path))?;
        *next = number + 1;
        Ok(number)
    }
}

/// One of 1023 places to begin, by the name: FNV-1a, as it has to be the same in every build.
fn first_of(instance: &str) -> u32 {
    let hash = instance
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash % 1023) * 1024 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_not_given_twice_within_a_boot() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("numbers.json");
        let open =
            |boot: &str, used: &[u32]| Numbers::open(path.clone(), boot, "a", used.iter().copied()).unwrap();
        let numbers = open("b1", &[4]);
        assert_eq!(numbers.take(|_| false).unwrap(), 5);
        assert_eq!(numbers.take(|number| number == 6).unwrap(), 7);
        // The records are gone, the boot is the same.
        assert_eq!(open("b1", &[]).take(|_| false).unwrap(), 8);
        assert_eq!(open("b2", &[2]).take(|_| false).unwrap(), 3);
        std::fs::write(&path, "").unwrap();
        assert_eq!(open("b2", &[]).take(|_| false).unwrap(), first_of("a"));
        assert_ne!(first_of("a"), first_of("b"));
    }

    #[test]
    fn numbers_begin_again_at_the_end_and_run_out_only_when_all_are_used() {
        let directory = tempfile::tempdir().unwrap();
        let numbers = Numbers::open(directory.path().join("n"), "b", "a", std::iter::once(LAST - 1)).unwrap();
        assert_eq!(numbers.take(|_| false).unwrap(), LAST);
        assert_eq!(numbers.take(|number| number == 1).unwrap(), 2);
        assert!(numbers.take(|_| true).is_err());
    }
}

//! The host report: what this machine offers, what was chosen, why, and what to do about it.

use serde::{Deserialize, Serialize};

/// Everything `doctor` found, in the order to be shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// One line per thing looked at.
    pub checks: Vec<Check>,
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Short name, such as `kvm` or `disk`.
    pub name: String,
    /// How good it is.
    pub status: Status,
    /// What was found and what was chosen because of it.
    pub found: String,
    /// What a person can do to make it better; absent when nothing is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// How good a checked thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As wished.
    Ok,
    /// Works, but something better exists; `advice` says what.
    Degraded,
    /// Sandboxes cannot run until `advice` is followed.
    Missing,
}

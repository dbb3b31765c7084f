//! What waits for room on the host. Owns nothing.

use std::time::SystemTime;

/// An export that has requests waiting until the host has room for them again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stall {
    /// Of the export.
    pub number: u32,
    /// What its storage said.
    pub reason: String,
    /// When the first of the waiting requests came.
    pub since: SystemTime,
    /// How many requests wait.
    pub requests: u32,
}

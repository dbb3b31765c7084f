//! The slots in the real kernel. Needs root; see `testbed` for why it is safe to run anywhere.
#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod isolation;
mod slots;
mod testbed;

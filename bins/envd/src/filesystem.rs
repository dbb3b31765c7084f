//! The guest's file tree as clients see it. The daemon acts as root; what it makes belongs to the user who asked.
//!
//! [`entry`] describes what is there, [`change`] changes it, [`rpc`] is the wire side. Contents travel by
//! [`crate::files`]. Owns no state. All of it but [`rpc`] blocks: call it off the event loop.

pub(crate) mod change;
pub(crate) mod entry;
pub(crate) mod rpc;

//! Layers from the outside: files as any program may have written them, against a plain model of the disk.
//!
//! `model` encodes files by itself, from the description of the format, so that reader and writer are not only tested
//! against one another. Owns nothing.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod golden;
mod hostile;
mod model;
mod stacks;
mod written;

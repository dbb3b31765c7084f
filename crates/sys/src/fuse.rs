//! The FUSE device of the kernel: its protocol, mounting, and memory for requests that outlives a process.
//!
//! Owns nothing: descriptors and memory belong to whoever asked for them. Decides nothing about files; it knows how a
//! request and an answer look, not what to answer.
//!
//! | module | what |
//! |---|---|
//! | [`abi`] | messages and flags of the protocol, version 7.31 and later |
//! | [`device`] | `/dev/fuse`: open, mount, further descriptors of one connection |
//! | [`slots`] | shared memory that requests are read into, kept by another process |
//! | [`pressure`] | what lets a server of files work while memory is short |

pub mod abi;
pub mod device;
pub mod pressure;
pub mod slots;

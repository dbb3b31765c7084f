//! What the kernel is told without having asked: that names changed and files are gone.
//!
//! Owns a descriptor of the connection. The kernel may take locks that it holds while it waits for an answer of ours: a
//! worker never notifies.

use aenv_sys::fuse::abi::{self, NotifyDelete, NotifyEntry, ReplyHeader, notify};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use zerocopy::IntoBytes;

/// Tells the kernel what it did not ask.
#[derive(Debug)]
pub(super) struct Notifier {
    device: OwnedFd,
}

impl Notifier {
    pub(super) fn new(device: OwnedFd) -> Self {
        Self { device }
    }

    /// A name may stand for another file, or for none.
    pub(super) fn entry_changed(&self, name: &str) -> io::Result<()> {
        let body = NotifyEntry { parent: abi::ROOT_NODE, name_length: name.len() as u32, flags: 0 };
        self.send(notify::INVALIDATE_ENTRY, body.as_bytes(), name)
    }

    /// A file is gone, though it may be in use.
    pub(super) fn deleted(&self, node: u64, name: &str) -> io::Result<()> {
        let (parent, name_length) = (abi::ROOT_NODE, name.len() as u32);
        let body = NotifyDelete { parent, child: node, name_length, padding: 0 };
        self.send(notify::DELETE, body.as_bytes(), name)
    }

    fn send(&self, code: i32, body: &[u8], name: &str) -> io::Result<()> {
        let length = size_of::<ReplyHeader>() + body.len() + name.len() + 1;
        let header = ReplyHeader { length: length as u32, error: code, unique: 0 };
        let message = [header.as_bytes(), body, name.as_bytes(), b"\0"].concat();
        match rustix::io::write(&self.device, &message) {
            // The kernel knows no such entry, or nothing is mounted any more.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

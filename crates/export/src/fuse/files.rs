//! Which file stands for which export.
//!
//! ```text
//! add / recover ──▶ present ──remove──▶ closed: requests fail ──kernel forgets──▶ number may be used again
//! ```
//! Owns the table, the attributes and what is behind each file. Knows no request. A file's node number is the export's
//! number plus one, so that it is the same in every daemon.

use crate::{Content, Export, ExportError};
use aenv_sys::fuse::abi::Attributes;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Longest name of an export in bytes.
pub(super) const NAME_BYTES: usize = 255;
/// File type of `mode`.
pub(super) const REGULAR_FILE: u32 = 0o100_000;

/// Number of the node that stands for an export; 1 is the directory.
pub(super) fn node_of(number: u32) -> u64 {
    u64::from(number) + 1
}

/// All files.
#[derive(Debug, Default)]
pub(super) struct Files {
    table: RwLock<Table>,
    /// Look-ups that the kernel has not forgotten, by node.
    lookups: Mutex<HashMap<u64, u64>>,
}

#[derive(Debug, Default)]
struct Table {
    by_node: BTreeMap<u64, Arc<File>>,
    by_name: HashMap<String, u64>,
}

/// One file.
#[derive(Debug)]
pub(super) struct File {
    /// Of the export.
    pub(super) number: u32,
    /// Of the export.
    pub(super) name: String,
    /// Bytes.
    pub(super) size: u64,
    /// Whether it is written, and then not cached.
    pub(super) is_disk: bool,
    permissions: Mutex<Permissions>,
    /// Held for reading during every request; none once the export was removed.
    content: RwLock<Option<Content>>,
    /// Whether a failure was logged.
    pub(super) failed: AtomicBool,
}

/// What `chown` and `chmod` change.
#[derive(Debug, Clone, Copy)]
pub(super) struct Permissions {
    /// Owner.
    pub(super) user: u32,
    /// Group.
    pub(super) group: u32,
    /// Permission bits.
    pub(super) mode: u32,
}

impl File {
    fn new(export: &Export, content: Content) -> Self {
        let (size, is_disk, mode) = match &content {
            Content::Disk(disk) => (disk.size(), true, 0o600),
            // Shared by VMs of different users.
            Content::Image(image) => (image.size(), false, 0o444),
        };
        let permissions = Permissions { user: export.owner, group: export.owner, mode };
        Self {
            number: export.number,
            name: export.name.clone(),
            size,
            is_disk,
            permissions: Mutex::new(permissions),
            content: RwLock::new(Some(content)),
            failed: AtomicBool::new(false),
        }
    }

    /// Number of its node.
    pub(super) fn node(&self) -> u64 {
        node_of(self.number)
    }

    /// As `stat` shows it.
    pub(super) fn attributes(&self) -> Attributes {
        let permissions = *self.permissions.lock().unwrap_or_else(PoisonError::into_inner);
        Attributes {
            inode: self.node(),
            size: self.size,
            blocks: self.size.div_ceil(512),
            mode: REGULAR_FILE | permissions.mode,
            links: 1,
            user: permissions.user,
            group: permissions.group,
            block_size: 4096,
            ..Attributes::default()
        }
    }

    /// Changes owner, group or permissions.
    pub(super) fn change(&self, change: impl FnOnce(&mut Permissions)) {
        change(&mut self.permissions.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Does something with the content, which stays until it is done; `None` when the export was removed.
    pub(super) fn with_content<T>(&self, work: impl FnOnce(&Content) -> T) -> Option<T> {
        let content = self.content.read().unwrap_or_else(PoisonError::into_inner);
        content.as_ref().map(work)
    }

    /// Whether this is the first failure.
    pub(super) fn fails_first(&self) -> bool {
        !self.failed.swap(true, Ordering::Relaxed)
    }
}

impl Files {
    /// Makes a file for a new export.
    ///
    /// # Errors
    /// When the name is not valid, or name or number are in use, the latter possibly by the kernel only.
    pub(super) fn add(&self, export: &Export, content: Content) -> Result<(), ExportError> {
        check(export)?;
        // Taken in this order everywhere.
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let lookups = self.lookups.lock().unwrap_or_else(PoisonError::into_inner);
        if lookups.contains_key(&node_of(export.number)) {
            return Err(ExportError::Taken { what: "number", value: export.number.to_string() });
        }
        table.insert(export, content)
    }

    /// Makes the file of an export that the kernel may know.
    ///
    /// # Errors
    /// As [`Files::add`].
    pub(super) fn recover(&self, export: &Export, content: Content) -> Result<(), ExportError> {
        check(export)?;
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let mut lookups = self.lookups.lock().unwrap_or_else(PoisonError::into_inner);
        table.insert(export, content)?;
        // How many there were is not known: one stands for all, and what the kernel forgets is never less.
        lookups.insert(node_of(export.number), 1);
        Ok(())
    }

    /// Removes an export's file. Returns when no request uses its content any more. One that is gone is no error.
    pub(super) fn remove(&self, export: &Export) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let node = node_of(export.number);
        let Some(file) = table.by_node.get(&node).filter(|file| file.name == export.name).cloned() else {
            return;
        };
        table.by_node.remove(&node);
        table.by_name.remove(&export.name);
        drop(table);
        // Dropped here, outside of the lock: it may have files to close.
        let content = file.content.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(content);
    }

    /// The file of a node.
    pub(super) fn get(&self, node: u64) -> Option<Arc<File>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).by_node.get(&node).cloned()
    }

    /// The file of a name, counted as known to the kernel.
    pub(super) fn look_up(&self, name: &str) -> Option<Arc<File>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let file = table.by_node.get(table.by_name.get(name)?)?;
        self.count(file.node());
        Some(Arc::clone(file))
    }

    /// Files with a node of at least `node`, in order, for as long as `visit` returns true. With `counted` each visited
    /// one is known to the kernel.
    pub(super) fn visit(&self, node: u64, counted: bool, mut visit: impl FnMut(&File) -> bool) {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        for file in table.by_node.range(node..).map(|(_, file)| file) {
            if !visit(file) {
                return;
            }
            if counted {
                self.count(file.node());
            }
        }
    }

    /// Number of files and bytes of all of them.
    pub(super) fn totals(&self) -> (u64, u64) {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let bytes = table.by_node.values().fold(0_u64, |sum, file| sum.saturating_add(file.size));
        (table.by_node.len() as u64, bytes)
    }

    fn count(&self, node: u64) {
        let mut lookups = self.lookups.lock().unwrap_or_else(PoisonError::into_inner);
        let count = lookups.entry(node).or_default();
        *count = count.saturating_add(1);
    }

    /// The kernel has forgotten so many look-ups of a node.
    pub(super) fn forget(&self, node: u64, count: u64) {
        let mut lookups = self.lookups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lookups.get_mut(&node) {
            *known = known.saturating_sub(count);
            if *known == 0 {
                lookups.remove(&node);
            }
        }
    }
}

impl Table {
    fn insert(&mut self, export: &Export, content: Content) -> Result<(), ExportError> {
        if self.by_node.contains_key(&node_of(export.number)) {
            return Err(ExportError::Taken { what: "number", value: export.number.to_string() });
        }
        if self.by_name.contains_key(&export.name) {
            return Err(ExportError::Taken { what: "name", value: export.name.clone() });
        }
        let file = File::new(export, content);
        if i64::try_from(file.size).is_err() {
            return Err(invalid(export, "it is larger than a file can be"));
        }
        self.by_name.insert(export.name.clone(), file.node());
        self.by_node.insert(file.node(), Arc::new(file));
        Ok(())
    }
}

fn check(export: &Export) -> Result<(), ExportError> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if export.number == 0 {
        return Err(invalid(export, "its number is 0"));
    }
    if export.name.is_empty() || export.name.len() > NAME_BYTES || !export.name.bytes().all(valid) {
        return Err(invalid(export, "a name has 1 to 255 letters, digits and hyphens"));
    }
    Ok(())
}

fn invalid(export: &Export, reason: &'static str) -> ExportError {
    ExportError::Invalid { name: export.name.clone(), reason }
}

#[cfg(test)]
mod tests;

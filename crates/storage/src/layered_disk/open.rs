//! Making, opening and removing disks: what each crash leaves behind is put right here.
//!
//! | found | because | done |
//! |---|---|---|
//! | a pending manifest of this boot | it was not flushed since | it is the disk's; its files stay until it is durable |
//! | a pending manifest of another boot, or a broken one | the host lost its power | ignored and removed |
//! | the current top is sealed | a crash in the middle of a seal | it joins the sealed ones, a new one is made |
//! | a top that no manifest names, not sealed | a crash before a seal, or a manifest that is ignored | removed |
//! | a top that no manifest names, sealed | lost with a pending manifest; a child may stand on it | left |
//! | a top that is `removable` | a crash during or after a compaction | removed, when nobody else holds it |
//!
//! Owns nothing that lasts.

use super::manifest::{self, DURABLE, Found, LOCK, PENDING, WRITING};
use super::{
    Allowance, BootId, Directory, HostDirectory, Identity, Image, Keeper, LayeredDisk, Lock, Manifest,
    SealedTop, StackedImage, State, StorageError, StoredFile, Top, TopName, failed, number_of, remove_files,
    remove_if_there, top_name,
};
use crate::BLOCK_BYTES;
use crate::top::{Access, count_shown, log_name};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};

impl LayeredDisk {
    pub(crate) fn create_in(
        directory: Arc<dyn Directory>,
        lower: Arc<dyn Image>,
        size: u64,
        quota: u64,
        boot: &BootId,
    ) -> Result<Self, StorageError> {
        let path = directory.path().to_owned();
        if lower.size() > size {
            let reason = format!("{size} bytes are less than the {} of what it stands on", lower.size());
            return Err(StorageError::Unsupported { name: path.display().to_string(), reason });
        }
        let lock = lock_disk(&*directory)?;
        let names = directory.names().map_err(|error| failed("read", &path, error))?;
        if names.iter().any(|name| name == DURABLE || name == PENDING) {
            let source = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(StorageError::Io { action: "make a disk in", path, source });
        }
        // An earlier attempt may have died before its manifest, and children may stand on tops of a disk that was removed.
        sweep(&*directory, &names, &BTreeSet::new(), boot)?;
        let number = next_number(&names);
        let name = top_name(number);
        let identity = Identity { id: rand::random(), parent: [0; 16], size };
        let top = Arc::new(Top::create(&*directory, &name, identity, boot)?);
        let manifest = Manifest::new(boot, size, lower.size(), quota, TopName::new(&name, &identity.id));
        manifest::write(&*directory, &manifest)?;
        manifest::publish(&*directory)?;
        let keeper = Keeper::new(Arc::clone(&directory), manifest, true, vec![Arc::clone(&top)]);
        let below = StackedImage::new(Arc::clone(&lower), Vec::new());
        let state = State { current_name: name, current: top, below };
        let allowance = Allowance::new(&path, quota, 0);
        Ok(Self::assemble(directory, *boot, lower, Arc::new(keeper), allowance, state, number + 1, lock))
    }

    pub(crate) fn open_in(
        directory: Arc<dyn Directory>,
        lower: Arc<dyn Image>,
        boot: &BootId,
    ) -> Result<Self, StorageError> {
        let path = directory.path().to_owned();
        let lock = lock_disk(&*directory)?;
        let chosen = choose_manifest(&*directory, boot)?;
        let manifest = chosen.manifest;
        if manifest.lower_size != lower.size() {
            let (made, given) = (manifest.lower_size, lower.size());
            let reason = format!("it was made on an image of {made} bytes, and is opened on one of {given}");
            return Err(StorageError::Unsupported { name: path.display().to_string(), reason });
        }
        let names = directory.names().map_err(|error| failed("read", &path, error))?;
        sweep(&*directory, &names, &chosen.named, boot)?;
        let next_number = next_number(&names);
        let opened = Top::open(&*directory, &manifest.current.name, Access::Write, boot)?;
        check_top(&opened.top, &manifest.current, &manifest)?;
        let current = Arc::new(opened.top);
        let keeper =
            Keeper::new(Arc::clone(&directory), manifest.clone(), chosen.pending, vec![Arc::clone(&current)]);
        let keeper = Arc::new(keeper);
        let mut tops = Vec::new();
        for name in &manifest.sealed {
            let sealed =
                SealedTop::open_in(Arc::clone(&directory), &name.name, Some(Arc::clone(&keeper)), boot)?;
            check_top(sealed.top(), name, &manifest)?;
            if chosen.pending {
                keeper.add_unsettled(sealed.top());
            }
            tops.push(Arc::new(sealed));
        }
        let below = StackedImage::new(Arc::clone(&lower), tops);
        let map = current.map();
        let charged = count_shown(&std::iter::once(map).chain(below.maps()), 0..map.blocks());
        let allowance = Allowance::new(&path, manifest.quota, charged * BLOCK_BYTES);
        let state = State { current_name: manifest.current.name, current, below };
        let disk = Self::assemble(directory, *boot, lower, keeper, allowance, state, next_number, lock);
        if opened.sealed {
            disk.replace_sealed_current()?;
        }
        if let Err(error) = disk.remove_merged_tops() {
            // They only take room; the manifest goes on naming them, and the next to compact or open it tries again.
            tracing::warn!(disk = %path.display(), %error, "merged tops cannot be removed");
        }
        Ok(disk)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields, in one place for both ways to get a disk")]
    fn assemble(
        directory: Arc<dyn Directory>,
        boot: BootId,
        lower: Arc<dyn Image>,
        keeper: Arc<Keeper>,
        allowance: Allowance,
        state: State,
        next_number: u64,
        lock: Arc<dyn StoredFile>,
    ) -> Self {
        Self {
            directory,
            boot,
            lower,
            lower_is_durable: AtomicBool::new(false),
            size: state.current.size(),
            keeper,
            allowance,
            structure: Mutex::new(()),
            compaction: Mutex::new(()),
            gate: RwLock::new(()),
            state: RwLock::new(Arc::new(state)),
            next_number: AtomicU64::new(next_number),
            _lock: lock,
        }
    }

    /// Ends a seal that an earlier process had begun.
    fn replace_sealed_current(&self) -> Result<(), StorageError> {
        let state = self.state();
        let (name, top) = self.new_top(state.current.identity().id)?;
        let mut next = self.keeper.manifest();
        next.sealed.push(next.current);
        next.current = TopName::new(&name, &top.identity().id);
        self.record(next, &[&state.current, &top])?;
        let (directory, keeper) = (Arc::clone(&self.directory), Some(Arc::clone(&self.keeper)));
        let sealed =
            SealedTop::hold(state.current_name.clone(), Arc::clone(&state.current), directory, keeper)?;
        let mut tops = state.below.tops().to_vec();
        tops.push(Arc::new(sealed));
        let below = StackedImage::new(Arc::clone(&self.lower), tops);
        let next_state = State { current_name: name, current: top, below };
        *self.state.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(next_state);
        Ok(())
    }
}

struct Chosen {
    manifest: Manifest,
    pending: bool,
    /// Tops that some manifest names which may be needed.
    named: BTreeSet<String>,
}

fn choose_manifest(directory: &dyn Directory, boot: &BootId) -> Result<Chosen, StorageError> {
    let path = directory.path();
    let damaged =
        |reason: String| StorageError::Damaged { name: path.join(DURABLE).display().to_string(), reason };
    let durable = match manifest::read(directory, DURABLE)? {
        Found::None => None,
        Found::Valid(manifest) => Some(manifest),
        Found::Damaged(reason) => return Err(damaged(reason)),
    };
    let found = manifest::read(directory, PENDING)?;
    let lost = !matches!(found, Found::None);
    let pending = match found {
        Found::Valid(pending) if pending.written_in(boot) => Some(pending),
        _ => None,
    };
    let all = durable.iter().chain(&pending);
    let named = all
        .flat_map(|it| it.names().chain(it.removable.iter().map(String::as_str)))
        .map(str::to_owned)
        .collect();
    match (pending, durable) {
        (Some(manifest), _) => Ok(Chosen { manifest, pending: true, named }),
        (None, Some(manifest)) => {
            let removed = remove_if_there(directory, PENDING);
            removed.map_err(|error| failed("remove", &path.join(PENDING), error))?;
            Ok(Chosen { manifest, pending: false, named })
        }
        (None, None) if lost => Err(StorageError::NeverDurable { path: path.to_owned() }),
        (None, None) => {
            let source = io::Error::from(io::ErrorKind::NotFound);
            Err(StorageError::Io { action: "open the disk in", path: path.to_owned(), source })
        }
    }
}

fn check_top(top: &Top, name: &TopName, manifest: &Manifest) -> Result<(), StorageError> {
    let reason = match () {
        () if !name.is(&top.identity().id) => "it is another top than the disk's manifest names",
        () if top.size() != manifest.size => "its size is not the disk's",
        () => return Ok(()),
    };
    Err(StorageError::Damaged { name: top.data_path().display().to_string(), reason: reason.to_owned() })
}

/// Removes tops that no manifest names and nobody can stand on.
fn sweep(
    directory: &dyn Directory,
    names: &[String],
    named: &BTreeSet<String>,
    boot: &BootId,
) -> Result<(), StorageError> {
    for name in tops_in(names).filter(|name| !named.contains(name)) {
        let sealed = match Top::open(directory, &name, Access::Read, boot) {
            Ok(opened) => opened.sealed,
            // Half-made, or half there after a power cut.
            Err(StorageError::Damaged { .. }) => false,
            Err(StorageError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        if !sealed && is_free(directory, &name)? {
            remove_files(directory, &name)?;
        }
    }
    Ok(())
}

/// Whether nobody else holds a top. One whose log is gone is nobody's.
pub(super) fn is_free(directory: &dyn Directory, name: &str) -> Result<bool, StorageError> {
    let log = log_name(name);
    match directory.open(&log) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        opened => opened
            .and_then(|file| file.lock(Lock::Exclusive))
            .map_err(|error| failed("lock", &directory.path().join(log), error)),
    }
}

/// The names of tops among names of files.
fn tops_in(names: &[String]) -> impl Iterator<Item = String> {
    let stems =
        names.iter().filter_map(|name| name.strip_suffix(".log").or_else(|| name.strip_suffix(".data")));
    stems.filter(|stem| number_of(stem).is_some()).map(str::to_owned).collect::<BTreeSet<_>>().into_iter()
}

/// A number that no top has.
fn next_number(names: &[String]) -> u64 {
    tops_in(names).filter_map(|name| number_of(&name)).max().unwrap_or(0).saturating_add(1)
}

fn lock_disk(directory: &dyn Directory) -> Result<Arc<dyn StoredFile>, StorageError> {
    let path = directory.path().join(LOCK);
    let file = match directory.create(LOCK) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => directory.open(LOCK),
        made => made,
    };
    let file = file.map_err(|error| failed("open", &path, error))?;
    match file.lock(Lock::Exclusive) {
        Ok(true) => Ok(file),
        Ok(false) => Err(StorageError::InUse { path: directory.path().to_owned() }),
        Err(error) => Err(failed("lock", &path, error)),
    }
}

/// See [`LayeredDisk::remove`].
pub(super) fn remove(path: &Path) -> Result<Vec<PathBuf>, StorageError> {
    if !path.try_exists().map_err(|error| failed("open", path, error))? {
        return Ok(Vec::new());
    }
    let directory = HostDirectory::new(path);
    let _lock = lock_disk(&directory)?;
    let names = directory.names().map_err(|error| failed("read", path, error))?;
    // The manifests first: a disk that lacks some of its tops must not be opened.
    for name in [DURABLE, PENDING, WRITING] {
        remove_if_there(&directory, name).map_err(|error| failed("remove", &path.join(name), error))?;
    }
    let mut held = Vec::new();
    for name in tops_in(&names) {
        if is_free(&directory, &name)? {
            remove_files(&directory, &name)?;
        } else {
            held.push(path.join(format!("{name}.data")));
        }
    }
    if held.is_empty() {
        remove_if_there(&directory, LOCK).map_err(|error| failed("remove", &path.join(LOCK), error))?;
        match std::fs::remove_dir(path) {
            // The caller's own files may be there.
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => {
                return Err(failed("remove", path, error));
            }
            _ => {}
        }
    }
    Ok(held)
}

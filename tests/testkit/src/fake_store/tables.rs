//! What the fake block service knows, by the rules of the real one: what others are made of stays, and every request may be sent twice.
//!
//! Owns the files of disks, tops and images. Knows no connection and no fault.

use aenv_storage::Image as _;
use aenv_storage::block_service::{
    CacheView, CollectGarbage, Collected, CreateDisk, CreateImage, DiskList, DiskState, DiskView, ErrorCode,
    ExportView, ImageList, ImageView, LayerRef, Name, ReleaseLayer, Released, RewindDisk, SealDisk, Sealed,
    Status,
};
use aenv_storage::cache::BlockCache;
use aenv_storage::chain::LayerChain;
use aenv_storage::layer::Layer;
use aenv_storage::memory_chain::{self, MemoryFiles};
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

type Refused = (ErrorCode, String);

/// What of a disk or a memory a fake guest uses.
const USED_BYTES: usize = 64 << 10;

struct Disk {
    made_by: CreateDisk,
    /// Sealed ones, bottom to top; the writable one has the next number.
    tops: Vec<Name>,
    made_tops: u64,
    /// It was deleted, but others are made of it.
    kept: bool,
}

pub(super) struct Tables {
    directory: PathBuf,
    disks: BTreeMap<Name, Disk>,
    images: BTreeMap<Name, (CreateImage, u64)>,
}

impl Tables {
    pub(super) fn new(directory: &Path) -> Self {
        for name in ["disks", "tops", "images"] {
            std::fs::create_dir_all(directory.join(name)).expect("directories of the fake block service");
        }
        Self { directory: directory.to_owned(), disks: BTreeMap::new(), images: BTreeMap::new() }
    }

    pub(super) fn of_vms(&self) -> Vec<String> {
        let disks = self.disks.iter().filter(|(_, disk)| !disk.kept).map(|(name, _)| name.to_string());
        let images = self.images.keys().map(Name::to_string).filter(|name| !name.starts_with("c-"));
        disks.chain(images).collect()
    }

    pub(super) fn status(&self) -> Status {
        let way = || ExportView { way: "fake".to_owned(), reason: "for tests".to_owned() };
        Status {
            version: "1".to_owned(),
            pid: 1,
            disks_by: way(),
            images_by: way(),
            cache: CacheView { hits: 0, misses: 0, bytes: 0, capacity: 0 },
            disks: self.disks.len(),
            images: self.images.len(),
            open_layers: 0,
            failed: Vec::new(),
            stalled: Vec::new(),
        }
    }

    pub(super) fn disks(&self) -> DiskList {
        DiskList { disks: self.disks.iter().map(|(name, disk)| self.view(name, disk)).collect() }
    }

    pub(super) fn disk(&self, name: &str) -> Result<DiskView, Refused> {
        let name = parsed(name)?;
        self.disks.get(&name).map(|disk| self.view(&name, disk)).ok_or_else(|| not_found(&name))
    }

    pub(super) fn images(&self) -> ImageList {
        ImageList {
            images: self.images.values().map(|(image, size)| self.view_of_image(image, *size)).collect(),
        }
    }

    pub(super) fn image(&self, name: &str) -> Result<ImageView, Refused> {
        let name = parsed(name)?;
        let (image, size) = self.images.get(&name).ok_or_else(|| not_found(&name))?;
        Ok(self.view_of_image(image, *size))
    }

    pub(super) fn create_disk(&mut self, wished: CreateDisk) -> Result<DiskView, Refused> {
        let name = wished.name.clone();
        if let Some(disk) = self.disks.get(&name) {
            if disk.kept || disk.made_by != wished {
                return Err((ErrorCode::Conflict, format!("there is another disk {name}")));
            }
            return Ok(self.view(&name, disk));
        }
        let content = match wished.layers.last() {
            None => Vec::new(),
            Some(LayerRef::Raw { raw }) => read(raw)?,
            Some(LayerRef::Top { disk, top }) => read(&self.top_path(disk, top))?,
            Some(LayerRef::File { .. }) => read_layers(&wished.layers)?,
        };
        write(&self.disk_path(&name), &content)?;
        let disk = Disk { made_by: wished, tops: Vec::new(), made_tops: 0, kept: false };
        let view = self.view(&name, &disk);
        self.disks.insert(name, disk);
        Ok(view)
    }

    pub(super) fn seal(&mut self, name: &str, wished: &SealDisk) -> Result<Sealed, Refused> {
        let name = parsed(name)?;
        let path = self.disk_path(&name);
        let disk = self.live(&name)?;
        let writable = next_top(disk)?;
        let sealed = wished.top.clone().unwrap_or_else(|| writable.clone());
        if sealed == writable {
            disk.tops.push(sealed.clone());
            disk.made_tops += 1;
            let content = read(&path)?;
            write(&self.top_path(&name, &sealed), &content)?;
        }
        let disk = self.live(&name)?;
        let Some(position) = disk.tops.iter().position(|top| *top == sealed) else {
            return Err(not_found(&sealed));
        };
        let tops = disk.tops.iter().take(position + 1);
        let tops = tops.map(|top| LayerRef::Top { disk: name.clone(), top: top.clone() });
        let layers = disk.made_by.layers.iter().cloned().chain(tops).collect();
        Ok(Sealed { sealed, layers, writable_top: next_top(disk)?, stored_bytes: Some(0) })
    }

    pub(super) fn rewind(&mut self, name: &str, wished: &RewindDisk) -> Result<DiskView, Refused> {
        let name = parsed(name)?;
        let disk = self.live(&name)?;
        let Some(position) = disk.tops.iter().position(|top| *top == wished.top) else {
            return Err(not_found(&wished.top));
        };
        let later: Vec<Name> = disk.tops.drain(position + 1..).collect();
        if later.iter().any(|top| self.uses_of_top(&name, top)) {
            self.live(&name)?.tops.extend(later);
            return Err((ErrorCode::Conflict, format!("others are made of a later top of {name}")));
        }
        for top in &later {
            remove(&self.top_path(&name, top));
        }
        let content = read(&self.top_path(&name, &wished.top))?;
        write(&self.disk_path(&name), &content)?;
        // The name of a writable top is never used for another one.
        self.live(&name)?.made_tops += 1;
        self.disk(name.as_str())
    }

    pub(super) fn delete_disk(&mut self, name: &str) {
        let Ok(name) = parsed(name) else { return };
        if let Some(disk) = self.disks.get_mut(&name) {
            disk.kept = true;
            remove(&self.disk_path(&name));
        }
        self.prune();
    }

    pub(super) fn create_image(&mut self, wished: CreateImage) -> Result<ImageView, Refused> {
        let name = wished.name.clone();
        if let Some((image, size)) = self.images.get(&name) {
            if *image != wished {
                return Err((ErrorCode::Conflict, format!("there is another image {name}")));
            }
            return Ok(self.view_of_image(image, *size));
        }
        let (mut files, mut size) = (MemoryFiles::default(), 0);
        for layer in &wished.layers {
            match layer {
                LayerRef::Raw { raw } => {
                    size = std::fs::metadata(raw).map_err(|error| broken(raw, &error))?.len();
                    files.image = Some(raw.clone());
                }
                LayerRef::File { file } => {
                    let cache = Arc::new(BlockCache::new(1 << 20));
                    let layer = Layer::open(file, &cache)
                        .map_err(|error| (ErrorCode::Internal, error.to_string()))?;
                    size = layer.virtual_size();
                    files.layers.push(file.clone());
                }
                LayerRef::Top { disk, top } => drop(read(&self.top_path(disk, top))?),
            }
        }
        // What is made of tops is a disk, and is not read by itself.
        let is_memory = wished.layers.iter().all(|layer| !matches!(layer, LayerRef::Top { .. }));
        if is_memory && !files.layers.is_empty() {
            let path = self.image_path(&name);
            let memory = memory_chain::open(&files, size, &Arc::new(BlockCache::new(1 << 20)));
            let mut content = vec![0; USED_BYTES];
            memory
                .and_then(|memory| memory.read_at(&mut content, 0))
                .map_err(|error| (ErrorCode::Internal, error.to_string()))?;
            write(&path, &content)?;
        }
        let view = self.view_of_image(&wished, size);
        self.images.insert(name, (wished, size));
        Ok(view)
    }

    pub(super) fn delete_image(&mut self, name: &str) {
        let Ok(name) = parsed(name) else { return };
        self.images.remove(&name);
        remove(&self.image_path(&name));
        self.prune();
    }

    /// Removes a layer file that nothing is made of.
    pub(super) fn release(&self, release: &ReleaseLayer) -> Released {
        let removed = !self.files().any(|path| path == release.file);
        if removed {
            remove(&release.file);
        }
        Released { removed }
    }

    fn files(&self) -> impl Iterator<Item = &Path> {
        let of_disks = self.disks.values().flat_map(|disk| &disk.made_by.layers);
        let layers = of_disks.chain(self.images.values().flat_map(|(image, _)| &image.layers));
        layers.filter_map(|layer| match layer {
            LayerRef::File { file: path } | LayerRef::Raw { raw: path } => Some(path.as_path()),
            LayerRef::Top { .. } => None,
        })
    }

    /// Removes the files beside those of our images that nothing is made of.
    pub(super) fn collect(&self, collect: &CollectGarbage) -> Collected {
        let mut needed: Vec<&Path> = self.files().collect();
        needed.extend(collect.keep_layers.iter().map(PathBuf::as_path));
        let directories: std::collections::BTreeSet<_> =
            collect.keep_layers.iter().filter_map(|path| path.parent()).collect();
        let mut collected = Collected::default();
        for entry in directories.into_iter().flat_map(std::fs::read_dir).flatten().flatten() {
            if !needed.contains(&entry.path().as_path()) {
                remove(&entry.path());
                collected.layers += 1;
            }
        }
        collected
    }

    fn live(&mut self, name: &Name) -> Result<&mut Disk, Refused> {
        self.disks.get_mut(name).filter(|disk| !disk.kept).ok_or_else(|| not_found(name))
    }

    fn uses_of_top(&self, disk: &Name, top: &Name) -> bool {
        let wanted = LayerRef::Top { disk: disk.clone(), top: top.clone() };
        self.images.values().any(|(image, _)| image.layers.contains(&wanted))
            || self.disks.iter().any(|(name, other)| name != disk && other.made_by.layers.contains(&wanted))
    }

    /// Forgets deleted disks that nothing is made of any more.
    fn prune(&mut self) {
        let over: Vec<Name> = self
            .disks
            .iter()
            .filter(|(name, disk)| disk.kept && !disk.tops.iter().any(|top| self.uses_of_top(name, top)))
            .map(|(name, _)| name.clone())
            .collect();
        for name in &over {
            for top in self.disks.remove(name).into_iter().flat_map(|disk| disk.tops) {
                remove(&self.top_path(name, &top));
            }
        }
        // One disk may have been all that kept another.
        if !over.is_empty() {
            self.prune();
        }
    }

    fn view(&self, name: &Name, disk: &Disk) -> DiskView {
        DiskView {
            name: name.clone(),
            state: if disk.kept { DiskState::Kept } else { DiskState::Ready },
            failure: None,
            path: (!disk.kept).then(|| self.disk_path(name)),
            number: 0,
            size: disk.made_by.size,
            quota: disk.made_by.quota.unwrap_or(disk.made_by.size),
            stored_bytes: 0,
            owner: disk.made_by.owner,
            layers: disk.made_by.layers.clone(),
            tops: Vec::new(),
            writable_top: (!disk.kept).then(|| next_top(disk).ok()).flatten(),
            stalled: None,
        }
    }

    fn view_of_image(&self, image: &CreateImage, size: u64) -> ImageView {
        ImageView {
            name: image.name.clone(),
            state: DiskState::Ready,
            failure: None,
            path: image.exported.then(|| self.image_path(&image.name)),
            number: 0,
            size,
            owner: image.owner,
            layers: image.layers.clone(),
        }
    }

    fn disk_path(&self, name: &Name) -> PathBuf {
        self.directory.join("disks").join(name.as_str())
    }

    fn image_path(&self, name: &Name) -> PathBuf {
        self.directory.join("images").join(name.as_str())
    }

    fn top_path(&self, disk: &Name, top: &Name) -> PathBuf {
        self.directory.join("tops").join(format!("{disk}-{top}"))
    }
}

fn next_top(disk: &Disk) -> Result<Name, Refused> {
    parsed(&format!("top-{}", disk.made_tops + 1))
}

fn parsed(name: &str) -> Result<Name, Refused> {
    name.parse()
        .map_err(|error: aenv_storage::block_service::InvalidName| (ErrorCode::Invalid, error.to_string()))
}

fn not_found(name: &Name) -> Refused {
    (ErrorCode::NotFound, format!("there is no {name}"))
}

fn broken(path: &Path, error: &std::io::Error) -> Refused {
    (ErrorCode::Internal, format!("{}: {error}", path.display()))
}

/// What a fake guest uses of a file.
/// The beginning of what layer files show together.
fn read_layers(layers: &[LayerRef]) -> Result<Vec<u8>, Refused> {
    let cache = Arc::new(BlockCache::new(1 << 20));
    let failed = |error: aenv_storage::StorageError| (ErrorCode::Internal, error.to_string());
    let open = |layer: &LayerRef| match layer {
        LayerRef::File { file } => Layer::open(file, &cache).map_err(failed),
        other => Err((ErrorCode::Invalid, format!("{other:?} lies below a layer file"))),
    };
    let chain = LayerChain::new(layers.iter().map(open).collect::<Result<_, _>>()?).map_err(failed)?;
    let used = chain.size().min(u64::try_from(USED_BYTES).unwrap_or(u64::MAX));
    let mut content = vec![0; usize::try_from(used).unwrap_or(USED_BYTES)];
    chain.read_at(&mut content, 0).map_err(failed)?;
    Ok(content)
}

fn read(path: &Path) -> Result<Vec<u8>, Refused> {
    let mut content = Vec::new();
    let limit = u64::try_from(USED_BYTES).unwrap_or(u64::MAX);
    let read = std::fs::File::open(path).and_then(|file| file.take(limit).read_to_end(&mut content));
    read.map(|_| content).map_err(|error| broken(path, &error))
}

fn write(path: &Path, content: &[u8]) -> Result<(), Refused> {
    std::fs::write(path, content).map_err(|error| broken(path, &error))
}

fn remove(path: &Path) {
    // What is not there need not be removed.
    drop(std::fs::remove_file(path));
}

//! `aenv layer export` and `aenv layer import`: from layers to a raw image and back, complete or not at all.
//!
//! Owns the new file. It gets its name when all of it is there and durable; until then it is a temporary one beside it,
//! which disappears on failure and on signals. Memory use does not depend on sizes.

use super::{Opened, cache, total_bytes, working};
use crate::arguments::{LayerCompression, LayerExportArguments, LayerImportArguments};
use crate::failure::{Exit, Failure};
use crate::output::Printer;
use aenv_storage::chain::{LayerChain, check_order};
use aenv_storage::commit::{LayerOptions, Source};
use aenv_storage::raw_image::{RawImage, write_raw};
use aenv_storage::stored_form::{StoredForm, write_stored};
use aenv_storage::zfile::ZFileOptions;
use aenv_storage::{Image, StorageError};
use serde_json::json;
use std::fs::{File, Metadata, Permissions};
use std::io::BufWriter;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::NamedTempFile;

/// Writes what a stack of layers shows into a raw file.
pub(crate) async fn export(printer: Printer, arguments: LayerExportArguments) -> Result<Exit, Failure> {
    let target = Target::new(&arguments.output, &arguments.layers)?;
    let file = target.file()?;
    let name = arguments.output.clone();
    let (layers, any_order) = (arguments.layers, arguments.any_order);
    let total = total_bytes(&layers);
    let copying = move |done: Arc<AtomicU64>| {
        let cache = cache();
        let opened: Vec<Opened> =
            layers.iter().map(|path| Opened::open(path, &cache)).collect::<Result<_, StorageError>>()?;
        let stack: Vec<_> = opened.iter().map(|opened| opened.layer.clone()).collect();
        if !any_order {
            check_order(&stack).map_err(|error| {
                let hint = "name the layers from the bottom to the top, or accept it with --any-order";
                Failure::new(error.to_string()).with_hint(hint)
            })?;
        }
        for layer in &opened {
            layer.verify(&done)?;
        }
        let chain = LayerChain::new(stack)?;
        let data_bytes = write_raw(&chain, &file, &name)?;
        Ok::<_, Failure>((chain.size(), data_bytes))
    };
    let (size, data_bytes) = working(printer, Some(total), copying).await?;
    target.complete()?;
    if printer.is_json() {
        let path = arguments.output.display().to_string();
        printer.json(&json!({ "path": path, "bytes": size, "dataBytes": data_bytes }))?;
    } else {
        printer.note(&format!(
            "{} in {}, {} of them data",
            indicatif::BinaryBytes(size),
            arguments.output.display(),
            indicatif::BinaryBytes(data_bytes)
        ));
    }
    Ok(Exit::DONE)
}

/// Makes a layer of a raw file.
pub(crate) async fn import(printer: Printer, arguments: LayerImportArguments) -> Result<Exit, Failure> {
    let image = RawImage::open(&arguments.raw)?;
    if image.size() == 0 {
        return Err(Failure::new(format!("{} is empty: no disk has 0 bytes", arguments.raw.display())));
    }
    let target = Target::new(&arguments.output, std::slice::from_ref(&arguments.raw))?;
    let file = target.file()?;
    let (size, total, name) = (image.size(), image.data_bytes(), arguments.output.clone());
    let form = StoredForm {
        compression: match arguments.compression {
            LayerCompression::None => None,
            LayerCompression::Lz4 => Some(ZFileOptions::lz4()),
            LayerCompression::Zstd => Some(ZFileOptions::zstd()),
        },
        in_tar: arguments.tar,
    };
    let reading = move |done| {
        let image = Counted { image, done };
        let mut output = BufWriter::with_capacity(1 << 20, &file);
        write_stored(Source::Image(&image), &LayerOptions::default(), form, &mut output, &name)
    };
    let summary = working(printer, Some(total), reading).await?;
    let stored = target.complete()?;
    if printer.is_json() {
        let path = arguments.output.display().to_string();
        printer.json(&json!({
            "path": path, "virtualBytes": size, "storedBytes": stored,
            "layerBytes": summary.layer_bytes, "entries": summary.entries,
        }))?;
    } else {
        printer.note(&format!(
            "a layer of {} in {}, for a disk of {}",
            indicatif::BinaryBytes(stored),
            arguments.output.display(),
            indicatif::BinaryBytes(size)
        ));
    }
    Ok(Exit::DONE)
}

/// An image that counts what is read of it.
#[derive(Debug)]
struct Counted {
    image: RawImage,
    done: Arc<AtomicU64>,
}

impl Image for Counted {
    fn size(&self) -> u64 {
        self.image.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.done.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.image.read_at(buffer, offset)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        self.image.next_data(offset)
    }
}

/// The file that is to be there at the end.
#[derive(Debug)]
struct Target {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl Target {
    /// `inputs` are what it is made of.
    fn new(path: &Path, inputs: &[PathBuf]) -> Result<Self, Failure> {
        let path = match std::fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => {
                return Err(Failure::new(format!("{} is there and not a regular file", path.display())));
            }
            Ok(metadata) if inputs.iter().any(|input| is_same_file(input, &metadata)) => {
                let reason = format!("{} is one of the files that are read", path.display());
                return Err(Failure::new(reason).with_hint("name another --output"));
            }
            // A link stays a link: what it points at is replaced.
            Ok(_) => std::fs::canonicalize(path).map_err(|error| unwritable(path, &error))?,
            Err(_absent) => path.to_owned(),
        };
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let temporary = tempfile::Builder::new()
            .prefix(".aenv-layer-")
            // The umask decides, as for any new file.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .map_err(|error| unwritable(&path, &error))?;
        Ok(Self { temporary, path })
    }

    /// The file, for the thread that writes it.
    fn file(&self) -> Result<File, Failure> {
        self.temporary.as_file().try_clone().map_err(|error| unwritable(&self.path, &error))
    }

    /// Makes it durable and gives it its name; returns its bytes.
    fn complete(self) -> Result<u64, Failure> {
        let Self { temporary, path } = self;
        let failed = |error: &std::io::Error| unwritable(&path, error);
        temporary.as_file().sync_all().map_err(|error| failed(&error))?;
        let file = temporary.persist(&path).map_err(|error| failed(&error.error))?;
        Ok(file.metadata().map_err(|error| failed(&error))?.len())
    }
}

/// Whether a path leads to that file; one that cannot be asked is not it, and is complained of when it is read.
fn is_same_file(path: &Path, of: &Metadata) -> bool {
    std::fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (of.dev(), of.ino()))
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    let failure = Failure::new(format!("{} cannot be written: {error}", path.display()));
    match error.kind() {
        std::io::ErrorKind::StorageFull => failure.with_hint("free room on this machine and try again"),
        std::io::ErrorKind::NotFound => failure.with_hint("make its directory first"),
        _ => failure,
    }
}

//! `aenv layer …`: layer files of this machine, without a node; and `gc`, which a node does with its own.
//!
//! ```text
//! info    open ─▶ what header, index and wrapping say
//! verify  open ─▶ its size ─▶ read all that is stored         per file: ok, or what is damaged where
//! export  open all ─▶ their order ─▶ verify all ─▶ read the stack ─▶ raw file      ┐ `copy`: a new file, complete or absent
//! import  raw file ─▶ layer, compressed, in an archive              ┘
//! ```
//! Owns the threads that read, which end with the process. Must not know formats: the storage engine does.

mod copy;
mod gc;

pub(crate) use gc::collect_garbage;

use crate::arguments::{LayerFileCommand, LayerInfoArguments, LayerVerifyArguments};
use crate::commands::Interrupts;
use crate::failure::{Exit, Failure};
use crate::output::Printer;
use aenv_storage::blob::FileBlob;
use aenv_storage::cache::BlockCache;
use aenv_storage::layer::{Form, Layer};
use aenv_storage::open::{Unwrapped, unwrap_layer};
use aenv_storage::{Blob, StorageError};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Decompressed blocks that are kept while a stack is read, in bytes.
const CACHE_BYTES: u64 = 64 << 20;
/// How often the bar is drawn.
const TICK: Duration = Duration::from_millis(100);

/// Runs a command about layer files.
pub(crate) async fn run(printer: Printer, command: LayerFileCommand) -> Result<Exit, Failure> {
    match command {
        LayerFileCommand::Info(arguments) => info(printer, arguments).await,
        LayerFileCommand::Verify(arguments) => verify(printer, arguments).await,
        LayerFileCommand::Export(arguments) => copy::export(printer, arguments).await,
        LayerFileCommand::Import(arguments) => copy::import(printer, arguments).await,
    }
}

/// A layer file that was opened, with its wrapping.
struct Opened {
    path: PathBuf,
    stored_bytes: u64,
    unwrapped: Unwrapped,
    layer: Arc<Layer>,
}

impl Opened {
    fn open(path: &Path, cache: &Arc<BlockCache>) -> Result<Self, StorageError> {
        let file = FileBlob::open(path)?;
        let stored_bytes = file.stored_size();
        let unwrapped = unwrap_layer(Arc::new(file), cache)?;
        let layer = Layer::from_blob(unwrapped.blob.clone())?;
        Ok(Self { path: path.to_owned(), stored_bytes, unwrapped, layer })
    }

    /// Bytes of the layer without compression and archive.
    fn layer_bytes(&self) -> u64 {
        self.unwrapped.blob.stored_size()
    }

    /// Reads it to its end. Adds to `done` the share of the file's bytes that was read.
    fn verify(&self, done: &AtomicU64) -> Result<(), StorageError> {
        self.layer.check_size()?;
        let (mut read, mut told) = (0_u64, 0_u64);
        self.unwrapped.verify(|bytes| {
            read += bytes;
            let whole = u128::from(self.layer_bytes().max(1));
            let share = u128::from(read) * u128::from(self.stored_bytes) / whole;
            let share = u64::try_from(share).unwrap_or(u64::MAX);
            done.fetch_add(share.saturating_sub(told), Ordering::Relaxed);
            told = told.max(share);
        })
    }
}

/// Bytes of files, as far as they can be told: for a bar only.
fn total_bytes(paths: &[PathBuf]) -> u64 {
    let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(0, |file| file.len());
    paths.iter().map(bytes).fold(0, u64::saturating_add)
}

fn cache() -> Arc<BlockCache> {
    Arc::new(BlockCache::new(CACHE_BYTES))
}

/// What `layer info` shows of a file.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Description {
    file: String,
    form: &'static str,
    in_tar: bool,
    compression: Option<Compression>,
    /// Bytes of the disk it is a layer of.
    virtual_bytes: u64,
    /// Bytes of the file.
    stored_bytes: u64,
    /// Bytes of the layer without compression and archive.
    layer_bytes: u64,
    /// Mappings, padding not counted.
    entries: usize,
    uuid: Option<String>,
    parent: Option<String>,
    user_tag: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Compression {
    algorithm: &'static str,
    block_bytes: u32,
    checksums: bool,
}

impl Description {
    fn new(opened: &Opened) -> Self {
        let layer = &opened.layer;
        let compression = opened.unwrapped.compression().map(|info| Compression {
            algorithm: info.algorithm.name(),
            block_bytes: info.block_bytes,
            checksums: info.has_checksums,
        });
        Self {
            file: opened.path.display().to_string(),
            form: form_name(layer.form()),
            in_tar: opened.unwrapped.in_tar,
            compression,
            virtual_bytes: layer.virtual_size(),
            stored_bytes: opened.stored_bytes,
            layer_bytes: opened.layer_bytes(),
            entries: layer.index().len(),
            uuid: layer.uuid().map(|uuid| uuid.to_string()),
            parent: layer.parent().map(|uuid| uuid.to_string()),
            user_tag: String::from_utf8_lossy(layer.user_tag()).into_owned(),
        }
    }

    fn row(&self) -> [String; 9] {
        let compression = match &self.compression {
            None => "none".to_owned(),
            Some(found) => format!("{} in {} KiB", found.algorithm, found.block_bytes >> 10),
        };
        [
            self.file.clone(),
            if self.in_tar { format!("{}, in tar", self.form) } else { self.form.to_owned() },
            compression,
            indicatif::BinaryBytes(self.virtual_bytes).to_string(),
            indicatif::BinaryBytes(self.stored_bytes).to_string(),
            self.entries.to_string(),
            self.uuid.clone().unwrap_or_default(),
            self.parent.clone().unwrap_or_default(),
            self.user_tag.clone(),
        ]
    }
}

fn form_name(form: Form) -> &'static str {
    match form {
        Form::Committed => "committed",
        Form::SealedInPlace => "sealed in place",
        Form::LogStructured => "log-structured",
        Form::Sparse => "sparse",
    }
}

/// Shows every file that can be opened; fails with the first that cannot.
async fn info(printer: Printer, arguments: LayerInfoArguments) -> Result<Exit, Failure> {
    let opening = move |_done| {
        let opened = arguments.files.iter().map(|path| Opened::open(path, &cache()));
        Ok::<_, Failure>(opened.map(|opened| opened.map(|opened| Description::new(&opened))).collect())
    };
    let opened: Vec<Result<Description, StorageError>> = working(printer, None, opening).await?;
    let mut failed = None;
    let mut descriptions = Vec::new();
    for opened in opened {
        match opened {
            Ok(description) => descriptions.push(description),
            Err(error) => {
                // The last one is told by the caller.
                if let Some(earlier) = failed.replace(Failure::from(error)) {
                    printer.failure(&earlier);
                }
            }
        }
    }
    if printer.is_json() {
        printer.json(&descriptions)?;
    } else if !descriptions.is_empty() {
        let header = ["FILE", "FORM", "COMPRESSION", "VIRTUAL", "STORED", "ENTRIES", "UUID", "PARENT", "TAG"];
        printer.table(header, descriptions.iter().map(Description::row).collect())?;
    }
    failed.map_or(Ok(Exit::DONE), Err)
}

/// What `layer verify` found.
#[derive(Debug, Serialize)]
struct Judgement {
    file: String,
    ok: bool,
    /// What is wrong where.
    error: Option<String>,
}

/// Reads every file to its end.
async fn verify(printer: Printer, arguments: LayerVerifyArguments) -> Result<Exit, Failure> {
    let total = total_bytes(&arguments.files);
    let reading = move |done: Arc<AtomicU64>| {
        let judge = |path: &PathBuf| {
            let outcome = Opened::open(path, &cache()).and_then(|opened| opened.verify(&done));
            let error = outcome.err().map(|error| error.to_string());
            Judgement { file: path.display().to_string(), ok: error.is_none(), error }
        };
        Ok::<_, Failure>(arguments.files.iter().map(judge).collect())
    };
    let judgements: Vec<Judgement> = working(printer, Some(total), reading).await?;
    let damaged = judgements.iter().filter(|judgement| !judgement.ok).count();
    if printer.is_json() {
        printer.json(&judgements)?;
    } else {
        let row = |judgement: &Judgement| {
            let words = judgement.error.clone().unwrap_or_else(|| "ok".to_owned());
            [judgement.file.clone(), words]
        };
        printer.table(["FILE", "RESULT"], judgements.iter().map(row).collect())?;
    }
    match damaged {
        0 => Ok(Exit::DONE),
        _ => Err(Failure::new(format!("{damaged} of {} files cannot be used", judgements.len()))),
    }
}

/// Does something long on another thread; shows how far it is, counted in bytes by the work itself, of `total`. Ends at
/// once when a person asks for it: the work must then own nothing that needs to be cleaned up.
async fn working<T: Send + 'static, E: Into<Failure> + Send + 'static>(
    printer: Printer,
    total: Option<u64>,
    work: impl FnOnce(Arc<AtomicU64>) -> Result<T, E> + Send + 'static,
) -> Result<T, Failure> {
    let mut interrupts = Interrupts::catch()?;
    let done = Arc::new(AtomicU64::new(0));
    let counter = done.clone();
    let mut work = tokio::task::spawn_blocking(move || work(counter));
    let mut progress = printer.transfer(total);
    let mut shown = 0;
    loop {
        tokio::select! {
            ended = &mut work => {
                return match ended {
                    Ok(result) => result.map_err(E::into),
                    Err(error) => Err(Failure::new(format!("the reading thread ended: {error}"))),
                };
            }
            signal = interrupts.next() => return Err(Failure::quiet(Exit::signalled(signal))),
            () = tokio::time::sleep(TICK) => {
                let now = done.load(Ordering::Relaxed);
                progress.advance(usize::try_from(now.saturating_sub(shown)).unwrap_or(usize::MAX));
                shown = now;
            }
        }
    }
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        let failure = Self::new(error.to_string());
        match error {
            StorageError::NoSpace { .. } => failure.with_hint("free room on this machine and try again"),
            StorageError::Damaged { .. } => failure.with_hint("get the file again from where it came from"),
            _ => failure,
        }
    }
}

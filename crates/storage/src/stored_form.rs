//! Writes a layer in the form it is to be stored in: plain, compressed, and inside of an archive. The counterpart of
//! [`crate::open`].
//!
//! ```text
//! source ─▶ layer ─▶ (zfile) ─▶ (tar archive) ─▶ output
//! ```
//! Owns no state. Must not make the output durable, nor name it.

use crate::StorageError;
use crate::commit::{LayerOptions, LayerSummary, Source, write_layer};
use crate::raw_file::failed;
use crate::tar_wrap::Wrapping;
use crate::zfile::{ZFileOptions, ZFileWriter};
use std::io::{Seek, Write};
use std::path::Path;

/// How a layer is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoredForm {
    /// Whether and how it is compressed.
    pub compression: Option<ZFileOptions>,
    /// Whether it is put into an archive, as registries want it.
    pub in_tar: bool,
}

/// Writes a layer at the output's present position; it is left at the end. `name` is the output's name in messages. The
/// summary is that of the layer itself.
///
/// # Errors
/// As [`write_layer`]; what was written until then is of no use.
pub fn write_stored<W: Write + Seek>(
    source: Source<'_>,
    options: &LayerOptions,
    form: StoredForm,
    output: &mut W,
    name: &Path,
) -> Result<LayerSummary, StorageError> {
    let unwritable = |error| failed("write", name, error);
    let wrapping = if form.in_tar { Some(Wrapping::begin(output).map_err(unwritable)?) } else { None };
    let summary = match form.compression {
        None => write_layer(source, options, output, name)?,
        Some(compression) => {
            let mut writer = ZFileWriter::new(&mut *output, compression).map_err(unwritable)?;
            let summary = write_layer(source, options, &mut writer, name)?;
            writer.finish().map_err(unwritable)?;
            summary
        }
    };
    if let Some(wrapping) = wrapping {
        wrapping.finish(output).map_err(unwritable)?;
    }
    output.flush().map_err(unwritable)?;
    Ok(summary)
}

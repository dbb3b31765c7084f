//! Writes zfiles that overlaybd's own tools read: blocks of at most 32 KiB, checksums everywhere, plain index.
//!
//! ```text
//! write ─▶ batch of blocks ─full─▶ compress on all processors ─▶ records in order
//! finish ─▶ last batch ─▶ index ─▶ trailer ─▶ header overwritten: only now any reader takes the file
//! ```
//! Owns the batch and the index until `finish`. Must not make the file durable: who asked for it knows when.

use super::codec::{Algorithm, Compressor, raw_crc, record_crc};
use super::header::{Layout, Role};
use super::index::CRC_BYTES;
use super::{HEADER_BYTES, MAX_BLOCKS, MAX_WRITTEN_BLOCK_BYTES, MIN_BLOCK_BYTES};
use std::io::{self, Seek, SeekFrom, Write};

/// Level of zstd that overlaybd uses too.
pub const DEFAULT_ZSTD_LEVEL: i32 = 3;

/// Uncompressed bytes that one processor is given at once.
const BATCH_BYTES_PER_THREAD: usize = 512 << 10;
/// Processors used at most.
const MAX_THREADS: usize = 8;

/// How to compress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileOptions {
    /// Compression.
    pub algorithm: Algorithm,
    /// Bytes of a block, a power of two from 4 KiB to 32 KiB. Larger is smaller, and slower for small random reads.
    pub block_bytes: u32,
    /// Level of zstd, 1 to 22; lz4 has none.
    pub level: i32,
}

impl ZFileOptions {
    /// For what is read often and must be decompressed fast: lz4 in blocks of 16 KiB.
    #[must_use]
    pub fn lz4() -> Self {
        Self { algorithm: Algorithm::Lz4, block_bytes: 16 << 10, level: 0 }
    }

    /// For what is stored long or sent far: zstd in blocks of 16 KiB.
    #[must_use]
    pub fn zstd() -> Self {
        Self { algorithm: Algorithm::Zstd, block_bytes: 16 << 10, level: DEFAULT_ZSTD_LEVEL }
    }

    fn judge(&self) -> io::Result<()> {
        let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let allowed = MIN_BLOCK_BYTES..=MAX_WRITTEN_BLOCK_BYTES;
        if !self.block_bytes.is_power_of_two() || !allowed.contains(&self.block_bytes) {
            return invalid(format!(
                "blocks of {} bytes: a power of two from {MIN_BLOCK_BYTES} to {MAX_WRITTEN_BLOCK_BYTES} is needed",
                self.block_bytes
            ));
        }
        if self.algorithm == Algorithm::Zstd && !(1..=22).contains(&self.level) {
            return invalid(format!("zstd has no level {}: 1 to 22", self.level));
        }
        Ok(())
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compressed {
    /// Bytes that went in.
    pub original_bytes: u64,
    /// Bytes of the whole zfile.
    pub stored_bytes: u64,
}

/// Compresses what is written to it. What was written is a zfile only after [`ZFileWriter::finish`].
pub struct ZFileWriter<W> {
    pub(super) output: W,
    /// Where the zfile starts in the output.
    start: u64,
    options: ZFileOptions,
    batch: Vec<u8>,
    batch_bytes: usize,
    compressors: Vec<Compressor>,
    /// Lengths of the records, as they stand in the file.
    index: Vec<u8>,
    records_bytes: u64,
    original_bytes: u64,
    /// A batch was lost to an error: nothing that follows can make the file right.
    broken: bool,
}

impl<W: Write + Seek> ZFileWriter<W> {
    /// Starts a zfile at the output's present position.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for options that are out of range; else those of the output.
    pub fn new(mut output: W, options: ZFileOptions) -> io::Result<Self> {
        options.judge()?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let compressors = (0..threads)
            .map(|_| Compressor::new(options.algorithm, options.level))
            .collect::<io::Result<Vec<_>>>()?;
        let start = output.stream_position()?;
        let batch_bytes = BATCH_BYTES_PER_THREAD * threads;
        let writer = Self {
            output,
            start,
            options,
            batch: Vec::with_capacity(batch_bytes),
            batch_bytes,
            compressors,
            index: Vec::new(),
            records_bytes: 0,
            original_bytes: 0,
            broken: false,
        };
        let unfinished = writer.layout().encode_unfinished();
        let mut writer = writer;
        writer.output.write_all(&unfinished)?;
        Ok(writer)
    }

    /// Completes the file; the output is left at its end.
    ///
    /// # Errors
    /// Those of the output, and when an earlier write has failed.
    pub fn finish(mut self) -> io::Result<(W, Compressed)> {
        self.compress_batch()?;
        let layout = self.layout();
        self.output.write_all(&self.index)?;
        self.output.write_all(&layout.encode(Role::Trailer))?;
        let end = self.output.stream_position()?;
        self.output.seek(SeekFrom::Start(self.start))?;
        self.output.write_all(&layout.encode(Role::Header))?;
        self.output.seek(SeekFrom::Start(end))?;
        self.output.flush()?;
        let written = Compressed { original_bytes: self.original_bytes, stored_bytes: end - self.start };
        Ok((self.output, written))
    }

    fn layout(&self) -> Layout {
        Layout {
            index_offset: HEADER_BYTES as u64 + self.records_bytes,
            blocks: self.index.len() as u64 / 4,
            original_size: self.original_bytes,
            index_crc: raw_crc(&self.index, 0),
            block_bytes: self.options.block_bytes,
            algorithm: self.options.algorithm,
            // Only told, never needed; no level is above 22.
            level: u8::try_from(self.options.level).unwrap_or(0),
            records_have_crc: true,
        }
    }

    fn compress_batch(&mut self) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::other("an earlier write has failed"));
        }
        if self.batch.is_empty() {
            return Ok(());
        }
        let block_bytes = self.options.block_bytes as usize;
        let blocks = self.batch.len().div_ceil(block_bytes);
        if (self.index.len() / 4 + blocks) as u64 > MAX_BLOCKS {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("more than {MAX_BLOCKS} blocks: larger blocks are needed"),
            ));
        }
        self.broken = true;
        let share = blocks.div_ceil(self.compressors.len()) * block_bytes;
        let parts = self.batch.chunks(share).zip(&mut self.compressors);
        let compressed: Vec<io::Result<Records>> = std::thread::scope(|scope| {
            let others: Vec<_> = parts
                .map(|(part, compressor)| {
                    scope.spawn(move || Records::compress(part, block_bytes, compressor))
                })
                .collect();
            others
                .into_iter()
                .map(|other| {
                    other.join().unwrap_or_else(|_| Err(io::Error::other("the compressor panicked")))
                })
                .collect()
        });
        for records in compressed {
            let records = records?;
            self.output.write_all(&records.bytes)?;
            self.records_bytes += records.bytes.len() as u64;
            self.index.extend_from_slice(&records.index);
        }
        self.batch.clear();
        self.broken = false;
        Ok(())
    }
}

/// Neighbouring records.
struct Records {
    bytes: Vec<u8>,
    index: Vec<u8>,
}

impl Records {
    fn compress(data: &[u8], block_bytes: usize, compressor: &mut Compressor) -> io::Result<Self> {
        let mut records = Self { bytes: Vec::with_capacity(data.len() / 2), index: Vec::new() };
        for block in data.chunks(block_bytes) {
            let start = records.bytes.len();
            let length = compressor.append(block, &mut records.bytes)?;
            let crc = record_crc(&records.bytes[start..]);
            records.bytes.extend_from_slice(&crc.to_le_bytes());
            let length = u32::try_from(length + CRC_BYTES).map_err(io::Error::other)?;
            records.index.extend_from_slice(&length.to_le_bytes());
        }
        Ok(records)
    }
}

impl<W: Write + Seek> Write for ZFileWriter<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.batch.len() == self.batch_bytes {
            self.compress_batch()?;
        }
        let count = data.len().min(self.batch_bytes - self.batch.len());
        self.batch.extend_from_slice(&data[..count]);
        self.original_bytes += count as u64;
        Ok(count)
    }

    /// Compressed is what fills a batch; the rest waits for [`ZFileWriter::finish`].
    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

impl<W> std::fmt::Debug for ZFileWriter<W> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ZFileWriter")
            .field("options", &self.options)
            .field("original_bytes", &self.original_bytes)
            .finish_non_exhaustive()
    }
}

/// Compresses a whole blob.
///
/// # Errors
/// As [`ZFileWriter`]; what the blob fails with is in the error's source.
pub fn write<W: Write + Seek>(
    source: &dyn crate::Blob,
    output: W,
    options: ZFileOptions,
) -> io::Result<Compressed> {
    let mut writer = ZFileWriter::new(output, options)?;
    let size = source.stored_size();
    let mut buffer = vec![0; 256 << 10];
    let mut offset = 0;
    while offset < size {
        let count = (size - offset).min(buffer.len() as u64);
        let part = &mut buffer[..count as usize];
        source.read_exact_at(part, offset).map_err(io::Error::other)?;
        writer.write_all(part)?;
        offset += count;
    }
    Ok(writer.finish()?.1)
}

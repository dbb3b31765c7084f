//! The baseline: a disk by NBD, served by `qemu-nbd` from a plain file, read by a client of just what is measured.
//!
//! Owns the server process; it ends with the value. Numbers are those of the protocol's specification.

use anyhow::{Context, Result, bail};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const EXPORT_NAME: u32 = 1;
const FIXED_NEWSTYLE: u32 = 1;
const NO_ZEROES: u32 = 2;

/// What can be asked.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Request {
    Read = 0,
    Write = 1,
    Flush = 3,
}

/// A server process.
#[derive(Debug)]
pub(crate) struct Server {
    process: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts it on a raw file; none where `qemu-nbd` is not installed.
    pub(crate) fn start(file: &Path, socket: &Path) -> Result<Option<Self>> {
        let mut command = Command::new("qemu-nbd");
        command.args([
            "--format=raw",
            "--cache=none",
            "--aio=threads",
            "--shared=4",
            "--persistent",
            "--socket",
        ]);
        let spawned = command.arg(socket).arg(file).stdin(Stdio::null()).spawn();
        let process = match spawned {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.context("cannot start qemu-nbd")?,
        };
        let mut server = Self { process, socket: socket.to_owned() };
        let started = Instant::now();
        while !socket.exists() {
            if let Some(status) = server.process.try_wait().context("cannot wait for qemu-nbd")? {
                bail!("qemu-nbd ended: {status}");
            }
            if started.elapsed() > Duration::from_secs(10) {
                bail!("qemu-nbd does not listen");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Some(server))
    }

    /// A new connection.
    pub(crate) fn connect(&self) -> Result<Client> {
        Client::connect(&self.socket).context("cannot connect to qemu-nbd")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself; there is nobody to tell.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// One connection, one request at a time.
#[derive(Debug)]
pub(crate) struct Client {
    stream: UnixStream,
    cookie: u64,
}

impl Client {
    fn connect(socket: &Path) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        if &greeting[..8] != b"NBDMAGIC" || &greeting[8..16] != OPTION_MAGIC {
            return Err(io::Error::other("the server does not speak NBD"));
        }
        stream.write_all(&(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes())?;
        stream.write_all(OPTION_MAGIC)?;
        stream.write_all(&EXPORT_NAME.to_be_bytes())?;
        stream.write_all(&0_u32.to_be_bytes())?;
        // Size and flags of the export.
        stream.read_exact(&mut [0; 10])?;
        Ok(Self { stream, cookie: 0 })
    }

    /// Asks and waits for the answer; `data` is what is written, or where it is read to.
    pub(crate) fn ask(&mut self, command: Request, data: &mut [u8], offset: u64) -> io::Result<usize> {
        self.cookie += 1;
        let length = u32::try_from(data.len()).map_err(io::Error::other)?;
        let mut request = [0; 28];
        request[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        request[6..8].copy_from_slice(&(command as u16).to_be_bytes());
        request[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        request[16..24].copy_from_slice(&offset.to_be_bytes());
        request[24..].copy_from_slice(&length.to_be_bytes());
        self.stream.write_all(&request)?;
        if matches!(command, Request::Write) {
            self.stream.write_all(data)?;
        }
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        if reply[..4] != REPLY_MAGIC.to_be_bytes() || reply[4..8] != [0; 4] {
            return Err(io::Error::other("the server refused"));
        }
        if matches!(command, Request::Read) {
            self.stream.read_exact(data)?;
        }
        Ok(data.len())
    }
}

//! One fake VMM process with its guest: an HTTP server that answers while the vCPUs run, and a memory of a few pages.

use super::memory::FakeMemory;
use crate::fake_host::{FakeHost, Operation};
use aenv_protocol::envd::{ENVD_PORT, InitRequest};
use aenv_vmm::{Exit, Placement, ProcessRecord};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What is in a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guest {
    /// Nothing yet: the process is prepared for a capture.
    None,
    /// A guest whose vCPUs stand still.
    Stopped,
    /// A guest that answers.
    Running,
}

/// A live or ended VM.
pub(crate) struct FakeProcess {
    name: String,
    netns: PathBuf,
    disk: PathBuf,
    memory: Mutex<FakeMemory>,
    record: ProcessRecord,
    guest: watch::Sender<Guest>,
    exit: watch::Sender<Option<Exit>>,
    ports: Mutex<HashMap<u16, SocketAddr>>,
    inits: Mutex<Vec<InitRequest>>,
    ended: CancellationToken,
}

impl FakeProcess {
    /// Starts it with its guest daemon listening.
    pub(crate) fn start(
        host: &Arc<FakeHost>,
        placement: &Placement,
        guest: Guest,
        memory: FakeMemory,
    ) -> std::io::Result<Arc<Self>> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let number = host.next_vm();
        let process = Arc::new(Self {
            name: placement.name.clone(),
            netns: placement.netns.clone(),
            disk: placement.disk.clone(),
            memory: Mutex::new(memory),
            record: ProcessRecord {
                pid: 1_000_000 + number,
                start_time: u64::from(number),
                control_socket: placement.run_dir.join("fake.sock"),
            },
            guest: watch::Sender::new(guest),
            exit: watch::Sender::new(None),
            ports: Mutex::new(HashMap::from([(ENVD_PORT, address)])),
            inits: Mutex::default(),
            ended: CancellationToken::new(),
        });
        let (guest, host_of_guest) = (Arc::clone(&process), Arc::downgrade(host));
        host.handle().spawn(async move {
            let ended = guest.ended.clone();
            ended.run_until_cancelled(serve(listener, guest, host_of_guest)).await;
        });
        Ok(process)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn netns(&self) -> &Path {
        &self.netns
    }

    pub(crate) fn record(&self) -> &ProcessRecord {
        &self.record
    }

    pub(crate) fn is_running(&self) -> bool {
        self.guest() == Guest::Running
    }

    pub(crate) fn guest(&self) -> Guest {
        *self.guest.borrow()
    }

    /// Puts a stopped guest into a prepared process.
    pub(crate) fn load(&self) -> Result<(), String> {
        if self.guest() != Guest::None {
            return Err("it was not prepared for a capture, or has loaded it".to_owned());
        }
        locked(&self.memory).load().map_err(|error| format!("cannot read the memory image: {error}"))?;
        self.guest.send_replace(Guest::Stopped);
        Ok(())
    }

    /// Lets the vCPUs run, or stops them.
    pub(crate) fn run(&self, running: bool) -> Result<(), String> {
        if self.guest() == Guest::None {
            return Err("no capture was loaded".to_owned());
        }
        self.guest.send_replace(if running { Guest::Running } else { Guest::Stopped });
        Ok(())
    }

    /// The memory of the guest.
    pub(crate) fn memory(&self) -> MutexGuard<'_, FakeMemory> {
        locked(&self.memory)
    }

    pub(crate) fn write(&self, page: u64, value: u8) {
        assert!(self.is_running(), "a guest that stands still writes nothing");
        self.try_write(page, value).expect("a write to the disk");
    }

    pub(crate) fn try_write(&self, page: u64, value: u8) -> std::io::Result<()> {
        locked(&self.memory).write(page, value);
        std::fs::File::options().write(true).open(&self.disk)?.write_all_at(&[value], page * 4096)
    }

    pub(crate) fn read(&self, page: u64) -> (u8, u8) {
        let mut block = [0];
        let disk = std::fs::File::open(&self.disk).expect("the disk");
        // Behind its end is nothing.
        let _short = disk.read_at(&mut block, page * 4096).expect("a read of the disk");
        (locked(&self.memory).read(page), block[0])
    }

    pub(crate) fn exit(&self) -> Option<Exit> {
        self.exit.borrow().clone()
    }

    pub(crate) fn end(&self, exit: Exit) {
        self.ended.cancel();
        self.exit.send_if_modified(|known| {
            let first = known.is_none();
            if first {
                *known = Some(exit);
            }
            first
        });
    }

    pub(crate) async fn wait(&self) -> Exit {
        let mut exit = self.exit.subscribe();
        let ended = exit.wait_for(Option::is_some).await.expect("the process holds the sender");
        ended.clone().expect("waited for")
    }

    pub(crate) fn inits(&self) -> Vec<InitRequest> {
        locked(&self.inits).clone()
    }

    pub(crate) fn open_port(&self, port: u16, address: SocketAddr) {
        locked(&self.ports).insert(port, address);
    }

    pub(crate) fn port(&self, port: u16) -> Option<SocketAddr> {
        locked(&self.ports).get(&port).copied()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(listener: std::net::TcpListener, process: Arc<FakeProcess>, host: Weak<FakeHost>) {
    let listener = TcpListener::from_std(listener).expect("a listener for a fake guest");
    while let Ok((stream, _)) = listener.accept().await {
        let (process, host) = (Arc::clone(&process), host.clone());
        tokio::spawn(async move {
            let ended = process.ended.clone();
            let answer = service_fn(|request| answer(Arc::clone(&process), host.clone(), request));
            let connection =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
            // A connection that breaks is what several tests are about.
            drop(ended.run_until_cancelled(connection).await);
        });
    }
}

async fn answer(
    process: Arc<FakeProcess>,
    host: Weak<FakeHost>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut guest = process.guest.subscribe();
    guest.wait_for(|guest| *guest == Guest::Running).await.expect("the process holds the sender");
    let status = |status: StatusCode| {
        let mut response = Response::new(Full::default());
        *response.status_mut() = status;
        Ok(response)
    };
    let operation = match request.uri().path() {
        "/health" => Operation::Health,
        "/init" => Operation::Init,
        "/sync" => Operation::Sync,
        // No fault is planned for commands: the answer is that of a guest without the program.
        "/process.Process/Start" => return status(StatusCode::OK),
        _ => return status(StatusCode::NOT_FOUND),
    };
    let Some(host) = host.upgrade() else { return status(StatusCode::GONE) };
    let Ok(call) = host.begin(operation).await else { return status(StatusCode::INTERNAL_SERVER_ERROR) };
    if operation == Operation::Init {
        let body =
            request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        match serde_json::from_slice(&body) {
            Ok(init) => locked(&process.inits).push(init),
            Err(_) => return status(StatusCode::BAD_REQUEST),
        }
    }
    if call.is_fatal() {
        let exit = Exit { cause: aenv_vmm::ExitCause::GuestPanic, detail: "planned panic".to_owned() };
        host.end(&process, exit);
    }
    call.reply().await;
    status(StatusCode::NO_CONTENT)
}

use super::*;
use crate::view::Dial;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A namespace in which the listed guest ports lead to listeners of this test.
struct Ports {
    open: std::sync::Mutex<HashMap<u16, SocketAddr>>,
    connects: AtomicUsize,
}

impl Ports {
    fn new(open: impl IntoIterator<Item = (u16, SocketAddr)>) -> Arc<Self> {
        Arc::new(Self {
            open: std::sync::Mutex::new(open.into_iter().collect()),
            connects: AtomicUsize::new(0),
        })
    }
}

#[async_trait::async_trait]
impl DialNamespace for Ports {
    async fn connect(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        self.connects.fetch_add(1, Ordering::SeqCst);
        let address = self.open.lock().unwrap().get(&to.port()).copied();
        TcpStream::connect(address.ok_or(std::io::ErrorKind::ConnectionRefused)?).await
    }
}

/// Answers every request of every connection with `answer`, at most `per_connection` of them.
async fn serve(answer: &'static str, per_connection: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 16384];
                for _ in 0..per_connection {
                    if stream.read(&mut buffer).await.unwrap_or(0) == 0 {
                        return;
                    }
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    address
}

const NO_CONTENT: &str = "HTTP/1.1 204 No Content\r\n\r\n";
const LIMIT: Duration = Duration::from_secs(5);

fn channel(ports: &Arc<Ports>) -> GuestChannel {
    GuestChannel::to(Arc::clone(ports) as Arc<dyn DialNamespace>, Ipv4Addr::new(169, 254, 0, 21))
}

fn dialer(ports: Arc<Ports>) -> GuestDialer {
    GuestDialer::new(&Slot {
        name: aenv_network::SlotName("s".to_owned()),
        netns: "/n".into(),
        tap: "tap0".to_owned(),
        user: 1 << 30,
        guest_address: Ipv4Addr::new(169, 254, 0, 21),
        dialer: ports,
    })
}

#[tokio::test]
async fn requests_share_one_connection() {
    let ports = Ports::new([(ENVD_PORT, serve(NO_CONTENT, usize::MAX).await)]);
    let channel = channel(&ports);
    for _ in 0..3 {
        channel.health(LIMIT).await.unwrap();
        channel.init(&InitRequest::default(), LIMIT).await.unwrap();
    }
    assert_eq!(ports.connects.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_kept_connection_that_broke_is_replaced() {
    let ports = Ports::new([(ENVD_PORT, serve(NO_CONTENT, 1).await)]);
    let channel = channel(&ports);
    for _ in 0..3 {
        channel.health(LIMIT).await.unwrap();
    }
    assert_eq!(ports.connects.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn refusals_and_silence_are_typed() {
    let ports = Ports::new([(
        ENVD_PORT,
        serve("HTTP/1.1 409 Conflict\r\ncontent-length: 4\r\n\r\nnope", usize::MAX).await,
    )]);
    let error = channel(&ports).init(&InitRequest::default(), LIMIT).await.unwrap_err();
    assert!(
        matches!(&error, GuestError::Refused { status, body, .. } if status.as_u16() == 409 && body == "nope")
    );

    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ports = Ports::new([(ENVD_PORT, silent.local_addr().unwrap())]);
    let error = channel(&ports).health(Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(error, GuestError::Timeout { .. }));

    let error = channel(&Ports::new([])).health(LIMIT).await.unwrap_err();
    assert!(matches!(error, GuestError::Unreachable { .. }));
}

#[tokio::test]
async fn a_starting_daemon_is_waited_for() {
    let ports = Ports::new([]);
    let waiting = channel(&ports);
    let address = serve(NO_CONTENT, usize::MAX).await;
    let opener = Arc::clone(&ports);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(120)).await;
        opener.open.lock().unwrap().insert(ENVD_PORT, address);
    });
    waiting.wait_until_healthy(LIMIT).await.unwrap();
    assert!(ports.connects.load(Ordering::SeqCst) > 1);
}

#[tokio::test]
async fn a_server_on_the_guests_loopback_is_reached_through_the_relay() {
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ports = Ports::new([(aenv_protocol::envd::RELAY_PORT, relay.local_addr().unwrap())]);
    tokio::spawn(async move {
        let (mut stream, _) = relay.accept().await.unwrap();
        let mut line = [0; 5];
        stream.read_exact(&mut line).await.unwrap();
        assert_eq!(&line, b"8080\n");
        // The answer and the server's own first bytes in one segment.
        stream.write_all(b"ok\nhello").await.unwrap();
    });
    let mut stream = dialer(ports).dial(8080).await.unwrap();
    let mut hello = String::new();
    stream.read_to_string(&mut hello).await.unwrap();
    assert_eq!(hello, "hello");
}

#[tokio::test]
async fn a_port_nobody_listens_on_is_refused_after_some_attempts() {
    let relay = serve("refused\n", 1).await;
    let ports = Ports::new([(aenv_protocol::envd::RELAY_PORT, relay)]);
    let error = dialer(Arc::clone(&ports)).dial(8080).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(
        ports.connects.load(Ordering::SeqCst),
        10,
        "five times directly, five times through the relay"
    );
}

//! A running daemon and a client that shows every byte.

use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// A daemon on a port of its own; killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) port: u16,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|line| line.split_once(": ").filter(|(key, _)| *key == name))
            .map(|(_, v)| v)
    }
}

impl Daemon {
    /// A new daemon, or nothing where this user cannot start programs as others.
    pub(crate) fn start() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let mut child = Command::new(env!("CARGO_BIN_EXE_envd"))
            .args(["--address", "127.0.0.1", "--port", "0", "--relay-port", "0"])
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut lines = BufReader::new(child.stderr.take().expect("is piped")).lines();
        let ready = lines.next().expect("says something").expect("is text");
        let address = ready.split("address=127.0.0.1:").nth(1).unwrap_or_else(|| panic!("{ready}"));
        let port = address.split_whitespace().next().expect("has a port").parse().expect("is a port");
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                writeln!(std::io::stderr(), "envd: {line}").expect("shows");
            }
        });
        Some(Self { child, port })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request and leaves the connection open.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut connection = TcpStream::connect(("127.0.0.1", self.port)).expect("connects");
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {}\r\n\r\n", body.len());
        connection.write_all(head.as_bytes()).expect("sends");
        connection.write_all(body).expect("sends");
        connection
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        answer(&mut self.send(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], b"")
    }

    /// Calls a unary procedure with JSON.
    pub(crate) fn call(&self, procedure: &str, message: &Value) -> Answer {
        let headers = [("Content-Type", "application/json"), ("Connect-Protocol-Version", "1")];
        self.request("POST", &format!("/{procedure}"), &headers, message.to_string().as_bytes())
    }

    /// Opens a stream of answers with JSON.
    pub(crate) fn stream(&self, procedure: &str, message: &Value, headers: &[(&str, &str)]) -> Events {
        let mut all =
            vec![("Content-Type", "application/connect+json"), ("Accept-Encoding", "zstd, gzip, br")];
        all.extend([("Connect-Content-Encoding", "identity"), ("Connect-Accept-Encoding", "identity")]);
        all.extend(headers);
        let body = envelope(message.to_string().as_bytes());
        let mut connection = BufReader::new(self.send("POST", &format!("/{procedure}"), &all, &body));
        let head = head(&mut connection);
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(!head.to_lowercase().contains("content-encoding"), "{head}");
        Events { body: Chunks { connection, left: 0 } }
    }

    /// Starts a shell script.
    pub(crate) fn shell(&self, script: &str) -> Events {
        let message =
            serde_json::json!({"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "stdin": false});
        self.stream("process.Process/Start", &message, &[])
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().expect("is ours");
        self.child.wait().expect("ends");
    }
}

/// One data envelope.
pub(crate) fn envelope(message: &[u8]) -> Vec<u8> {
    let mut framed = vec![0];
    framed.extend(u32::try_from(message.len()).expect("is short").to_be_bytes());
    framed.extend(message);
    framed
}

fn head(connection: &mut impl std::io::BufRead) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && !head.ends_with("\n\r\n") {
        assert_ne!(connection.read_line(&mut head).expect("reads"), 0, "the connection ended in {head:?}");
    }
    head
}

pub(crate) fn answer(connection: &mut TcpStream) -> Answer {
    let mut reader = BufReader::new(connection);
    let head = head(&mut reader);
    let status = head.split(' ').nth(1).expect("has a status").parse().expect("is a number");
    let mut body = Vec::new();
    if head.contains("transfer-encoding: chunked") {
        Chunks { connection: reader, left: 0 }.read_to_end(&mut body).expect("reads");
    } else {
        reader.read_to_end(&mut body).expect("reads");
    }
    Answer { status, head, body }
}

/// A chunked body.
struct Chunks<C> {
    connection: C,
    left: usize,
}

impl<C: std::io::BufRead> Read for Chunks<C> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 {
            let mut line = String::new();
            while line.trim().is_empty() {
                line.clear();
                if self.connection.read_line(&mut line)? == 0 {
                    return Ok(0);
                }
            }
            self.left = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
            if self.left == 0 {
                return Ok(0);
            }
        }
        let wanted = buffer.len().min(self.left);
        let read = self.connection.read(&mut buffer[..wanted])?;
        self.left -= read;
        Ok(read)
    }
}

/// A stream of events.
pub(crate) struct Events {
    body: Chunks<BufReader<TcpStream>>,
}

impl Events {
    /// The next frame: its flags and its message.
    pub(crate) fn frame(&mut self) -> (u8, Value) {
        let mut prefix = [0; 5];
        self.body.read_exact(&mut prefix).expect("reads");
        let length = u32::from_be_bytes(prefix[1..].try_into().expect("are four"));
        let mut message = vec![0; length as usize];
        self.body.read_exact(&mut message).expect("reads");
        (prefix[0], serde_json::from_slice(&message).expect("is JSON"))
    }

    /// The next event.
    pub(crate) fn event(&mut self) -> Value {
        let (flags, message) = self.frame();
        assert_eq!(flags, 0, "{message}");
        message["event"].clone()
    }

    /// The process id of the first event.
    pub(crate) fn pid(&mut self) -> i64 {
        let event = self.event();
        event["start"]["pid"].as_i64().unwrap_or_else(|| panic!("{event}"))
    }

    /// Everything up to the end: both outputs and the end event.
    pub(crate) fn finish(&mut self) -> (String, String, Value) {
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        loop {
            let event = self.event();
            if let Some(end) = event.get("end") {
                let (flags, last) = self.frame();
                assert_eq!((flags, last), (2, serde_json::json!({})));
                let text = |bytes| String::from_utf8(bytes).expect("is text");
                return (text(output), text(errors), end.clone());
            }
            output.extend(bytes(&event["data"]["stdout"]));
            errors.extend(bytes(&event["data"]["stderr"]));
        }
    }

    /// The error of a stream that carries nothing else.
    pub(crate) fn error(&mut self) -> Value {
        let (flags, message) = self.frame();
        assert_eq!(flags, 2, "{message}");
        message["error"].clone()
    }
}

fn bytes(value: &Value) -> Vec<u8> {
    use base64::Engine as _;
    let text = value.as_str().unwrap_or_default();
    let bytes = base64::engine::general_purpose::STANDARD.decode(text).expect("is base64");
    assert!(bytes.len() <= 32 * 1024, "a chunk of {} bytes", bytes.len());
    bytes
}

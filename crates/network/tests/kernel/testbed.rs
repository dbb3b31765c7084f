//! A host to test on: a network namespace of its own, so that nothing of the real host is seen or changed, and another one
//! behind it that plays the world. Only the pins in /run/netns are shared; each test uses an instance name of its own and
//! removes what carries it, also after a failure.

use aenv_network::{InstanceName, LinuxSlots, Slot, SlotSettings};
use aenv_sys::netns::{self, NetworkNamespace};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// The world's public address.
pub(crate) const WORLD: &str = "198.51.100.2";
/// Public address of the host on the way to the world.
pub(crate) const HOST: &str = "198.51.100.1";
/// Another address of the host, on no way to anywhere.
pub(crate) const HOST_ELSEWHERE: &str = "203.0.113.9";
/// An IPv6 address of the host.
pub(crate) const HOST_IPV6: &str = "2001:db8::1";
/// Addresses of the world to which the host has a route and guests have none.
pub(crate) const BLOCKED: [&str; 5] =
    ["10.77.0.2", "172.16.9.9", "192.168.9.9", "169.254.169.254", "100.100.100.200"];
/// A port on which the world, the host and guests answer.
pub(crate) const PORT: u16 = 7007;
/// How long nothing must come before it counts as "does not get through".
const PATIENCE: Duration = Duration::from_millis(600);

const PINS: &str = "/run/netns";

/// The host of one test.
pub(crate) struct Host {
    instance: InstanceName,
    folder: tempfile::TempDir,
}

impl Host {
    /// Runs a test on a host of its own.
    pub(crate) fn run(instance: &str, test: impl AsyncFnOnce(&Host) + Send) {
        let _pins = Unpin(format!("aenv-{instance}-"));
        let host = Host { instance: instance.parse().unwrap(), folder: tempfile::tempdir().unwrap() };
        let folder = Folder(host.folder.path().to_owned());
        netns::run_in_new(|| {
            ip("link set lo up");
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(test(&host));
        })
        .unwrap();
        drop(folder);
    }

    /// Settings for slots on this host.
    pub(crate) fn settings(&self) -> SlotSettings {
        SlotSettings {
            pool_size: 0,
            forwarding_record: self.folder.path().join("state/forwarding"),
            ..SlotSettings::new(self.instance.clone(), "100.126.0.0/24".parse().unwrap())
        }
    }

    /// Starts slots without a pool.
    pub(crate) async fn slots(&self) -> LinuxSlots {
        LinuxSlots::start(self.settings()).await.unwrap()
    }

    /// Another namespace, unpinned when the test ends.
    pub(crate) fn namespace(&self, name: &str) -> Peer {
        let path = self.folder.path().join(name);
        let namespace = NetworkNamespace::create_pinned(&path).unwrap();
        namespace.run(|| ip("link set lo up")).unwrap();
        Peer { namespace, path }
    }

    /// Adds a world behind the host, with a server on every address of both.
    pub(crate) fn connect_world(&self) -> Peer {
        let world = self.namespace("world");
        ip(&format!("link add world0 type veth peer name host0 netns {}", world.path.display()));
        ip(&format!("address add {HOST_ELSEWHERE}/32 dev lo"));
        ip(&format!("address add {HOST}/24 dev world0"));
        ip(&format!("address add {HOST_IPV6}/64 dev world0 nodad"));
        ip("link set world0 up");
        world.ip(&format!("address add {WORLD}/24 dev host0"));
        world.ip("link set host0 up");
        for address in BLOCKED {
            world.ip(&format!("address add {address}/32 dev lo"));
            ip(&format!("route add {address}/32 via {WORLD}"));
        }
        world.ip(&format!("route add 100.126.0.0/24 via {HOST}"));
        world.serve(PORT);
        serve(PORT);
        world
    }

    /// Puts a guest at the other end of the slot's tap. The tap itself needs a program that speaks Ethernet, so a veth
    /// of the same name and addresses takes its place; the rules only know the name.
    pub(crate) fn guest(&self, slot: &Slot, name: &str) -> Peer {
        let guest = self.namespace(name);
        let peer = guest.path.display().to_string();
        inside(slot, || {
            ip("link delete tap0");
            ip(&format!("link add tap0 address 02:fc:00:00:00:01 type veth peer name eth0 netns {peer}"));
            ip("address add 169.254.0.22/30 dev tap0");
            ip("link set tap0 up");
            ip("neighbour add 169.254.0.21 lladdr 02:fc:00:00:00:02 dev tap0 nud permanent");
        });
        guest.ip("link set eth0 address 02:fc:00:00:00:02");
        guest.ip("address add 169.254.0.21/30 dev eth0");
        guest.ip("link set eth0 up");
        guest.ip("route add default via 169.254.0.22");
        guest.serve(PORT);
        guest
    }

    /// What of the instance and of slots in general there is: pins, interfaces, nftables tables.
    pub(crate) fn inventory(&self) -> (Vec<String>, Vec<String>, String) {
        (self.pins(), interfaces(), output("nft", "list tables"))
    }

    /// Names of the instance's pins.
    pub(crate) fn pins(&self) -> Vec<String> {
        netns::list_pinned(Path::new(PINS), &format!("aenv-{}-", self.instance)).unwrap()
    }
}

/// Names of the interfaces of the calling thread's namespace.
pub(crate) fn interfaces() -> Vec<String> {
    let listed = output("ip", "-o link show");
    let names = listed.lines().filter_map(|line| line.split(": ").nth(1));
    names.map(|name| name.split('@').next().unwrap().to_owned()).collect()
}

/// A namespace beside the host's.
pub(crate) struct Peer {
    pub(crate) namespace: NetworkNamespace,
    pub(crate) path: PathBuf,
}

impl Peer {
    pub(crate) fn ip(&self, arguments: &str) {
        self.namespace.run(|| ip(arguments)).unwrap();
    }

    /// Answers on a port of every address.
    pub(crate) fn serve(&self, port: u16) {
        self.namespace.run(|| serve(port)).unwrap();
    }

    /// Does a connection from here come through and answer?
    pub(crate) fn reaches(&self, address: &str, port: u16) -> bool {
        self.connect(address, port).is_ok()
    }

    /// Opens a connection and has it answer once.
    pub(crate) fn connect(&self, address: &str, port: u16) -> io::Result<TcpStream> {
        self.namespace.run(|| connect(address, port)).unwrap()
    }
}

/// Runs something inside a slot.
pub(crate) fn inside<T: Send>(slot: &Slot, work: impl FnOnce() -> T + Send) -> T {
    NetworkNamespace::open(&slot.netns).unwrap().run(work).unwrap()
}

/// From the calling thread's namespace: opens a connection and has it answer once.
pub(crate) fn connect(address: &str, port: u16) -> io::Result<TcpStream> {
    let address: IpAddr = address.parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((address, port)), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    exchange(&mut stream)?;
    Ok(stream)
}

/// Sends a byte and waits for it to come back.
pub(crate) fn exchange(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// From the calling thread's namespace: sends back what comes, on a port of every address.
pub(crate) fn serve(port: u16) {
    let listener = TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || echo(&stream));
        }
    });
}

fn echo(stream: &TcpStream) {
    let (mut from, mut to) = (stream, stream);
    // Ends with the connection, in whatever way the test ends it.
    drop(io::copy(&mut from, &mut to));
}

/// Runs `ip` in the calling thread's namespace.
pub(crate) fn ip(arguments: &str) {
    output("ip", arguments);
}

/// What a command says; it must succeed.
pub(crate) fn output(command: &str, arguments: &str) -> String {
    let done = Command::new(command).args(arguments.split_whitespace()).output().unwrap();
    assert!(done.status.success(), "{command} {arguments}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Unpins what begins with a prefix when the test ends, however it ends.
struct Unpin(String);

impl Drop for Unpin {
    fn drop(&mut self) {
        for name in netns::list_pinned(Path::new(PINS), &self.0).unwrap() {
            netns::remove_pinned(&Path::new(PINS).join(name)).unwrap();
        }
    }
}

/// Unpins everything in a folder when the test ends, however it ends.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        for name in netns::list_pinned(&self.0, "").unwrap() {
            if self.0.join(&name).is_file() {
                netns::remove_pinned(&self.0.join(name)).unwrap();
            }
        }
    }
}

//! Namespaces as root sees them. Each test pins in a folder of its own and unpins on every way out.

use super::{NetworkNamespace, SocketOpener, interface_index, list_pinned, remove_pinned, run_in_new};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// A folder for pins that is emptied when the test ends, however it ends.
struct Pins(tempfile::TempDir);

impl Pins {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        for name in list_pinned(self.0.path(), "").unwrap() {
            remove_pinned(&self.path(&name)).unwrap();
        }
    }
}

fn inode_of_this_thread() -> u64 {
    std::fs::metadata(super::THIS_THREAD).unwrap().ino()
}

#[test]
fn what_runs_inside_is_inside_and_the_caller_is_not() {
    let pins = Pins::new();
    let outside = inode_of_this_thread();
    let namespace = NetworkNamespace::create_pinned(&pins.path("one")).unwrap();
    let inside = namespace.run(inode_of_this_thread).unwrap();
    assert_ne!(inside, outside);
    assert_eq!(inode_of_this_thread(), outside);
    let again = NetworkNamespace::open(&pins.path("one")).unwrap();
    assert_eq!(again.run(inode_of_this_thread).unwrap(), inside);
}

#[test]
fn a_pin_is_made_once_and_removed_any_number_of_times() {
    let pins = Pins::new();
    let path = pins.path("one");
    NetworkNamespace::create_pinned(&path).unwrap();
    assert_eq!(NetworkNamespace::create_pinned(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
    NetworkNamespace::open(&path).unwrap();
    remove_pinned(&path).unwrap();
    assert_eq!(NetworkNamespace::open(&path).unwrap_err().kind(), ErrorKind::NotFound);
    remove_pinned(&path).unwrap();
}

#[test]
fn a_half_made_pin_is_listed_but_does_not_open() {
    let pins = Pins::new();
    std::fs::write(pins.path("a-half"), "").unwrap();
    NetworkNamespace::create_pinned(&pins.path("a-whole")).unwrap();
    NetworkNamespace::create_pinned(&pins.path("b-other")).unwrap();
    assert_eq!(list_pinned(pins.0.path(), "a-").unwrap(), ["a-half", "a-whole"]);
    assert_eq!(NetworkNamespace::open(&pins.path("a-half")).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(list_pinned(&pins.path("nowhere"), "").unwrap().is_empty());
}

#[test]
fn interfaces_are_found_in_the_namespace_of_the_thread() {
    run_in_new(|| {
        assert_eq!(interface_index("lo").unwrap(), 1);
        assert_eq!(interface_index("none0").unwrap_err().kind(), ErrorKind::NotFound);
    })
    .unwrap();
}

#[test]
fn a_panic_inside_reaches_the_caller() {
    let panicked = std::panic::catch_unwind(|| run_in_new(|| panic!("inside")));
    assert!(panicked.is_err());
}

#[tokio::test]
async fn sockets_are_opened_inside_until_the_pin_is_gone() {
    let pins = Pins::new();
    let path = pins.path("one");
    let opener = SocketOpener::new();
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let missing = opener.open_tcp(&path, &to).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);

    NetworkNamespace::create_pinned(&path).unwrap();
    let socket = tokio::net::TcpSocket::from_std_stream(opener.open_tcp(&path, &to).await.unwrap());
    // The loopback device of a new namespace is down: a socket outside would be refused instead.
    let error = socket.connect(to).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);

    remove_pinned(&path).unwrap();
    assert_eq!(opener.open_tcp(&path, &to).await.unwrap_err().kind(), ErrorKind::NotFound);
}

//! Being told of what appears in a directory, instead of looking again and again.
//!
//! Owns one inotify descriptor per watch.

use rustix::fd::OwnedFd;
use rustix::fs::inotify;
use rustix::io::Errno;
use std::io;
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// A watched directory. What is made in it after the watch began is not missed.
#[derive(Debug)]
pub struct DirectoryWatch {
    events: AsyncFd<OwnedFd>,
}

impl DirectoryWatch {
    /// Begins to watch.
    ///
    /// # Errors
    /// When there is no such directory, or the user has too many watches. Panics outside of a tokio runtime.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let events = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        let flags =
            inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::ONLYDIR;
        inotify::add_watch(&events, directory, flags)?;
        // SAFETY: an `OwnedFd` stays open, under the same number, until the `AsyncFd` that owns it is dropped.
        let events = unsafe { AsyncFd::register_with_interest(events, tokio::io::Interest::READABLE) }?;
        Ok(Self { events })
    }

    /// Waits until something was made since the watch began or since the last call, whichever is later. One answer may
    /// stand for several things.
    ///
    /// # Errors
    /// The system's error.
    pub async fn created(&mut self) -> io::Result<()> {
        let mut buffer = [0; 4096];
        loop {
            let mut ready = self.events.readable().await?;
            let mut seen = false;
            loop {
                match rustix::io::read(ready.get_inner(), &mut buffer) {
                    Ok(_) => seen = true,
                    Err(Errno::AGAIN) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            ready.clear_ready();
            if seen {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn what_is_made_after_the_watch_began_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("before"), "").unwrap();
        let mut watch = DirectoryWatch::new(directory.path()).unwrap();
        std::fs::write(directory.path().join("one"), "").unwrap();
        std::fs::write(directory.path().join("two"), "").unwrap();
        watch.created().await.unwrap();
        let quiet = tokio::time::timeout(Duration::from_millis(20), watch.created()).await;
        assert!(quiet.is_err(), "told twice");
        std::fs::rename(directory.path().join("one"), directory.path().join("three")).unwrap();
        watch.created().await.unwrap();
        assert!(DirectoryWatch::new(&directory.path().join("none")).is_err());
    }
}

//! Reads a process's pipes, tells its followers, and announces its end.
//!
//! The end is announced soon after the *leader* ended: children that hold the pipes do not delay it beyond a short
//! grace, in which what they wrote last still gets through. Afterwards the pipes stay open and are read and dropped, so
//! that a server left in the background is not killed by SIGPIPE.

use super::{Event, Process, Progress};
use crate::reaper::Ending;
use bytes::{Bytes, BytesMut};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Most bytes of one chunk. Source: E2B's daemon.
const CHUNK_BYTES: usize = 32 * 1024;
/// Silence after the leader's end that counts as the end of output, when children still hold the pipes.
const GRACE_SILENCE: Duration = Duration::from_millis(25);
/// Longest time after the leader's end in which output is still told.
const GRACE_TOTAL: Duration = Duration::from_secs(2);
/// A follower that takes nothing for so long is dropped, so that a frozen client cannot stop a process for ever.
const FOLLOWER_STALL: Duration = Duration::from_secs(600);

/// Both pipes of a process.
pub(crate) struct Pipes {
    output: Option<Receiver>,
    errors: Option<Receiver>,
}

impl Pipes {
    /// Wraps the pipes of a new process.
    ///
    /// # Errors
    /// When they cannot be watched for readiness.
    pub(crate) fn new(output: std::os::fd::OwnedFd, errors: std::os::fd::OwnedFd) -> io::Result<Self> {
        Ok(Self {
            output: Some(Receiver::from_owned_fd(output)?),
            errors: Some(Receiver::from_owned_fd(errors)?),
        })
    }

    /// The next chunk of either pipe; nothing once both have ended.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                chunk = read(&mut self.output), if self.output.is_some() => match chunk {
                    Some(chunk) => return Some(Event::Output(chunk)),
                    None => self.output = None,
                },
                chunk = read(&mut self.errors), if self.errors.is_some() => match chunk {
                    Some(chunk) => return Some(Event::Errors(chunk)),
                    None => self.errors = None,
                },
                else => return None,
            }
        }
    }
}

/// A chunk; nothing at the end of the pipe. Takes no memory while it waits.
async fn read(pipe: &mut Option<Receiver>) -> Option<Bytes> {
    let pipe = pipe.as_mut()?;
    // A pipe cannot fail but by a bug of ours; its end is the right answer to that as well.
    pipe.readable().await.ok()?;
    let mut chunk = BytesMut::with_capacity(CHUNK_BYTES);
    match pipe.read_buf(&mut chunk).await {
        Ok(0) | Err(_) => None,
        Ok(_) if chunk.len() < CHUNK_BYTES / 4 => Some(Bytes::copy_from_slice(&chunk)),
        Ok(_) => Some(chunk.freeze()),
    }
}

/// Carries the output of `process` until its end, and drops what comes afterwards.
pub(crate) async fn carry(process: Arc<Process>, mut pipes: Pipes, mut ending: oneshot::Receiver<Ending>) {
    let ended = loop {
        tokio::select! {
            // The end first: a child that floods the pipe must not hide it.
            biased;
            ended = &mut ending => {
                drain(&process, &mut pipes).await;
                break ended;
            }
            event = pipes.next() => match event {
                Some(event) => tell(&process, event).await,
                None => break (&mut ending).await,
            },
        }
    };
    let Ok(ended) = ended else {
        tracing::error!(pid = process.pid, "the reaper has gone");
        return;
    };
    process.input.close().await;
    let followers = match std::mem::replace(
        &mut *process.progress(),
        Progress::Ended(ended, std::time::Instant::now()),
    ) {
        Progress::Running(followers) => followers,
        Progress::Ended(..) => Vec::new(),
    };
    // Nobody waits for the slowest: each follower is told on its own.
    for follower in followers {
        tokio::spawn(async move { send(&follower, Event::End(ended)).await });
    }
    drop(process);
    while pipes.next().await.is_some() {}
}

/// Tells what is left after the leader's end.
async fn drain(process: &Process, pipes: &mut Pipes) {
    let last = Instant::now() + GRACE_TOTAL;
    loop {
        let until = last.min(Instant::now() + GRACE_SILENCE);
        match tokio::time::timeout_at(until, pipes.next()).await {
            Ok(Some(event)) => tell(process, event).await,
            Ok(None) | Err(_) => return,
        }
    }
}

/// Hands `event` to all followers of this moment and forgets those that have gone.
async fn tell(process: &Process, event: Event) {
    let followers = match &*process.progress() {
        Progress::Running(followers) => followers.clone(),
        Progress::Ended(..) => Vec::new(),
    };
    let mut gone = Vec::new();
    for follower in &followers {
        if !send(follower, event.clone()).await {
            gone.push(follower);
        }
    }
    if !gone.is_empty()
        && let Progress::Running(followers) = &mut *process.progress()
    {
        followers.retain(|follower| !gone.iter().any(|gone| gone.same_channel(follower)));
    }
}

/// Whether the follower took it.
async fn send(follower: &mpsc::Sender<Event>, event: Event) -> bool {
    match follower.try_send(event) {
        Ok(()) => true,
        Err(mpsc::error::TrySendError::Closed(_)) => false,
        Err(mpsc::error::TrySendError::Full(event)) => {
            follower.send_timeout(event, FOLLOWER_STALL).await.is_ok()
        }
    }
}

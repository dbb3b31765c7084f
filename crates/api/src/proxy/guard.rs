//! Bodies that break: with an error, so that the server closes the connection without a proper end, as soon as the
//! sandbox ends or when nothing moved in either direction for [`IDLE_LIMIT`]. Nothing is buffered here.

use crate::proxy::upstream::Permit;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// How long nothing may move: longer than any client of E2B keeps a silent connection.
pub(crate) const IDLE_LIMIT: Duration = Duration::from_secs(620);

/// Why a body broke.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// The sandbox ended.
    #[error("the sandbox ended")]
    Ended,
    /// Nothing moved.
    #[error("nothing was sent or received for {IDLE_LIMIT:?}")]
    Idle,
    /// The other side broke first.
    #[error(transparent)]
    Peer(hyper::Error),
}

/// When something last moved in an exchange, shared by both of its bodies.
#[derive(Clone)]
pub(crate) struct Activity {
    origin: Instant,
    last: Arc<AtomicU64>,
}

impl Activity {
    /// Something moved just now.
    pub(crate) fn start() -> Self {
        Self { origin: Instant::now(), last: Arc::default() }
    }

    fn mark(&self) {
        let elapsed = u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(elapsed, Ordering::Relaxed);
    }

    fn deadline(&self) -> Instant {
        self.origin + Duration::from_millis(self.last.load(Ordering::Relaxed)) + IDLE_LIMIT
    }

    /// Returns when nothing moved for too long.
    pub(crate) async fn idle(&self) {
        while Instant::now() < self.deadline() {
            tokio::time::sleep_until(self.deadline()).await;
        }
    }
}

/// A body under guard.
pub(crate) struct Guarded {
    inner: Incoming,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
    activity: Activity,
    alarm: Pin<Box<Sleep>>,
    /// Counts the exchange as under way for as long as this body lives.
    _permit: Option<Permit>,
}

impl Guarded {
    /// Puts a body under guard.
    pub(crate) fn new(
        inner: Incoming,
        ended: &CancellationToken,
        activity: Activity,
        permit: Option<Permit>,
    ) -> Self {
        let alarm = Box::pin(tokio::time::sleep_until(activity.deadline()));
        Self { inner, ended: Box::pin(ended.clone().cancelled_owned()), activity, alarm, _permit: permit }
    }

    fn poll_alarm(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.alarm.as_mut().poll(context));
            let deadline = self.activity.deadline();
            if deadline <= Instant::now() {
                return Poll::Ready(());
            }
            self.alarm.as_mut().reset(deadline);
        }
    }
}

impl Body for Guarded {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.ended.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(Broken::Ended)));
        }
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(frame) => {
                self.activity.mark();
                Poll::Ready(frame.map(|frame| frame.map_err(Broken::Peer)))
            }
            Poll::Pending => self.poll_alarm(context).map(|()| Some(Err(Broken::Idle))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

//! How a server is told to end: what it takes in first, then what it is at, then its connections.

use tokio_util::sync::{CancellationToken, DropGuard};

/// Ends a server from anywhere. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Stopper {
    leave: CancellationToken,
    drain: CancellationToken,
    stop: CancellationToken,
    hang_up: CancellationToken,
}

impl Stopper {
    /// End in good order: accept nobody new, then drain.
    pub fn leave(&self) {
        self.leave.cancel();
    }

    /// Take nothing new, finish what runs (up to `--drain-timeout-ms`), then end.
    pub fn drain(&self) {
        self.leave.cancel();
        self.drain.cancel();
    }

    /// End at once: answers are cut, with an error where there is still a client to tell.
    pub fn stop(&self) {
        self.leave.cancel();
        self.drain.cancel();
        self.stop.cancel();
    }

    pub(crate) async fn leaving(&self) {
        self.leave.cancelled().await;
    }

    pub(crate) async fn draining(&self) {
        self.drain.cancelled().await;
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.drain.is_cancelled()
    }

    pub(crate) async fn stopping(&self) {
        self.stop.cancelled().await;
    }

    /// With these, whatever goes by this ends at the latest when they drop.
    pub(crate) fn guards(&self) -> [DropGuard; 2] {
        [&self.stop, &self.hang_up].map(|token| token.clone().drop_guard())
    }

    /// Ends connections, whatever they are at.
    pub(crate) fn hang_up(&self) {
        self.hang_up.cancel();
    }

    /// Connections end now, whatever they are at.
    pub(crate) async fn stopped(&self) {
        self.hang_up.cancelled().await;
    }
}

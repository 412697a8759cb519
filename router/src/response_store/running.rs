//! Responses that are streamed now: whose they are, what they begin with, and how they are cancelled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use super::OwnerId;

/// Within this a response ends that was cancelled, where its client reads. A guess.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// All of them. Each is bounded by its stream.
#[derive(Debug, Default)]
pub(super) struct Running(Mutex<HashMap<String, RunningEntry>>);

/// A response that is streamed and will be stored.
#[derive(Debug, Clone)]
struct RunningEntry {
    owner: OwnerId,
    head: Bytes,
    cancel: CancellationToken,
    ended: CancellationToken,
}

impl Running {
    pub(super) fn begin(
        self: &Arc<Self>,
        owner: OwnerId,
        id: &str,
        head: Bytes,
    ) -> RunningResponse {
        let cancel = CancellationToken::new();
        let ended = CancellationToken::new();
        let entry = RunningEntry { owner, head, cancel: cancel.clone(), ended: ended.clone() };
        self.entries().insert(id.to_owned(), entry);
        RunningResponse { running: Arc::clone(self), id: id.to_owned(), cancel, ended }
    }

    pub(super) fn head(&self, owner: OwnerId, id: &str) -> Option<Bytes> {
        let entries = self.entries();
        entries.get(id).filter(|entry| entry.owner == owner).map(|entry| entry.head.clone())
    }

    pub(super) async fn cancel(&self, owner: OwnerId, id: &str) -> bool {
        let entry = self.entries().get(id).filter(|entry| entry.owner == owner).cloned();
        let Some(entry) = entry else { return false };
        entry.cancel.cancel();
        tokio::time::timeout(ENDS_WITHIN, entry.ended.cancelled()).await.ok();
        true
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<String, RunningEntry>> {
        self.0.lock().expect("no holder panics")
    }
}

/// A response while it is streamed. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct RunningResponse {
    running: Arc<Running>,
    id: String,
    cancel: CancellationToken,
    ended: CancellationToken,
}

impl RunningResponse {
    /// Comes when somebody cancels it.
    pub(crate) fn cancelled(&self) -> impl Future<Output = ()> + Send + use<> {
        self.cancel.clone().cancelled_owned()
    }
}

impl Drop for RunningResponse {
    fn drop(&mut self) {
        self.running.entries().remove(&self.id);
        self.ended.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_running_response_is_its_owners_until_it_ends() {
        let all: Arc<Running> = Arc::default();
        let running = all.begin(1, "a", Bytes::from_static(b"head"));
        assert_eq!(all.head(1, "a").as_deref(), Some(&b"head"[..]));
        assert!(all.head(2, "a").is_none());
        assert!(!all.cancel(2, "a").await);
        let (cancelled, ()) = tokio::join!(all.cancel(1, "a"), async {
            running.cancelled().await;
            drop(running);
        });
        assert!(cancelled && all.head(1, "a").is_none());
        assert!(!all.cancel(1, "a").await);
    }

    #[tokio::test(start_paused = true)]
    async fn who_cancels_waits_for_no_client_that_does_not_read() {
        let all: Arc<Running> = Arc::default();
        let _running = all.begin(1, "a", Bytes::new());
        assert!(all.cancel(1, "a").await);
        assert!(all.head(1, "a").is_some());
    }
}

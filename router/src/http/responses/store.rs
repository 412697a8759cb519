//! Responses that clients may ask for again: bounded in bytes and number, each its tenant's own, for a time.
//!
//! They are kept in memory. Who continues a response or reads it keeps it for as long again.

mod shelves;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Once, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::StoreConfig;
use crate::limits::memory::MemoryPool;
use crate::metrics::Metrics;
use shelves::Shelves;

/// Whose a response is: the account of a tenant.
pub(in crate::http) type OwnerId = u64;

/// What is kept of a response, as JSON in the pieces in which it is sent.
#[derive(Debug)]
pub(in crate::http) struct StoredResponse {
    /// The object up to its output.
    pub(in crate::http) head: Bytes,
    /// The list of its output items.
    pub(in crate::http) output: Bytes,
    /// The rest of the object.
    pub(in crate::http) tail: Bytes,
    /// The list of the request's own input items.
    pub(in crate::http) input: Bytes,
    /// The response that it continues.
    pub(in crate::http) previous: Option<String>,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let texts = [&self.head, &self.output, &self.tail, &self.input];
        let texts = texts.into_iter().map(Bytes::len).sum::<usize>();
        texts + self.previous.as_ref().map_or(0, String::len)
    }
}

/// A cheap handle.
#[derive(Debug, Clone)]
pub(in crate::http) struct ResponseStore(Arc<Store>);

#[derive(Debug)]
struct Store {
    shelves: Mutex<Shelves>,
    running: Mutex<HashMap<String, RunningEntry>>,
    metrics: Arc<Metrics>,
    on: bool,
    ttl: Duration,
    forgets: Once,
}

/// A response that is streamed and will be stored.
#[derive(Debug, Clone)]
struct RunningEntry {
    owner: OwnerId,
    head: Bytes,
    cancel: CancellationToken,
    ended: CancellationToken,
}

impl ResponseStore {
    /// Empty. From its first response on it forgets by itself what is too old, until the last handle drops.
    pub(in crate::http) fn new(
        config: &StoreConfig,
        pool: &MemoryPool,
        metrics: &Arc<Metrics>,
    ) -> Self {
        Self(Arc::new(Store {
            shelves: Mutex::new(Shelves::new(config, pool)),
            running: Mutex::default(),
            metrics: Arc::clone(metrics),
            on: config.bytes > 0,
            ttl: config.ttl,
            forgets: Once::new(),
        }))
    }

    /// True if anything is stored at all.
    pub(in crate::http) fn is_on(&self) -> bool {
        self.0.on
    }

    /// Keeps a response, in the place of older ones where there is no room. What is too large is not kept, and counted.
    pub(in crate::http) fn put(&self, owner: OwnerId, id: &str, response: Arc<StoredResponse>) {
        self.0.forgets.call_once(|| {
            tokio::spawn(forget(Arc::downgrade(&self.0), self.0.ttl));
        });
        let kept = self.0.shelves().put(owner, id, response, Instant::now());
        if !kept {
            self.0.metrics.responses.not_stored.inc();
        }
        self.0.show();
    }

    /// A response of this owner.
    pub(in crate::http) fn get(&self, owner: OwnerId, id: &str) -> Option<Arc<StoredResponse>> {
        let found = self.0.shelves().get(owner, id, Instant::now());
        self.0.show();
        found
    }

    /// Forgets a response; false if there is none.
    pub(in crate::http) fn delete(&self, owner: OwnerId, id: &str) -> bool {
        let was_there = self.0.shelves().delete(owner, id, Instant::now());
        self.0.show();
        was_there
    }

    /// A response begins that can be cancelled and asked for by its id, until what is returned drops.
    pub(in crate::http) fn begin(&self, owner: OwnerId, id: &str, head: Bytes) -> RunningResponse {
        let cancel = CancellationToken::new();
        let ended = CancellationToken::new();
        let entry = RunningEntry { owner, head, cancel: cancel.clone(), ended: ended.clone() };
        self.0.running().insert(id.to_owned(), entry);
        RunningResponse { store: self.clone(), id: id.to_owned(), cancel, ended }
    }

    /// What a running response of this owner begins with.
    pub(in crate::http) fn running(&self, owner: OwnerId, id: &str) -> Option<Bytes> {
        let running = self.0.running();
        running.get(id).filter(|entry| entry.owner == owner).map(|entry| entry.head.clone())
    }

    /// Ends a running response, and waits a while until it has ended. False if none runs.
    pub(in crate::http) async fn cancel(&self, owner: OwnerId, id: &str) -> bool {
        let entry = self.0.running().get(id).filter(|entry| entry.owner == owner).cloned();
        let Some(entry) = entry else { return false };
        entry.cancel.cancel();
        tokio::time::timeout(ENDS_WITHIN, entry.ended.cancelled()).await.ok();
        true
    }
}

impl Store {
    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().expect("no holder panics")
    }

    fn running(&self) -> MutexGuard<'_, HashMap<String, RunningEntry>> {
        self.running.lock().expect("no holder panics")
    }

    fn show(&self) {
        let (count, evicted) = self.shelves().counts();
        self.metrics.responses.stored.set(i64::try_from(count).unwrap_or(i64::MAX));
        self.metrics.responses.evicted.inc_by(evicted);
    }
}

/// Within this a response ends that was cancelled, where its client reads. A guess.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// Times that old responses are looked for within the time that they are kept.
const LOOKS: u32 = 8;

async fn forget(store: Weak<Store>, ttl: Duration) {
    let pause = (ttl / LOOKS).clamp(Duration::from_secs(1), Duration::from_secs(60));
    loop {
        tokio::time::sleep(pause).await;
        let Some(store) = store.upgrade() else { return };
        store.shelves().expire(Instant::now());
        store.show();
    }
}

/// A response while it is streamed. Dropping it ends it.
#[derive(Debug)]
pub(in crate::http) struct RunningResponse {
    store: ResponseStore,
    id: String,
    cancel: CancellationToken,
    ended: CancellationToken,
}

impl RunningResponse {
    /// Comes when somebody cancels it.
    pub(in crate::http) async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }
}

impl Drop for RunningResponse {
    fn drop(&mut self) {
        self.store.0.running().remove(&self.id);
        self.ended.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(100);

    fn store() -> ResponseStore {
        let config = StoreConfig { bytes: 1 << 20, tenant_responses: 10, ttl: TTL };
        ResponseStore::new(&config, &MemoryPool::private(1 << 20), &Arc::default())
    }

    fn response() -> Arc<StoredResponse> {
        let (head, output, tail, input) = Default::default();
        Arc::new(StoredResponse { head, output, tail, input, previous: None })
    }

    #[tokio::test(start_paused = true)]
    async fn old_responses_go_though_nobody_asks() {
        let store = store();
        store.put(1, "a", response());
        assert_eq!(store.0.metrics.responses.stored.get(), 1);
        tokio::time::sleep(TTL + TTL / LOOKS).await;
        assert_eq!(store.0.metrics.responses.stored.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_running_response_is_its_owners_until_it_ends() {
        let store = store();
        let running = store.begin(1, "a", Bytes::from_static(b"head"));
        assert_eq!(store.running(1, "a").as_deref(), Some(&b"head"[..]));
        assert!(store.running(2, "a").is_none());
        assert!(!store.cancel(2, "a").await);
        let (cancelled, ()) = tokio::join!(store.cancel(1, "a"), async {
            running.cancelled().await;
            drop(running);
        });
        assert!(cancelled && store.running(1, "a").is_none());
        assert!(!store.cancel(1, "a").await);
    }

    #[tokio::test(start_paused = true)]
    async fn who_cancels_waits_for_no_client_that_does_not_read() {
        let store = store();
        let _running = store.begin(1, "a", Bytes::new());
        assert!(store.cancel(1, "a").await);
        assert!(store.running(1, "a").is_some());
    }
}

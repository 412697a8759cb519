//! Responses in the router's memory: a restart forgets them.

use std::sync::{Arc, Mutex, MutexGuard, Once, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::shelves::Shelves;
use super::{OwnerId, StoredResponse};
use crate::config::StoreConfig;
use crate::limits::memory::MemoryPool;
use crate::metrics::Metrics;

/// From its first response on it forgets by itself what is too old, until the last handle drops.
#[derive(Debug)]
pub(super) struct MemoryStore {
    shared: Arc<Shared>,
    forgets: Once,
}

#[derive(Debug)]
struct Shared {
    shelves: Mutex<Shelves<Arc<StoredResponse>>>,
    metrics: Arc<Metrics>,
    ttl: Duration,
}

impl MemoryStore {
    pub(super) fn new(config: &StoreConfig, pool: &MemoryPool, metrics: Arc<Metrics>) -> Self {
        let shelves = Mutex::new(Shelves::new(config, pool));
        let shared = Arc::new(Shared { shelves, metrics, ttl: config.ttl });
        Self { shared, forgets: Once::new() }
    }

    pub(super) fn put(&self, owner: OwnerId, id: &str, response: Arc<StoredResponse>) {
        let shared = &self.shared;
        self.forgets.call_once(|| {
            tokio::spawn(forget(Arc::downgrade(shared), shared.ttl));
        });
        let value = (response.bytes(), response);
        if !shared.shelves().put(owner, id, value, Instant::now()) {
            shared.metrics.responses.not_stored.inc();
        }
        shared.show();
    }

    pub(super) fn get(&self, owner: OwnerId, id: &str) -> Option<Arc<StoredResponse>> {
        let found = self.shared.shelves().get(owner, id, Instant::now());
        self.shared.show();
        found
    }

    pub(super) fn delete(&self, owner: OwnerId, id: &str) -> bool {
        let was_there = self.shared.shelves().delete(owner, id, Instant::now());
        self.shared.show();
        was_there
    }
}

impl Shared {
    fn shelves(&self) -> MutexGuard<'_, Shelves<Arc<StoredResponse>>> {
        self.shelves.lock().expect("no holder panics")
    }

    fn show(&self) {
        let mut shelves = self.shelves();
        drop(shelves.gone()); // nobody else has them
        shelves.show(&self.metrics);
    }
}

/// Times that old responses are looked for within the time that they are kept.
const LOOKS: u32 = 8;

/// Between two looks for responses that are too old.
pub(super) fn pause(ttl: Duration) -> Duration {
    (ttl / LOOKS).clamp(Duration::from_secs(1), Duration::from_secs(60))
}

async fn forget(shared: Weak<Shared>, ttl: Duration) {
    loop {
        tokio::time::sleep(pause(ttl)).await;
        let Some(shared) = shared.upgrade() else { return };
        shared.shelves().expire(Instant::now());
        shared.show();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(100);

    #[tokio::test(start_paused = true)]
    async fn old_responses_go_though_nobody_asks() {
        let config = StoreConfig { bytes: 1 << 20, tenant_responses: 10, ttl: TTL, file: None };
        let store = MemoryStore::new(&config, &MemoryPool::private(1 << 20), Arc::default());
        let (head, output, tail, input) = Default::default();
        let response = StoredResponse { head, output, tail, input, previous: None, _memory: None };
        store.put(1, "a", Arc::new(response));
        let stored = || store.shared.metrics.responses.stored.get();
        assert_eq!(stored(), 1);
        tokio::time::sleep(TTL + TTL / LOOKS).await;
        assert_eq!(stored(), 0);
    }
}

//! Responses that clients may ask for again: bounded in bytes and number, each its tenant's own, for a time.
//!
//! They are kept in memory, or in the file of `--response-store`, where they survive a restart. Who continues a response or reads
//! it keeps it for as long again. Putting one there never waits: a file that is too slow or full loses it, which is counted.

mod disk;
mod in_memory;
mod running;
mod shelves;

use std::sync::Arc;

use bytes::Bytes;

use crate::config::StoreConfig;
use crate::error::RouteError;
use crate::limits::memory::{Memory, MemoryShare};
use crate::metrics::Metrics;
use disk::DiskStore;
pub(crate) use disk::StoreFileError;
use in_memory::MemoryStore;
use running::Running;
pub(crate) use running::RunningResponse;

/// Whose a response is: the account of a tenant. The same after a restart.
pub(crate) type OwnerId = u64;

/// What is kept of a response, as JSON in the pieces in which it is sent.
#[derive(Debug)]
pub(crate) struct StoredResponse {
    /// The object up to its output.
    pub(crate) head: Bytes,
    /// The list of its output items.
    pub(crate) output: Bytes,
    /// The rest of the object.
    pub(crate) tail: Bytes,
    /// The list of the request's own input items.
    pub(crate) input: Bytes,
    /// The response that it continues.
    pub(crate) previous: Option<String>,
    /// What it was charged to where it was read from a file.
    pub(crate) _memory: Option<MemoryShare>,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let texts = [&self.head, &self.output, &self.tail, &self.input];
        let texts = texts.into_iter().map(Bytes::len).sum::<usize>();
        texts + self.previous.as_ref().map_or(0, String::len)
    }
}

/// A cheap handle. When the last one drops, what was put into a file is there.
#[derive(Debug, Clone)]
pub(crate) struct ResponseStore {
    kept: Kept,
    running: Arc<Running>,
    on: bool,
}

#[derive(Debug, Clone)]
enum Kept {
    InMemory(Arc<MemoryStore>),
    OnDisk(Arc<DiskStore>),
}

impl ResponseStore {
    /// With what the file holds; in memory it is empty at first.
    ///
    /// # Errors
    /// The file cannot be used.
    pub(crate) fn open(
        config: &StoreConfig,
        memory: &Memory,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, StoreFileError> {
        let kept = match &config.file {
            Some(path) => Kept::OnDisk(Arc::new(DiskStore::open(path, config, memory, metrics)?)),
            None => {
                let store = MemoryStore::new(config, &memory.responses, Arc::clone(metrics));
                Kept::InMemory(Arc::new(store))
            }
        };
        Ok(Self { kept, running: Arc::default(), on: config.bytes > 0 })
    }

    /// True if anything is stored at all.
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Keeps a response, in the place of older ones where there is no room. What cannot be kept is counted.
    pub(crate) fn put(&self, owner: OwnerId, id: &str, response: Arc<StoredResponse>) {
        match &self.kept {
            Kept::InMemory(store) => store.put(owner, id, response),
            Kept::OnDisk(store) => store.put(owner, id, response),
        }
    }

    /// A response of this owner.
    ///
    /// # Errors
    /// The file cannot be read, has too much to do, or there is no memory for the response.
    pub(crate) async fn get(
        &self,
        owner: OwnerId,
        id: &str,
    ) -> Result<Option<Arc<StoredResponse>>, RouteError> {
        match &self.kept {
            Kept::InMemory(store) => Ok(store.get(owner, id)),
            Kept::OnDisk(store) => store.get(owner, id).await,
        }
    }

    /// Forgets a response; false if there is none.
    ///
    /// # Errors
    /// The file cannot be written, or has too much to do.
    pub(crate) async fn delete(&self, owner: OwnerId, id: &str) -> Result<bool, RouteError> {
        match &self.kept {
            Kept::InMemory(store) => Ok(store.delete(owner, id)),
            Kept::OnDisk(store) => store.delete(owner, id).await,
        }
    }

    /// A response begins that can be cancelled and asked for by its id, until what is returned drops.
    pub(crate) fn begin(&self, owner: OwnerId, id: &str, head: Bytes) -> RunningResponse {
        self.running.begin(owner, id, head)
    }

    /// What a running response of this owner begins with.
    pub(crate) fn running(&self, owner: OwnerId, id: &str) -> Option<Bytes> {
        self.running.head(owner, id)
    }

    /// Ends a running response, and waits a while until it has ended. False if none runs.
    pub(crate) async fn cancel(&self, owner: OwnerId, id: &str) -> bool {
        self.running.cancel(owner, id).await
    }
}

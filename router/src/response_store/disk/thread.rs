//! The thread that has the file: what is kept by its bounds, written and read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::file::{StoreFile, StoreFileError};
use super::{Found, StoreCommand};
use crate::config::StoreConfig;
use crate::error::RouteError;
use crate::limits::memory::{MemoryPool, MemoryShare, Refused};
use crate::metrics::Metrics;
use crate::response_store::in_memory::pause;
use crate::response_store::shelves::Shelves;
use crate::response_store::{OwnerId, StoredResponse};

/// See the head of this file.
#[derive(Debug)]
pub(super) struct StoreThread {
    pub(super) file: StoreFile,
    /// Of each response its bytes.
    shelves: Shelves<usize>,
    /// Those that are forgotten, and are in the file until it can be written.
    stale: Vec<String>,
    /// The last write failed, which the log says already.
    failing: bool,
    behind: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
    ttl: Duration,
}

impl StoreThread {
    /// With what the file holds; what is too old or too much by now is forgotten.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn new(
        file: StoreFile,
        config: &StoreConfig,
        pool: &MemoryPool,
        metrics: &Arc<Metrics>,
        behind: Arc<AtomicBool>,
    ) -> Result<Self, StoreFileError> {
        let mut shelves = Shelves::new(config, pool);
        let (now, now_ms, ttl) = (Instant::now(), unix_ms(), config.ttl);
        let mut stale = Vec::new();
        file.each(|id, owner, bytes, used_ms| {
            let age = Duration::from_millis(now_ms.saturating_sub(used_ms));
            let left = ttl.saturating_sub(age);
            let kept =
                !left.is_zero() && shelves.put_back(owner, &id, (bytes, bytes), now, now + left);
            if !kept {
                stale.push(id);
            }
        })?;
        let metrics = Arc::clone(metrics);
        let mut thread = Self { file, shelves, stale, failing: false, behind, metrics, ttl };
        thread.tidy();
        Ok(thread)
    }

    /// Until nobody can send anything any more.
    pub(super) fn run(mut self, inbox: &Receiver<StoreCommand>) {
        let pause = pause(self.ttl);
        let mut looked = Instant::now();
        loop {
            match inbox.recv_timeout(pause) {
                Ok(command) => self.take(command),
                Err(RecvTimeoutError::Timeout) => self.behind.store(false, Relaxed),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if looked.elapsed() >= pause {
                looked = Instant::now();
                self.shelves.expire(looked);
                self.tidy();
            }
        }
        if let Err(error) = self.file.close() {
            tracing::warn!(%error, "--response-store: closing the file");
        }
    }

    pub(super) fn take(&mut self, command: StoreCommand) {
        match command {
            StoreCommand::Put { owner, id, response, memory } => {
                self.put(owner, &id, &response);
                drop((response, memory));
            }
            StoreCommand::Get { owner, id, memory, reply } => {
                let _ = reply.send(self.get(owner, &id, memory)); // whoever asked may have left
            }
            StoreCommand::Delete { owner, id, reply } => {
                let _ = reply.send(self.delete(owner, &id));
            }
        }
        self.tidy();
    }

    fn put(&mut self, owner: OwnerId, id: &str, response: &StoredResponse) {
        let bytes = response.bytes();
        if !self.shelves.put(owner, id, (bytes, bytes), Instant::now()) {
            self.metrics.responses.not_stored.inc();
            return;
        }
        self.stale.append(&mut self.shelves.gone());
        match self.file.put(&self.stale, owner, id, response, unix_ms()) {
            Ok(()) => {
                self.stale.clear();
                self.works();
            }
            Err(error) => {
                self.shelves.delete(owner, id, Instant::now());
                self.metrics.responses.not_stored.inc();
                self.fails(&error);
            }
        }
    }

    fn get(
        &mut self,
        owner: OwnerId,
        id: &str,
        mut memory: MemoryShare,
    ) -> Result<Found, RouteError> {
        let Some(bytes) = self.shelves.get(owner, id, Instant::now()) else { return Ok(None) };
        memory.charge(bytes).map_err(Refused::answer)?;
        let found = self.file.get(id, memory).map_err(|error| {
            self.metrics.responses.store_errors.inc();
            RouteError::internal("reading a stored response", error)
        })?;
        if found.is_none() {
            return Err(RouteError::mistake("a stored response is not in its file"));
        }
        if let Err(error) = self.file.touch(id, unix_ms()) {
            self.fails(&error); // after a restart it is older than it should be
        }
        Ok(found.map(Arc::new))
    }

    /// It is gone only where it is gone from the file.
    fn delete(&mut self, owner: OwnerId, id: &str) -> Result<bool, RouteError> {
        if !self.shelves.has(owner, id, Instant::now()) {
            return Ok(false);
        }
        if let Err(error) = self.file.forget(&[id.to_owned()]) {
            self.fails(&error);
            return Err(RouteError::internal("deleting a stored response", error));
        }
        self.works();
        Ok(self.shelves.delete(owner, id, Instant::now()))
    }

    /// Takes what is forgotten out of the file, too.
    fn tidy(&mut self) {
        self.stale.append(&mut self.shelves.gone());
        if !self.stale.is_empty() {
            match self.file.forget(&self.stale) {
                Ok(()) => {
                    self.stale.clear();
                    self.works();
                }
                Err(error) => self.fails(&error),
            }
        }
        self.shelves.show(&self.metrics);
    }

    fn works(&mut self) {
        if std::mem::take(&mut self.failing) {
            tracing::info!("the file of --response-store can be written again");
        }
    }

    fn fails(&mut self, error: &rusqlite::Error) {
        self.metrics.responses.store_errors.inc();
        if !std::mem::replace(&mut self.failing, true) {
            let path = self.file.path().display();
            tracing::warn!(
                %error,
                "cannot write {path} (--response-store): responses are answered and not stored until it can be \
                 written again; make room, or name another file"
            );
        }
    }
}

/// Of the wall clock, as what is stored outlives the process.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

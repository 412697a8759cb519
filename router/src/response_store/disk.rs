//! Responses in the file of `--response-store`. One thread reads and writes it, and has what it has to do over a bounded channel.
//!
//! What the disk does not take is lost, counted and logged, and the answers go on. With the first write that works again, so
//! does the store. Whoever asks for a response waits for the thread, for a while.

mod file;
mod thread;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

use super::{OwnerId, StoredResponse};
use crate::config::StoreConfig;
use crate::error::RouteError;
use crate::limits::memory::{Memory, MemoryPool, MemoryShare};
use crate::metrics::Metrics;
use file::StoreFile;
pub(crate) use file::StoreFileError;
use thread::StoreThread;

/// What may wait for the thread. A guess: a disk does thousands in a second.
const WAITING: usize = 1_024;
/// For as long a caller waits for the thread. A guess.
const WAITS: Duration = Duration::from_secs(10);
/// A router that was started anew waits so long for the one before it to let the file go. A guess.
const PREDECESSOR: Duration = Duration::from_secs(5);

/// Where the thread says what came of it.
type Reply<T> = oneshot::Sender<Result<T, RouteError>>;
type Found = Option<Arc<StoredResponse>>;

/// What the thread is to do.
#[derive(Debug)]
enum StoreCommand {
    Put {
        owner: OwnerId,
        id: String,
        response: Arc<StoredResponse>,
        /// Pays for the response until it is written.
        memory: MemoryShare,
    },
    Get {
        owner: OwnerId,
        id: String,
        /// Will pay for the response.
        memory: MemoryShare,
        reply: Reply<Found>,
    },
    Delete {
        owner: OwnerId,
        id: String,
        reply: Reply<bool>,
    },
}

/// The way to the thread. Dropping it waits until all is written.
#[derive(Debug)]
pub(super) struct DiskStore {
    /// `None` only while it drops.
    commands: Option<SyncSender<StoreCommand>>,
    thread: Option<JoinHandle<()>>,
    /// Pays for what is on its way.
    answers: MemoryPool,
    metrics: Arc<Metrics>,
    /// The thread has more to do than may wait, which the log says already.
    behind: Arc<AtomicBool>,
}

impl DiskStore {
    /// Opens the file, forgets what is too old or too much, and starts the thread.
    ///
    /// # Errors
    /// It cannot be used.
    pub(super) fn open(
        path: &Path,
        config: &StoreConfig,
        memory: &Memory,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, StoreFileError> {
        let file = StoreFile::open(path, PREDECESSOR)?;
        let behind = Arc::new(AtomicBool::new(false));
        let metrics = Arc::clone(metrics);
        let pool = &memory.responses;
        let thread = StoreThread::new(file, config, pool, &metrics, Arc::clone(&behind))?;
        let (commands, inbox) = sync_channel(WAITING);
        let named = std::thread::Builder::new().name("response-store".into());
        let thread = named.spawn(move || thread.run(&inbox)).map_err(StoreFileError::Open)?;
        let answers = memory.answers.clone();
        Ok(Self { commands: Some(commands), thread: Some(thread), answers, metrics, behind })
    }

    /// Writes a response soon, or counts it as not stored.
    pub(super) fn put(&self, owner: OwnerId, id: &str, response: Arc<StoredResponse>) {
        let mut memory = self.answers.share();
        let paid = memory.charge(response.bytes()).is_ok();
        let id = id.to_owned();
        if paid && self.send(StoreCommand::Put { owner, id, response, memory }) {
            return;
        }
        self.metrics.responses.not_stored.inc();
        if !self.behind.swap(true, Relaxed) {
            tracing::warn!(
                "the disk of --response-store is too slow: responses are not stored until it has caught up"
            );
        }
    }

    pub(super) async fn get(&self, owner: OwnerId, id: &str) -> Result<Found, RouteError> {
        let (id, memory) = (id.to_owned(), self.answers.share());
        self.ask(|reply| StoreCommand::Get { owner, id, memory, reply }).await
    }

    pub(super) async fn delete(&self, owner: OwnerId, id: &str) -> Result<bool, RouteError> {
        let id = id.to_owned();
        self.ask(|reply| StoreCommand::Delete { owner, id, reply }).await
    }

    /// False if too much waits already.
    fn send(&self, command: StoreCommand) -> bool {
        self.commands.as_ref().is_some_and(|commands| commands.try_send(command).is_ok())
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> StoreCommand,
    ) -> Result<T, RouteError> {
        let (reply, answer) = oneshot::channel();
        if !self.send(command(reply)) {
            return Err(busy());
        }
        match tokio::time::timeout(WAITS, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(RouteError::mistake("the thread of the response store ended")),
            Err(_) => Err(busy()),
        }
    }
}

fn busy() -> RouteError {
    let retry_after = Duration::from_secs(1);
    RouteError::Overloaded { what: "the disk of stored responses", retry_after }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has nothing to say
        }
    }
}

#[cfg(test)]
mod tests;

//! What is in the file outlives the router, within its bounds; what cannot be written is counted; what cannot be used is named.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use bytes::Bytes;

use super::*;
use crate::config::MemoryConfig;

const A: OwnerId = u64::MAX - 1; // more than SQLite's integers hold
const B: OwnerId = 2;
const TTL: Duration = Duration::from_secs(3_600);
const SECRET: &str = "a secret of the client";

/// A folder of its own with a file for a store, gone with the test.
struct StoreFolder {
    path: PathBuf,
    metrics: Arc<Metrics>,
    config: StoreConfig,
}

impl StoreFolder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("headrace-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        let file = Some(path.join("responses.db"));
        let config = StoreConfig { bytes: 1 << 20, tenant_responses: 100, ttl: TTL, file };
        Self { path, metrics: Arc::default(), config }
    }

    fn file(&self) -> &Path {
        self.config.file.as_deref().unwrap()
    }

    fn memory(&self, answer: usize) -> Memory {
        let config = MemoryConfig { bodies: 1 << 20, body: 1 << 20, answers: 2 * answer, answer };
        Memory::new(&config, self.config.bytes, &self.metrics)
    }

    fn start(&self) -> DiskStore {
        DiskStore::open(self.file(), &self.config, &self.memory(1 << 20), &self.metrics).unwrap()
    }

    /// Why it does not start.
    fn refused(&self) -> String {
        match StoreFile::open(self.file(), Duration::ZERO) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("it opens"),
        }
    }

    fn thread(&self, pages: u32) -> StoreThread {
        let file = StoreFile::open(self.file(), Duration::ZERO).unwrap();
        file.bound_pages(pages);
        let pool = &self.memory(1 << 20).responses;
        StoreThread::new(file, &self.config, pool, &self.metrics, Arc::default()).unwrap()
    }

    fn not_stored(&self) -> (u64, u64) {
        let responses = &self.metrics.responses;
        (responses.not_stored.get(), responses.store_errors.get())
    }
}

impl Drop for StoreFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn response(text: &str) -> Arc<StoredResponse> {
    Arc::new(StoredResponse {
        head: Bytes::from(format!("head of {text}")),
        output: Bytes::from(format!("output of {text}")),
        tail: Bytes::from_static(b"tail"),
        input: Bytes::from_static(b"input"),
        previous: Some("resp_before".to_owned()),
        _memory: None,
    })
}

fn texts(response: &StoredResponse) -> [&[u8]; 4] {
    [&response.head, &response.output, &response.tail, &response.input]
}

async fn has(store: &DiskStore, ids: &[&str]) -> Vec<bool> {
    let mut found = Vec::new();
    for id in ids {
        found.push(store.get(A, id).await.unwrap().is_some());
    }
    found
}

#[tokio::test]
async fn a_response_outlives_the_router_and_is_its_owners_alone() {
    let folder = StoreFolder::new("store-restart");
    let first = folder.start();
    first.put(A, "a", response("a"));
    drop(first);
    let again = folder.start();
    let found = again.get(A, "a").await.unwrap().unwrap();
    assert_eq!(texts(&found), texts(&response("a")));
    assert_eq!(found.previous.as_deref(), Some("resp_before"));
    assert!(again.get(B, "a").await.unwrap().is_none());
    assert!(!again.delete(B, "a").await.unwrap());
    assert_eq!(folder.metrics.responses.stored.get(), 1);
    drop(again);
    let files: Vec<_> = fs::read_dir(&folder.path).unwrap().collect();
    assert_eq!(files.len(), 1, "{files:?}");
    assert_eq!(fs::metadata(folder.file()).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn what_is_deleted_is_gone_from_the_file() {
    let folder = StoreFolder::new("store-delete");
    let holds = || {
        let bytes = fs::read(folder.file()).unwrap();
        bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
    };
    let store = folder.start();
    store.put(A, "a", response(SECRET));
    drop(store);
    assert!(holds());
    let store = folder.start();
    assert!(store.delete(A, "a").await.unwrap());
    assert!(!store.delete(A, "a").await.unwrap());
    drop(store);
    assert!(!holds());
    assert_eq!(has(&folder.start(), &["a"]).await, [false]);
}

#[tokio::test]
async fn what_was_not_used_for_too_long_is_forgotten_by_the_next_start() {
    let folder = StoreFolder::new("store-ttl");
    let store = folder.start();
    for id in ["old", "new"] {
        store.put(A, id, response(id));
    }
    drop(store);
    let file = StoreFile::open(folder.file(), Duration::ZERO).unwrap();
    file.touch("old", 1_000).unwrap();
    file.close().unwrap();
    let store = folder.start();
    assert_eq!(folder.metrics.responses.stored.get(), 1);
    assert_eq!(has(&store, &["old", "new"]).await, [false, true]);
    drop(store);
    let mut ids = Vec::new();
    let file = StoreFile::open(folder.file(), Duration::ZERO).unwrap();
    file.each(|id, _, _, _| ids.push(id)).unwrap();
    assert_eq!(ids, ["new"]);
}

#[tokio::test]
async fn bounds_count_what_was_there_before() {
    let mut folder = StoreFolder::new("store-bounds");
    let store = folder.start();
    for id in ["a", "b", "c"] {
        store.put(A, id, response(id));
    }
    drop(store);
    folder.config.tenant_responses = 2;
    let store = folder.start();
    assert_eq!(has(&store, &["a", "b", "c"]).await, [false, true, true]);
    store.put(A, "d", response("d"));
    store.put(B, "e", response("e"));
    assert_eq!(has(&store, &["b", "c", "d"]).await, [false, true, true]);
    store.put(A, "long", response(&"x".repeat(folder.config.bytes)));
    assert_eq!(has(&store, &["long", "d"]).await, [false, true]);
    assert_eq!(folder.not_stored(), (1, 0));
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let folder = StoreFolder::new("store-wrong");
    fs::write(folder.file(), "no database ".repeat(1_000)).unwrap();
    assert!(folder.refused().contains("not a file of stored responses"), "{}", folder.refused());

    fs::remove_file(folder.file()).unwrap();
    let other = rusqlite::Connection::open(folder.file()).unwrap();
    other.execute_batch("CREATE TABLE t (a); INSERT INTO t VALUES (1)").unwrap();
    drop(other);
    assert!(folder.refused().contains("not a file of stored responses"), "{}", folder.refused());

    fs::remove_file(folder.file()).unwrap();
    let open = StoreFile::open(folder.file(), Duration::ZERO).unwrap();
    assert!(folder.refused().contains("another router uses it"), "{}", folder.refused());
    open.close().unwrap();

    let later = rusqlite::Connection::open(folder.file()).unwrap();
    later.execute_batch("PRAGMA user_version = 7").unwrap();
    drop(later);
    assert!(folder.refused().contains("its layout is 7"), "{}", folder.refused());

    fs::remove_file(folder.file()).unwrap();
    fs::create_dir(folder.file()).unwrap();
    assert!(folder.refused().contains("directory"), "{}", folder.refused());
}

#[test]
fn a_damaged_file_is_found_at_the_start() {
    let folder = StoreFolder::new("store-damage");
    let store = folder.start();
    for i in 0..50 {
        store.put(A, &format!("resp_{i}"), response(&"x".repeat(3_000)));
    }
    drop(store);
    let mut bytes = fs::read(folder.file()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..].fill(0xee);
    fs::write(folder.file(), bytes).unwrap();
    assert!(folder.refused().contains("damaged"), "{}", folder.refused());
}

#[test]
fn a_full_disk_loses_what_is_new_until_there_is_room() {
    let folder = StoreFolder::new("store-full");
    let mut thread = folder.thread(12);
    let put = |thread: &mut StoreThread, id: &str, bytes: usize| {
        let (response, memory) = (response(&"x".repeat(bytes)), MemoryPool::private(1).share());
        thread.take(StoreCommand::Put { owner: A, id: id.to_owned(), response, memory });
    };
    put(&mut thread, "a", 10_000);
    assert_eq!(folder.not_stored(), (0, 0));
    put(&mut thread, "b", 100_000);
    assert_eq!(folder.not_stored(), (1, 1));
    let found = |thread: &mut StoreThread, id: &str| {
        let memory = MemoryPool::private(1 << 20).share();
        let (reply, mut answer) = oneshot::channel();
        thread.take(StoreCommand::Get { owner: A, id: id.to_owned(), memory, reply });
        answer.try_recv().unwrap().unwrap().is_some()
    };
    assert!(found(&mut thread, "a") && !found(&mut thread, "b"));
    thread.file.bound_pages(1_000);
    put(&mut thread, "b", 100_000);
    assert!(found(&mut thread, "a") && found(&mut thread, "b"));
    assert_eq!(folder.not_stored(), (1, 1));
}

#[tokio::test]
async fn a_disk_that_is_too_slow_keeps_nobody_waiting() {
    let folder = StoreFolder::new("store-slow");
    let (commands, inbox) = sync_channel(1);
    let store = DiskStore {
        commands: Some(commands),
        thread: None,
        answers: MemoryPool::private(1 << 20),
        metrics: Arc::clone(&folder.metrics),
        behind: Arc::default(),
    };
    store.put(A, "a", response("a"));
    assert_eq!(folder.not_stored(), (0, 0));
    store.put(A, "b", response("b"));
    assert_eq!(folder.not_stored(), (1, 0));
    let busy = store.get(A, "a").await.unwrap_err();
    assert!(matches!(busy, RouteError::Overloaded { .. }), "{busy}");
    drop(inbox);
}

#[tokio::test(start_paused = true)]
async fn who_asks_waits_for_the_disk_so_long_and_no_longer() {
    let (commands, _inbox) = sync_channel(1);
    let answers = MemoryPool::private(1 << 20);
    let (metrics, behind) = (Arc::default(), Arc::default());
    let store = DiskStore { commands: Some(commands), thread: None, answers, metrics, behind };
    let busy = store.delete(A, "a").await.unwrap_err();
    assert!(matches!(busy, RouteError::Overloaded { .. }), "{busy}");
}

#[tokio::test]
async fn what_is_read_again_is_paid_for() {
    let folder = StoreFolder::new("store-memory");
    let memory = folder.memory(200_000);
    let store = DiskStore::open(folder.file(), &folder.config, &memory, &folder.metrics).unwrap();
    store.put(A, "a", response(&"x".repeat(150_000 / 2)));
    let first = store.get(A, "a").await.unwrap().unwrap();
    let second = store.get(A, "a").await.unwrap().unwrap();
    let full = store.get(A, "a").await.unwrap_err();
    assert!(matches!(full, RouteError::Overloaded { .. }), "{full}");
    drop((first, second));
    assert!(store.get(A, "a").await.unwrap().is_some());
}

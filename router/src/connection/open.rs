//! The open connections: how many there may be, and who makes room for new ones.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::socket::Socket;
use crate::app::App;

/// At most one in so many is closed at once, so that looking for them costs little per connection.
const EVICTED_SHARE: usize = 64;
/// For their tasks to end, which do nothing else: a guess, for a machine that is very busy.
const EVICTION: Duration = Duration::from_secs(1);

pub(super) struct Open {
    app: Arc<App>,
    most: usize,
    room: Arc<Semaphore>,
    all: Mutex<HashMap<u64, Arc<Socket>>>,
    next: AtomicU64,
    /// Those that were asked to make room and are still there.
    leaving: Arc<AtomicUsize>,
}

impl Open {
    pub(super) fn new(app: &Arc<App>, most: usize) -> Self {
        Self {
            app: Arc::clone(app),
            most,
            room: Arc::new(Semaphore::new(most)),
            all: Mutex::default(),
            next: AtomicU64::new(0),
            leaving: Arc::default(),
        }
    }

    /// Room for one more. Where there is none, connections that rest are closed; `None` if none does.
    pub(super) async fn room(&self) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.room).try_acquire_owned();
        if let Ok(permit) = permit {
            return Some(permit);
        }
        if !self.make_room() {
            return None;
        }
        timeout(EVICTION, Arc::clone(&self.room).acquire_owned()).await.ok()?.ok()
    }

    /// Closes those that have rested longest, unless others are on their way out. False if none rests.
    pub(super) fn make_room(&self) -> bool {
        self.leaving.load(Relaxed) > 0 || self.evict() > 0
    }

    fn evict(&self) -> u64 {
        let all = self.all();
        let resting = all.values().filter_map(|socket| Some((socket.resting_since()?, socket)));
        let mut resting: Vec<_> = resting.collect();
        resting.sort_unstable_by_key(|(since, _)| *since);
        let silent = resting.iter().filter(|(_, socket)| !socket.may_have_asked());
        let mut evicted = 0;
        for (_, socket) in silent.take(self.most.div_ceil(EVICTED_SHARE)) {
            socket.evict(&self.leaving);
            evicted += 1;
        }
        self.app.metrics.http.connections_evicted.inc_by(evicted);
        evicted
    }

    /// One more is open, until the result drops.
    pub(super) fn enter(&self, socket: &Arc<Socket>) -> Entered<'_> {
        let id = self.next.fetch_add(1, Relaxed);
        self.all().insert(id, Arc::clone(socket));
        self.app.metrics.http.connections.inc_by(1);
        Entered { open: self, id }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u64, Arc<Socket>>> {
        self.all.lock().expect("no holder panics")
    }
}

pub(super) struct Entered<'a> {
    open: &'a Open,
    id: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.open.all().remove(&self.id);
        self.open.app.metrics.http.connections.dec_by(1);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Context;

    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpStream;

    use super::super::socket::pair;
    use super::super::tests::app;
    use super::*;

    #[tokio::test]
    async fn those_that_rested_longest_make_room_and_no_others_while_they_leave() {
        let app = app().await;
        let open = Open::new(&app, 128);
        let metrics = &app.metrics.http;
        assert!(!open.make_room(), "nobody rests");

        let mut sockets = Vec::new();
        for _ in 0..9 {
            let (socket, client) = pair().await;
            sockets.push(Some((open.enter(&socket), socket, client)));
        }
        assert_eq!(metrics.connections.get(), 9);
        let resting = |sockets: &[Option<(Entered<'_>, Arc<Socket>, TcpStream)>]| {
            let rests = |(_, socket, _): &(Entered<'_>, Arc<Socket>, TcpStream)| {
                socket.resting_since().is_some()
            };
            sockets.iter().map(|one| one.as_ref().is_some_and(rests)).collect::<Vec<_>>()
        };
        // a sixty-fourth of 128
        for _ in 0..3 {
            assert!(open.make_room());
            assert_eq!(resting(&sockets), [[false; 2].as_slice(), &[true; 7]].concat());
        }
        assert_eq!(metrics.connections_evicted.get(), 2);
        sockets[0] = None;
        assert!(open.make_room() && resting(&sockets)[2], "one of the two is still there");
        sockets[1] = None;
        assert!(open.make_room());
        assert_eq!(resting(&sockets), [[false; 4].as_slice(), &[true; 5]].concat());
        assert_eq!((metrics.connections_evicted.get(), metrics.connections.get()), (4, 7));
    }

    #[tokio::test]
    async fn nobody_whose_request_waits_to_be_read_makes_room() {
        let app = app().await;
        let open = Open::new(&app, 128);
        let mut sockets = Vec::new();
        for asks in [true, true, false, true] {
            let (socket, mut client) = pair().await;
            if asks {
                client.write_all(b"GET").await.unwrap();
                let here = |context: &mut Context<'_>| {
                    socket.wire().stream.plain().unwrap().poll_read_ready(context)
                };
                poll_fn(here).await.unwrap();
            }
            sockets.push((open.enter(&socket), socket, client));
        }
        assert!(open.make_room());
        let rest: Vec<_> = sockets.iter().map(|(_, socket, _)| socket.resting_since()).collect();
        let rest: Vec<_> = rest.iter().map(Option::is_some).collect();
        assert_eq!(rest, [true, true, false, true], "the silent one alone");
        drop(sockets.remove(2));
        assert!(!open.make_room(), "a newcomer is refused");
        assert_eq!(app.metrics.http.connections_evicted.get(), 1);
    }
}

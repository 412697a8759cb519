//! Whole answers that wait for clients to read them: bounded for each connection, and more narrowly once all connections
//! together hold much. Streams are not counted here: of each of them one piece waits at most, and its tokens wait in the
//! store of its request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use axum::body::Body;
use hyper::body::Body as _;

use super::Clients;
use super::socket::Socket;

/// Of one connection, in bytes: a hundred answers of 20 kB that ended at the same time. A guess.
const OF_A_CONNECTION: usize = 2 << 20;
/// Of all connections, in bytes. A guess: what a router can spare.
const OF_ALL: usize = 256 << 20;
/// Of one connection, its first answer included, while all hold more than [`OF_ALL`].
const WHEN_CROWDED: usize = 64 << 10;

/// Bytes of whole answers that wait for clients.
#[derive(Default)]
pub(super) struct Unread(AtomicUsize);

/// An answer that waits, until this drops.
pub(super) struct UnreadCharge {
    bytes: usize,
    socket: Arc<Socket>,
    clients: Arc<Clients>,
}

impl Clients {
    /// Counts an answer. `None`: there is no room for it. The first answer of a connection may have any length while not
    /// all hold too much.
    pub(super) fn charge(
        self: &Arc<Self>,
        socket: &Arc<Socket>,
        body: &Body,
    ) -> Option<UnreadCharge> {
        let bytes = body.size_hint().exact().unwrap_or(0);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let held = socket.unread.fetch_add(bytes, Relaxed);
        let all = self.unread.0.fetch_add(bytes, Relaxed);
        self.app.metrics.http.unread_bytes.inc_by(signed(bytes));
        let charge = UnreadCharge { bytes, socket: Arc::clone(socket), clients: Arc::clone(self) };
        let fits = fits(bytes, held, all);
        if !fits {
            self.app.metrics.http.answers_refused.inc();
        }
        fits.then_some(charge)
    }

    /// The client has to read before it may ask for more.
    pub(super) fn reads_too_little(&self, socket: &Socket) -> bool {
        let (held, all) = (socket.unread.load(Relaxed), self.unread.0.load(Relaxed));
        let too_little = held > if all > OF_ALL { WHEN_CROWDED } else { OF_A_CONNECTION };
        if too_little {
            self.app.metrics.http.answers_refused.inc();
        }
        too_little
    }
}

fn fits(bytes: usize, held: usize, all: usize) -> bool {
    let together = held.saturating_add(bytes);
    if all.saturating_add(bytes) > OF_ALL {
        together <= WHEN_CROWDED
    } else {
        held == 0 || together <= OF_A_CONNECTION
    }
}

impl Drop for UnreadCharge {
    fn drop(&mut self) {
        self.socket.unread.fetch_sub(self.bytes, Relaxed);
        self.clients.unread.0.fetch_sub(self.bytes, Relaxed);
        self.clients.app.metrics.http.unread_bytes.dec_by(signed(self.bytes));
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::socket::pair;
    use super::super::tests::clients;
    use super::*;

    #[test]
    fn the_first_answer_may_be_long_and_all_together_are_bounded() {
        assert!(fits(16 << 20, 0, 0), "somebody reads it");
        assert!(!fits(16 << 20, 1, 1));
        assert!(fits(OF_A_CONNECTION - 5, 5, 5) && !fits(OF_A_CONNECTION, 5, 5));
        assert!(!fits(16 << 20, 0, OF_ALL), "nobody reads the others");
        assert!(fits(WHEN_CROWDED, 0, OF_ALL) && !fits(WHEN_CROWDED, 1, OF_ALL));
        assert!(!fits(usize::MAX, 1, 1));
    }

    #[tokio::test]
    async fn what_waits_is_counted_until_it_is_taken_and_who_leaves_too_much_may_not_ask() {
        let clients = clients().await;
        let metrics = &clients.app.metrics.http;
        let counted = || (metrics.unread_bytes.get(), metrics.answers_refused.get());
        let ((one, _one), (other, _other)) = (pair().await, pair().await);
        let body = |bytes: usize| Body::from(vec![b'x'; bytes]);

        let most = clients.charge(&one, &body(OF_A_CONNECTION)).expect("it is the first");
        assert!(!clients.reads_too_little(&one));
        assert!(clients.charge(&one, &body(1)).is_none());
        assert_eq!(counted(), (OF_A_CONNECTION as i64, 1), "what was refused is not held");
        drop(most);
        let long = clients.charge(&one, &body(OF_A_CONNECTION + 1)).expect("it is the first");
        assert!(clients.reads_too_little(&one) && !clients.reads_too_little(&other));
        assert_eq!(counted(), (OF_A_CONNECTION as i64 + 1, 2));
        drop(long);

        let small = clients.charge(&one, &body(WHEN_CROWDED + 1)).expect("there is room");
        clients.unread.0.fetch_add(OF_ALL, Relaxed);
        assert!(clients.reads_too_little(&one) && !clients.reads_too_little(&other));
        assert!(clients.charge(&other, &body(WHEN_CROWDED + 1)).is_none());
        assert!(clients.charge(&other, &body(WHEN_CROWDED)).is_some());
        drop(small);
        assert_eq!(clients.unread.0.load(Relaxed), OF_ALL);
        assert_eq!((counted(), one.unread.load(Relaxed)), ((0, 4), 0));
    }
}

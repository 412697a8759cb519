//! A client's socket, and whose turn it is: the server's while it answers, else the client's.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use hyper::Version;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::gate::{InHand, RequestInHand, RunningStream};
use super::half_closed::Shut;
use super::transport::Transport;
use super::wire::ClientWire;
use crate::net::Peer;

/// A connection may rest this long between two requests. A guess: longer than the 60 s after which clients and proxies
/// tend to give one up themselves, so that none sends a request into a connection that is just being closed.
const REST: Duration = Duration::from_secs(120);

/// One that sends requests which wait for nothing more often than this, for long, asks on and on. A client that waits is
/// sometimes so fast that its next request is there when the router looks for it. A guess.
const PRESSES: Duration = Duration::from_millis(10);
/// So many of them at once are not yet too often.
const AT_ONCE: u32 = 8;

/// Shared, so that last words can be said after hyper gave up. The locks are never contended.
pub(super) struct Socket {
    pub(super) peer: Peer,
    /// Of the task that serves it.
    pub(super) in_hand: InHand,
    wire: Mutex<ClientWire>,
    /// Bytes came since the last ones that were sent.
    asked: AtomicBool,
    /// Hyper has more to write than it has written.
    pub(super) unflushed: AtomicBool,
    /// Bytes of its answers that wait for the client.
    pub(super) unread: AtomicUsize,
    /// Pieces of answers of HTTP/2 that were given to it since the client's frames were counted.
    pub(super) carried: AtomicUsize,
    /// Read of HTTP/2 in this turn of its task.
    pub(super) of_turn: AtomicUsize,
    /// Held by that request of it which waits for its slot among those of clients that ask on and on.
    pub(super) slot: tokio::sync::Mutex<()>,
    /// A comment is to be sent.
    pub(super) comment: AtomicBool,
    turn: Mutex<WriteTurn>,
    room_is_needed: Notify,
    pub(super) shut: Notify,
    /// It sends frames of HTTP/2 without end.
    pub(super) floods: Notify,
}

pub(super) struct WriteTurn {
    /// Requests whose answers are not over.
    pub(super) answering: usize,
    /// Of them, those whose bodies are still coming.
    pub(super) receiving: usize,
    /// Of them, those whose answers have not begun.
    pub(super) unanswered: usize,
    /// The answer that has begun is a stream of events, into which comments fit.
    pub(super) events: bool,
    /// Since when it is the client's turn, or since when its request comes, or the body of the last one.
    since: Instant,
    /// Of those whose bodies are still coming, the ones whose handlers wait for more of it.
    starved: usize,
    /// See [`Socket::presses`]: each request adds to it.
    pressed_until: Instant,
    /// A request has begun to come.
    asking: bool,
    /// HTTP/2, where bytes without a request are nothing unusual.
    multiplexed: bool,
    /// TLS, where the end of what a client says is the end of the conversation.
    encrypted: bool,
    /// Version of the last request.
    pub(super) version: Version,
    /// The client stopped writing.
    pub(super) shut: Option<Shut>,
    /// It was asked to make room, and is counted among those that were.
    evicted: Option<Arc<AtomicUsize>>,
}

impl WriteTurn {
    fn deadline(&self, header_timeout: Duration) -> Option<Instant> {
        let limit = if self.asking { header_timeout } else { REST };
        (self.answering == 0).then(|| self.since + limit)
    }

    /// All that it has asked for waits for the client to send more of a body.
    fn only_receives(&self) -> bool {
        self.starved > 0 && self.starved == self.answering
    }

    fn stay(&mut self) {
        if let Some(leaving) = self.evicted.take() {
            leaving.fetch_sub(1, Relaxed);
        }
    }

    /// A client that stopped writing gets its answer, unless answers are told apart by more than their order. Clients that
    /// speak TLS say that they close, which no client does that still reads.
    pub(super) fn answers_in_order(&self) -> bool {
        self.answering > 0 && !self.multiplexed && !self.encrypted
    }
}

impl Socket {
    pub(super) fn new(stream: impl Into<Transport>, peer: Peer) -> Self {
        let stream = stream.into();
        let turn = WriteTurn {
            answering: 0,
            receiving: 0,
            unanswered: 0,
            events: false,
            starved: 0,
            pressed_until: Instant::now(),
            since: Instant::now(),
            asking: true, // the first request has to come at once
            multiplexed: false,
            encrypted: stream.plain().is_none(),
            version: Version::HTTP_11,
            shut: None,
            evicted: None,
        };
        Self {
            peer,
            in_hand: InHand::default(),
            wire: Mutex::new(ClientWire::new(stream)),
            asked: AtomicBool::new(false),
            unflushed: AtomicBool::new(false),
            unread: AtomicUsize::new(0),
            carried: AtomicUsize::new(0),
            of_turn: AtomicUsize::new(0),
            slot: tokio::sync::Mutex::new(()),
            comment: AtomicBool::new(false),
            turn: Mutex::new(turn),
            room_is_needed: Notify::new(),
            shut: Notify::new(),
            floods: Notify::new(),
        }
    }

    pub(super) fn wire(&self) -> MutexGuard<'_, ClientWire> {
        self.wire.lock().expect("no holder panics")
    }

    pub(super) fn turn(&self) -> MutexGuard<'_, WriteTurn> {
        self.turn.lock().expect("no holder panics")
    }

    /// Takes note that bytes came: unless an answer is being made, a request begins.
    pub(super) fn hear(&self) {
        self.asked.store(true, Relaxed);
        let mut turn = self.turn();
        if turn.answering == 0 && !turn.asking && !turn.multiplexed {
            turn.asking = true;
            turn.since = Instant::now();
        }
    }

    /// Bytes were sent.
    pub(super) fn spoke(&self) {
        self.asked.store(false, Relaxed);
    }

    /// A client that sent nothing since the last answer only kept the connection for later.
    pub(super) fn has_asked(&self) -> bool {
        self.asked.load(Relaxed)
    }

    /// Takes note of a request that waited for nothing: over HTTP/1 it was there before the last answer was sent, over HTTP/2 its
    /// own answer was there at once.
    pub(super) fn presses(&self) {
        let mut turn = self.turn();
        turn.pressed_until = turn.pressed_until.max(Instant::now()) + PRESSES;
    }

    /// Its client asks on and on.
    pub(super) fn is_pressing(&self) -> bool {
        self.turn().pressed_until > Instant::now() + AT_ONCE * PRESSES
    }

    /// It is HTTP/2: bytes begin no request, and without one it rests.
    pub(super) fn multiplexes(&self) {
        let mut turn = self.turn();
        turn.multiplexed = true;
        turn.asking = false;
        turn.since = Instant::now();
    }

    /// Returns when the client is too late with its request. Nothing wakes it: no deadline is nearer than
    /// `header_timeout` when it is set.
    pub(super) async fn late(&self, header_timeout: Duration) {
        loop {
            let now = Instant::now();
            let deadline = self.turn().deadline(header_timeout);
            if deadline.is_some_and(|deadline| deadline <= now) {
                if !self.unflushed.load(Relaxed) {
                    return;
                }
                self.turn().since = now; // it still reads, or else the write fails
                continue;
            }
            let look = now + header_timeout;
            sleep_until(deadline.map_or(look, |deadline| deadline.min(look))).await;
        }
    }

    /// Since when no request of it is answered. Not of one that makes room already.
    pub(super) fn resting_since(&self) -> Option<Instant> {
        self.waiting_since(|turn| turn.answering == 0)
    }

    /// Since when a body has been on its way, where nothing else is answered. Not of one that makes room already.
    pub(super) fn receiving_since(&self) -> Option<Instant> {
        self.waiting_since(WriteTurn::only_receives)
    }

    fn waiting_since(&self, waits: impl FnOnce(&WriteTurn) -> bool) -> Option<Instant> {
        let is_sent = !self.unflushed.load(Relaxed);
        let turn = self.turn();
        (is_sent && turn.evicted.is_none() && waits(&turn)).then_some(turn.since)
    }

    /// A request may have come that a busy router has not read yet. This is a system call.
    pub(super) fn may_have_asked(&self) -> bool {
        self.wire().stream.has_unread()
    }

    /// Asks for its descriptor. It counts among those that leave until it has gone, or a request was faster.
    pub(super) fn evict(&self, leaving: &Arc<AtomicUsize>) {
        let mut turn = self.turn();
        turn.stay();
        leaving.fetch_add(1, Relaxed);
        turn.evicted = Some(Arc::clone(leaving));
        drop(turn);
        self.room_is_needed.notify_one();
    }

    /// Returns when its descriptor is needed while it rests, or while the body of its request is on its way.
    pub(super) async fn evicted(&self) {
        loop {
            self.room_is_needed.notified().await;
            let is_sent = !self.unflushed.load(Relaxed);
            let mut turn = self.turn();
            if is_sent && (turn.answering == 0 || turn.only_receives()) {
                return;
            }
            turn.stay(); // a request, or the end of one, was faster
        }
    }

    /// The body of a request is on its way that has no answer yet.
    pub(super) fn receives(&self) -> bool {
        let turn = self.turn();
        turn.receiving > 0 && turn.unanswered > 0
    }
}

impl Drop for WriteTurn {
    fn drop(&mut self) {
        self.stay();
    }
}

/// A request that is answered. When this drops, it is the client's turn again.
pub(super) struct Answering {
    socket: Arc<Socket>,
    stream: OnceLock<RunningStream>,
    /// Over HTTP/1.1 the connection's task does all for it; over HTTP/2 it has a task of its own.
    _request: Option<RequestInHand>,
    /// All of its request was read.
    is_read: AtomicBool,
}

impl Answering {
    /// `receiving`: its body is still to come.
    pub(super) fn begin(socket: &Arc<Socket>, version: Version, receiving: bool) -> Self {
        let mut turn = socket.turn();
        turn.answering += 1;
        turn.unanswered += 1;
        if receiving && turn.receiving == 0 {
            turn.since = Instant::now();
        }
        turn.receiving += usize::from(receiving);
        turn.asking = false;
        turn.version = version;
        drop(turn);
        let is_read = AtomicBool::new(!receiving);
        let _request = (version != Version::HTTP_2).then(|| socket.in_hand.request());
        Self { socket: Arc::clone(socket), stream: OnceLock::new(), _request, is_read }
    }

    /// The whole request is here, or nobody wants the rest of it.
    pub(super) fn received(&self, is_whole: bool) {
        self.is_read.store(is_whole, Relaxed);
        let mut turn = self.socket.turn();
        turn.receiving -= 1;
        if turn.receiving > 0 {
            turn.since = Instant::now();
        }
    }

    /// Its handler waits for more of its body, or not any more.
    pub(super) fn starves(&self, starves: bool) {
        let mut turn = self.socket.turn();
        turn.starved = if starves { turn.starved + 1 } else { turn.starved - 1 };
    }

    /// Its body comes, and not slowly.
    pub(super) fn goes_on(&self) {
        self.socket.turn().since = Instant::now();
    }

    /// What comes next on the connection is the next request.
    pub(super) fn is_read(&self) -> bool {
        self.is_read.load(Relaxed)
    }

    /// Its answer begins; `events`: as a stream of events.
    pub(super) fn answered(&self, events: bool) {
        if events {
            self.stream.get_or_init(|| self.socket.in_hand.stream());
        }
        let mut turn = self.socket.turn();
        turn.unanswered -= 1;
        turn.events = events;
    }

    /// A comment is to be sent between two events; said once.
    pub(super) fn takes_comment(&self) -> bool {
        self.socket.comment.load(Relaxed) && self.socket.comment.swap(false, Relaxed)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut turn = self.socket.turn();
        turn.answering -= 1;
        if turn.answering == 0 {
            turn.since = Instant::now();
            turn.wake_reader();
        }
    }
}

/// A socket, and the client's end of it.
#[cfg(test)]
pub(super) async fn pair() -> (Arc<Socket>, tokio::net::TcpStream) {
    pair_from(std::net::Ipv4Addr::LOCALHOST.into()).await
}

/// The same with a client of this address.
#[cfg(test)]
pub(super) async fn pair_from(address: std::net::IpAddr) -> (Arc<Socket>, tokio::net::TcpStream) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    (Arc::new(Socket::new(stream, Peer { address, connection: 1 })), client)
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, timeout};

    use super::*;

    const HEADERS: Duration = Duration::from_secs(10);
    const SECOND: Duration = Duration::from_secs(1);

    fn answer(socket: &Arc<Socket>) -> Answering {
        Answering::begin(socket, Version::HTTP_11, false)
    }

    /// Seconds until the client is late.
    async fn late(socket: &Socket) -> f64 {
        let begin = Instant::now();
        socket.late(HEADERS).await;
        begin.elapsed().as_secs_f64().round()
    }

    #[tokio::test]
    async fn over_http1_the_task_of_the_connection_works_on_its_requests() {
        let (socket, _client) = pair().await;
        assert_eq!(socket.in_hand.request_now(), (1, false));
        let multiplexed = Answering::begin(&socket, Version::HTTP_2, false);
        assert_eq!(socket.in_hand.request_now(), (1, false), "it has a task of its own");
        drop(multiplexed);
        let first = answer(&socket);
        assert_eq!(socket.in_hand.request_now(), (1, true));
        drop(first);
        assert_eq!(socket.in_hand.request_now(), (2, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_has_its_time_however_its_bytes_come() {
        let (socket, _client) = pair().await;
        advance(6 * SECOND).await;
        socket.hear();
        assert_eq!(late(&socket).await, 4.0, "the first one, since it came");
        drop(answer(&socket));
        advance(50 * SECOND).await;
        socket.hear();
        advance(3 * SECOND).await;
        socket.hear();
        assert_eq!(late(&socket).await, 7.0, "a later one, since its first byte");
    }

    #[tokio::test(start_paused = true)]
    async fn between_requests_a_connection_rests_from_the_end_of_the_last_answer() {
        let (socket, _client) = pair().await;
        let (first, second) = (answer(&socket), answer(&socket));
        advance(1_000 * SECOND).await;
        assert!(timeout(1_000 * SECOND, socket.late(HEADERS)).await.is_err(), "it is our turn");
        drop(first);
        advance(30 * SECOND).await;
        socket.hear();
        drop(second);
        assert_eq!(late(&socket).await, REST.as_secs_f64());
    }

    #[tokio::test(start_paused = true)]
    async fn who_still_reads_is_not_late() {
        let (socket, _client) = pair().await;
        drop(answer(&socket));
        socket.unflushed.store(true, Relaxed);
        assert!(timeout(10 * REST, socket.late(HEADERS)).await.is_err());
        socket.unflushed.store(false, Relaxed);
        assert!(late(&socket).await <= REST.as_secs_f64());
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_http2_begin_no_request() {
        let (socket, _client) = pair().await;
        socket.multiplexes();
        advance(5 * SECOND).await;
        socket.hear();
        assert_eq!(late(&socket).await, REST.as_secs_f64() - 5.0);
        let _answering = answer(&socket);
        assert!(!socket.turn().answers_in_order());
    }

    #[tokio::test]
    async fn a_request_is_read_when_its_end_was_seen() {
        let (socket, _client) = pair().await;
        assert!(answer(&socket).is_read(), "it has no body");
        for is_whole in [false, true] {
            let answering = Answering::begin(&socket, Version::HTTP_11, true);
            assert!(!answering.is_read());
            answering.received(is_whole);
            assert_eq!(answering.is_read(), is_whole, "others dropped it");
        }
    }

    #[tokio::test]
    async fn who_sent_nothing_since_the_last_answer_has_not_asked() {
        let (socket, _client) = pair().await;
        assert!(!socket.has_asked());
        socket.hear();
        assert!(socket.has_asked());
        socket.spoke();
        assert!(!socket.has_asked());
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_every_10_ms_may_ask_8_times_at_once_and_no_more() {
        let (socket, _client) = pair().await;
        (0..8).for_each(|_| socket.presses());
        assert!(!socket.is_pressing());
        socket.presses();
        assert!(socket.is_pressing());
        for _ in 0..100 {
            advance(PRESSES).await;
            assert!(!socket.is_pressing(), "as much was made up for");
            socket.presses();
            assert!(socket.is_pressing());
        }
        advance(1_000 * SECOND).await;
        (0..8).for_each(|_| socket.presses());
        assert!(!socket.is_pressing());
        socket.presses();
        assert!(socket.is_pressing(), "who was silent for long may not ask more often then");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_rests_makes_room_and_counts_until_it_is_gone() {
        let (socket, _client) = pair().await;
        let leaving = Arc::default();
        assert!(socket.resting_since().is_some());
        socket.evict(&leaving);
        assert_eq!((socket.resting_since(), leaving.load(Relaxed)), (None, 1));
        socket.evict(&leaving);
        assert_eq!(leaving.load(Relaxed), 1, "once");
        socket.evicted().await;
        drop(socket);
        assert_eq!(leaving.load(Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_answered_or_still_read_stays() {
        let (socket, _client) = pair().await;
        let leaving = Arc::default();
        let answering = answer(&socket);
        assert_eq!(socket.resting_since(), None);
        socket.evict(&leaving); // it was found resting just before
        assert!(timeout(SECOND, socket.evicted()).await.is_err());
        assert_eq!(leaving.load(Relaxed), 0, "nobody waits for it");
        drop(answering);

        socket.unflushed.store(true, Relaxed);
        assert_eq!(socket.resting_since(), None);
        socket.evict(&leaving);
        assert!(timeout(SECOND, socket.evicted()).await.is_err());
        assert_eq!(leaving.load(Relaxed), 0);
        socket.unflushed.store(false, Relaxed);
        assert!(socket.resting_since().is_some());
    }
}

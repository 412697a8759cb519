//! The open connections: how many there may be, and who makes room for new ones: those that have rested for a second, the
//! longest first; then those whose bodies have been on their way for as long, of the address that has most of them; then
//! those that rest.
//!
//! An address that has more than its share of all these is a crowd: its newcomers turn out its own connections alone, and
//! for clients of others its connections need not have waited for so long. So whoever dials and says nothing, or begins
//! requests and never ends them, keeps nobody of another address out; of its own, while it dials no faster than they.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use super::socket::Socket;
use crate::app::App;
use crate::net::lobby::Origin;

/// At most one in so many is closed at once, so that looking for them costs little per connection.
const EVICTED_SHARE: usize = 64;
/// Of those whose bodies are on their way, at once: what they have sent is lost.
const BODIES: usize = 4;
/// For their tasks to end, which do nothing else: a guess, for a machine that is very busy.
const EVICTION: Duration = Duration::from_secs(1);
/// After so long others are asked, too.
const LEAVE: Duration = Duration::from_millis(250);
/// Whoever has not sent a request by then, or the body of one, goes before those who have just come. A guess: 12 MB at 100 Mbit/s.
const LONG: Duration = Duration::from_secs(1);
/// The part of all connections that one address may leave without a whole request, as long as others find no room. A guess.
const SHARE: usize = 4;
/// After a look that found nobody. A look at 20,000 connections takes 2 ms, and many may dial meanwhile.
const FRUITLESS: Duration = Duration::from_millis(10);

pub(super) struct Open {
    app: Arc<App>,
    most: usize,
    room: Arc<Semaphore>,
    all: Mutex<HashMap<u64, Arc<Socket>>>,
    next: AtomicU64,
    /// Those that were asked to make room and are still there.
    leaving: Arc<AtomicUsize>,
    looks: Mutex<Looks>,
}

/// Looks for those who can make room.
#[derive(Default)]
struct Looks {
    /// When somebody was asked to leave.
    asked: Option<Instant>,
    /// When nobody was found for anybody.
    fruitless: Option<Instant>,
    /// When nobody was found for newcomers of crowds, of which there are less than `SHARE`.
    of_crowds: HashMap<Origin, Instant>,
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
            looks: Mutex::default(),
        }
    }

    /// Room for one more, of this address. Where there is none, others are closed; `None` if nobody can be.
    pub(super) async fn room(&self, address: IpAddr) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.room).try_acquire_owned();
        if let Ok(permit) = permit {
            return Some(permit);
        }
        if !self.make_room(Some(address)) {
            return None;
        }
        timeout(EVICTION, Arc::clone(&self.room).acquire_owned()).await.ok()?.ok()
    }

    /// Closes those that can be, unless others are on their way out. False if none can. `address`: who wants the room.
    pub(super) fn make_room(&self, address: Option<IpAddr>) -> bool {
        let newcomer = address.map(Origin::of);
        let is_recent =
            |then: Option<&Instant>, time| then.is_some_and(|then| then.elapsed() < time);
        let mut looks = self.looks.lock().expect("no holder panics");
        if self.leaving.load(Relaxed) > 0 && is_recent(looks.asked.as_ref(), LEAVE) {
            return true;
        }
        let of_crowd = newcomer.and_then(|newcomer| looks.of_crowds.get(&newcomer));
        if is_recent(looks.fruitless.as_ref(), FRUITLESS) || is_recent(of_crowd, FRUITLESS) {
            return false;
        }
        let (evicted, crowd) = self.evict(newcomer);
        let now = Instant::now();
        match crowd {
            _ if evicted > 0 => looks.asked = Some(now),
            None => looks.fruitless = Some(now),
            Some(crowd) => {
                looks.of_crowds.retain(|_, then| then.elapsed() < FRUITLESS);
                looks.of_crowds.insert(crowd, now);
            }
        }
        evicted > 0
    }

    /// How many were asked to leave; and the newcomer's origin, if it is a crowd.
    fn evict(&self, newcomer: Option<Origin>) -> (u64, Option<Origin>) {
        let all = self.all();
        let mut waiting: Vec<_> = all.values().filter_map(Evictable::of).collect();
        let mut of_origin: HashMap<Origin, usize> = HashMap::new();
        for one in &waiting {
            *of_origin.entry(one.origin).or_default() += 1;
        }
        let has_its_share = |origin| of_origin[&origin] > self.most / SHARE;
        let crowd = newcomer.filter(|own| of_origin.contains_key(own) && has_its_share(*own));
        if let Some(own) = crowd {
            waiting.retain(|one| one.origin == own);
        }
        let goes_at_once = |one: &Evictable<'_>| {
            let is_long = one.since.elapsed() >= LONG;
            is_long || (has_its_share(one.origin) && newcomer != Some(one.origin))
        };
        waiting.sort_unstable_by_key(|one| one.since);
        let (mut resting, mut bodies, mut fresh) = (Vec::new(), Vec::new(), Vec::new());
        for one in &waiting {
            match (one.rests, goes_at_once(one)) {
                (true, true) => resting.push(one),
                (false, true) => bodies.push(one),
                (true, false) => fresh.push(one), // about to ask, as a rule
                (false, false) => {}
            }
        }
        bodies.sort_by_key(|one| Reverse(of_origin[&one.origin]));
        let many = self.most.div_ceil(EVICTED_SHARE);
        let buckets = [(resting, many), (bodies, many.min(BODIES)), (fresh, many)];
        let asked = buckets.iter().find_map(|(these, most)| self.ask_to_leave(these, *most));
        let evicted = asked.map_or(0, NonZero::get);
        self.app.metrics.http.connections_evicted.inc_by(evicted);
        (evicted, crowd)
    }

    /// The first of them, but none that has sent what nobody has read yet, unless it sends on and on.
    fn ask_to_leave(&self, waiting: &[&Evictable<'_>], most: usize) -> Option<NonZero<u64>> {
        let silent =
            |one: &&&Evictable<'_>| one.socket.is_pressing() || !one.socket.may_have_asked();
        let mut asked = 0;
        for one in waiting.iter().filter(silent).take(most) {
            one.socket.evict(&self.leaving);
            asked += 1;
        }
        NonZero::new(asked)
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

/// A connection on which nothing is answered.
struct Evictable<'a> {
    origin: Origin,
    /// No body is on its way.
    rests: bool,
    since: Instant,
    socket: &'a Arc<Socket>,
}

impl<'a> Evictable<'a> {
    fn of(socket: &'a Arc<Socket>) -> Option<Self> {
        let rests = socket.resting_since();
        let since = rests.or_else(|| socket.receiving_since())?;
        let origin = Origin::of(socket.peer.address);
        Some(Self { origin, rests: rests.is_some(), since, socket })
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

    use hyper::Version;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpStream;
    use tokio::time::advance;

    use super::super::socket::{Answering, pair, pair_from};
    use super::super::tests::app;
    use super::*;

    /// A request whose handler waits for its body.
    fn body(socket: &Arc<Socket>) -> Answering {
        let answering = Answering::begin(socket, Version::HTTP_11, true);
        answering.starves(true);
        answering
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_rested_longest_make_room_and_no_others_while_they_leave() {
        let app = app().await;
        let open = Open::new(&app, 128);
        let metrics = &app.metrics.http;
        assert!(!open.make_room(None), "nobody rests");
        advance(FRUITLESS).await;

        let mut sockets = Vec::new();
        for _ in 0..9 {
            let (socket, client) = pair().await;
            sockets.push(Some((open.enter(&socket), socket, client)));
            advance(Duration::from_millis(1)).await;
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
            assert!(open.make_room(None));
            assert_eq!(resting(&sockets), [[false; 2].as_slice(), &[true; 7]].concat());
        }
        assert_eq!(metrics.connections_evicted.get(), 2);
        sockets[0] = None;
        assert!(open.make_room(None) && resting(&sockets)[2], "one of the two is still there");
        sockets[1] = None;
        assert!(open.make_room(None));
        assert_eq!(resting(&sockets), [[false; 4].as_slice(), &[true; 5]].concat());
        assert_eq!((metrics.connections_evicted.get(), metrics.connections.get()), (4, 7));
    }

    #[tokio::test(start_paused = true)]
    async fn slow_bodies_make_room_where_nobody_rests_of_the_crowd_and_the_longest_first() {
        let app = app().await;
        let open = Open::new(&app, 128);
        let mut sockets = Vec::new();
        for address in [1, 2, 2, 2, 2, 2].map(|host| [192, 0, 2, host].into()) {
            let (socket, client) = pair_from(address).await;
            let entered = open.enter(&socket);
            sockets.push((entered, body(&socket), socket, client));
            advance(LONG / 4).await; // three of the six are slow at the end
        }
        let leave = |sockets: &[(Entered<'_>, Answering, Arc<Socket>, TcpStream)]| {
            let leaves =
                |(_, _, socket, _): &(_, _, Arc<Socket>, _)| socket.receiving_since().is_none();
            sockets.iter().map(leaves).collect::<Vec<_>>()
        };
        assert!(open.make_room(None));
        assert_eq!(leave(&sockets), [false, true, true, false, false, false]);
        sockets.drain(1..3);
        assert!(open.make_room(None));
        assert_eq!(leave(&sockets), [true, false, false, false], "whose address has but one");
        sockets.remove(0);
        assert!(!open.make_room(None), "the others are young");
        advance(LONG).await;
        sockets[0].1.starves(false);
        assert!(open.make_room(None));
        assert_eq!(leave(&sockets), [true; 3], "one is read, and two make room");
        assert_eq!(app.metrics.http.connections_evicted.get(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_with_more_than_its_share_makes_room_for_others_at_once() {
        const MOST: usize = 12; // of which three are a quarter
        let app = app().await;
        let open = Open::new(&app, MOST);
        let (crowd, other) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let mut sockets = Vec::new();
        for has_room in [false, false, false, true] {
            let (socket, client) = pair_from(crowd).await;
            sockets.push((open.enter(&socket), body(&socket), socket, client));
            assert!(!open.make_room(Some(crowd)), "it has not waited for a second");
            assert_eq!(open.make_room(Some(other)), has_room, "{} of {MOST}", sockets.len());
            advance(FRUITLESS).await;
        }
        let left = sockets.iter().filter(|(_, _, socket, _)| socket.receiving_since().is_some());
        assert_eq!(left.count(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_comes_is_not_slow_and_few_of_those_that_are_leave_at_once() {
        let app = app().await;
        let open = Open::new(&app, 1_000);
        let mut sockets = Vec::new();
        for _ in 0..10 {
            let (socket, client) = pair().await;
            advance(Duration::from_millis(1)).await; // a body has its time from its begin on
            sockets.push((open.enter(&socket), body(&socket), socket, client));
        }
        advance(LONG - Duration::from_millis(1)).await;
        for (_, body, ..) in &sockets {
            body.goes_on();
        }
        assert!(!open.make_room(None));
        advance(LONG).await;
        assert!(open.make_room(None));
        assert_eq!(app.metrics.http.connections_evicted.get(), 4);
        assert!(open.make_room(None), "they are on their way out");
        assert_eq!(app.metrics.http.connections_evicted.get(), 4);
        advance(LEAVE).await;
        assert!(open.make_room(None), "and do not go");
        assert_eq!(app.metrics.http.connections_evicted.get(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_just_come_stays_where_a_body_is_slow() {
        let app = app().await;
        let open = Open::new(&app, 128);
        let ((slow, _one), (fresh, _other)) = (pair().await, pair().await);
        let _slow = (open.enter(&slow), body(&slow));
        advance(LONG).await;
        let _fresh = open.enter(&fresh);
        fresh.multiplexes(); // its rest begins now
        assert!(open.make_room(None) && slow.receiving_since().is_none());
        assert!(fresh.resting_since().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_fruitless_look_for_a_crowd_is_none_for_others() {
        let app = app().await;
        let open = Open::new(&app, 4);
        let (crowd, other) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let mut sockets = Vec::new();
        for _ in 0..2 {
            let (socket, client) = pair_from(crowd).await;
            sockets.push((open.enter(&socket), body(&socket), socket, client));
        }
        assert!(!open.make_room(Some(crowd)));
        advance(LONG).await;
        sockets[0].1.goes_on();
        sockets[1].1.goes_on();
        assert!(!open.make_room(Some(crowd)));
        assert!(open.make_room(Some(other)));
    }

    #[tokio::test]
    async fn who_sends_on_and_on_makes_room_whatever_it_has_sent() {
        let app = app().await;
        let open = Open::new(&app, 128);
        let (socket, mut client) = pair().await;
        let _entered = open.enter(&socket);
        client.write_all(b"GET").await.unwrap();
        let here = |context: &mut Context<'_>| {
            socket.wire().stream.plain().unwrap().poll_read_ready(context)
        };
        poll_fn(here).await.unwrap();
        assert_eq!(open.evict(None).0, 0);
        (0..1_000).for_each(|_| socket.presses());
        assert_eq!(open.evict(None).0, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn newcomers_of_a_crowd_turn_out_their_own_alone() {
        let app = app().await;
        let open = Open::new(&app, 4);
        let (crowd, other) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let (rests, _client) = pair_from(other).await;
        let _entered = open.enter(&rests);
        advance(LONG).await;
        let mut sockets = Vec::new();
        for _ in 0..2 {
            let (socket, client) = pair_from(crowd).await;
            sockets.push((open.enter(&socket), body(&socket), socket, client));
        }
        assert!(!open.make_room(Some(crowd)) && rests.resting_since().is_some());
        advance(LONG).await;
        assert!(open.make_room(Some(crowd)) && rests.resting_since().is_some());
        assert!(
            sockets[0].2.receiving_since().is_none() || sockets[1].2.receiving_since().is_none()
        );
        sockets.clear();
        assert!(
            open.make_room(Some(crowd)) && rests.resting_since().is_none(),
            "it is none any more"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn who_rests_goes_before_slow_bodies_and_a_fruitless_look_is_not_repeated_at_once() {
        let app = app().await;
        let open = Open::new(&app, 1);
        let (slow, _client) = pair().await;
        let (_slow, _body) = (open.enter(&slow), body(&slow));
        advance(LONG).await;
        let (rests, _client) = pair().await;
        let entered = open.enter(&rests);
        assert!(open.make_room(None) && rests.resting_since().is_none());
        assert!(slow.receiving_since().is_some());
        drop((entered, rests));

        let answered = Answering::begin(&slow, Version::HTTP_11, false);
        assert!(!open.make_room(None), "a request beside it is answered");
        drop(answered);
        advance(FRUITLESS - Duration::from_millis(1)).await;
        assert!(!open.make_room(None), "nobody has looked");
        advance(Duration::from_millis(1)).await;
        assert!(open.make_room(None));
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
        assert!(open.make_room(None));
        let rest: Vec<_> = sockets.iter().map(|(_, socket, _)| socket.resting_since()).collect();
        let rest: Vec<_> = rest.iter().map(Option::is_some).collect();
        assert_eq!(rest, [true, true, false, true], "the silent one alone");
        drop(sockets.remove(2));
        assert!(!open.make_room(None), "a newcomer is refused");
        assert_eq!(app.metrics.http.connections_evicted.get(), 1);
    }
}

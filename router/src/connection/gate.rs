//! Whose turn it is to do work for a client. A task that writes a running stream goes on whenever it is woken. All others
//! pass a gate: the queue of the runtime is first come, first served, and a burst of requests would stand in it before the
//! next tokens of everybody else.
//!
//! The gate lets few in and then waits for one round of the runtime's queue, in which everybody else has had a turn. A place
//! lasts for one poll and never across an await, so nobody holds one while it waits for a client or a worker, and who goes
//! away leaves nothing behind. Those outside go in by the order in which they came, and a request that was in keeps its place in
//! that order for the next few times: of thousands that come at once, those that have begun are finished before others are
//! read. Where streams keep the threads busy, a round takes long, and the gate opens wider: a place is given away for every few polls
//! of streams as well.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::socket::Socket;
use crate::process::cores::Cores;

/// Places in a round for each thread of the runtime, some 200 us of work. With two of them, 64 clients at full speed cost 45 us of
/// CPU a request in rounds alone, where all of a request took 110 (`headrace-bench load`, no file).
const PLACES_PER_THREAD: usize = 8;
/// Polls of streams for which one more is let in. A guess: those of requests take several times as long.
const POLLS_PER_PLACE: usize = 4;

/// So often a request goes in by its place in the order; then it has to take a new one. Read and placed, sent to its worker, first
/// token: those who come again and again, with each piece of a long body or for each token of an answer that is sent whole, keep
/// nobody out.
const TIMES_IN: u8 = 4;

/// Between two requests of those who ask on and on, all of them together. A turn for each is not enough: they keep the cores
/// busy, and the workers and clients of the same machine wait for the end of a slice of 3 ms at each step of a token's way. With some 25 us a
/// request this leaves three quarters of a core.
const PACE: Duration = Duration::from_micros(100);
/// So much earlier than its slot a request may begin: timers tell milliseconds apart.
const EARLY: Duration = Duration::from_millis(1);

/// More of them outside than this are a burst. A router that has as much as it can do, but no more, goes on without a break: for
/// 64 clients at full speed a break in each round cost a third of the requests a second (`headrace-bench load`, no file).
const CROWD: usize = 128;

/// See the head of this file.
struct Gate {
    rounds: Arc<Rounds>,
    usher: AbortHandle,
}

struct Rounds {
    /// Of a round.
    places: usize,
    turns: Mutex<Turns>,
    /// The last place of a round was taken.
    taken: Notify,
    /// Of streams, in this round while somebody is outside.
    polls: AtomicUsize,
    /// The number of those outside, to be read without the lock.
    outside: AtomicUsize,
    /// The next of those who ask on and on begins then.
    next_slot: Mutex<Instant>,
}

#[derive(Default)]
struct Turns {
    /// Places of this round that are left.
    free: usize,
    /// By ticket; who was called is not here any more.
    outside: BTreeMap<u64, Waker>,
    tickets: u64,
}

/// A gate for each runtime whose threads serve clients: each has a queue of its own.
pub(super) struct Gates(Vec<Gate>);

impl Gates {
    /// Of all runtimes among which this is called.
    pub(super) fn new() -> Self {
        Self(match Cores::current() {
            Some(cores) => {
                let gates = cores.handles().enumerate().map(|(number, core)| {
                    let _ushers = core.enter();
                    Gate::begin(PLACES_PER_THREAD, number == 0)
                });
                gates.collect()
            }
            None => {
                let threads = Handle::current().metrics().num_workers();
                vec![Gate::begin(PLACES_PER_THREAD * threads, true)]
            }
        })
    }

    /// That of the runtime that this is called on.
    fn here(&self) -> &Gate {
        self.0.get(Cores::index_here()).unwrap_or(&self.0[0])
    }

    /// As [`Gate::pass`].
    ///
    /// # Cancel safety
    /// A dropped call waits no longer.
    pub(super) async fn pass<T>(&self, in_hand: &InHand, work: impl Future<Output = T>) -> T {
        self.here().pass(in_hand, work).await
    }

    /// Waits for the slot of a client that asks on and on.
    ///
    /// # Cancel safety
    /// A dropped call waits no longer, and its slot is left to others.
    pub(super) async fn slot(&self, socket: &Socket) {
        let _one_at_a_time = socket.slot.lock().await;
        let now = Instant::now();
        let mut slot = self.here().rounds.slot(now);
        if slot.begins >= now + EARLY {
            sleep_until(slot.begins).await;
        }
        slot.is_taken = true;
    }

    /// A stream is written elsewhere than in its own task.
    pub(super) fn stream_goes(&self) {
        self.here().rounds.stream_goes();
    }
}

impl Gate {
    /// `gives_way`: other processes have their turn after each round of a burst. One gate that does so is enough.
    fn begin(places: usize, gives_way: bool) -> Self {
        let rounds = Arc::new(Rounds {
            places,
            turns: Mutex::new(Turns { free: places, ..Turns::default() }),
            taken: Notify::new(),
            polls: AtomicUsize::new(0),
            outside: AtomicUsize::new(0),
            next_slot: Mutex::new(Instant::now()),
        });
        let usher = tokio::spawn(usher(Arc::clone(&rounds), gives_way)).abort_handle();
        Self { rounds, usher }
    }

    /// Does `work`, a whole task, in turns while it has no stream `in_hand`.
    ///
    /// # Cancel safety
    /// A dropped call waits no longer.
    async fn pass<T>(&self, in_hand: &InHand, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let mut turn = Turn { rounds: &self.rounds, place: None, is_outside: false };
        poll_fn(|context| {
            if in_hand.any_stream() {
                turn.leave();
                self.rounds.stream_goes();
            } else {
                ready!(turn.poll_enter(in_hand, context));
            }
            work.as_mut().poll(context)
        })
        .await
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.usher.abort();
    }
}

/// Begins a round once all others of the runtime have had their turn since the last one.
async fn usher(rounds: Arc<Rounds>, gives_way: bool) {
    loop {
        rounds.taken.notified().await;
        loop {
            end_of_queue().await;
            if !rounds.begin() {
                break;
            }
            if gives_way && rounds.outside.load(Relaxed) > CROWD {
                std::thread::yield_now(); // it leaves no core to the other processes of this machine otherwise
            }
        }
    }
}

/// Goes to the end of the runtime's queue: whoever wakes itself goes there, and not before others as one that another task
/// wakes does.
async fn end_of_queue() {
    let mut is_there = false;
    poll_fn(|context| {
        if std::mem::replace(&mut is_there, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl Rounds {
    /// A new round; false if nobody waited for it.
    fn begin(&self) -> bool {
        let mut turns = self.turns();
        let places = self.places + self.polls.swap(0, Relaxed) / POLLS_PER_PLACE;
        let called: Vec<Waker> =
            std::iter::from_fn(|| Some(turns.outside.pop_first()?.1)).take(places).collect();
        turns.free = (places - called.len()).min(self.places);
        self.outside.store(turns.outside.len(), Relaxed);
        drop(turns);
        let any = !called.is_empty();
        called.into_iter().for_each(Waker::wake);
        any
    }

    /// The next slot of those who ask on and on.
    fn slot(&self, now: Instant) -> PacedSlot<'_> {
        let mut next = self.next_slot();
        let begins = (*next).max(now);
        *next = begins + PACE;
        PacedSlot { rounds: self, begins, is_taken: false }
    }

    fn next_slot(&self) -> MutexGuard<'_, Instant> {
        self.next_slot.lock().expect("no holder panics")
    }

    /// A stream is polled, or written elsewhere.
    fn stream_goes(&self) {
        if self.outside.load(Relaxed) > 0 {
            self.polls.fetch_add(1, Relaxed);
        }
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().expect("no holder panics")
    }
}

/// A slot. One that is not taken is made up for by the ones that are given away next.
struct PacedSlot<'a> {
    rounds: &'a Rounds,
    begins: Instant,
    is_taken: bool,
}

impl Drop for PacedSlot<'_> {
    fn drop(&mut self) {
        if !self.is_taken {
            *self.rounds.next_slot() -= PACE;
        }
    }
}

/// A task at the gate. When this drops, it is away.
struct Turn<'a> {
    rounds: &'a Rounds,
    /// In the order of those who came.
    place: Option<GatePlace>,
    /// It waits; if nobody waits with its ticket, it was called.
    is_outside: bool,
}

#[derive(Clone, Copy)]
struct GatePlace {
    ticket: u64,
    /// By its number among those of the task.
    request: u64,
    times_left: u8,
}

impl Turn<'_> {
    fn poll_enter(&mut self, in_hand: &InHand, context: &Context<'_>) -> Poll<()> {
        let mut turns = self.rounds.turns();
        if self.is_outside {
            if let Some(waker) = self.place.and_then(|place| turns.outside.get_mut(&place.ticket)) {
                waker.clone_from(context.waker());
                return Poll::Pending;
            }
            self.is_outside = false;
            return Poll::Ready(());
        }
        let (request, goes_on) = in_hand.request_now();
        let place = match self.place {
            Some(place) if goes_on && place.request == request && place.times_left > 0 => place,
            _ => {
                turns.tickets += 1;
                GatePlace { ticket: turns.tickets, request, times_left: TIMES_IN }
            }
        };
        self.place = Some(GatePlace { times_left: place.times_left - 1, ..place });
        if turns.free > 0 && turns.outside.is_empty() {
            turns.free -= 1;
            if turns.free == 0 {
                self.rounds.taken.notify_one();
            }
            return Poll::Ready(());
        }
        turns.outside.insert(place.ticket, context.waker().clone());
        self.is_outside = true;
        self.rounds.outside.store(turns.outside.len(), Relaxed);
        Poll::Pending
    }

    fn leave(&mut self) {
        if std::mem::take(&mut self.is_outside)
            && let Some(place) = self.place.take()
        {
            let mut turns = self.rounds.turns();
            turns.outside.remove(&place.ticket);
            self.rounds.outside.store(turns.outside.len(), Relaxed);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What a task does for its client.
#[derive(Clone, Default)]
pub(super) struct InHand(Arc<CountsInHand>);

#[derive(Default)]
struct CountsInHand {
    requests: AtomicUsize,
    /// Of all requests, those that are over, too.
    begun: AtomicU64,
    /// Of events.
    streams: AtomicUsize,
}

/// A request that is not answered yet, until it drops.
pub(super) struct RequestInHand(InHand);

/// A stream of events that is written, until it drops.
pub(super) struct RunningStream(InHand);

impl InHand {
    pub(super) fn request(&self) -> RequestInHand {
        self.0.begun.fetch_add(1, Relaxed);
        self.0.requests.fetch_add(1, Relaxed);
        RequestInHand(self.clone())
    }

    pub(super) fn stream(&self) -> RunningStream {
        self.0.streams.fetch_add(1, Relaxed);
        RunningStream(self.clone())
    }

    /// The number of the request that the task works on, and whether that has begun; else it is the next one's.
    pub(super) fn request_now(&self) -> (u64, bool) {
        let (begun, goes_on) = (self.0.begun.load(Relaxed), self.0.requests.load(Relaxed) > 0);
        (if goes_on { begun } else { begun + 1 }, goes_on)
    }

    fn any_stream(&self) -> bool {
        self.0.streams.load(Relaxed) > 0
    }
}

impl Drop for RequestInHand {
    fn drop(&mut self) {
        self.0.0.requests.fetch_sub(1, Relaxed);
    }
}

impl Drop for RunningStream {
    fn drop(&mut self) {
        self.0.0.streams.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests;

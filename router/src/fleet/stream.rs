//! The tokens of a request's legs on their way from the workers' links to the request: a mailbox that gathers what came
//! since the reader last looked. Nothing is dropped, and it holds no more than the request's own `max_tokens`.

mod chunk;
mod direct;

use std::mem;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::core::candidate::WorkerId;
use crate::core::frame::{Output, Ranked, TokenLogprob};
use crate::error::RouteError;
use crate::fleet::link::{Hangup, Lease};
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare, Refused};
use crate::process::lock::{Held, Lock};

pub use self::chunk::Chunk;
use self::chunk::wrong_vector;
pub(crate) use self::direct::Burst;
pub use self::direct::DirectReader;

/// Where links put the tokens of a request's legs.
#[derive(Debug)]
pub(crate) struct Mailbox(Lock<State>);

#[derive(Debug)]
struct State {
    chunk: Chunk,
    /// What the log-probabilities of `chunk` are charged to: a reader that stalls lets them pile up.
    memory: MemoryShare,
    /// Tokens that may still come.
    allowed: usize,
    /// The bytes of the vector that is to come in their place.
    pooled: Option<usize>,
    /// Who is to send the next one.
    from: WorkerId,
    error: Option<(RouteError, WorkerId)>,
    /// The reader waits.
    waker: Option<Waker>,
    /// Called in the place of a wake while the legs go on.
    direct: Option<Weak<dyn DirectReader>>,
    /// It is among those that are to be called.
    is_listed: bool,
    /// The reader has looked at least once: from then on it can stall.
    read: bool,
    /// Since when `chunk` waits for the reader.
    waiting_since: Option<Instant>,
    last_arrival: Option<Instant>,
}

/// What became of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    /// It will be read. `Some`: time since the output before.
    Fine(Option<Duration>),
    /// More tokens than asked for, not one log-probability for each, or drafts that cannot be.
    Wrong(&'static str),
    /// Its log-probabilities found no memory. It is not there.
    Refused(Refused),
}

impl Mailbox {
    /// Empty, for at most `max_tokens`, the first of them by `from`. Log-probabilities in it are charged to `memory`.
    pub(crate) fn new(max_tokens: u32, from: WorkerId, memory: MemoryShare) -> Self {
        let state = State {
            chunk: Chunk::default(),
            memory,
            allowed: usize::try_from(max_tokens).unwrap_or(usize::MAX),
            pooled: None,
            from,
            error: None,
            waker: None,
            direct: None,
            is_listed: false,
            read: false,
            waiting_since: None,
            last_arrival: None,
        };
        Self(Lock::new("the tokens of a request", state))
    }

    /// The prompt as a vector of `width` is to come, and nothing else.
    pub(crate) fn pooling(self, width: u32) -> Self {
        let width = usize::try_from(width).unwrap_or(usize::MAX);
        self.lock().pooled = Some(width.saturating_mul(4));
        self
    }

    /// Adds what a step brought. Its reader hears of it with `burst`.
    pub(crate) fn append(&self, output: Output, now: Instant, burst: &mut Burst) -> Appended {
        let mut state = self.lock();
        if output.ids.len() > state.allowed {
            return Appended::Wrong("more tokens than max_tokens");
        }
        if output.logprobs.as_ref().is_some_and(|all| all.len() != output.ids.len()) {
            return Appended::Wrong("not one log-probability for each token");
        }
        let accepted = usize::try_from(output.accepted).unwrap_or(usize::MAX);
        if accepted > output.ids.len() || output.accepted > output.drafted {
            return Appended::Wrong("more accepted drafts than tokens or drafts");
        }
        if let Some(what) = wrong_vector(&output, state.pooled) {
            return Appended::Wrong(what);
        }
        let scored = output.logprobs.iter().chain(&output.prompt_logprobs).flatten();
        let bytes: usize = scored.map(bytes_of).sum();
        // tokens that came without have a place, too, once others come with theirs
        let bare = state.chunk.ids.len().saturating_sub(state.chunk.logprobs.len());
        let bare = if output.logprobs.is_some() { bare } else { 0 };
        let bytes = bytes + 2 * bare * size_of::<TokenLogprob>();
        let bytes = bytes + output.pooled.as_ref().map_or(0, Vec::capacity);
        if bytes > 0
            && let Err(refused) = state.memory.charge(bytes)
        {
            return Appended::Refused(refused);
        }
        state.allowed -= output.ids.len();
        let chunk = &mut state.chunk;
        if let Some(logprobs) = output.logprobs {
            chunk.logprobs.resize_with(chunk.ids.len(), || None); // outputs before may have come without
            chunk.logprobs.extend(logprobs.into_iter().map(Some));
        }
        if chunk.ids.is_empty() {
            chunk.ids = output.ids;
        } else {
            chunk.ids.extend_from_slice(&output.ids);
        }
        chunk.prompt_logprobs = chunk.prompt_logprobs.take().or(output.prompt_logprobs);
        chunk.cached_tokens = chunk.cached_tokens.or(output.cached_tokens);
        chunk.finish = output.finish;
        chunk.pooled = output.pooled;
        chunk.drafted = chunk.drafted.saturating_add(output.drafted);
        chunk.accepted = chunk.accepted.saturating_add(output.accepted);
        state.waiting_since.get_or_insert(now);
        let gap = state.last_arrival.replace(now).map(|last| now - last);
        state.tell(burst);
        Appended::Fine(gap)
    }

    /// It is over because of this worker: the reader gets this after what has come already.
    pub(crate) fn fail(&self, error: RouteError, worker: WorkerId) {
        let mut state = self.lock();
        state.error.get_or_insert((error, worker));
        wake(state);
    }

    /// Since when something waits for a reader that has begun to read.
    pub(crate) fn unread_since(&self) -> Option<Instant> {
        let state = self.lock();
        state.waiting_since.filter(|_| state.read)
    }

    /// The next token is to come from this worker.
    pub(crate) fn expects(&self, from: WorkerId) {
        self.lock().from = from;
    }

    /// At least one token came.
    pub(crate) fn has_begun(&self) -> bool {
        self.lock().last_arrival.is_some()
    }

    /// What came since the last look, or the worker that it is over with and why.
    fn poll_next(&self, context: &mut Context<'_>) -> Poll<Result<Chunk, (RouteError, WorkerId)>> {
        let mut state = self.lock();
        if !state.read {
            // what came before the first look counts from now
            state.read = true;
            state.waiting_since = None;
        }
        state.is_listed = false;
        if state.chunk.has_news() {
            state.waiting_since = None;
            state.memory.give_all_back();
            return Poll::Ready(Ok(mem::take(&mut state.chunk)));
        }
        if let Some(error) = state.error.take() {
            return Poll::Ready(Err(error));
        }
        state.waiting_since = None; // an output without news is nothing that the reader could take
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            None => state.waker = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    fn lock(&self) -> Held<'_, State> {
        self.0.lock()
    }
}

impl State {
    /// Something came. An end is for the reader's own task: it may have to place the rest elsewhere.
    fn tell(&mut self, burst: &mut Burst) {
        if self.is_listed {
            return;
        }
        let goes_on = self.chunk.finish.is_none() && self.error.is_none();
        let direct = self.direct.as_ref().filter(|_| goes_on);
        if let Some(reader) = direct.and_then(Weak::upgrade) {
            self.is_listed = true;
            burst.calls(reader);
        } else if let Some(waker) = self.waker.take() {
            burst.wakes(waker);
        }
    }
}

/// What a log-probability takes with its alternatives. Twice its place in the list, which doubles.
fn bytes_of(at: &TokenLogprob) -> usize {
    2 * size_of::<TokenLogprob>() + at.top.capacity() * size_of::<Ranked>() + ALLOCATION_BYTES
}

/// Wakes after the lock is gone, so that the reader does not run into it.
fn wake(mut state: Held<'_, State>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Tokens of a request's legs. Dropping it cancels them on their workers (after the last token, a no-op).
#[derive(Debug)]
pub struct TokenStream {
    mailbox: Arc<Mailbox>,
    hangup: Arc<Hangup>,
    _decode: Lease,
    _prefill: Option<Lease>,
}

impl TokenStream {
    pub(crate) fn new(
        mailbox: Arc<Mailbox>,
        hangup: Arc<Hangup>,
        decode: Lease,
        prefill: Option<Lease>,
    ) -> Self {
        Self { mailbox, hangup, _decode: decode, _prefill: prefill }
    }

    /// Nobody will read on: from here to the last free block the time is taken.
    pub(crate) fn hung_up(&self) {
        self.hangup.begin();
    }

    /// All that came since the last call. The last one has `finish`, or is an error; none may follow.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing.
    ///
    /// # Errors
    /// The leg is over.
    pub async fn next(&mut self) -> Result<Chunk, RouteError> {
        std::future::poll_fn(|context| self.poll_next(context)).await.map_err(|(error, _)| error)
    }

    /// As [`Self::next`]; an error comes with the worker that it is about.
    pub(crate) fn poll_next(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Chunk, (RouteError, WorkerId)>> {
        self.mailbox.poll_next(context)
    }

    /// From now on links call this reader, rather than wake the task that waits.
    pub(crate) fn read_directly(&self, reader: Weak<dyn DirectReader>) {
        self.mailbox.lock().direct = Some(reader);
    }

    /// Who is to send the next token.
    pub(crate) fn awaited(&self) -> WorkerId {
        self.mailbox.lock().from
    }

    /// When the last token came.
    pub(crate) fn last_arrival(&self) -> Option<Instant> {
        self.mailbox.lock().last_arrival
    }
}

#[cfg(test)]
mod tests;

//! Named threads for work that must not run on the async threads: in turns, the shortest first, behind a bounded queue.

mod queue;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use self::queue::{PoolFull, Queue, QueueBounds, TokenizeJob};
use crate::error::{Panicked, RouteError};
use crate::process::background;

/// Threads that render templates and tokenise. One pool serves all models.
///
/// Long work is done in turns, between which shorter work goes first, so what is short waits for a turn and not for a
/// text. What cannot be cut into short turns has a thread of its own, the slow lane, and holds up only its like.
///
/// Dropping it lets every thread finish the turn in its hands, drops the rest and joins.
#[derive(Debug)]
pub struct TokenizePool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    lanes: Mutex<Lanes>,
    wake: [Condvar; 2],
    bounds: QueueBounds,
    threads: usize,
}

#[derive(Debug)]
struct Lanes {
    queues: [Queue<Box<dyn Work>>; 2],
    tickets: u64,
    closed: bool,
}

/// Whose threads do the next turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// All threads but one. A turn takes some 10 ms here.
    Quick,
    /// A thread of low priority for turns that may take longer.
    Slow,
    /// The thread of whoever asks: for a first turn that takes less than the way to another thread. Nothing waits here.
    Here,
}

/// Work that is done in turns.
pub(crate) trait Turns: Send + 'static {
    /// What comes of it.
    type Output: Send + 'static;

    /// Does a part of it, on a thread of `lane`.
    fn turn(&mut self, lane: Lane) -> Turn<Self::Output>;
}

/// What came of a turn.
pub(crate) enum Turn<T> {
    Done(T),
    /// There is more to do: so many bytes of text, first of all in this lane.
    More {
        left: usize,
        lane: Lane,
    },
}

/// [`Turns`] and who waits for their end.
trait Work: Send + std::fmt::Debug {
    /// `None`: it is over, or nobody waits for it any more.
    fn turn(&mut self, lane: Lane) -> Option<(usize, Lane)>;
}

struct Task<W: Turns> {
    work: W,
    reply: Option<oneshot::Sender<Result<W::Output, Panicked>>>,
}

/// Work of a single turn.
struct Once<F>(Option<F>);

/// Takes its job out of the queue when nobody waits for it any more.
struct Leaves<'a> {
    shared: &'a Shared,
    ticket: u64,
}

/// Deep template recursion fits: renderings stop at 1,000 levels. Only touched pages cost memory.
const STACK_BYTES: usize = 16 << 20;

/// Text that may wait, in bytes; a minute of one thread.
const QUEUE_BYTES: usize = 64 << 20;

/// About what a thread tokenises in a second.
const BYTES_PER_SECOND: usize = 1 << 20;

impl TokenizePool {
    /// Starts `threads` threads and the one of the slow lane; at most `queue` jobs wait for one.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(threads: usize, queue: usize) -> std::io::Result<Self> {
        Self::with_bounds(threads, QueueBounds { jobs: queue.max(1), bytes: QUEUE_BYTES })
    }

    fn with_bounds(threads: usize, bounds: QueueBounds) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let lanes = Lanes { queues: [Queue::new(), Queue::new()], tickets: 0, closed: false };
        let (lanes, wake) = (Mutex::new(lanes), [Condvar::new(), Condvar::new()]);
        let shared = Arc::new(Shared { lanes, wake, bounds, threads });
        // Built first, so that a failed spawn drops it and joins those already started.
        let pool = Self { shared: Arc::clone(&shared), threads: Mutex::default() };
        let quick = (0..threads).map(|i| (format!("tokenize-{i}"), Lane::Quick));
        for (name, lane) in quick.chain([("tokenize-slow".to_owned(), Lane::Slow)]) {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(
                move || {
                    if lane == Lane::Slow {
                        background::lower_priority();
                    }
                    shared.work(lane);
                },
            )?;
            lock(&pool.threads).push(thread);
        }
        Ok(pool)
    }

    /// Runs short work that no text is behind on a pool thread, and returns what it returned.
    ///
    /// # Errors
    /// `Overloaded` if the queue is full, `ShuttingDown` after [`Self::shutdown`], `Internal` if the job panicked.
    ///
    /// # Cancel safety
    /// A dropped call takes the job out of the queue; if it has started, its result is thrown away.
    pub async fn run<T, F>(&self, job: F) -> Result<T, RouteError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.run_turns(Once(Some(job)), 0, Lane::Quick).await
    }

    /// Does `work`, which goes through `bytes` bytes of text and begins in `lane`, turn by turn.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Cancel safety
    /// A dropped call takes the work out of the queue, or lets it end with its present turn.
    pub(crate) async fn run_turns<W: Turns>(
        &self,
        work: W,
        bytes: usize,
        lane: Lane,
    ) -> Result<W::Output, RouteError> {
        let (reply, answer) = oneshot::channel();
        let ticket = self.shared.push(Box::new(Task { work, reply: Some(reply) }), bytes, lane)?;
        let _leaves = Leaves { shared: &self.shared, ticket };
        match answer.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(panic)) => Err(RouteError::internal("the tokenizer failed", panic)),
            Err(_) => Err(RouteError::ShuttingDown),
        }
    }

    /// Does the first turn of `work` on this thread. What is left is for [`Self::run_turns`].
    ///
    /// # Errors
    /// `ShuttingDown` after [`Self::shutdown`], `Internal` if the work panicked.
    pub(crate) fn turn_here<W: Turns>(&self, work: &mut W) -> Result<Turn<W::Output>, RouteError> {
        if lock(&self.shared.lanes).closed {
            return Err(RouteError::ShuttingDown);
        }
        // whoever reads an error drops the work
        catch_unwind(AssertUnwindSafe(|| work.turn(Lane::Here)))
            .map_err(|panic| RouteError::internal("the tokenizer failed", Panicked::with(&*panic)))
    }

    /// Jobs that wait for a thread.
    #[must_use]
    pub fn queued(&self) -> usize {
        lock(&self.shared.lanes).len()
    }

    /// Bytes of text that they hold.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        lock(&self.shared.lanes).bytes()
    }

    /// Refuses new jobs, drops the waiting ones and joins the threads. Blocks until their current turns end.
    pub fn shutdown(&self) {
        let waiting: Vec<_> = {
            let mut lanes = lock(&self.shared.lanes);
            lanes.closed = true;
            lanes.queues.iter_mut().flat_map(Queue::drain).collect()
        };
        self.shared.wake.iter().for_each(Condvar::notify_all);
        drop(waiting);
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            // Jobs hold no handle to the pool, so this is never one of its own threads.
            thread.join().ok();
        }
    }
}

impl Drop for TokenizePool {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        let gone = {
            let mut lanes = lock(&self.shared.lanes);
            lanes.queues.iter_mut().find_map(|queue| queue.remove(self.ticket))
        };
        drop(gone); // its text, perhaps megabytes, after the lock
    }
}

impl Lanes {
    fn len(&self) -> usize {
        self.queues.iter().map(Queue::len).sum()
    }

    fn bytes(&self) -> usize {
        self.queues.iter().map(Queue::bytes).sum()
    }
}

impl Shared {
    fn push(&self, work: Box<dyn Work>, bytes: usize, lane: Lane) -> Result<u64, RouteError> {
        let mut lanes = lock(&self.lanes);
        if lanes.closed {
            return Err(RouteError::ShuttingDown);
        }
        let waiting = lanes.bytes();
        let admitted = self.bounds.admit(lanes.len(), waiting, bytes);
        admitted.map_err(|full| self.overloaded(full, waiting))?;
        lanes.tickets += 1;
        let ticket = lanes.tickets;
        let job = TokenizeJob { ticket, since: Instant::now(), work, left: bytes, held: bytes };
        lanes.queues[lane as usize].put(job);
        drop(lanes);
        self.wake[lane as usize].notify_one();
        Ok(ticket)
    }

    /// What a caller is told who met a full queue, and when it should try again.
    fn overloaded(&self, full: PoolFull, waiting: usize) -> RouteError {
        let what = match full {
            PoolFull::Jobs => "prompts that wait to be tokenised",
            PoolFull::Bytes => "bytes of prompts that wait to be tokenised",
        };
        let seconds = 1 + waiting / (self.threads * BYTES_PER_SECOND);
        RouteError::Overloaded { what, retry_after: Duration::from_secs(seconds as u64) }
    }

    fn work(&self, lane: Lane) {
        while let Some(mut job) = self.next(lane) {
            if let Some((left, next)) = job.work.turn(lane) {
                job.left = left;
                self.again(job, next);
            }
        }
    }

    /// Waits for a job; `None` once the pool is closed.
    fn next(&self, lane: Lane) -> Option<TokenizeJob<Box<dyn Work>>> {
        let mut lanes = lock(&self.lanes);
        while !lanes.closed {
            if let Some(job) = lanes.queues[lane as usize].pop(Instant::now()) {
                return Some(job);
            }
            let woken = self.wake[lane as usize].wait(lanes);
            lanes = woken.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Lets a job wait for its next turn, unless the pool is closed.
    fn again(&self, job: TokenizeJob<Box<dyn Work>>, lane: Lane) {
        let mut lanes = lock(&self.lanes);
        if !lanes.closed {
            lanes.queues[lane as usize].put(job);
            self.wake[lane as usize].notify_one();
        }
    }
}

impl<W: Turns> Work for Task<W> {
    fn turn(&mut self, lane: Lane) -> Option<(usize, Lane)> {
        if self.reply.as_ref().is_none_or(oneshot::Sender::is_closed) {
            return None;
        }
        // A panic must not take the thread with it; the job's state dies with the job.
        let result = match catch_unwind(AssertUnwindSafe(|| self.work.turn(lane))) {
            Ok(Turn::More { left, lane }) => return Some((left, lane)),
            Ok(Turn::Done(value)) => Ok(value),
            Err(panic) => Err(Panicked::with(&*panic)),
        };
        if let Some(reply) = self.reply.take() {
            reply.send(result).ok();
        }
        None
    }
}

impl<W: Turns> std::fmt::Debug for Task<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").finish_non_exhaustive()
    }
}

impl<T, F> Turns for Once<F>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    type Output = T;

    fn turn(&mut self, _lane: Lane) -> Turn<T> {
        let job = self.0.take().expect("a job that is done has no more turns");
        Turn::Done(job())
    }
}

/// No code that can panic runs under these locks, so a poisoned one is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;

//! Named threads for work that must not run on the async threads, behind a bounded queue.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::error::RouteError;

type Work = Box<dyn FnOnce() + Send>;

/// Threads that render templates and tokenise. One pool serves all models.
///
/// Dropping it lets every thread finish the job in its hands, drops the queued ones and joins.
#[derive(Debug)]
pub struct TokenizePool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    limit: usize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Work>,
    closed: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// Deep template recursion fits: renderings stop at 1,000 levels. Only touched pages cost memory.
const STACK_BYTES: usize = 16 << 20;

/// When a caller that met a full queue should try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

impl TokenizePool {
    /// Starts `threads` threads; at most `queue` jobs wait for one.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(threads: usize, queue: usize) -> std::io::Result<Self> {
        let shared =
            Arc::new(Shared { queue: Mutex::default(), wake: Condvar::new(), limit: queue.max(1) });
        // Built first, so that a failed spawn drops it and joins those already started.
        let pool = Self { shared: Arc::clone(&shared), threads: Mutex::default() };
        for i in 0..threads.max(1) {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new()
                .name(format!("tokenize-{i}"))
                .stack_size(STACK_BYTES)
                .spawn(move || shared.work())?;
            lock(&pool.threads).push(thread);
        }
        Ok(pool)
    }

    /// Runs `job` on a pool thread and returns what it returned.
    ///
    /// # Errors
    /// `Overloaded` if the queue is full, `ShuttingDown` after [`Self::shutdown`], `Internal` if the job panicked.
    ///
    /// # Cancel safety
    /// A dropped call skips the job if it has not started; otherwise its result is thrown away.
    pub async fn run<T, F>(&self, job: F) -> Result<T, RouteError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        self.shared.push(Box::new(move || {
            if reply.is_closed() {
                return;
            }
            // A panic must not take the thread with it; the job's state dies with the job.
            let result = catch_unwind(AssertUnwindSafe(job)).map_err(|panic| panic_text(&*panic));
            reply.send(result).ok();
        }))?;
        match answer.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(panic)) => Err(RouteError::Internal(format!("tokenizer panicked: {panic}"))),
            Err(_) => Err(RouteError::ShuttingDown),
        }
    }

    /// Jobs that wait for a thread.
    #[must_use]
    pub fn queued(&self) -> usize {
        lock(&self.shared.queue).jobs.len()
    }

    /// Refuses new jobs, drops the waiting ones and joins the threads. Blocks until their current jobs end.
    pub fn shutdown(&self) {
        let waiting = {
            let mut queue = lock(&self.shared.queue);
            queue.closed = true;
            std::mem::take(&mut queue.jobs)
        };
        self.shared.wake.notify_all();
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

impl Shared {
    fn push(&self, work: Work) -> Result<(), RouteError> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return Err(RouteError::ShuttingDown);
        }
        if queue.jobs.len() >= self.limit {
            return Err(RouteError::Overloaded { what: "tokenizer", retry_after: RETRY_AFTER });
        }
        queue.jobs.push_back(work);
        drop(queue);
        self.wake.notify_one();
        Ok(())
    }

    fn work(&self) {
        loop {
            let job = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(job) = queue.jobs.pop_front() {
                        break job;
                    }
                    if queue.closed {
                        return;
                    }
                    queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            job();
        }
    }
}

/// No code that can panic runs under these locks, so a poisoned one is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "?".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Blocks the only thread of `pool` until the returned sender is dropped.
    async fn block(
        pool: &Arc<TokenizePool>,
    ) -> (mpsc::Sender<()>, tokio::task::JoinHandle<Result<(), RouteError>>) {
        let (release, gate) = mpsc::channel::<()>();
        let (started, running) = oneshot::channel();
        let pool = Arc::clone(pool);
        let blocked = tokio::spawn(async move {
            pool.run(move || {
                started.send(()).unwrap();
                gate.recv().ok();
            })
            .await
        });
        running.await.unwrap();
        (release, blocked)
    }

    /// Polls `call` once, which queues its job.
    async fn start<T>(call: &mut (impl Future<Output = T> + Unpin)) {
        tokio::select! {
            biased;
            _ = call => panic!("the pool should have been busy"),
            () = std::future::ready(()) => {}
        }
    }

    #[tokio::test]
    async fn full_queue_is_overloaded_and_a_dropped_call_skips_its_job() {
        let pool = Arc::new(TokenizePool::new(1, 1).unwrap());
        let (release, blocked) = block(&pool).await;
        let (ran, did_run) = mpsc::channel();
        let mut waiting = Box::pin(pool.run(move || ran.send(()).unwrap()));
        start(&mut waiting).await;
        assert_eq!(pool.queued(), 1);
        assert!(matches!(pool.run(|| ()).await, Err(RouteError::Overloaded { .. })));
        drop(waiting);
        drop(release);
        blocked.await.unwrap().unwrap();
        while let Err(RouteError::Overloaded { .. }) = pool.run(|| ()).await {
            tokio::task::yield_now().await;
        }
        assert!(did_run.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_panic_is_an_internal_error_and_the_thread_lives_on() {
        let pool = TokenizePool::new(1, 4).unwrap();
        let error = pool.run(|| panic!("boom")).await.unwrap_err();
        assert!(matches!(&error, RouteError::Internal(m) if m.contains("boom")), "{error}");
        assert_eq!(pool.run(|| 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn shutdown_drops_the_queue_and_joins() {
        let pool = Arc::new(TokenizePool::new(1, 4).unwrap());
        let (release, blocked) = block(&pool).await;
        let mut waiting = Box::pin(pool.run(|| ()));
        start(&mut waiting).await;
        let stop = {
            let pool = Arc::clone(&pool);
            tokio::task::spawn_blocking(move || pool.shutdown())
        };
        assert!(matches!(waiting.await, Err(RouteError::ShuttingDown)));
        drop(release);
        stop.await.unwrap();
        blocked.await.unwrap().unwrap();
        assert!(matches!(pool.run(|| ()).await, Err(RouteError::ShuttingDown)));
    }
}

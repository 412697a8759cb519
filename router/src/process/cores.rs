//! A thread for each core, with a runtime of its own: what is spawned on one stays there. Tasks wake each other without a look
//! at other threads, which is cheaper than one runtime for all; the price is that a thread with too much to do gets no help,
//! so whatever is long-lived goes to the thread that has the fewest of its kind.

use std::cell::OnceCell;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

thread_local! {
    /// Of a thread that is one of them, with its number.
    static CURRENT: OnceCell<(Arc<Cores>, usize)> = const { OnceCell::new() };
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Cores {
    threads: Vec<Core>,
}

#[derive(Debug)]
struct Core {
    handle: Handle,
    /// How many of each kind are here.
    held: [AtomicUsize; 2],
}

/// What is counted apart, as one is not as much work as one of the other kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Connection,
    Link,
}

/// A place on a core, until this drops.
#[derive(Debug)]
pub(crate) struct CorePlace {
    cores: Arc<Cores>,
    core: usize,
    kind: Kind,
}

/// Ends the threads when it drops. What runs there is dropped.
#[derive(Debug)]
pub(super) struct LiveCores(CancellationToken);

impl Drop for LiveCores {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Cores {
    /// Starts so many threads, each with a runtime that `builder` sets up.
    ///
    /// # Errors
    /// The system gives no threads or descriptors.
    pub(super) fn start(
        count: usize,
        builder: impl Fn() -> Builder,
    ) -> io::Result<(Arc<Self>, LiveCores)> {
        let ends = CancellationToken::new();
        let running = LiveCores(ends.clone());
        let mut runtimes = Vec::with_capacity(count);
        for _ in 0..count.max(1) {
            runtimes.push(builder().build()?);
        }
        let core = |handle| Core { handle, held: Default::default() };
        let threads = runtimes.iter().map(|runtime| core(runtime.handle().clone())).collect();
        let cores = Arc::new(Self { threads });
        for (number, runtime) in runtimes.into_iter().enumerate() {
            let (cores, ends) = (Arc::clone(&cores), ends.clone());
            thread::Builder::new().name("headrace-router".to_owned()).spawn(move || {
                CURRENT.with(|current| current.set((cores, number))).expect("the thread is new");
                runtime.block_on(ends.cancelled());
                runtime.shutdown_background(); // a plain drop waits for blocking work
            })?;
        }
        Ok((cores, running))
    }

    /// Those that this thread is one of.
    pub(crate) fn current() -> Option<Arc<Self>> {
        CURRENT.with(|current| current.get().map(|(cores, _)| Arc::clone(cores)))
    }

    /// The number of this thread among them; 0 if it is none of them.
    pub(crate) fn index_here() -> usize {
        CURRENT.with(|current| current.get().map_or(0, |(_, number)| *number))
    }

    /// The runtimes among which this is called: of all cores, or of tokio's own threads.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub(crate) fn runtimes_here() -> Vec<Handle> {
        Self::current()
            .map_or_else(|| vec![Handle::current()], |cores| cores.handles().cloned().collect())
    }

    /// The runtimes.
    pub(crate) fn handles(&self) -> impl Iterator<Item = &Handle> {
        self.threads.iter().map(|core| &core.handle)
    }

    /// Runs `work` on the first core, and waits for its end. `None`: it panicked.
    ///
    /// Blocks, so it is not for a core's own thread.
    pub(super) fn wait_for<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (done, result) = std::sync::mpsc::sync_channel(1);
        self.threads[0].handle.spawn(async move {
            let _ = done.send(work.await); // whoever asked waits
        });
        result.recv().ok()
    }

    /// The first one of them, for what is not spread.
    pub(super) fn first(&self) -> &Handle {
        &self.threads[0].handle
    }

    /// A place where the fewest of this kind are.
    pub(crate) fn place(self: &Arc<Self>, kind: Kind) -> CorePlace {
        let held = |core: &usize| self.threads[*core].held[kind as usize].load(Relaxed);
        let core = (0..self.threads.len()).min_by_key(held).expect("there is at least one");
        self.threads[core].held[kind as usize].fetch_add(1, Relaxed);
        CorePlace { cores: Arc::clone(self), core, kind }
    }
}

impl CorePlace {
    pub(crate) fn handle(&self) -> &Handle {
        &self.cores.threads[self.core].handle
    }
}

impl Drop for CorePlace {
    fn drop(&mut self) {
        self.cores.threads[self.core].held[self.kind as usize].fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;

    fn cores(count: usize) -> (Arc<Cores>, LiveCores) {
        Cores::start(count, || {
            let mut builder = Builder::new_current_thread();
            builder.enable_all();
            builder
        })
        .unwrap()
    }

    #[test]
    fn a_task_stays_on_the_thread_of_its_place_and_knows_the_others() {
        let (cores, _running) = cores(3);
        let places = [(); 3].map(|()| cores.place(Kind::Connection));
        let threads = places.each_ref().map(|place| {
            let task = place.handle().spawn(async {
                let before = thread::current().id();
                for _ in 0..100 {
                    yield_now().await;
                    assert_eq!(thread::current().id(), before);
                }
                let spawned = tokio::spawn(async { thread::current().id() }).await.unwrap();
                assert_eq!(spawned, before);
                (before, Cores::index_here(), Cores::current().unwrap().threads.len())
            });
            cores.wait_for(task).unwrap().unwrap()
        });
        assert_eq!(threads.map(|(_, number, count)| (number, count)), [(0, 3), (1, 3), (2, 3)]);
        let threads = threads.map(|(thread, ..)| thread);
        assert!(threads[0] != threads[1] && threads[1] != threads[2] && threads[0] != threads[2]);
        assert!(Cores::current().is_none(), "this thread is none of them");
    }

    #[test]
    fn a_new_one_goes_where_the_fewest_of_its_kind_are() {
        let (cores, _running) = cores(2);
        let mut connections: Vec<_> = (0..4).map(|_| cores.place(Kind::Connection)).collect();
        assert_eq!(connections.iter().map(|place| place.core).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(cores.place(Kind::Link).core, 0, "links are counted apart");
        connections.remove(1);
        connections.remove(2);
        assert_eq!([(); 2].map(|()| cores.place(Kind::Connection)).map(|p| p.core), [1, 1]);
    }

    #[test]
    fn what_panics_has_no_result_and_its_thread_goes_on() {
        let (cores, _running) = cores(1);
        assert_eq!(cores.wait_for(async { panic!("on purpose") }), None::<()>);
        assert_eq!(cores.wait_for(async { 7 }), Some(7));
    }

    #[test]
    fn threads_end_with_what_runs_on_them() {
        let (cores, running) = cores(2);
        let (held, dropped) = std::sync::mpsc::channel::<()>();
        for handle in cores.handles() {
            let held = held.clone();
            handle.spawn(async move {
                let _held = held;
                std::future::pending::<()>().await;
            });
        }
        drop((held, running));
        assert!(dropped.recv().is_err(), "all of them are gone");
    }
}

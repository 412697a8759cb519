//! The runtime that a router serves on.

use std::future::Future;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Builder;

use super::cores::{Cores, LiveCores};

/// A thread for blocking work without any ends after this long. An allocator keeps what a thread has freed for that
/// thread, so memory of a large body comes back when the thread goes; tokio's own 10 s are long after a peak.
const BLOCKING_REST: Duration = Duration::from_secs(1);

/// A thread looks for what sockets have received after so many tasks. Some of tokio's own 61 may be connections that each
/// receive a piece of a long body, which is a millisecond a task while the kernel clears its pages. Where two threads share a queue
/// each looks for both, so as often as one alone; a core that looks after every 8 reads its links so often that 9,900 streams get a
/// fifth more events, and as much more CPU goes into them (by hand, no file).
const TASKS_BETWEEN_LOOKS: u32 = 16;
const TASKS_BETWEEN_LOOKS_OF_SHARED: u32 = 8;

/// This process gets no huge pages, which mimalloc asks for. The kernel clears one at its first use, and gives nobody else
/// the core meanwhile: 0.2 ms where this machine had the memory before, 4.6 ms (p50; 6.4 the longest) where its host has to find it,
/// against 5 us for a small one (virtual machine, two cores, CPU time of the touch, no file).
fn take_small_pages() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::warn!(%error, "huge pages may delay others while memory grows");
    }
}

/// What a router runs on.
#[derive(Debug)]
pub struct Runtime(Threads);

#[derive(Debug)]
enum Threads {
    Shared(tokio::runtime::Runtime),
    PerCore(Arc<Cores>, LiveCores),
}

impl Runtime {
    /// Starts its threads, as many as there are cores. The process takes small pages from here on.
    ///
    /// `per_core`: each connection and each link stays on one of them, in the place of whichever is free.
    ///
    /// # Errors
    /// The system gives no threads or descriptors.
    pub fn start(per_core: bool) -> io::Result<Self> {
        take_small_pages();
        if !per_core {
            let runtime =
                set_up(Builder::new_multi_thread(), TASKS_BETWEEN_LOOKS_OF_SHARED).build()?;
            return Ok(Self(Threads::Shared(runtime)));
        }
        let count = std::thread::available_parallelism().map_or(1, NonZero::get);
        let builder = || set_up(Builder::new_current_thread(), TASKS_BETWEEN_LOOKS);
        let (cores, live) = Cores::start(count, builder)?;
        Ok(Self(Threads::PerCore(cores, live)))
    }

    /// Runs `work` to its end. Blocks.
    ///
    /// # Panics
    /// `work` does.
    pub fn block_on<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        match &self.0 {
            Threads::Shared(runtime) => runtime.block_on(work),
            Threads::PerCore(cores, _) => cores.wait_for(work).expect("the work does not panic"),
        }
    }

    /// Runs `work` beside the caller.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        match &self.0 {
            Threads::Shared(runtime) => drop(runtime.spawn(work)),
            Threads::PerCore(cores, _) => drop(cores.first().spawn(work)),
        }
    }

    /// Drops what runs, and waits for none of it.
    pub fn shutdown_background(self) {
        match self.0 {
            Threads::Shared(runtime) => runtime.shutdown_background(),
            Threads::PerCore(_, running) => drop(running),
        }
    }
}

fn set_up(mut builder: Builder, tasks_between_looks: u32) -> Builder {
    builder.thread_name("headrace-router").thread_keep_alive(BLOCKING_REST);
    builder.event_interval(tasks_between_looks).enable_all();
    builder
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn a_router_takes_no_huge_pages() {
        let _runtime = super::Runtime::start(false).unwrap();
        assert!(rustix::thread::transparent_huge_pages_are_disabled().unwrap());
    }
}

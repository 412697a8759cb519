//! The runtime that a router serves on.

use std::io;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// A thread for blocking work without any ends after this long. An allocator keeps what a thread has freed for that
/// thread, so memory of a large body comes back when the thread goes; tokio's own 10 s are long after a peak.
const BLOCKING_REST: Duration = Duration::from_secs(1);

/// A thread looks for what sockets have received after so many tasks. Some of tokio's own 61 may be connections that each
/// receive a piece of a long body, which is a millisecond a task while the kernel clears its pages.
const TASKS_BETWEEN_LOOKS: u32 = 8;

/// This process gets no huge pages, which mimalloc asks for. The kernel clears one at its first use, and gives nobody else
/// the core meanwhile: 0.2 ms where this machine had the memory before, 4.6 ms (p50; 6.4 the longest) where its host has to find it,
/// against 5 us for a small one (virtual machine, two cores, CPU time of the touch, no file).
fn take_small_pages() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::warn!(%error, "huge pages may delay others while memory grows");
    }
}

/// As many threads as there are cores. The process takes small pages from here on.
///
/// # Errors
/// The system gives no threads or descriptors.
pub fn runtime() -> io::Result<Runtime> {
    take_small_pages();
    let mut builder = Builder::new_multi_thread();
    builder.thread_name("headrace-router").thread_keep_alive(BLOCKING_REST);
    builder.event_interval(TASKS_BETWEEN_LOOKS).enable_all().build()
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn a_router_takes_no_huge_pages() {
        let _runtime = super::runtime().unwrap();
        assert!(rustix::thread::transparent_huge_pages_are_disabled().unwrap());
    }
}

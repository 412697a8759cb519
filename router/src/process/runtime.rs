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

/// As many threads as there are cores.
///
/// # Errors
/// The system gives no threads or descriptors.
pub fn runtime() -> io::Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.thread_name("headrace-router").thread_keep_alive(BLOCKING_REST);
    builder.event_interval(TASKS_BETWEEN_LOOKS).enable_all().build()
}

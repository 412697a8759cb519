//! Threads for work that takes long: where it wants the same core as a thread that serves sockets, the socket goes first.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::sync::oneshot;

use crate::error::{Panicked, RouteError};

/// So much lower than what the process has. A thread with it gets a tenth of a core that another one wants as well, and all
/// of a core that is free.
const LOWER: i32 = 10;

/// Lowers the priority of this thread for good: a process without privileges cannot raise it again. Elsewhere than on Linux,
/// where a priority belongs to a whole process, it does nothing.
pub(crate) fn lower_priority() {
    #[cfg(target_os = "linux")]
    {
        let me = Some(rustix::thread::gettid());
        let lowered = rustix::process::getpriority_process(me)
            .and_then(|nice| rustix::process::setpriority_process(me, nice.saturating_add(LOWER)));
        if let Err(error) = lowered {
            tracing::warn!(%error, "long work has the priority of short work");
        }
    }
}

/// Does `work` on a thread of its own, which is gone afterwards: what an allocator keeps for a thread goes with it.
///
/// # Errors
/// `Internal` if the system gives no thread, or the work panicked.
///
/// # Cancel safety
/// A dropped call does not stop the work.
pub(crate) async fn run<T, F>(name: &'static str, work: F) -> Result<T, RouteError>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let (reply, answer) = oneshot::channel();
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        lower_priority();
        let done = catch_unwind(AssertUnwindSafe(work));
        reply.send(done.map_err(|panic| Panicked::with(&*panic))).ok(); // nobody may wait any more
    });
    spawned.map_err(|error| RouteError::internal(format!("no thread for `{name}`"), error))?;
    let done = answer.await.map_err(|error| RouteError::internal(failed(name), error))?;
    done.map_err(|panic| RouteError::internal(failed(name), panic))
}

fn failed(name: &str) -> String {
    format!("the thread `{name}` failed")
}

/// Drops `value` on a thread of its own, or here if there is none to be had.
pub(crate) fn free(value: impl Send + 'static) {
    let spawned = std::thread::Builder::new().name("free".to_owned()).spawn(move || {
        lower_priority();
        drop(value);
    });
    drop(spawned);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Causes;

    #[tokio::test]
    #[cfg(target_os = "linux")]
    async fn work_has_a_lower_priority_than_who_waits_for_it() {
        let nice = || rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap();
        let mine = nice();
        let its = run("test", nice).await.unwrap();
        assert_eq!(its, (mine + LOWER).min(19));
        assert_eq!(nice(), mine);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_freed_is_dropped_by_another_thread_of_lower_priority() {
        struct Tells(std::sync::mpsc::Sender<(std::thread::ThreadId, i32)>);
        impl Drop for Tells {
            fn drop(&mut self) {
                self.0.send(thread()).ok();
            }
        }
        fn thread() -> (std::thread::ThreadId, i32) {
            let nice = rustix::process::getpriority_process(Some(rustix::thread::gettid()));
            (std::thread::current().id(), nice.unwrap())
        }
        let (tell, told) = std::sync::mpsc::channel();
        free(Tells(tell));
        let ((its, nice), (mine, my_nice)) = (told.recv().unwrap(), thread());
        assert_ne!(its, mine);
        assert_eq!(nice, (my_nice + LOWER).min(19));
    }

    #[tokio::test]
    async fn a_panic_is_an_error_for_who_waits() {
        let error = run("test", || -> u32 { panic!("on purpose") }).await.unwrap_err();
        assert_eq!(
            Causes(&error).to_string(),
            "internal error: the thread `test` failed: panicked: on purpose"
        );
    }
}

//! A mutex around what the whole process depends on. A panic of its holder leaves that half changed, and there is nothing to
//! go back to: the process ends, with a line that says so, and whoever watches it starts another one. Otherwise it would go
//! on as one that answers `/health` and serves nothing.

use std::fmt;
use std::io::Write as _;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError, mpsc};
use std::time::Duration;

/// For the last line to be written: stderr may be a pipe that nobody reads.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// See the head of this file.
pub(crate) struct Lock<T> {
    /// What is in it, for the last line.
    what: &'static str,
    value: Mutex<T>,
    /// Threads that wait for it.
    waiting: AtomicUsize,
}

/// Lets go when it drops.
#[derive(Debug)]
pub(crate) struct Held<'a, T> {
    what: &'static str,
    value: MutexGuard<'a, T>,
    /// The thread was panicking when it was taken: that one came from elsewhere, and this is a destructor at its work.
    unwinding: bool,
}

impl<T> Lock<T> {
    pub(crate) const fn new(what: &'static str, value: T) -> Self {
        Self { what, value: Mutex::new(value), waiting: AtomicUsize::new(0) }
    }

    /// Waits for whoever has it.
    pub(crate) fn lock(&self) -> Held<'_, T> {
        let unwinding = std::thread::panicking();
        // only a holder in the midst of another panic can have left it poisoned, and that one did not panic itself
        let value = match self.value.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.waiting.fetch_add(1, Relaxed);
                let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
                self.waiting.fetch_sub(1, Relaxed);
                value
            }
        };
        Held { what: self.what, value, unwinding }
    }

    /// Another thread waits for it. Whoever takes it again and again has to ask: a thread that slept needs longer to wake
    /// up than this one to come back, and the mutex gives it to whoever is there first.
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiting.load(Relaxed) > 0
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.unwinding {
            end_process(self.what);
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.value, f)
    }
}

/// The panic itself is on stderr already.
#[cold]
fn end_process(what: &'static str) -> ! {
    tracing::error!(what, "a panic left the router's state half changed: the process ends");
    let (written, last_words) = mpsc::channel();
    std::thread::spawn(move || {
        let line = format!("headrace: a panic left {what} half changed: the process ends\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
        let _ = written.send(());
    });
    let _ = last_words.recv_timeout(LAST_WORDS);
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;
    use std::sync::Arc;

    use super::*;

    const CHILD: &str = "HEADRACE_TEST_PANICS";

    #[test]
    fn a_panic_of_the_holder_ends_the_process_by_name() {
        if std::env::var_os(CHILD).is_some() {
            let lock = Arc::new(Lock::new("the books", 1));
            let other = Arc::clone(&lock);
            let holder = std::thread::spawn(move || {
                *other.lock() += 1;
                let _held = other.lock();
                panic!("on purpose");
            });
            let _ = holder.join();
            return; // as a process that goes on
        }
        let this = "process::lock::tests::a_panic_of_the_holder_ends_the_process_by_name";
        let mut child = Command::new(std::env::current_exe().expect("this test has a file"));
        let child = child.args(["--exact", this, "--nocapture"]).env(CHILD, "1");
        let output = child.output().expect("it runs again");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "{text}");
        assert!(text.contains("on purpose") && text.contains("a panic left the books"), "{text}");
    }

    #[test]
    fn who_holds_it_knows_that_somebody_waits() {
        let lock = Arc::new(Lock::new("a number", 0));
        let held = lock.lock();
        assert!(!lock.is_wanted());
        let other = Arc::clone(&lock);
        let waits = std::thread::spawn(move || *other.lock() += 1);
        while !lock.is_wanted() {
            std::thread::yield_now();
        }
        drop(held);
        while lock.is_wanted() {
            std::thread::yield_now();
        }
        assert!(waits.join().is_ok());
        assert_eq!(*lock.lock(), 1, "it got it");
    }

    #[test]
    fn a_destructor_that_takes_it_in_a_panic_from_elsewhere_ends_nothing() {
        struct Takes(Arc<Lock<u32>>);
        impl Drop for Takes {
            fn drop(&mut self) {
                *self.0.lock() += 1;
            }
        }
        let lock = Arc::new(Lock::new("a number", 0));
        let takes = Takes(Arc::clone(&lock));
        let panics = std::thread::spawn(move || {
            let _takes = takes;
            panic!("on purpose");
        });
        assert!(panics.join().is_err());
        assert_eq!(*lock.lock(), 1, "and it serves on");
    }
}

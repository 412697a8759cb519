//! After a server has ended: what its app holds is put away, and what takes too long is left behind.

use std::sync::mpsc::channel;
use std::time::Duration;

/// For the decision log to be written and for threads to end the job in their hands. A guess: a long prompt's tokens take
/// less, and what has more than this left is not worth waiting for.
pub const PUT_AWAY: Duration = Duration::from_secs(2);

/// Drops `what`, the app that a server leaves, on a thread of its own, as that waits for other threads. False if it was still
/// busy after `timeout`, and is left behind.
pub fn put_away<T: Send + 'static>(what: T, timeout: Duration) -> bool {
    let (done, ended) = channel();
    let thread = std::thread::Builder::new().name("put-away".into()).spawn(move || {
        drop(what);
        let _ = done.send(()); // nobody may be waiting any more
    });
    thread.is_ok() && ended.recv_timeout(timeout).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes as long to drop as its channel is open.
    struct Busy(std::sync::mpsc::Receiver<()>);

    impl Drop for Busy {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn what_is_busy_is_left_behind_and_what_is_not_is_waited_for() {
        let (release, gate) = channel();
        assert!(!put_away(Busy(gate), Duration::from_millis(1)));
        drop(release);
        let (_, gate) = channel();
        assert!(put_away(Busy(gate), Duration::from_secs(20)));
    }
}

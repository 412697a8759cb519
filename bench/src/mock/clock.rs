//! Alarms that ring to within some tens of microseconds. The runtime's own timer has ticks of a millisecond, and a step
//! at `--speed 20` is shorter.

use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// A thread that sleeps until the next alarm. It ends with the last handle.
#[derive(Debug, Clone)]
pub(crate) struct Clock(Arc<Handle>);

#[derive(Debug)]
struct Handle(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    alarms: BinaryHeap<Alarm>,
    closed: bool,
}

/// What the thread of a clock does next.
#[derive(Debug)]
enum Next {
    Ring(oneshot::Sender<()>),
    Sleep(Duration),
    /// There is no alarm.
    Rest,
}

#[derive(Debug)]
struct Alarm {
    at: Instant,
    ring: oneshot::Sender<()>,
}

impl Clock {
    /// # Errors
    /// There can be no further thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("clock".into()).spawn(move || of_thread.run())?;
        Ok(Self(Arc::new(Handle(shared))))
    }

    /// Rings at `at`, or at once where that has passed.
    pub(crate) fn at(&self, at: Instant) -> oneshot::Receiver<()> {
        let (ring, rings) = oneshot::channel();
        let shared = &self.0.0;
        let mut state = shared.state();
        let first = state.alarms.peek().is_none_or(|alarm| at < alarm.at);
        state.alarms.push(Alarm { at, ring });
        drop(state);
        if first {
            shared.changed.notify_one();
        }
        rings
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    fn run(&self) {
        let mut state = self.state();
        while !state.closed {
            match state.next(Instant::now()) {
                Next::Ring(ring) => {
                    drop(state);
                    let _ = ring.send(()); // nobody waits any more
                    state = self.state();
                }
                Next::Sleep(time) => {
                    let woken = self.changed.wait_timeout(state, time);
                    state = woken.expect("no holder panics").0;
                }
                Next::Rest => state = self.changed.wait(state).expect("no holder panics"),
            }
        }
    }
}

impl State {
    /// What is to be done at `now`.
    fn next(&mut self, now: Instant) -> Next {
        match self.alarms.peek_mut() {
            None => Next::Rest,
            Some(alarm) if alarm.at > now => Next::Sleep(alarm.at - now),
            Some(alarm) => Next::Ring(PeekMut::pop(alarm).ring),
        }
    }
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Alarm {}

impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Alarm {
    /// The earliest is the greatest: it leaves the heap first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.at.cmp(&self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_ring_in_order_and_not_early() {
        let (begin, mut state) = (Instant::now(), State::default());
        let at = |ms| begin + Duration::from_millis(ms);
        assert!(matches!(state.next(begin), Next::Rest));
        let mut rings = [9, 3].map(|ms| {
            let (ring, rings) = oneshot::channel();
            state.alarms.push(Alarm { at: at(ms), ring });
            rings
        });
        for (early, due, which) in [(1, 3, 1), (8, 9, 0)] {
            let Next::Sleep(time) = state.next(at(early)) else { panic!("{early}") };
            assert_eq!(time, Duration::from_millis(due - early));
            let Next::Ring(ring) = state.next(at(due)) else { panic!("{due}") };
            ring.send(()).unwrap();
            assert_eq!(rings[which].try_recv(), Ok(()));
        }
        assert!(matches!(state.next(at(10)), Next::Rest));
    }

    #[tokio::test]
    async fn the_thread_sleeps_until_the_first_alarm_of_all() {
        let clock = Clock::start().unwrap();
        let late = clock.at(Instant::now() + Duration::from_secs(3600));
        let mut early = clock.at(Instant::now() + Duration::from_micros(300));
        clock.at(Instant::now() + Duration::from_millis(1)).await.unwrap();
        assert_eq!(early.try_recv(), Ok(()), "it rang before");
        drop(clock);
        assert!(late.await.is_err(), "the thread ended");
    }
}

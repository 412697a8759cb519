//! Alarms that ring to within some tens of microseconds. The runtime's own timer has ticks of a millisecond, and a step
//! at `--speed 20` is shorter.

use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

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
            let now = Instant::now();
            let Some(next) = state.alarms.peek().map(|alarm| alarm.at) else {
                state = self.changed.wait(state).expect("no holder panics");
                continue;
            };
            if next > now {
                state = self.changed.wait_timeout(state, next - now).expect("no holder panics").0;
                continue;
            }
            if let Some(alarm) = state.alarms.pop() {
                drop(state);
                let _ = alarm.ring.send(()); // nobody waits any more
                state = self.state();
            }
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
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn alarms_ring_in_order_and_not_early() {
        let clock = Clock::start().unwrap();
        let now = Instant::now();
        let late = clock.at(now + Duration::from_micros(900));
        let early = clock.at(now + Duration::from_micros(300));
        clock.at(now).await.unwrap();
        early.await.unwrap();
        assert!(now.elapsed() >= Duration::from_micros(300));
        late.await.unwrap();
        assert!(now.elapsed() >= Duration::from_micros(900));
    }
}

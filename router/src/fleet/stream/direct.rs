//! Readers that a link calls itself: they take what came on the link's own task, and write it to their clients, where others
//! would have to be woken for each token.
//!
//! A link calls them once for all frames that were there together, so that tokens gather while it is behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use bytes::BytesMut;
use tokio::task::yield_now;

use crate::metrics::Counter;

/// Whoever reads a request's tokens, and can do that on any thread.
pub trait DirectReader: Send + Sync {
    /// Takes what came and gives it on; what cannot be given on at once waits for the reader's own task, which is woken.
    /// `out` is room to write in, for all readers of a link.
    fn read(&self, out: &mut BytesMut);

    /// Wakes the reader's own task.
    fn wake(&self);
}

/// Readers whose turn comes before others have theirs. A guess: some 0.4 ms of writing.
const AT_ONCE: usize = 128;
/// Frames of one burst. A guess: a link that is so far behind gathers enough.
const FRAMES: usize = 16;
/// A buffer larger than this is given back. A guess: events of one step are shorter.
const KEEP_BYTES: usize = 64 << 10;

/// Who is to hear of a burst of frames: tasks that wait are woken after each of them, direct readers are called after the last
/// one. Readers that are not called when this drops are woken.
#[derive(Default)]
pub(crate) struct Burst {
    waiting: Vec<Waker>,
    readers: Vec<Arc<dyn DirectReader>>,
    frames: usize,
    out: BytesMut,
}

impl Burst {
    pub(super) fn calls(&mut self, reader: Arc<dyn DirectReader>) {
        self.readers.push(reader);
    }

    pub(super) fn wakes(&mut self, task: Waker) {
        self.waiting.push(task);
    }

    /// Wakes the tasks: once what they may ask for is counted.
    pub(in crate::fleet) fn wake(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }

    /// Nobody is to be called.
    pub(in crate::fleet) fn is_empty(&self) -> bool {
        self.readers.is_empty()
    }

    /// A frame was taken in. True if no other one should be before the readers are called.
    pub(in crate::fleet) fn ends_after_frame(&mut self) -> bool {
        self.frames += 1;
        self.frames >= FRAMES
    }

    /// Calls the readers, and counts them in `calls`. Others have their turn after every few.
    ///
    /// # Cancel safety
    /// A dropped call calls no more of them, and the others when the burst drops.
    pub(in crate::fleet) async fn flush(&mut self, calls: &Counter) {
        self.frames = 0;
        if self.is_empty() {
            return;
        }
        calls.inc_by(self.readers.len() as u64);
        let mut called = 0;
        // in the order in which they came
        self.readers.reverse();
        while let Some(reader) = self.readers.pop() {
            self.call(&*reader);
            called += 1;
            if called % AT_ONCE == 0 && !self.is_empty() {
                yield_now().await;
            }
        }
        if self.out.capacity() > KEEP_BYTES {
            self.out = BytesMut::new();
        }
    }

    /// A reader that panics is one request's trouble and not that of all that share its worker. Its own task finds it
    /// broken.
    fn call(&mut self, reader: &dyn DirectReader) {
        self.out.clear();
        // `out` is cleared before the next one, and the reader's lock is poisoned
        let read = AssertUnwindSafe(|| reader.read(&mut self.out));
        if catch_unwind(read).is_err() {
            reader.wake();
        }
    }
}

impl Drop for Burst {
    fn drop(&mut self) {
        self.wake();
        self.readers.drain(..).for_each(|reader| reader.wake());
    }
}

#[cfg(test)]
mod tests;

//! Who hears of a burst, when, and what happens to those that do not.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Wake};

use tokio::time::Instant;

use super::*;
use crate::core::candidate::WorkerId;
use crate::core::frame::{Finish, Output, RequestId};
use crate::fleet::stream::Mailbox;
use crate::limits::memory::MemoryPool;

/// A reader, and its own task.
#[derive(Default)]
struct Reader {
    reads: AtomicUsize,
    wakes: AtomicUsize,
    panics: AtomicBool,
}

impl DirectReader for Reader {
    fn read(&self, out: &mut BytesMut) {
        assert!(out.is_empty(), "what others wrote is gone");
        out.extend_from_slice(b"some");
        self.reads.fetch_add(1, Relaxed);
        assert!(!self.panics.load(Relaxed), "on purpose");
    }

    fn wake(&self) {
        self.wakes.fetch_add(1, Relaxed);
    }
}

impl Wake for Reader {
    fn wake(self: Arc<Self>) {
        DirectReader::wake(&*self);
    }
}

impl Reader {
    fn heard(&self) -> (usize, usize) {
        (self.reads.load(Relaxed), self.wakes.load(Relaxed))
    }
}

/// The mailbox of a reader whose task waits, called directly or not.
fn mailbox(reader: &Arc<Reader>, directly: bool) -> Mailbox {
    let mailbox = Mailbox::new(100, WorkerId(1), MemoryPool::private(1 << 20).share());
    if directly {
        let reader: Weak<dyn DirectReader> = Arc::<Reader>::downgrade(reader);
        mailbox.lock().direct = Some(reader);
    }
    take(&mailbox, reader);
    mailbox
}

/// What the reader takes; it waits if that is nothing.
fn take(mailbox: &Mailbox, reader: &Arc<Reader>) -> Vec<u32> {
    let waker = Waker::from(Arc::clone(reader));
    match mailbox.poll_next(&mut Context::from_waker(&waker)) {
        Poll::Ready(chunk) => chunk.unwrap().ids,
        Poll::Pending => Vec::new(),
    }
}

fn gets(mailbox: &Mailbox, id: u32, finish: Option<Finish>, burst: &mut Burst) {
    let output = Output {
        request: RequestId(1),
        ids: vec![id],
        logprobs: None,
        finish,
        cached_tokens: None,
        prompt_logprobs: None,
        drafted: 0,
        accepted: 0,
        pooled: None,
    };
    mailbox.append(output, Instant::now(), burst);
}

#[tokio::test]
async fn a_direct_reader_is_called_once_for_a_burst_and_others_are_woken() {
    let (direct, other) = (Arc::<Reader>::default(), Arc::<Reader>::default());
    let (box_of_direct, box_of_other) = (mailbox(&direct, true), mailbox(&other, false));
    let (mut burst, calls) = (Burst::default(), Counter::default());
    for id in 1..4 {
        gets(&box_of_direct, id, None, &mut burst);
        gets(&box_of_other, id, None, &mut burst);
        assert_eq!(other.heard(), (0, usize::from(id > 1)), "once all is counted");
        burst.wake();
    }
    assert_eq!((direct.heard(), other.heard()), ((0, 0), (0, 1)));
    burst.flush(&calls).await;
    assert_eq!((direct.heard(), calls.get()), ((1, 0), 1));
    assert_eq!(take(&box_of_direct, &direct), [1, 2, 3]);
    gets(&box_of_direct, 4, None, &mut burst);
    burst.flush(&calls).await;
    assert_eq!((direct.heard(), calls.get()), ((2, 0), 2), "and again after it has read");
}

#[test]
fn an_end_is_for_the_readers_own_task() {
    let reader = Arc::<Reader>::default();
    let mailbox = mailbox(&reader, true);
    let mut burst = Burst::default();
    gets(&mailbox, 1, Some(Finish::Stop), &mut burst);
    burst.wake();
    assert!(burst.is_empty());
    assert_eq!(reader.heard(), (0, 1));
}

#[test]
fn a_reader_that_is_gone_gets_nothing() {
    let reader = Arc::<Reader>::default();
    let mailbox = mailbox(&reader, true);
    mailbox.lock().waker = None; // as if its task had ended
    drop(reader);
    let mut burst = Burst::default();
    gets(&mailbox, 1, None, &mut burst);
    assert!(burst.is_empty());
}

#[test]
fn whoever_was_not_called_is_woken_in_the_end() {
    let (direct, other) = (Arc::<Reader>::default(), Arc::<Reader>::default());
    let mut burst = Burst::default();
    gets(&mailbox(&direct, true), 1, None, &mut burst);
    gets(&mailbox(&other, false), 1, None, &mut burst);
    drop(burst);
    assert_eq!((direct.heard(), other.heard()), ((0, 1), (0, 1)));
}

#[tokio::test]
async fn a_reader_that_panics_is_one_stream_s_trouble() {
    let readers = [(); 3].map(|()| Arc::<Reader>::default());
    readers[1].panics.store(true, Relaxed);
    let mut burst = Burst::default();
    let mailboxes = readers.each_ref().map(|reader| mailbox(reader, true));
    mailboxes.iter().for_each(|mailbox| gets(mailbox, 1, None, &mut burst));
    burst.flush(&Counter::default()).await;
    assert_eq!(readers.each_ref().map(|reader| reader.heard()), [(1, 0), (1, 1), (1, 0)]);
}

#[tokio::test]
async fn others_have_their_turn_after_every_few_readers_and_all_are_called() {
    let readers: Vec<_> = (0..2 * AT_ONCE + 1).map(|_| Arc::<Reader>::default()).collect();
    let mut burst = Burst::default();
    let mailboxes: Vec<_> = readers.iter().map(|reader| mailbox(reader, true)).collect();
    mailboxes.iter().for_each(|mailbox| gets(mailbox, 1, None, &mut burst));
    let calls = Counter::default();
    let called = || readers.iter().filter(|reader| reader.heard().0 == 1).count();
    let mut flush = std::pin::pin!(burst.flush(&calls));
    for expected in [AT_ONCE, 2 * AT_ONCE] {
        assert!(futures_util::poll!(flush.as_mut()).is_pending());
        assert_eq!(called(), expected);
    }
    flush.await;
    assert_eq!(called(), readers.len());
}

#[test]
fn a_burst_ends_after_so_many_frames() {
    let mut burst = Burst::default();
    let ends: Vec<_> = (0..FRAMES).map(|_| burst.ends_after_frame()).collect();
    assert_eq!(ends.iter().position(|ends| *ends), Some(FRAMES - 1));
}

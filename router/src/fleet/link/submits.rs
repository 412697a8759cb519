//! Submits on their way to the socket of a worker. A burst leaves thousands of them here while the worker has other things to do: one
//! that waited in its request's task would hold four times the memory, and that task had to be woken for it. What they
//! hold is bounded, as those of clients that have gone stay until the socket takes what is before them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc};
use tokio::time::timeout;

use super::NotTaken;
use crate::core::frame::Submit;

/// What may wait, in KiB: 16,384 short prompts, or forty of 100,000 tokens.
const ROOM_KIB: u32 = 16 << 10;

/// Where requests put them.
#[derive(Debug)]
pub(super) struct Submits {
    queue: mpsc::UnboundedSender<WaitingSubmit>,
    room: Arc<Semaphore>,
}

/// Where the writer of a link takes them from, in their order. Nothing is taken in once it drops.
#[derive(Debug)]
pub(in crate::fleet) struct SubmitQueue {
    queue: mpsc::UnboundedReceiver<WaitingSubmit>,
    room: Arc<Semaphore>,
}

#[derive(Debug)]
struct WaitingSubmit {
    submit: Box<Submit>,
    _room: OwnedSemaphorePermit,
}

pub(super) fn submits() -> (Submits, SubmitQueue) {
    let room = Arc::new(Semaphore::new(ROOM_KIB as usize));
    let (sender, receiver) = mpsc::unbounded_channel(); // no longer than there is room
    (Submits { queue: sender, room: Arc::clone(&room) }, SubmitQueue { queue: receiver, room })
}

impl Submits {
    /// Puts one behind all others, as soon as there is room for it.
    ///
    /// # Errors
    /// The link ended, or there was no room for so long.
    ///
    /// # Cancel safety
    /// A dropped call puts nothing there.
    pub(super) async fn put(&self, submit: Box<Submit>, longest: Duration) -> Result<(), NotTaken> {
        let kib = kib(&submit);
        let room = match Arc::clone(&self.room).try_acquire_many_owned(kib) {
            Ok(room) => room,
            Err(TryAcquireError::Closed) => return Err(NotTaken::Closed),
            Err(TryAcquireError::NoPermits) => {
                let room = Arc::clone(&self.room).acquire_many_owned(kib);
                let room = timeout(longest, room).await.map_err(|_| NotTaken::Full)?;
                room.map_err(|_| NotTaken::Closed)?
            }
        };
        self.queue.send(WaitingSubmit { submit, _room: room }).map_err(|_| NotTaken::Closed)
    }
}

impl SubmitQueue {
    /// The next one, or `None` where nobody can put one there any more.
    ///
    /// # Cancel safety
    /// A dropped call takes none.
    pub(super) async fn next(&mut self) -> Option<Box<Submit>> {
        Some(self.queue.recv().await?.submit)
    }

    /// The next one, if it is there.
    pub(super) fn next_now(&mut self) -> Option<Box<Submit>> {
        Some(self.queue.try_recv().ok()?.submit)
    }
}

impl Drop for SubmitQueue {
    fn drop(&mut self) {
        self.room.close();
    }
}

/// What it holds, rounded up, and never more than there is room for. The rest of it is small, whoever asks.
fn kib(submit: &Submit) -> u32 {
    let Submit { sampling, tokens, resume, stop_ids, .. } = submit;
    let words = |words: &Vec<u32>| size_of_val(words.as_slice());
    let bytes = size_of::<Submit>()
        + tokens.len()
        + resume.as_ref().map_or(0, |resume| resume.generated.len())
        + words(stop_ids)
        + size_of_val(sampling.logit_bias.as_slice())
        + sampling.grammar.as_ref().map_or(0, |grammar| grammar.source.len())
        + sampling.limits.as_ref().map_or(0, |limits| {
            words(&limits.allowed) + words(&limits.banned) + words(&limits.lengths)
        });
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(ROOM_KIB).min(ROOM_KIB)
}

#[cfg(test)]
pub(super) mod tests {
    use std::future::{Future, poll_fn};
    use std::pin::Pin;
    use std::task::Poll;

    use super::*;
    use crate::core::frame::{
        Grammar, GrammarKind, Ranked, RequestId, Resume, Sampling, TokenLimits,
    };

    const LONGEST: Duration = Duration::from_secs(60);

    pub(in crate::fleet::link) fn submit(request: u64, prompt_bytes: usize) -> Box<Submit> {
        Box::new(Submit {
            request: RequestId(request),
            tokens: vec![0; prompt_bytes],
            sampling: Sampling::default(),
            stop_ids: Vec::new(),
            max_tokens: 9,
            deadline_ms: None,
            priority: 0,
            salt: Vec::new(),
            kv_from: None,
            resume: None,
            kv_transfer: None,
            pooling: None,
            request_id: "".into(),
            trace: None,
        })
    }

    async fn is_pending(task: Pin<&mut impl Future>) -> bool {
        let mut task = task;
        poll_fn(|context| Poll::Ready(task.as_mut().poll(context).is_pending())).await
    }

    #[tokio::test]
    async fn they_come_in_their_order_and_as_many_as_there_is_room_for() {
        let (submits, mut queue) = submits();
        let half = 500 * ROOM_KIB as usize; // with itself, a little less than half of the room
        submits.put(submit(1, half), LONGEST).await.unwrap();
        submits.put(submit(2, half), LONGEST).await.unwrap();
        let mut third = Box::pin(submits.put(submit(3, half), LONGEST));
        assert!(is_pending(third.as_mut()).await);
        let mut small = Box::pin(submits.put(submit(6, 0), LONGEST));
        assert!(is_pending(small.as_mut()).await, "it overtakes no long one");
        drop(small);
        assert_eq!(queue.next().await.unwrap().request, RequestId(1));
        third.await.unwrap();
        assert_eq!(queue.next_now().unwrap().request, RequestId(2));
        assert_eq!(queue.next_now().unwrap().request, RequestId(3));
        assert!(queue.next_now().is_none());
        // one that is larger than the room takes all of it
        submits.put(submit(4, 3 * half), LONGEST).await.unwrap();
        assert!(is_pending(Box::pin(submits.put(submit(5, 0), LONGEST)).as_mut()).await);
        assert_eq!(queue.next().await.unwrap().request, RequestId(4));
        assert!(queue.next_now().is_none(), "who gave up put nothing there");
        drop(submits);
        assert!(queue.next().await.is_none());
    }

    #[tokio::test]
    async fn thousands_of_short_ones_wait_for_nobody() {
        let (submits, mut queue) = submits();
        for number in 0..ROOM_KIB.into() {
            submits.put(submit(number, 300), Duration::ZERO).await.unwrap();
        }
        let one_more = submits.put(submit(0, 300), Duration::ZERO).await;
        assert_eq!(one_more, Err(NotTaken::Full));
        for number in 0..ROOM_KIB.into() {
            assert_eq!(queue.next_now().unwrap().request, RequestId(number));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_the_link_ends_or_takes_nothing_for_long_nothing_is_put() {
        let (submits, queue) = submits();
        let all = 1024 * ROOM_KIB as usize;
        submits.put(submit(1, all), LONGEST).await.unwrap();
        let began = tokio::time::Instant::now();
        assert_eq!(submits.put(submit(2, 0), LONGEST).await, Err(NotTaken::Full));
        assert_eq!(began.elapsed(), LONGEST);
        let mut waits = Box::pin(submits.put(submit(3, 0), LONGEST));
        assert!(is_pending(waits.as_mut()).await);
        drop(queue);
        assert_eq!(waits.await, Err(NotTaken::Closed));
        assert_eq!(submits.put(submit(4, 0), LONGEST).await, Err(NotTaken::Closed));
        assert_eq!(began.elapsed(), LONGEST, "at once");
    }

    #[test]
    fn whatever_of_one_can_be_large_counts() {
        const KIB_10: usize = 10 << 10;
        let small = kib(&submit(1, 0));
        assert!((1..=2).contains(&small), "{small}");
        let words = || vec![7_u32; KIB_10 / 4];
        let limits = TokenLimits { allowed: words(), banned: words(), lengths: words() };
        let sources: [fn(&mut Submit); 4] = [
            |submit| submit.tokens = vec![0; KIB_10],
            |submit| submit.stop_ids = vec![7; KIB_10 / 4],
            |submit| submit.resume = Some(Resume { generated: vec![0; KIB_10], rng_counter: 1 }),
            |submit| {
                let source = "a".repeat(KIB_10).into();
                submit.sampling.grammar = Some(Grammar { kind: GrammarKind::Regex, source });
            },
        ];
        for add in sources {
            let mut large = submit(1, 0);
            add(&mut large);
            assert_eq!(kib(&large), small + 10);
        }
        let mut large = submit(1, 0);
        large.sampling.limits = Some(limits);
        assert_eq!(kib(&large), small + 30);
        let mut large = submit(1, 0);
        let bias = Ranked(1, 1.0);
        large.sampling.logit_bias = vec![bias; KIB_10 / size_of::<Ranked>()];
        assert_eq!(kib(&large), small + 10);
    }
}

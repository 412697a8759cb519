//! What gathers in a mailbox while nobody looks, since when it waits, and who is woken.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use super::*;
use crate::core::frame::{Finish, RequestId};
use crate::limits::memory::MemoryPool;

const WORKER: WorkerId = WorkerId(1);

fn output(ids: &[u32], logprobs: bool) -> Output {
    let logprob = |id: &u32| TokenLogprob { logprob: -f64::from(*id), top: Vec::new() };
    Output {
        request: RequestId(1),
        ids: ids.to_vec(),
        logprobs: logprobs.then(|| ids.iter().map(logprob).collect()),
        finish: None,
        cached_tokens: None,
        prompt_logprobs: None,
        drafted: 0,
        accepted: 0,
        pooled: None,
    }
}

fn empty(max_tokens: u32) -> Mailbox {
    Mailbox::new(max_tokens, WORKER, MemoryPool::private(1 << 20).share())
}

impl Mailbox {
    /// An output of a burst of its own.
    fn gets(&self, output: Output, now: Instant) -> Appended {
        self.append(output, now, &mut Burst::default())
    }
}

/// What a reader would take now.
fn take(mailbox: &Mailbox) -> Chunk {
    mem::take(&mut mailbox.lock().chunk)
}

#[test]
fn log_probabilities_stay_with_their_tokens_whatever_comes_without() {
    let now = Instant::now();
    let outputs = [
        (&[1, 2][..], false),
        (&[3], true),
        (&[], false),
        (&[4], false),
        (&[5, 6], true),
        (&[7], false),
    ];
    let aligned = |chunk: &Chunk| {
        assert!(chunk.logprobs.len() <= chunk.ids.len());
        let pairs = chunk.ids.iter().zip(&chunk.logprobs);
        let pairs = pairs.filter_map(|(id, at)| Some((*id, at.as_ref()?.logprob)));
        pairs.collect::<Vec<_>>()
    };
    // gathered, and one by one
    let mailbox = empty(10);
    for (ids, logprobs) in outputs {
        assert_eq!(mailbox.gets(output(ids, logprobs), now).is_wrong(), None);
    }
    let chunk = take(&mailbox);
    assert_eq!(chunk.ids, [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(aligned(&chunk), [(3, -3.0), (5, -5.0), (6, -6.0)]);
    let mailbox = empty(10);
    let mut one_by_one = Vec::new();
    for (ids, logprobs) in outputs {
        mailbox.gets(output(ids, logprobs), now);
        one_by_one.extend(aligned(&take(&mailbox)));
    }
    assert_eq!(one_by_one, [(3, -3.0), (5, -5.0), (6, -6.0)]);
}

#[test]
fn what_cannot_be_an_output_is_refused_and_changes_nothing() {
    let now = Instant::now();
    let mailbox = empty(2);
    let short = Output { logprobs: Some(Vec::new()), ..output(&[1], false) };
    let drafts = Output { drafted: 1, accepted: 2, ..output(&[1, 2], false) };
    let tokens = Output { drafted: 5, accepted: 2, ..output(&[1], false) };
    for wrong in [output(&[1, 2, 3], false), short, drafts, tokens] {
        assert!(mailbox.gets(wrong, now).is_wrong().is_some());
    }
    assert!(take(&mailbox).ids.is_empty());
    assert_eq!(mailbox.gets(output(&[1, 2], true), now).is_wrong(), None);
    assert!(mailbox.gets(output(&[3], false), now).is_wrong().is_some(), "it had two to give");
}

#[test]
fn a_vector_has_the_awaited_length_and_finite_values_or_is_refused() {
    let now = Instant::now();
    let vector = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let ends = |pooled: Option<Vec<u8>>, finish| Output { pooled, finish, ..output(&[], false) };
    let length = Some(Finish::Length);
    let fine = vector(&[0.5, -1e30]);
    let mailbox = || empty(0).pooling(2);
    for wrong in [
        ends(None, length),
        ends(None, Some(Finish::Stop)),
        ends(Some(Vec::new()), length),
        ends(Some(fine[..7].to_vec()), length),
        ends(Some(vector(&[1.0, 2.0, 3.0])), length),
        ends(Some(vector(&[1.0, f32::NAN])), length),
        ends(Some(vector(&[f32::INFINITY, 1.0])), length),
        ends(Some(fine.clone()), None),
        ends(Some(fine.clone()), Some(Finish::Cancelled)),
        output(&[1], false),
    ] {
        let shown = format!("{wrong:?}");
        assert!(mailbox().gets(wrong, now).is_wrong().is_some(), "{shown}");
    }
    let unasked = empty(0).gets(ends(Some(fine.clone()), length), now);
    assert!(unasked.is_wrong().is_some(), "nobody asked for it");
    assert_eq!(mailbox().gets(ends(None, Some(Finish::Cancelled)), now).is_wrong(), None);
    let taken = mailbox();
    assert_eq!(taken.gets(ends(Some(fine.clone()), length), now).is_wrong(), None);
    assert_eq!(take(&taken).pooled, Some(fine));
}

#[test]
fn tokens_that_keep_coming_do_not_make_a_stalled_reader_look_awake() {
    let begin = Instant::now();
    let at = |s| begin + Duration::from_secs(s);
    let mailbox = empty(100);
    mailbox.gets(output(&[1], false), at(0));
    assert_eq!(mailbox.unread_since(), None, "it has not begun to read");
    mailbox.lock().read = true;
    mailbox.lock().waiting_since = None;
    for second in 5..60 {
        mailbox.gets(output(&[2], false), at(second));
        assert_eq!(mailbox.unread_since(), Some(at(5)), "since the first that it did not take");
    }
}

fn ranked(alternatives: u32) -> Output {
    let top = (0..alternatives).map(|id| Ranked(id, -1.0)).collect();
    Output {
        request: RequestId(1),
        ids: vec![7],
        logprobs: Some(vec![TokenLogprob { logprob: -1.0, top }]),
        finish: None,
        cached_tokens: None,
        prompt_logprobs: None,
        drafted: 0,
        accepted: 0,
        pooled: None,
    }
}

/// Appends until there is no memory for more; says how many that were.
fn fill(mailbox: &Mailbox, alternatives: u32) -> usize {
    let now = Instant::now();
    for appended in 0..10_000 {
        match mailbox.gets(ranked(alternatives), now) {
            Appended::Fine(_) => {}
            Appended::Refused(Refused::TooMuch { limit: 40_000 }) => return appended,
            wrong @ (Appended::Wrong(_) | Appended::Refused(_)) => panic!("{wrong:?}"),
        }
    }
    panic!("10,000 outputs of {alternatives} alternatives")
}

#[test]
fn log_probabilities_that_nobody_reads_are_bounded() {
    let mailbox = Mailbox::new(u32::MAX, WorkerId(0), MemoryPool::private(40_000).share());
    let few = fill(&mailbox, 20);
    assert!((90..110).contains(&few), "{few}");
    let taken = {
        let mut state = mailbox.lock();
        state.memory.give_all_back();
        mem::take(&mut state.chunk)
    };
    assert_eq!((taken.ids.len(), taken.logprobs.len()), (few, few));
    assert!(fill(&mailbox, 1) > 3 * few, "what was read is given back");
}

impl Appended {
    fn is_wrong(self) -> Option<&'static str> {
        match self {
            Self::Fine(_) => None,
            Self::Wrong(what) => Some(what),
            Self::Refused(_) => Some("no memory"),
        }
    }
}

/// A reader that counts how often it is woken.
#[derive(Default)]
struct Reader(AtomicUsize);

impl Wake for Reader {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Reader {
    fn poll(self: &Arc<Self>, mailbox: &Mailbox) -> Poll<Result<Chunk, (RouteError, WorkerId)>> {
        mailbox.poll_next(&mut Context::from_waker(&Waker::from(Arc::clone(self))))
    }

    fn woken(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

fn ready(polled: Poll<Result<Chunk, (RouteError, WorkerId)>>) -> Chunk {
    match polled {
        Poll::Ready(Ok(chunk)) => chunk,
        other @ (Poll::Ready(Err(_)) | Poll::Pending) => panic!("{other:?}"),
    }
}

#[test]
fn a_reader_is_woken_by_tokens_and_by_the_end() {
    let (mailbox, reader) = (empty(10), Arc::new(Reader::default()));
    assert!(reader.poll(&mailbox).is_pending());
    mailbox.gets(output(&[1], false), Instant::now());
    assert_eq!(reader.woken(), 1);
    mailbox.gets(output(&[2], false), Instant::now());
    assert_eq!(reader.woken(), 1, "it is awake");
    assert_eq!(ready(reader.poll(&mailbox)).ids, [1, 2]);
    assert!(reader.poll(&mailbox).is_pending());
    mailbox.fail(RouteError::ShuttingDown, WORKER);
    assert_eq!(reader.woken(), 2);
    assert!(matches!(reader.poll(&mailbox), Poll::Ready(Err((RouteError::ShuttingDown, WORKER)))));
}

#[test]
fn who_looked_last_is_the_one_that_is_woken() {
    let (mailbox, [first, last]) = (empty(10), [(); 2].map(|()| Arc::new(Reader::default())));
    assert!(first.poll(&mailbox).is_pending() && last.poll(&mailbox).is_pending());
    mailbox.gets(output(&[1], false), Instant::now());
    assert_eq!((first.woken(), last.woken()), (0, 1));
}

#[test]
fn tokens_are_read_before_an_error_and_only_the_first_error_counts() {
    let (mailbox, reader) = (empty(10), Arc::new(Reader::default()));
    mailbox.gets(output(&[1], false), Instant::now());
    mailbox.fail(RouteError::ShuttingDown, WORKER);
    mailbox.fail(RouteError::mistake("of its end"), WorkerId(2));
    assert_eq!(ready(reader.poll(&mailbox)).ids, [1]);
    assert!(matches!(reader.poll(&mailbox), Poll::Ready(Err((RouteError::ShuttingDown, WORKER)))));
}

#[test]
fn an_end_and_what_the_prompt_was_likely_are_news_without_tokens_and_no_tokens_are_none() {
    let (mailbox, reader) = (empty(10), Arc::new(Reader::default()));
    let now = Instant::now();
    let append = |output: Output| assert_eq!(mailbox.gets(output, now).is_wrong(), None);
    assert!(reader.poll(&mailbox).is_pending());
    append(output(&[], false));
    assert_eq!(mailbox.unread_since(), Some(now));
    assert!(reader.poll(&mailbox).is_pending());
    assert_eq!(mailbox.unread_since(), None, "there is nothing that it could take");
    let prompt_logprobs = Some(vec![TokenLogprob { logprob: -1.0, top: Vec::new() }]);
    append(Output { prompt_logprobs, ..output(&[], false) });
    assert!(ready(reader.poll(&mailbox)).prompt_logprobs.is_some());
    append(Output { finish: Some(Finish::Stop), ..output(&[], false) });
    assert_eq!(mailbox.unread_since(), Some(now));
    assert_eq!(ready(reader.poll(&mailbox)).finish, Some(Finish::Stop));
    assert_eq!(mailbox.unread_since(), None, "it was read");
}

#[test]
fn drafts_add_up_and_what_was_cached_stays_until_it_is_read() {
    let (mailbox, reader) = (empty(10), Arc::new(Reader::default()));
    for (cached_tokens, drafted, accepted) in [(Some(5), 3, 1), (None, 2, 0), (None, 1, 1)] {
        let output = Output { cached_tokens, drafted, accepted, ..output(&[1], false) };
        mailbox.gets(output, Instant::now());
    }
    let chunk = ready(reader.poll(&mailbox));
    assert_eq!((chunk.cached_tokens, chunk.drafted, chunk.accepted), (Some(5), 6, 2));
}

#[test]
fn a_reader_that_takes_log_probabilities_makes_room_for_others() {
    let mailbox = Mailbox::new(u32::MAX, WORKER, MemoryPool::private(40_000).share());
    let reader = Arc::new(Reader::default());
    let first = fill(&mailbox, 20);
    assert_eq!(ready(reader.poll(&mailbox)).ids.len(), first);
    assert_eq!(fill(&mailbox, 20), first);
}

#[test]
fn places_of_tokens_without_log_probabilities_are_charged_once_others_have_theirs() {
    let now = Instant::now();
    let small = || Mailbox::new(u32::MAX, WORKER, MemoryPool::private(10_000).share());
    let mailbox = small();
    for _ in 0..10_000 {
        assert_eq!(mailbox.gets(output(&[1], false), now).is_wrong(), None, "nothing to charge");
    }
    assert!(matches!(mailbox.gets(output(&[2], true), now), Appended::Refused(_)));
    let mailbox = small();
    let logprob = || TokenLogprob { logprob: -1.0, top: Vec::new() };
    let prompt_logprobs = Some((0..1_000).map(|_| logprob()).collect());
    let prompt = Output { prompt_logprobs, ..output(&[1], false) };
    assert!(matches!(mailbox.gets(prompt, now), Appended::Refused(_)), "of the prompt, too");
}

//! What gathers in a mailbox while nobody looks, and since when it waits.

use super::*;
use crate::core::frame::RequestId;
use crate::memory::Pool;

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
    }
}

fn empty(max_tokens: u32) -> Mailbox {
    Mailbox::new(max_tokens, WORKER, Pool::private(1 << 20).share())
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
        assert_eq!(mailbox.append(output(ids, logprobs), now).is_wrong(), None);
    }
    let chunk = take(&mailbox);
    assert_eq!(chunk.ids, [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(aligned(&chunk), [(3, -3.0), (5, -5.0), (6, -6.0)]);
    let mailbox = empty(10);
    let mut one_by_one = Vec::new();
    for (ids, logprobs) in outputs {
        mailbox.append(output(ids, logprobs), now);
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
    for wrong in [output(&[1, 2, 3], false), short, drafts] {
        assert!(mailbox.append(wrong, now).is_wrong().is_some());
    }
    assert!(take(&mailbox).ids.is_empty());
    assert_eq!(mailbox.append(output(&[1, 2], true), now).is_wrong(), None);
    assert!(mailbox.append(output(&[3], false), now).is_wrong().is_some(), "it had two to give");
}

#[test]
fn tokens_that_keep_coming_do_not_make_a_stalled_reader_look_awake() {
    let begin = Instant::now();
    let at = |s| begin + Duration::from_secs(s);
    let mailbox = empty(100);
    mailbox.append(output(&[1], false), at(0));
    assert_eq!(mailbox.unread_since(), None, "it has not begun to read");
    mailbox.lock().read = true;
    mailbox.lock().waiting_since = None;
    for second in 5..60 {
        mailbox.append(output(&[2], false), at(second));
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
    }
}

/// Appends until there is no memory for more; says how many that were.
fn fill(mailbox: &Mailbox, alternatives: u32) -> usize {
    let now = Instant::now();
    for appended in 0..10_000 {
        match mailbox.append(ranked(alternatives), now) {
            Appended::Fine(_) => {}
            Appended::Refused(Refused::TooMuch { limit: 40_000 }) => return appended,
            wrong @ (Appended::Wrong(_) | Appended::Refused(_)) => panic!("{wrong:?}"),
        }
    }
    panic!("10,000 outputs of {alternatives} alternatives")
}

#[test]
fn log_probabilities_that_nobody_reads_are_bounded() {
    let mailbox = Mailbox::new(u32::MAX, WorkerId(0), Pool::private(40_000).share());
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

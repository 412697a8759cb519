//! Whose word on blocks is believed: what costs a worker its credit, what does not, and how it comes back.

use super::*;
use crate::core::scheduler::credit::Credit;

#[test]
fn an_overclaiming_worker_loses_its_credit_alone_and_a_snapshot_brings_it_back() {
    let mut scheduler = scheduler(2);
    let keys = keys(1, 40, 0);
    for id in [0, 1] {
        assert_eq!(scheduler.stored(WorkerId(id), Tier::Device, &keys), None);
    }
    let mut withdrawn = None;
    for n in 0..40 {
        let mut want = want(n, &keys);
        want.excluded = vec![WorkerId(1)];
        let placement = scheduler.place(&want, 0.0).unwrap();
        if chosen(&placement).held_tokens == 0 {
            break;
        }
        withdrawn = scheduler.begun(placement.request, 0, 1.0).unwrap().withdrawn.or(withdrawn);
        scheduler.end(placement.request, LegOutput { tokens: 1, complete: true }, 1.0);
    }
    assert_eq!(withdrawn, Some(Withdrawal::Overclaimed));
    assert_eq!(scheduler.view(WorkerId(0)).unwrap().withdrawn, Some(Withdrawal::Overclaimed));
    assert_eq!(scheduler.view(WorkerId(1)).unwrap().withdrawn, None);
    let placement = scheduler.place(&want(100, &keys), 2.0).unwrap();
    assert_eq!(placement.worker, WorkerId(1), "it still counts for what it is believed");
    scheduler.snapshot_begins(WorkerId(0));
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys[..30]), None);
    scheduler.snapshot_complete(WorkerId(0));
    let placement = scheduler.place(&want(101, &keys), 2.0).unwrap();
    assert_eq!(placement.decision.candidates[0].held_tokens, 480);
}

#[test]
fn blocks_evicted_while_a_request_waits_are_no_lie() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 40, 0);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys), None);
    for n in 0..20 {
        let placement = scheduler.place(&want(n, &keys), 0.0).unwrap();
        assert_eq!(chosen(&placement).held_tokens, 640);
        assert_eq!(scheduler.removed(WorkerId(0), Tier::Device, &keys[10..]), 0);
        let begun = scheduler.begun(placement.request, 160, 1.0).unwrap();
        assert_eq!((begun.held_tokens, begun.withdrawn), (160, None));
        scheduler.end(placement.request, LegOutput { tokens: 1, complete: true }, 1.0);
        assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys[10..]), None);
    }
}

#[test]
fn blocks_cleared_while_a_request_waits_are_no_lie() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 40, 0);
    for n in 0..20 {
        assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys), None);
        let placement = scheduler.place(&want(n, &keys), 0.0).unwrap();
        assert_eq!(chosen(&placement).held_tokens, 640);
        scheduler.cleared(WorkerId(0), Tier::Device);
        let begun = scheduler.begun(placement.request, 0, 1.0).unwrap();
        assert_eq!((begun.held_tokens, begun.withdrawn), (0, None));
        scheduler.end(placement.request, LegOutput { tokens: 1, complete: true }, 1.0);
    }
}

#[test]
fn more_blocks_than_announced_and_prompts_without_a_word_cost_the_credit() {
    let mut scheduler = scheduler(2);
    let too_many = keys(1, 1001, 0);
    let over = scheduler.stored(WorkerId(0), Tier::Device, &too_many);
    assert_eq!(over, Some(Withdrawal::OverCapacity));
    assert_eq!(scheduler.view(WorkerId(0)).unwrap().held_blocks, 0);
    for n in 1..10 {
        let mut want = want(n, &keys(n, 12, 0));
        want.excluded = vec![WorkerId(0)];
        scheduler.place(&want, 0.0).unwrap();
        scheduler.begun(RequestId(n), 0, 1.0).unwrap();
    }
    let silent =
        scheduler.step(WorkerId(1), &report(1, 200, Load::default()), Given::default(), 1.0);
    assert_eq!(silent, Some(Withdrawal::Silent));
    // both still serve
    assert!(scheduler.place(&want(10, &keys(10, 4, 0)), 0.0).is_ok());
}

#[test]
fn prompts_that_are_announced_are_not_met_with_silence_however_many_come_at_once() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 40, 0);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys), None);
    for n in 0..100 {
        // the same prompt again and again: computed each time, as if side by side, and announced once
        let mut leg = want(n, &keys);
        leg.max_tokens = 1;
        scheduler.place(&leg, 0.0).unwrap();
        scheduler.begun(RequestId(n), 640, 1.0).unwrap();
        assert_eq!(
            scheduler.step(
                WorkerId(0),
                &report(n + 1, 640, Load::default()),
                Given::default(),
                1.0
            ),
            None
        );
        scheduler.end(RequestId(n), LegOutput { tokens: 1, complete: true }, 2.0);
    }
    assert_eq!(scheduler.view(WorkerId(0)).unwrap().withdrawn, None);
}

#[test]
fn what_was_promised_is_void_once_the_snapshot_begins_anew() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 40, 0);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys), None);
    for n in 0..10 {
        scheduler.place(&want(n, &keys), 0.0).unwrap();
    }
    scheduler.snapshot_begins(WorkerId(0));
    scheduler.snapshot_complete(WorkerId(0));
    for n in 0..10 {
        let begun = scheduler.begun(RequestId(n), 0, 1.0).unwrap();
        assert_eq!((begun.held_tokens, begun.withdrawn), (0, None));
    }
}

#[test]
fn a_worker_without_a_prefix_cache_is_asked_once_and_then_left_alone() {
    let mut credit = Credit::default();
    credit.restore(0);
    let silent = |credit: &mut Credit| {
        (0..100).find_map(|_| {
            credit.computed(10);
            credit.silent()
        })
    };
    assert_eq!(silent(&mut credit), Some(Withdrawal::Silent));
    credit.withdraw(Withdrawal::Unknown); // its snapshot begins
    credit.restore(0);
    assert_eq!(credit.withdrawn(), Some(Withdrawal::Silent));
    assert_eq!(silent(&mut credit), None);
    credit.heard();
    assert!(credit.given(), "it speaks");
    assert_eq!(silent(&mut credit), Some(Withdrawal::Silent), "and is listened to again");
}

/// A worker that keeps what it says, once its snapshot is whole.
fn believed() -> Credit {
    let mut credit = Credit::default();
    credit.restore(100);
    credit
}

/// The number of the promise, of as many as the shares of them that are missing, that costs the credit.
fn withdrawn_at(missing: impl IntoIterator<Item = u32>) -> Option<usize> {
    let mut credit = believed();
    let audit = |missing| credit.audit(1_600, 1_600 - missing, 1).is_some();
    missing.into_iter().map(audit).position(|withdrawn| withdrawn).map(|i| i + 1)
}

#[test]
fn nobody_is_judged_before_the_eighth_promise() {
    assert_eq!(withdrawn_at([1_600; 100]), Some(8));
    let mut credit = believed();
    for _ in 0..20 {
        assert_eq!(credit.audit(0, 0, 16), None);
    }
    assert_eq!(credit.audit(1_600, 0, 16), None, "the first promise");
}

#[test]
fn a_quarter_of_what_was_promised_may_be_missing() {
    assert_eq!(withdrawn_at([400; 1_000]), None, "exactly a quarter");
    assert_eq!(withdrawn_at([401; 1_000]), Some(8));
    // what is over fades
    assert_eq!(withdrawn_at(std::iter::repeat_n(1_600, 2).chain([0; 100])), None);
}

#[test]
fn less_than_a_block_is_rounding() {
    let withdrawn = |missing: u32| {
        let mut credit = believed();
        (0..20).any(|_| credit.audit(32, 32 - missing, 16).is_some())
    };
    assert!(!withdrawn(15) && withdrawn(16));
}

#[test]
fn who_gets_no_credit_loses_none() {
    let mut credit = Credit::default();
    assert!((0..20).all(|_| credit.audit(1_600, 0, 16).is_none()));
    assert_eq!(credit.withdrawn(), Some(Withdrawal::Unknown));
}

#[test]
fn silence_is_more_than_eight_prompts_with_more_than_sixty_four_new_blocks() {
    let silent_after = |blocks: &[u32]| {
        let mut credit = believed();
        blocks.iter().for_each(|blocks| credit.computed(*blocks));
        credit.silent().is_some()
    };
    assert!(!silent_after(&[100; 8]) && silent_after(&[100; 9]));
    assert!(!silent_after(&[1; 64]) && silent_after(&[1; 65]));
    let mut credit = believed();
    (0..8).for_each(|_| credit.computed(100));
    credit.heard();
    credit.computed(100);
    assert_eq!(credit.silent(), None, "it is the first one since the worker spoke");
}

#[test]
fn a_word_while_the_snapshot_is_on_its_way_is_no_snapshot() {
    let mut credit = believed();
    credit.withdraw(Withdrawal::Silent);
    credit.withdraw(Withdrawal::Unknown);
    credit.heard();
    assert_eq!(credit.withdrawn(), Some(Withdrawal::Unknown));
}

/// Prompts of twelve blocks each of which the worker says nothing.
fn computes_in_silence(scheduler: &mut Scheduler, numbers: std::ops::Range<u64>) {
    for n in numbers {
        scheduler.place(&want(n, &keys(n, 12, 0)), 0.0).unwrap();
        scheduler.begun(RequestId(n), 0, 1.0).unwrap();
        scheduler.end(RequestId(n), LegOutput::default(), 1.0).unwrap();
    }
}

fn heartbeat(scheduler: &mut Scheduler) -> Option<Withdrawal> {
    scheduler.step(WorkerId(0), &report(0, 0, Load::default()), Given::default(), 1.0)
}

#[test]
fn any_word_of_its_blocks_ends_a_workers_silence() {
    let words: [fn(&mut Scheduler); 4] = [
        |_| {},
        |scheduler| assert_eq!(scheduler.stored(WorkerId(0), Tier::Host, &[7]), None),
        |scheduler| assert_eq!(scheduler.removed(WorkerId(0), Tier::Host, &[7]), 1),
        |scheduler| scheduler.cleared(WorkerId(0), Tier::Host),
    ];
    for (word, speak) in words.into_iter().enumerate() {
        let mut scheduler = scheduler(1);
        computes_in_silence(&mut scheduler, 0..5);
        speak(&mut scheduler);
        computes_in_silence(&mut scheduler, 5..10);
        let expected = (word == 0).then_some(Withdrawal::Silent);
        assert_eq!(heartbeat(&mut scheduler), expected, "word {word}");
    }
}

#[test]
fn what_a_worker_held_is_forgotten_with_its_silence_and_an_empty_snapshot_brings_no_credit() {
    let mut scheduler = scheduler(1);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys(99, 30, 0)), None);
    computes_in_silence(&mut scheduler, 0..10);
    assert_eq!(heartbeat(&mut scheduler), Some(Withdrawal::Silent));
    assert_eq!(scheduler.view(WorkerId(0)).unwrap().held_blocks, 0);
    scheduler.snapshot_begins(WorkerId(0));
    scheduler.snapshot_complete(WorkerId(0));
    assert_eq!(scheduler.view(WorkerId(0)).unwrap().withdrawn, Some(Withdrawal::Silent));
}

#[test]
fn a_lower_tier_that_is_cleared_takes_no_promise_back() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 40, 0);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys), None);
    scheduler.place(&want(1, &keys), 0.0).unwrap();
    scheduler.cleared(WorkerId(0), Tier::Host);
    assert_eq!(scheduler.begun(RequestId(1), 640, 1.0).unwrap().held_tokens, 640);
}

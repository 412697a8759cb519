//! A queue that is replayed in leaps costs what it costs step by step.

use proptest::prelude::*;

use super::*;
use crate::core::frame::StepCost;

const COST: StepCost =
    StepCost { fixed_ms: 12.0, prefill_ms: 0.05, context_ms: 2e-6, row_ms: 0.08, kv_ms: 3e-5 };

fn load(rows: f64, waiting: f64) -> WorkerLoad {
    WorkerLoad { occupied: rows + waiting, rows, step_tokens: 1000.0, ..WorkerLoad::idle(COST) }
}

fn prompt(left: u32) -> QueuedPrompt {
    QueuedPrompt { running: 0, left, from: 0, prompts: 1, awaits: None }
}

fn queue(rule: QueueRule, left: &[u32]) -> PromptQueue {
    let prompts = left.iter().map(|left| prompt(*left)).collect();
    PromptQueue { rule, prompts, ..PromptQueue::default() }
}

fn demand(prompt_tokens: f64) -> Demand {
    Demand { prompt_tokens, cached_tokens: 0.0, output_tokens: 10.0, block_tokens: 16.0 }
}

#[test]
fn a_short_prompt_overtakes_a_long_one_only_where_each_takes_half() {
    let (load, short) = (load(0.0, 1.0), demand(100.0));
    let halves = behind(&load, &queue(QueueRule::Halves, &[50_000]), &short);
    let fifo = behind(&load, &queue(QueueRule::Fifo, &[50_000]), &short);
    // the step that runs, of which nothing is known, and one of its own
    assert!(halves.wait_ms < 20.0 && halves.ms < 100.0, "{halves:?}");
    assert!(fifo.wait_ms > 50.0 * 50.0, "{fifo:?}");
    assert_eq!(fifo.delay_ms, 0.0, "nobody waits for what comes later");
    assert!((5.0..30.0).contains(&halves.delay_ms), "a hundred tokens: {halves:?}");
}

#[test]
fn who_counts_on_the_blocks_of_another_one_begins_once_these_are_computed() {
    let load = load(0.0, 1.0);
    let mut queue = queue(QueueRule::Halves, &[5_000]);
    let at_once = behind(&load, &queue, &demand(100.0));
    queue.awaits = Some(Awaited { place: 0, left: 1_000 });
    let later = behind(&load, &queue, &demand(100.0));
    assert!(later.wait_ms > at_once.wait_ms + 4.0 * 60.0, "{at_once:?} {later:?}");
    queue.awaits = Some(Awaited { place: 0, left: 5_000 });
    assert_eq!(behind(&load, &queue, &demand(100.0)), at_once, "there already");
}

#[test]
fn a_long_queue_is_kept_short_and_counts_whole() {
    let mut queue = PromptQueue { rule: QueueRule::Fifo, ..PromptQueue::default() };
    (0..100).for_each(|_| queue.push(prompt(40)));
    assert_eq!((queue.prompts.len(), queue.waiting()), (MOST_QUEUED, 100.0));
    let left: u32 = queue.prompts.iter().map(|prompt| prompt.left).sum();
    assert_eq!(left, 4_000);
    let behind = behind(&load(0.0, 100.0), &queue, &demand(10.0));
    assert!(behind.wait_ms + behind.ms > 4_000.0 * COST.prefill_ms);
}

#[test]
fn what_does_not_fit_into_the_queue_counts_with_its_last_prompt() {
    let mut queue = PromptQueue::default();
    (0..12).for_each(|_| queue.push(QueuedPrompt { running: 7, ..prompt(40) }));
    let last = *queue.prompts.last().unwrap();
    assert_eq!((last.running, last.left, last.prompts), (21, 120, 3));
    // one that somebody else wrote down may be longer
    queue.prompts.extend([prompt(40); 5]);
    assert!(behind(&load(0.0, 17.0), &queue, &demand(10.0)).ms > 0.0);
}

#[test]
fn who_lacks_no_more_than_is_left_of_a_step_gets_it_all() {
    for (left, chunk) in [(100.0, 100.0), (101.0, 50.0)] {
        let mut chunks = [0.0; 2];
        share_out(QueueRule::Halves, 100.0, &[left, 60.0], &mut chunks, |i| i == 0);
        assert_eq!(chunks[0], chunk);
    }
}

#[test]
fn a_prompt_that_is_all_cached_takes_a_step() {
    let mut queue = PromptQueue::default();
    queue.push(prompt(100));
    let cached = Demand { cached_tokens: 500.0, ..demand(500.0) };
    let behind = behind(&load(0.0, 1.0), &queue, &cached);
    assert!(behind.ms >= COST.fixed_ms, "{behind:?}");
}

proptest! {
    /// The steps of the table come one by one; here a leap of many equals them.
    #[test]
    fn tokens_are_given_whole_and_none_is_left_while_somebody_wants_it(
        left in prop::collection::vec(0_u32..20_000, 1..10),
        budget in 1_u32..9_000,
        fifo in any::<bool>(),
    ) {
        let rule = if fifo { QueueRule::Fifo } else { QueueRule::Halves };
        let left: Vec<f64> = left.into_iter().map(f64::from).collect();
        let mut chunks = vec![0.0; left.len()];
        share_out(rule, budget.into(), &left, &mut chunks, |i| i + 1 < left.len());
        let given: f64 = chunks.iter().sum();
        prop_assert_eq!(given, left.iter().sum::<f64>().min(budget.into()));
        prop_assert!(chunks.iter().zip(&left).all(|(chunk, left)| chunk <= left && chunk.fract() == 0.0));
    }

    /// A prompt more never makes the others sooner, all of them end, and the time of all is at least that of the work.
    #[test]
    fn a_queue_ends_and_takes_its_time(
        left in prop::collection::vec(0_u32..60_000, 1..9),
        own in 1_u32..60_000,
        fifo in any::<bool>(),
        held in prop::option::of((0_u32..8, 0_u32..60_000)),
    ) {
        let rule = if fifo { QueueRule::Fifo } else { QueueRule::Halves };
        let mut queue = queue(rule, &left);
        queue.awaits = held.map(|(place, left)| Awaited { place, left });
        let behind = behind(&load(3.0, left.len() as f64), &queue, &demand(own.into()));
        let all: f64 = left.iter().map(|left| f64::from(*left)).sum();
        prop_assert!(behind.delay_ms >= 0.0 && behind.wait_ms > 0.0);
        prop_assert!(behind.ms >= f64::from(own) * COST.prefill_ms, "{behind:?}");
        if fifo && held.is_none() {
            prop_assert!(behind.wait_ms + behind.ms >= (all + f64::from(own)) * COST.prefill_ms);
        }
    }
}

#[test]
fn a_queue_that_is_kept_has_no_room_for_more_prompts_than_there_can_be() {
    let mut queue = PromptQueue::default();
    let mut room = Vec::new();
    for left in 0..13 {
        queue.push(QueuedPrompt { running: 0, left, from: 0, prompts: 1, awaits: None });
        room.push(queue.prompts.capacity());
    }
    assert_eq!(room[..5], [FEW, FEW, FEW, FEW, MOST_QUEUED]);
    assert_eq!(room[5..], [MOST_QUEUED; 8]);
    let last = queue.prompts[MOST_QUEUED - 1];
    assert_eq!((last.left, last.prompts), (9 + 10 + 11 + 12, 4));
}

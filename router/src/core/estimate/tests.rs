//! Estimates mean what their names say. What is expected stands here as numbers that were worked out by hand from [`TRUE`],
//! or is added up step by step and token by token ([`steps_ms`]).

use super::*;
use crate::core::cost::context;

const TRUE: StepCost =
    StepCost { fixed_ms: 12.0, prefill_ms: 0.05, context_ms: 2e-6, row_ms: 0.08, kv_ms: 3e-5 };

fn idle() -> WorkerLoad {
    WorkerLoad::idle(TRUE)
}

/// A queue of which only the size is known.
fn nobody() -> PromptQueue {
    PromptQueue::default()
}

/// Ms of the steps that compute a prompt's tokens at `positions`, `per_step` of them in each, beside `rows` that read `kv_tokens`,
/// where no step is shorter than `least_ms`, that of another rank.
fn steps_ms(
    positions: std::ops::Range<u32>,
    per_step: usize,
    (rows, kv_tokens, least_ms): (u32, u32, f64),
) -> f64 {
    let mut ms = 0.0;
    for step in positions.collect::<Vec<_>>().chunks(per_step) {
        let mut around_ms = 12.0;
        (0..rows).for_each(|_| around_ms += 0.08);
        (0..kv_tokens).for_each(|_| around_ms += 3e-5);
        step.iter().for_each(|&position| around_ms += 0.05 + 2e-6 * f64::from(position));
        ms += f64::max(around_ms, least_ms);
    }
    ms
}

fn demand(prompt_tokens: f64, cached_tokens: f64) -> Demand {
    Demand { prompt_tokens, cached_tokens, output_tokens: 100.0, block_tokens: 16.0 }
}

#[test]
fn an_idle_worker_takes_its_prefill_in_whole_steps() {
    let estimate = estimate(&idle(), &nobody(), &demand(6000.0, 0.0));
    assert_eq!(estimate.queue_ms, 0.0);
    close(estimate.prefill_ms, steps_ms(0..6000, 4096, (0, 0, 0.0)));
    close(estimate.prefill_ms, 359.994); // 2 * 12 + 6000 * 0.05 + 17,997,000 * 2e-6
    assert_eq!((estimate.transfer_ms, estimate.interference_ms), (0.0, 0.0));
}

#[test]
fn what_is_cached_is_not_computed_but_still_attended_to() {
    let warm = estimate(&idle(), &nobody(), &demand(6000.0, 5000.0)).prefill_ms;
    close(warm, steps_ms(5000..6000, 4096, (0, 0, 0.0)));
    close(warm, 72.999); // 12 + 50 + 5,499,500 * 2e-6
    assert!(warm > estimate(&idle(), &nobody(), &demand(1000.0, 0.0)).prefill_ms);
}

#[test]
fn time_that_is_over_is_not_waited_for_again() {
    let busy = WorkerLoad {
        occupied: 2.0,
        rows: 1.0,
        backlog_tokens: 4000.0,
        backlog_context: context(0.0, 4000.0),
        backlog_runs: true,
        ..idle()
    };
    let later = WorkerLoad { elapsed_ms: 50.0, ..busy };
    let (now, then) = (
        estimate(&busy, &nobody(), &demand(100.0, 0.0)),
        estimate(&later, &nobody(), &demand(100.0, 0.0)),
    );
    assert!((now.queue_ms - then.queue_ms - 50.0).abs() < 1e-9);
    let overdue = WorkerLoad { elapsed_ms: 1e9, ..busy };
    assert_eq!(estimate(&overdue, &nobody(), &demand(100.0, 0.0)).queue_ms, 0.0);
}

#[test]
fn an_overdue_step_does_not_do_the_work_of_the_next_ones() {
    let tokens = 3.0 * idle().step_tokens;
    let busy = WorkerLoad {
        occupied: 9.0,
        backlog_tokens: tokens,
        backlog_context: context(0.0, tokens),
        backlog_runs: true,
        ..idle()
    };
    let hung = WorkerLoad { elapsed_ms: 1e9, ..busy };
    let (now, then) = (
        estimate(&busy, &nobody(), &demand(100.0, 0.0)),
        estimate(&hung, &nobody(), &demand(100.0, 0.0)),
    );
    assert!((then.queue_ms - now.queue_ms * 2.0 / 3.0).abs() < 1e-6, "two of three steps are left");
}

#[test]
fn a_prompt_among_the_rows_of_a_worker_that_generates_delays_each_of_them_in_full() {
    let busy = WorkerLoad { occupied: 10.0, rows: 10.0, ..idle() };
    let (both, decode) = (
        estimate(&busy, &nobody(), &demand(6000.0, 0.0)),
        alone(&busy, &nobody(), &demand(6000.0, 0.0)),
    );
    // of 335.994 ms for each of ten rows a tenth counts, or all
    close(decode.interference_ms - both.interference_ms, 3023.946);
    assert_eq!((decode.ttft_ms(), decode.decode_ms), (both.ttft_ms(), both.decode_ms));
    let none = (
        estimate(&idle(), &nobody(), &demand(6000.0, 0.0)),
        alone(&idle(), &nobody(), &demand(6000.0, 0.0)),
    );
    assert_eq!(none.0, none.1, "where nobody is delayed it is the same");
}

#[test]
fn accepted_drafts_shorten_decoding_and_a_slow_rank_lengthens_it() {
    let plain = estimate(&idle(), &nobody(), &demand(1000.0, 0.0)).decode_ms;
    let drafting = WorkerLoad { accepted: 2.0, ..idle() };
    assert!(
        (estimate(&drafting, &nobody(), &demand(1000.0, 0.0)).decode_ms - plain / 2.0).abs() < 1e-9
    );
    let grouped = WorkerLoad { group_ms: 100.0, group_rows: 8.0, ..idle() };
    let grouped = estimate(&grouped, &nobody(), &demand(1000.0, 0.0));
    assert!((grouped.decode_ms - 99.0 * 100.0).abs() < 1e-9);
    assert!(grouped.interference_ms > 0.0, "the other ranks wait for this prefill, too");
}

#[test]
fn saturation_is_convex_and_out_of_the_way_of_a_pool_with_room() {
    let saturation = |used: f64| {
        estimate(&WorkerLoad { blocks_used: used, ..idle() }, &nobody(), &demand(160.0, 0.0))
            .saturation_ms
    };
    let service = {
        let estimate = estimate(&idle(), &nobody(), &demand(160.0, 0.0));
        estimate.prefill_ms + estimate.decode_ms
    };
    assert!(saturation(4_900.0) < 0.01 * service);
    assert!(saturation(9_500.0) > 2.0 * saturation(9_000.0));
    assert!(saturation(20_000.0).is_finite());
    let slopes: Vec<f64> = (50..95)
        .map(|i| saturation(f64::from(i + 1) * 100.0) - saturation(f64::from(i) * 100.0))
        .collect();
    assert!(slopes.is_sorted_by(|a, b| a <= b));
}

#[test]
fn a_worker_without_a_slot_makes_a_request_wait_for_one() {
    let full = WorkerLoad { occupied: 64.0, rows: 64.0, ..idle() };
    let nearly = WorkerLoad { occupied: 63.0, rows: 63.0, ..idle() };
    let wait = |worker_load| estimate(&worker_load, &nobody(), &demand(100.0, 0.0)).queue_ms;
    assert!(wait(full) > wait(nearly) + 10.0);
}

#[test]
fn a_step_is_as_long_as_its_rows_make_it_or_as_the_slowest_rank_of_the_group() {
    // 12 + 10 * 0.08 + 1e5 * 3e-5
    for (group_ms, step_ms) in [(0.0, 15.8), (1.0, 15.8), (100.0, 100.0)] {
        let busy = WorkerLoad { occupied: 10.0, rows: 10.0, kv_tokens: 1e5, group_ms, ..idle() };
        let added_up = |tokens| steps_ms(0..tokens, 4086, (10, 100_000, group_ms));

        // the step that runs, and then its own two
        let short = demand(6129.0, 0.0);
        let elapsed = WorkerLoad { elapsed_ms: 2.0, ..busy };
        close(estimate(&elapsed, &nobody(), &short).queue_ms, step_ms - 2.0);
        close(estimate(&busy, &nobody(), &short).prefill_ms, added_up(6129));

        // behind three steps of others
        let backlog_tokens = 3.0 * 4086.0;
        let backlog_context = f64::from((0..3 * 4086_u32).sum::<u32>());
        let behind = WorkerLoad { backlog_tokens, backlog_context, backlog_runs: true, ..busy };
        close(estimate(&behind, &nobody(), &short).queue_ms, added_up(3 * 4086));
    }
}

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-6 * expected.abs().max(1.0), "{got}, not {expected}");
}

/// The decode leg of a split request whose blocks are of 1 MiB.
fn decode_leg(worker_load: &WorkerLoad, demand: &Demand) -> DecodeLeg {
    DecodeLeg::new(
        worker_load,
        &nobody(),
        demand,
        f64::from(1 << 20),
        &alone(worker_load, &nobody(), demand),
    )
}

#[test]
fn interference_is_what_a_request_adds_to_the_steps_of_all_who_are_there_and_of_those_to_come() {
    let busy = WorkerLoad {
        occupied: 10.0,
        rows: 8.0,
        kv_tokens: 1e5,
        group_rows: 5.0,
        accepted: 2.0,
        pressure: 3.0,
        ..idle()
    };
    let ask = demand(1_600.0, 600.0);
    // Its prompt takes 1,000 * 0.05 + 1,099,500 * 2e-6 = 52.199 ms, its row 0.128 ms in each of 50 steps, 6.4 in all. Of what the
    // fifteen rows wait a tenth counts; three ms are waited later for each of the prompt.
    close(estimate(&busy, &nobody(), &ask).interference_ms, 244.4955); // 1.5 * 58.599 + 156.597
    close(alone(&busy, &nobody(), &ask).interference_ms, 949.182); // 15 * 52.199 + 1.5 * 6.4 + 156.597
    let (prefill, leg) = (prefill_leg(&busy, &nobody(), &ask), decode_leg(&busy, &ask));
    close(prefill.interference_ms, 182.6965); // the other ranks: 0.5 * 52.199 + 156.597
    close(leg.interference_ms, 9.6);
    close(leg.with(&prefill, 7.0).interference_ms, 192.2965);
    close(leg.base_ms(), 798.073523897); // 99 tokens by two a step of 15.928 ms; 9.6; 0.0375 for blocks
}

#[test]
fn saturation_counts_all_blocks_that_a_request_will_fill_and_the_time_that_it_keeps_them() {
    let filling = WorkerLoad { blocks_used: 9_000.0, ..idle() };
    let ask = demand(1_600.0, 600.0);
    // x / (1 - x) of a pool of which 0.906875 are taken with prompt and answer, 0.90625 with the prompt alone. A prompt of 64.199 ms
    // and an answer of 1,200.672 ms keep 68.75 blocks, or the prompt 62.5, of 10,000.
    close(estimate(&filling, &nobody(), &ask).saturation_ms, 84.683750130);
    let (prefill, leg) = (prefill_leg(&filling, &nobody(), &ask), decode_leg(&filling, &ask));
    close(prefill.saturation_ms, 3.878689583);
    close(leg.saturation_ms, 80.385594765);
    close(leg.with(&prefill, 7.0).saturation_ms, 84.264284348);
}

#[test]
fn who_takes_twice_the_blocks_or_keeps_them_twice_as_long_delays_others_twice_as_much() {
    let of = |used: f64, blocks: f64, ms: f64| {
        saturation_ms(&WorkerLoad { blocks_used: used, ..idle() }, blocks, ms)
    };
    close(of(4_990.0, 10.0, 1_000.0), 1.0); // a thousandth of the pool, half of which is taken then, for a second
    close(of(4_980.0, 20.0, 1_000.0), 2.0);
    close(of(4_990.0, 10.0, 2_000.0), 2.0);
    close(of(7_490.0, 10.0, 1_000.0), 3.0);
    close(of(20_000.0, 10.0, 1_000.0), 99.0); // never fuller than 0.99
    let tiny = WorkerLoad { blocks: 0.0, ..idle() };
    close(saturation_ms(&tiny, 1.0, 1.0), 99.0);
}

#[test]
fn a_prompt_without_room_waits_until_the_blocks_that_it_lacks_are_given_back() {
    let ask = demand(1_600.0, 0.0);
    // 100 blocks where 10 are free: of those in use, 90 have to become free; at most all can. An answer of 100 tokens, 12.128 ms
    // each, is half way through: 606.4 ms. A prompt takes 94.5584 ms.
    for (used, blocks, answer_ms, prompt_ms) in
        [(9_990.0, 10_000.0, 5.463_063_063, 0.851_877_477), (10.0, 20.0, 606.4, 94.5584)]
    {
        let full = WorkerLoad { blocks_used: used, blocks, ..idle() };
        close(estimate(&full, &nobody(), &ask).queue_ms, answer_ms);
        close(prefill_leg(&full, &nobody(), &ask).queue_ms, prompt_ms);
    }
}

#[test]
fn an_answer_waits_for_a_slot_or_for_room_whichever_comes_later() {
    let ask = demand(1_600.0, 0.0);
    let full = WorkerLoad { occupied: 73.0, rows: 64.0, kv_tokens: 1e5, ..idle() };
    // The step that runs: 20.12 ms. Ten of 64 slots' answers of 100 tokens, 20.168 ms each: 315.125 ms.
    close(estimate(&full, &nobody(), &ask).queue_ms, 335.245);
    close(estimate(&full, &nobody(), &ask).decode_ms, 1_996.632); // 99 of them
    // half of the blocks in use: half of half an answer, 504.2 ms; a tenth of them: 100.84 ms
    for (used, queue_ms) in [(200.0, 524.32), (1_000.0, 335.245)] {
        let full = WorkerLoad { blocks_used: used, blocks: used, ..full };
        close(estimate(&full, &nobody(), &ask).queue_ms, queue_ms);
    }
}

#[test]
fn an_answer_decodes_beside_all_whose_prompts_are_still_to_be_computed_or_to_come() {
    let busy = WorkerLoad {
        occupied: 10.0,
        rows: 4.0,
        kv_tokens: 1e5,
        backlog_tokens: 3_000.0,
        arriving_tokens: 500.0,
        ..idle()
    };
    // eleven rows that read 104,500 tokens: 12 + 0.88 + 3.135 ms, 99 times
    close(estimate(&busy, &nobody(), &demand(1_000.0, 0.0)).decode_ms, 1_585.485);
}

#[test]
fn a_backlog_that_does_not_run_yet_comes_after_what_is_left_of_the_step() {
    let busy = WorkerLoad {
        occupied: 2.0,
        rows: 1.0,
        backlog_tokens: 4_095.0,
        backlog_context: context(0.0, 4_095.0),
        elapsed_ms: 5.0,
        ..idle()
    };
    // a step with one row takes 12.08 ms
    let ahead_ms = steps_ms(0..4_095, 4_095, (1, 0, 0.0));
    close(estimate(&busy, &nobody(), &demand(100.0, 0.0)).queue_ms, 7.08 + ahead_ms);
    close(7.08 + ahead_ms, 240.674_93);
}

#[test]
fn whole_blocks_move_and_none_before_both_sides_have_room() {
    let leg = decode_leg(&idle(), &demand(1_000.0, 0.0));
    assert_eq!((leg.lacks_mib, leg.wait_ms), (63.0, 0.0));
    let source = Source { queue_ms: 10.0, ttft_ms: 20.0, last_tokens: 500.0 };
    let cost = TransferCost { latency_ms: 1.0, mib_ms: 2.0, failing: 0.0 };
    close(leg.transfer_ms(&source, &cost), 117.0);
    let full = DecodeLeg { wait_ms: 100.0, ..leg };
    close(full.transfer_ms(&source, &cost), 207.0);
}

#[test]
fn prompts_that_wait_are_no_rows_that_a_prompt_delays() {
    let prompt = QueuedPrompt { running: 0, left: 500, from: 0, prompts: 3, awaits: None };
    let queue = PromptQueue { prompts: vec![prompt], ..PromptQueue::default() };
    // what counts in full on a worker that generates and by a tenth on others
    let of_rows = |occupied: f64| {
        let load = WorkerLoad { occupied, ..idle() };
        let ask = demand(600.0, 0.0);
        let [decode, both] = [alone(&load, &queue, &ask), estimate(&load, &queue, &ask)];
        decode.interference_ms - both.interference_ms
    };
    assert_eq!(
        (of_rows(3.0), of_rows(1.0)),
        (0.0, 0.0),
        "not even where fewer requests are known of"
    );
    assert!(of_rows(4.0) > 1.0);
}

#[test]
fn at_least_a_token_is_computed_moved_and_answered() {
    let nothing = Demand { output_tokens: 0.0, ..demand(0.0, 0.0) };
    let cost = estimate(&idle(), &nobody(), &nothing);
    close(cost.prefill_ms, 12.05);
    assert_eq!(cost.decode_ms, 0.0);
    assert_eq!(decode_leg(&idle(), &nothing).lacks_tokens, 1.0);
    let without_a_budget = WorkerLoad { step_tokens: 0.0, ..idle() };
    assert_eq!(Source::new(&without_a_budget, &demand(100.0, 0.0), &cost).last_tokens, 1.0);
}

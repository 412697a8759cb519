//! Estimates mean what their names say.

use super::*;
use crate::core::cost::context;

const TRUE: StepCost =
    StepCost { fixed_ms: 12.0, prefill_ms: 0.05, context_ms: 2e-6, row_ms: 0.08, kv_ms: 3e-5 };

fn idle() -> WorkerLoad {
    WorkerLoad::idle(TRUE)
}

fn demand(prompt_tokens: f64, cached_tokens: f64) -> Demand {
    Demand { prompt_tokens, cached_tokens, output_tokens: 100.0, block_tokens: 16.0 }
}

#[test]
fn an_idle_worker_takes_its_prefill_in_whole_steps() {
    let estimate = estimate(&idle(), &demand(6000.0, 0.0));
    assert_eq!(estimate.queue_ms, 0.0);
    let expected = 2.0 * TRUE.fixed_ms + TRUE.prompt_ms(0.0, 6000.0);
    assert!((estimate.prefill_ms - expected).abs() < 1e-9);
    assert_eq!((estimate.transfer_ms, estimate.interference_ms), (0.0, 0.0));
}

#[test]
fn what_is_cached_is_not_computed_but_still_attended_to() {
    let warm = estimate(&idle(), &demand(6000.0, 5000.0)).prefill_ms;
    assert!((warm - (TRUE.fixed_ms + TRUE.prompt_ms(5000.0, 1000.0))).abs() < 1e-9);
    assert!(warm > estimate(&idle(), &demand(1000.0, 0.0)).prefill_ms);
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
    let (now, then) = (estimate(&busy, &demand(100.0, 0.0)), estimate(&later, &demand(100.0, 0.0)));
    assert!((now.queue_ms - then.queue_ms - 50.0).abs() < 1e-9);
    let overdue = WorkerLoad { elapsed_ms: 1e9, ..busy };
    assert_eq!(estimate(&overdue, &demand(100.0, 0.0)).queue_ms, 0.0);
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
    let (now, then) = (estimate(&busy, &demand(100.0, 0.0)), estimate(&hung, &demand(100.0, 0.0)));
    assert!((then.queue_ms - now.queue_ms * 2.0 / 3.0).abs() < 1e-6, "two of three steps are left");
}

#[test]
fn a_prompt_among_the_rows_of_a_worker_that_generates_delays_each_of_them_in_full() {
    let busy = WorkerLoad { occupied: 10.0, rows: 10.0, ..idle() };
    let (both, decode) =
        (estimate(&busy, &demand(6000.0, 0.0)), alone(&busy, &demand(6000.0, 0.0)));
    let delay_ms = 10.0 * TRUE.prompt_ms(0.0, 6000.0);
    assert!((decode.interference_ms - both.interference_ms - (1.0 - HARM) * delay_ms).abs() < 1e-6);
    assert_eq!((decode.ttft_ms(), decode.decode_ms), (both.ttft_ms(), both.decode_ms));
    let nobody = (estimate(&idle(), &demand(6000.0, 0.0)), alone(&idle(), &demand(6000.0, 0.0)));
    assert_eq!(nobody.0, nobody.1, "where nobody is delayed it is the same");
}

#[test]
fn accepted_drafts_shorten_decoding_and_a_slow_rank_lengthens_it() {
    let plain = estimate(&idle(), &demand(1000.0, 0.0)).decode_ms;
    let drafting = WorkerLoad { accepted: 2.0, ..idle() };
    assert!((estimate(&drafting, &demand(1000.0, 0.0)).decode_ms - plain / 2.0).abs() < 1e-9);
    let grouped = WorkerLoad { group_ms: 100.0, group_rows: 8.0, ..idle() };
    let grouped = estimate(&grouped, &demand(1000.0, 0.0));
    assert!((grouped.decode_ms - 99.0 * 100.0).abs() < 1e-9);
    assert!(grouped.interference_ms > 0.0, "the other ranks wait for this prefill, too");
}

#[test]
fn the_barrier_is_convex_and_out_of_the_way_of_a_pool_with_room() {
    let saturation = |used: f64| {
        estimate(&WorkerLoad { blocks_used: used, ..idle() }, &demand(160.0, 0.0)).saturation_ms
    };
    let service = {
        let estimate = estimate(&idle(), &demand(160.0, 0.0));
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
    let wait = |worker_load| estimate(&worker_load, &demand(100.0, 0.0)).queue_ms;
    assert!(wait(full) > wait(nearly) + 10.0);
}

#[test]
fn a_step_is_as_long_as_its_rows_make_it_or_as_the_slowest_rank_of_the_group() {
    let (rows, kv_tokens) = (10.0, 1e5);
    let around_ms = TRUE.fixed_ms + TRUE.row_ms * rows + TRUE.kv_ms * kv_tokens;
    for (group_ms, step_ms) in [(0.0, around_ms), (1.0, around_ms), (100.0, 100.0)] {
        let busy = WorkerLoad { occupied: rows, rows, kv_tokens, group_ms, ..idle() };
        let per_step = busy.step_tokens - rows;
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a}, {b} with {group_ms}");

        // the step that runs, and then its own two
        let short = demand(1.5 * per_step, 0.0);
        let elapsed = WorkerLoad { elapsed_ms: 2.0, ..busy };
        close(estimate(&elapsed, &short).queue_ms, step_ms - 2.0);
        let own_ms = TRUE.prompt_ms(0.0, 1.5 * per_step);
        close(estimate(&busy, &short).prefill_ms, 2.0 * step_ms + own_ms);

        // behind three steps of others
        let tokens = 3.0 * per_step;
        let backlog_context = context(0.0, tokens);
        let behind =
            WorkerLoad { backlog_tokens: tokens, backlog_context, backlog_runs: true, ..busy };
        let ahead_ms = TRUE.prefill_ms * tokens + TRUE.context_ms * backlog_context;
        close(estimate(&behind, &short).queue_ms, 3.0 * step_ms + ahead_ms);
    }
}

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-6 * expected.abs().max(1.0), "{got}, not {expected}");
}

/// The decode leg of a split request whose blocks are of 1 MiB.
fn decode_leg(worker_load: &WorkerLoad, demand: &Demand) -> DecodeLeg {
    DecodeLeg::new(worker_load, demand, f64::from(1 << 20), &alone(worker_load, demand))
}

#[test]
fn harm_is_what_a_request_adds_to_the_steps_of_all_who_are_there_and_of_those_to_come() {
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
    let own_ms = TRUE.prompt_ms(600.0, 1_000.0);
    let row_ms = (TRUE.row_ms + TRUE.kv_ms * 1_600.0) * 100.0 / 2.0;
    close(estimate(&busy, &ask).interference_ms, HARM * 15.0 * (own_ms + row_ms) + 3.0 * own_ms);
    close(alone(&busy, &ask).interference_ms, 15.0 * (own_ms + HARM * row_ms) + 3.0 * own_ms);
    let (prefill, leg) = (prefill_leg(&busy, &ask), decode_leg(&busy, &ask));
    close(prefill.interference_ms, (HARM * 5.0 + 3.0) * own_ms);
    close(leg.interference_ms, HARM * 15.0 * row_ms);
    close(leg.with(&prefill, 7.0).interference_ms, prefill.interference_ms + leg.interference_ms);
    close(leg.base_ms(), leg.decode_ms + leg.interference_ms + leg.saturation_ms);
}

#[test]
fn the_barrier_counts_all_blocks_that_a_request_will_fill_and_the_time_that_it_keeps_them() {
    let filling = WorkerLoad { blocks_used: 9_000.0, ..idle() };
    let ask = demand(1_600.0, 600.0);
    let saturation_ms = |tokens: f64, ms: f64| {
        let fill = (9_000.0 + tokens / 16.0) / 10_000.0;
        ms * fill.powi(8) / (1.0 - fill)
    };
    let whole = estimate(&filling, &ask);
    close(whole.saturation_ms, saturation_ms(1_100.0, whole.prefill_ms + whole.decode_ms));
    let (prefill, leg) = (prefill_leg(&filling, &ask), decode_leg(&filling, &ask));
    close(prefill.saturation_ms, saturation_ms(1_000.0, prefill.prefill_ms));
    close(leg.saturation_ms, saturation_ms(1_100.0, leg.decode_ms));
    close(leg.with(&prefill, 7.0).saturation_ms, prefill.saturation_ms + leg.saturation_ms);
}

#[test]
fn a_prompt_without_room_waits_until_the_blocks_that_it_lacks_are_given_back() {
    let (ask, tpot_ms) = (demand(1_600.0, 0.0), TRUE.fixed_ms + TRUE.row_ms + TRUE.kv_ms * 1_600.0);
    // 100 blocks where 10 are free: of those in use, 90 have to become free; at most all can
    for (used, blocks, share) in [(9_990.0, 10_000.0, 90.0 / 9_990.0), (10.0, 20.0, 1.0)] {
        let full = WorkerLoad { blocks_used: used, blocks, ..idle() };
        close(estimate(&full, &ask).queue_ms, share * 100.0 * tpot_ms / 2.0);
        let prefill = prefill_leg(&full, &ask);
        close(prefill.queue_ms, share * prefill.prefill_ms);
    }
}

#[test]
fn an_answer_waits_for_a_slot_or_for_room_whichever_comes_later() {
    let ask = demand(1_600.0, 0.0);
    let full = WorkerLoad { occupied: 73.0, rows: 64.0, kv_tokens: 1e5, ..idle() };
    let around_ms = TRUE.fixed_ms + TRUE.row_ms * 64.0 + TRUE.kv_ms * 1e5;
    let tpot_ms = around_ms + TRUE.kv_ms * 1_600.0;
    let slot_ms = 10.0 * 100.0 * tpot_ms / 64.0;
    close(estimate(&full, &ask).queue_ms, around_ms + slot_ms);
    close(estimate(&full, &ask).decode_ms, 99.0 * tpot_ms);
    for (used, room_ms) in [(200.0, 100.0 * tpot_ms / 4.0), (1_000.0, 10.0 * tpot_ms / 2.0)] {
        let full = WorkerLoad { blocks_used: used, blocks: used, ..full };
        close(estimate(&full, &ask).queue_ms, around_ms + slot_ms.max(room_ms));
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
    let kv_tokens = 1e5 + 3_000.0 + 500.0 + 1_000.0;
    let tpot_ms = TRUE.fixed_ms + TRUE.row_ms * 11.0 + TRUE.kv_ms * kv_tokens;
    close(estimate(&busy, &demand(1_000.0, 0.0)).decode_ms, 99.0 * tpot_ms);
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
    let around_ms = TRUE.fixed_ms + TRUE.row_ms;
    let ahead_ms = around_ms + TRUE.prompt_ms(0.0, 4_095.0);
    close(estimate(&busy, &demand(100.0, 0.0)).queue_ms, around_ms - 5.0 + ahead_ms);
}

#[test]
fn whole_blocks_move_and_none_before_both_sides_have_room() {
    let leg = decode_leg(&idle(), &demand(1_000.0, 0.0));
    assert_eq!((leg.lacks_mib, leg.wait_ms), (63.0, 0.0));
    let source = Source { queue_ms: 10.0, ttft_ms: 20.0, last_tokens: 500.0 };
    let cost = TransferCost { latency_ms: 1.0, mib_ms: 2.0, failing: 0.0 };
    close(leg.transfer_ms(&source, &cost), 1.0 + 10.0 + 126.0 - 20.0);
    let full = DecodeLeg { wait_ms: 100.0, ..leg };
    close(full.transfer_ms(&source, &cost), 1.0 + 100.0 + 126.0 - 20.0);
}

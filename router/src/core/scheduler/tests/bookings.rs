//! The life of a leg in figures: what is booked for it, what its tenant pays, and what it says of its worker.

use super::split::scheduler_of;
use super::*;

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9 * expected.abs().max(1.0), "{got}, not {expected}");
}

/// One that computes prompts and one that decodes, always split.
fn pair() -> Scheduler {
    scheduler_of(PolicyName::RoundRobin, &[Role::Prefill, Role::Decode])
}

#[test]
fn a_leg_pays_for_its_prompt_and_half_of_its_answer_as_long_as_it_was_there() {
    let mut scheduler = scheduler(1);
    for n in 1..=3 {
        scheduler.place(&want(n, &keys(n, 4, 0)), 1_000.0).unwrap();
    }
    let output = LegOutput { tokens: 10, complete: true };
    let ended = scheduler.end(RequestId(1), output, 3_000.0).unwrap();
    close(ended.block_seconds, 72.0 / 16.0 * 2.0); // 67 tokens and 5
    let ended = scheduler.end(RequestId(2), output, 500.0).unwrap();
    assert_eq!(ended.block_seconds, 0.0, "a clock that ran back");
    let ((), lost) = scheduler.leave(WorkerId(0), 3_000.0).unwrap();
    close(lost[0].block_seconds, 67.0 / 16.0 * 2.0);
}

#[test]
fn each_half_of_a_split_is_likely_to_hold_its_blocks_until_the_kv_is_moved_or_the_answer_written() {
    let mut scheduler = pair();
    let wanted = want(1, &keys(1, 100, 0));
    let placement = scheduler.place(&wanted, 0.0).unwrap();
    let (_, estimate) = placement.decision.chosen().unwrap();
    let prompt_s = (estimate.ttft_ms() + estimate.transfer_ms) / 1e3;
    let expected = |request| scheduler.legs[&request].expected_block_seconds;
    close(expected(wanted.prefill_request), 1603.0 / 16.0 * prompt_s);
    let answer_s = prompt_s + estimate.decode_ms / 1e3;
    close(expected(wanted.request), (1603.0 + 25.0) / 16.0 * answer_s);
}

#[test]
fn an_answer_of_less_than_two_tokens_has_one_step_for_the_rest() {
    let mut scheduler = scheduler(1);
    (0..1_000).for_each(|_| scheduler.demand.lengths.ended(0, 1));
    let placement = scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    assert!((1.1..1.9).contains(&placement.decision.ask.output_tokens));
    let decode_ms = placement.decision.chosen().unwrap().1.decode_ms;
    assert_eq!(scheduler.legs[&RequestId(1)].predicted_tpot_ms, decode_ms);
}

#[test]
fn an_answer_whose_prompt_is_computed_elsewhere_delays_no_prompt() {
    let mut scheduler = pair();
    scheduler.set_open(WorkerId(0), false);
    scheduler.place(&want(1, &keys(1, 300, 0)), 0.0).unwrap();
    scheduler.set_open(WorkerId(0), true);
    let split = scheduler.place(&want(2, &keys(2, 300, 0)), 0.0).unwrap();
    assert!(split.prefill.is_some());
    let begun = scheduler.begun(RequestId(1), 0, 500.0).unwrap();
    assert_eq!(begun.last_ttft_ms, begun.predicted_ttft_ms);
}

#[test]
fn whoever_counts_on_cached_blocks_delays_others_by_the_rest_alone() {
    let mut scheduler = scheduler(1);
    let delayed_by = |blocks_of: u64, scheduler: &mut Scheduler| {
        for (request, prompt) in [(1, 1), (2, 2), (3, blocks_of)] {
            scheduler.place(&want(request, &keys(prompt, 300, 0)), 100.0 * request as f64).unwrap();
        }
        let before = scheduler.legs[&RequestId(2)].delayed_ms;
        for n in 1..=3 {
            scheduler.end(RequestId(n), LegOutput::default(), 400.0).unwrap();
        }
        before
    };
    // the first prompt again, of which three tokens are left to compute, or another one
    let (same, other) = (delayed_by(1, &mut scheduler), delayed_by(3, &mut scheduler));
    assert!(other > 100.0 && same < 20.0, "{same} {other}");
}

#[test]
fn all_who_come_in_the_same_moment_settle_a_prediction() {
    let mut scheduler = scheduler(1);
    for n in 1..=3 {
        scheduler.place(&want(n, &keys(n, 300, 0)), n as f64).unwrap();
    }
    let first = scheduler.begun(RequestId(1), 0, 300.0).unwrap();
    let second = scheduler.begun(RequestId(2), 0, 301.0).unwrap();
    assert!(second.last_ttft_ms > second.predicted_ttft_ms);
    assert_eq!(first.settled_ttft_ms, first.last_ttft_ms);
    assert_eq!((first.ttft_ms, second.ttft_ms), (299.0, 299.0), "since their placements");
}

#[test]
fn a_prompt_whose_blocks_are_there_books_none() {
    // ten blocks are there; the last token is always computed
    for (prompt_tokens, news) in [(163, false), (176, false), (177, true)] {
        let mut scheduler = scheduler(1);
        let keys = keys(1, prompt_tokens / BLOCK, 0);
        assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys[..10]), None);
        scheduler.place(&PlacementRequest { prompt_tokens, ..want(1, &keys) }, 0.0).unwrap();
        assert_eq!(scheduler.legs[&RequestId(1)].booked, news, "{prompt_tokens} tokens");
    }
}

#[test]
fn what_comes_for_one_answer_is_not_lacking_for_the_next() {
    let mut scheduler = pair();
    for n in 1..=2 {
        scheduler.place(&want(n, &keys(n, 60, 58)), 0.0).unwrap();
    }
    // of the second prompt's 963 tokens 928 come with the first one; both answers are to have 50
    let used = scheduler.workers[1].worker_load(BLOCK, 0.0).blocks_used;
    close(used, (963.0 + 50.0 + 35.0 + 50.0) / 16.0);
    // who has to compute the prompt nevertheless does not count on them
    scheduler.alone(RequestId(2), 1.0);
    assert_eq!(scheduler.view(WorkerId(1)).unwrap().backlog_tokens, 963);
}

/// A worker's steps may say four times the work that it was given, and 8,192 tokens more.
fn was_given(scheduler: &Scheduler, id: usize, tokens: f64) -> bool {
    let absurd = |more: f64| {
        let mut claims = scheduler.workers[id].claims.clone();
        claims.work(4.0 * tokens + 8_192.0 + more, 0.0)
    };
    !absurd(0.0) && absurd(1.0)
}

#[test]
fn a_worker_was_given_what_it_did_not_find_in_its_cache_and_what_was_called_off() {
    let mut scheduler = scheduler(1);
    let asks = |scheduler: &mut Scheduler, n| {
        scheduler.place(&want(n, &keys(n, 10, 0)), 0.0).unwrap(); // 163 tokens
    };
    asks(&mut scheduler, 1);
    scheduler.begun(RequestId(1), 160, 1.0).unwrap();
    assert!(was_given(&scheduler, 0, 3.0));
    scheduler.end(RequestId(1), LegOutput::default(), 1.0).unwrap();
    assert!(was_given(&scheduler, 0, 3.0), "once");
    asks(&mut scheduler, 2);
    scheduler.end(RequestId(2), LegOutput::default(), 1.0).unwrap();
    assert!(was_given(&scheduler, 0, 166.0), "as much of it may have been done");
}

#[test]
fn only_answers_that_began_and_came_to_their_end_say_how_long_they_take() {
    let mut scheduler = scheduler(1);
    let outcome = |scheduler: &Scheduler| scheduler.workers[0].claims.outcome().unwrap();
    let complete = LegOutput { tokens: 11, complete: true };
    for n in 1..=3 {
        scheduler.place(&want(n, &keys(n, 4, 0)), 0.0).unwrap();
    }
    let leg = &scheduler.legs[&RequestId(1)];
    let (ttft_ms, tpot_ms) = (leg.predicted_ttft_ms, leg.predicted_tpot_ms);
    scheduler.begun(RequestId(1), 0, 100.0).unwrap();
    scheduler.end(RequestId(1), complete, 600.0).unwrap();
    let (predicted_ms, took_ms, requests) = outcome(&scheduler);
    close(predicted_ms, 0.98 * ttft_ms + 10.0 * tpot_ms); // ten tokens after the first
    close(took_ms, 0.98 * 100.0 + 500.0);
    close(requests, 1.98);
    let usual = scheduler.demand.lengths.usual();
    scheduler.begun(RequestId(2), 0, 100.0).unwrap();
    let begun = outcome(&scheduler);
    scheduler.end(RequestId(2), LegOutput { complete: false, ..complete }, 600.0).unwrap();
    assert_eq!(scheduler.demand.lengths.usual(), usual, "nor how long they are");
    scheduler.end(RequestId(3), complete, 600.0).unwrap();
    assert_eq!(outcome(&scheduler), begun);
}

#[test]
fn how_long_a_transfer_takes_says_nothing_of_the_worker_that_decodes() {
    let mut scheduler = pair();
    let wanted = want(1, &keys(1, 100, 0));
    scheduler.place(&wanted, 0.0).unwrap();
    scheduler.begun(wanted.prefill_request, 0, 200.0).unwrap();
    scheduler.begun(wanted.request, 0, 1e6).unwrap();
    let requests = [0, 1].map(|i| scheduler.workers[i].claims.outcome().unwrap().2);
    assert_eq!(requests, [1.0, 0.0]);
}

#[test]
fn who_computes_the_prompt_of_a_lost_worker_has_it_for_others_too() {
    let mut scheduler = pair();
    let keys = keys(1, 100, 0);
    scheduler.place(&want(1, &keys), 0.0).unwrap();
    scheduler.leave(WorkerId(0), 1.0).unwrap();
    let one_of_others = Load { running: 1, ..Load::default() };
    let _ = scheduler.step(WorkerId(1), &report(1, 0, one_of_others), Given::default(), 2.0);
    scheduler.alone(RequestId(1), 3.0);
    assert_eq!(scheduler.candidates_at(&want(2, &keys), 4.0).candidates[0].cached_tokens, 1_600);
    assert_eq!(scheduler.workers[0].occupied(), 2, "it is not among those that were reported");
    scheduler.end(RequestId(1), LegOutput::default(), 5.0).unwrap();
    assert_eq!(scheduler.workers[0].occupied(), 1);
}

#[test]
fn a_pull_is_from_the_later_one_of_two_links_with_a_name() {
    let mut scheduler = scheduler(3);
    scheduler.join(Joining { name: "w0".into(), ..joining(5) }, ());
    scheduler.transferred(WorkerId(1), "w0", 1 << 20, 5.0, 0.0);
    let inbound = &mut scheduler.workers[1].inbound;
    inbound.refresh(0.0);
    let known: Vec<WorkerId> = inbound.costs().known.iter().map(|(id, _)| *id).collect();
    assert_eq!(known, [WorkerId(5)]);
}

#[test]
fn waiting_prompts_take_those_who_are_there_for_them_so_long_as_full_steps_do() {
    let mut scheduler = pair();
    // 5 ms and 204.8 for a step of 2,048 tokens
    close(scheduler.prefill_ms(2_048), 209.8);
    scheduler.demand.uncached_share = 0.5;
    close(scheduler.prefill_ms(2_048), 104.9);
    join_as(&mut scheduler, 2, Role::Both);
    close(scheduler.prefill_ms(4_096), 104.9);
    scheduler.set_open(WorkerId(2), false);
    close(scheduler.prefill_ms(2_048), 104.9);
    scheduler.set_open(WorkerId(0), false);
    close(scheduler.prefill_ms(2_048), 104.9); // by the one that is there to decode
}

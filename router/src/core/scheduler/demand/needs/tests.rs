use proptest::prelude::*;

use super::*;

const COST: StepCost =
    StepCost { fixed_ms: 10.0, prefill_ms: 0.1, context_ms: 0.0, row_ms: 0.1, kv_ms: 0.0 };
/// 100 ms of prompts and 20 ms of rows.
const ASKED: ModelDemand = ModelDemand {
    per_s: 10.0,
    prompt_tokens: 1_000.0,
    computed_tokens: 1_000.0,
    spread: 1.0,
    output_tokens: 200.0,
};
const BOTH: MeanWorker = MeanWorker {
    cost: COST,
    accepted: 1.0,
    sequences: 1e9,
    batched_tokens: 500.0,
    kv_tokens: 1e12,
    prompt_share: 1.0,
    answers: true,
};
const NO_LIMITS: Targets = Targets { ttft_ms: None, tpot_ms: None };

fn close(value: f64, expected: f64) {
    assert!((value - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{value}, not {expected}");
}

fn needed(asked: &ModelDemand, machine: &MeanWorker, targets: Targets) -> (u32, Binding) {
    let needs = Needs::of(asked, machine, targets, 1);
    (needs.workers, needs.because)
}

#[test]
fn erlangs_formula_has_the_values_of_the_tables() {
    close(erlang_c(1, 0.5), 0.5);
    close(erlang_c(2, 1.0), 1.0 / 3.0);
    close(erlang_c(10, 8.0), 0.409_180_15);
    assert_eq!(erlang_c(3, 0.0), 0.0);
}

#[test]
fn a_forecast_is_what_the_head_of_the_file_says() {
    // of each ms of a worker 0.5 ms of prompts and 0.1 ms of rows
    let then = BOTH.forecast(&ModelDemand { per_s: 5.0, ..ASKED }, 1);
    close(then.utilisation, 0.6);
    close(then.tpot_ms, 10.0 / 0.4);
    let turn_ms = 100.0 / 0.9;
    let busy: f64 = 0.005 * turn_ms;
    let wait_ms = turn_ms * 0.5 / (1.0 - busy) * (busy / LATE).ln();
    close(then.queue_ms, wait_ms);
    close(then.ttft_ms, wait_ms + turn_ms + 25.0);
    close(then.sequences, 0.005 * (200.0 * 25.0 + turn_ms + 25.0));
    // rows read the KV of the prompt and of half of the answer, and get two tokens a step
    let machine = MeanWorker { accepted: 2.0, cost: StepCost { kv_ms: 1e-3, ..COST }, ..BOTH };
    let then = machine.forecast(&ModelDemand { per_s: 1.0, ..ASKED }, 1);
    close(then.utilisation, 0.1 + 0.1 * (0.1 + 1.1));
    close(then.tpot_ms, 10.0 / (1.0 - 0.22) / 2.0);
    // no step is shorter than that of one row
    close(machine.forecast(&ModelDemand { per_s: 0.0, ..ASKED }, 1).tpot_ms, (10.0 + 1.2) / 2.0);
}

#[test]
fn workers_that_only_compute_prompts_pay_for_each_of_their_steps() {
    let prefill = MeanWorker { answers: false, ..BOTH };
    let then = prefill.forecast(&ModelDemand { per_s: 5.0, ..ASKED }, 1);
    close(then.utilisation, 0.005 * 120.0);
    assert_eq!((then.tpot_ms, then.ttft_ms), (0.0, then.queue_ms + 120.0));
    let short = ModelDemand { computed_tokens: 10.0, per_s: 0.0, ..ASKED };
    close(prefill.forecast(&short, 1).ttft_ms, 1.0 + 10.0);
    // a third of the prompts are computed here
    let third = MeanWorker { prompt_share: 1.0 / 3.0, ..prefill };
    close(third.forecast(&ASKED, 1).utilisation, 0.4);
    let as_many = prefill.forecast(&ModelDemand { per_s: 10.0 / 3.0, ..ASKED }, 1);
    close(third.forecast(&ASKED, 1).queue_ms, as_many.queue_ms);
    // what is cached is read, and not computed
    let reads = MeanWorker { cost: StepCost { context_ms: 1e-3, ..COST }, ..prefill };
    let cached = ModelDemand { computed_tokens: 500.0, per_s: 0.0, ..ASKED };
    close(reads.forecast(&cached, 1).ttft_ms, 50.0 + 10.0 + 1e-3 * 500.0 * (500.0 + 249.5));
}

#[test]
fn each_bound_is_the_one_that_binds() {
    assert_eq!(needed(&ModelDemand { per_s: 0.0, ..ASKED }, &BOTH, NO_LIMITS), (1, Binding::One));
    // 1.2 workers' worth of work, 85 % of the time
    assert_eq!(needed(&ASKED, &BOTH, NO_LIMITS), (2, Binding::Busy));
    assert_eq!(
        needed(&ModelDemand { per_s: 141.0, ..ASKED }, &BOTH, NO_LIMITS),
        (20, Binding::Busy)
    );
    // steps of 10 / (1 - u) ms: u = 1/2 at 20 ms
    let tpot = Targets { tpot_ms: Some(20.0), ..NO_LIMITS };
    assert_eq!(needed(&ASKED, &BOTH, tpot), (3, Binding::TokenTime));
    // an idle worker takes 110 ms and more: little may wait
    let ttft = |ms| Targets { ttft_ms: Some(ms), ..NO_LIMITS };
    let (few, many) = (needed(&ASKED, &BOTH, ttft(200.0)), needed(&ASKED, &BOTH, ttft(118.0)));
    assert_eq!((few.1, many.1), (Binding::FirstToken, Binding::FirstToken));
    assert!(2 < few.0 && few.0 < many.0 && many.0 < 8, "{few:?} {many:?}");
    let places = MeanWorker { sequences: 5.0, ..BOTH };
    assert_eq!(needed(&ASKED, &places, NO_LIMITS).1, Binding::Sequences);
    // nine tenths of the blocks, for prompts and halves of answers
    let held = BOTH.forecast(&ASKED, 5).sequences * 1_100.0;
    for (share, workers) in [(1.001, 5), (0.999, 6)] {
        let room = MeanWorker { kv_tokens: share * held / 0.9, ..BOTH };
        assert_eq!(needed(&ASKED, &room, NO_LIMITS), (workers, Binding::KvRoom));
    }
    // whoever computes prompts alone keeps them for a moment
    let prefill = MeanWorker { answers: false, sequences: 0.0, kv_tokens: 0.0, ..BOTH };
    assert_eq!(needed(&ASKED, &prefill, NO_LIMITS), (2, Binding::Busy));
}

#[test]
fn without_a_limit_nine_in_ten_wait_no_longer_than_a_prompt_takes_or_a_second() {
    // prompts of four seconds, half of the fleet's time, lengths far apart
    let long = ModelDemand { per_s: 0.2, prompt_tokens: 4e4, computed_tokens: 4e4, ..ASKED };
    let mixed = ModelDemand { spread: 20.0, ..long };
    let (alike, apart) = (needed(&long, &BOTH, NO_LIMITS), needed(&mixed, &BOTH, NO_LIMITS));
    assert_eq!(apart.1, Binding::FirstToken);
    assert!(alike.0 < apart.0, "{alike:?} {apart:?}");
    let idle = BOTH.forecast(&ModelDemand { per_s: 0.0, ..mixed }, 1);
    assert!(BOTH.forecast(&mixed, apart.0 as usize).queue_ms <= idle.ttft_ms);
    assert!(BOTH.forecast(&mixed, apart.0 as usize - 1).queue_ms > idle.ttft_ms);
}

#[test]
fn a_limit_that_no_worker_keeps_is_named_and_does_not_ask_for_all_of_them() {
    let targets = Targets { ttft_ms: Some(109.0), tpot_ms: Some(10.05) };
    let needs = Needs::of(&ASKED, &BOTH, targets, 2);
    assert!(needs.ttft_out_of_reach && needs.tpot_out_of_reach);
    assert_eq!((needs.workers, needs.because), (2, Binding::Busy));
    let targets = Targets { ttft_ms: Some(111.0), tpot_ms: Some(10.15) };
    let needs = Needs::of(&ASKED, &BOTH, targets, 2);
    assert!(!needs.ttft_out_of_reach && !needs.tpot_out_of_reach);
}

#[test]
fn what_there_is_now_is_told_whatever_is_needed() {
    let needs = Needs::of(&ASKED, &BOTH, NO_LIMITS, 1);
    let now = needs.now.expect("there is a worker");
    assert_eq!((now.utilisation, now.queue_ms), (1.0, f64::INFINITY));
    assert_eq!(Needs::of(&ASKED, &BOTH, NO_LIMITS, 0).now, None);
    let four = Needs::of(&ASKED, &BOTH, NO_LIMITS, 4).now.expect("there are workers");
    assert_eq!(four, BOTH.forecast(&ASKED, 4));
}

#[test]
fn no_fleet_is_larger_than_the_largest() {
    let flood = ModelDemand { per_s: 1e12, ..ASKED };
    assert_eq!(needed(&flood, &BOTH, NO_LIMITS).0 as usize, MOST_WORKERS);
    let nothing = ModelDemand {
        per_s: 0.0,
        prompt_tokens: 0.0,
        computed_tokens: 0.0,
        spread: 1.0,
        output_tokens: 0.0,
    };
    assert_eq!(needed(&nothing, &BOTH, NO_LIMITS), (1, Binding::One));
    let free =
        StepCost { fixed_ms: 0.0, prefill_ms: 0.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0 };
    let limits = Targets { ttft_ms: Some(1.0), tpot_ms: Some(1.0) };
    assert_eq!(needed(&flood, &MeanWorker { cost: free, ..BOTH }, limits), (1, Binding::One));
}

proptest! {
    #[test]
    fn more_work_or_slower_workers_never_take_fewer(
        per_s in 0.0..200.0f64, more in 1.0..3.0f64, prompt in 1.0..20_000.0f64, cached in 0.0..1.0f64,
        output in 1.0..2_000.0f64, spread in 1.0..10.0f64, ttft in 50.0..20_000.0f64, tpot in 5.0..200.0f64,
        answers in any::<bool>(), which in 0..4usize,
    ) {
        let asked = ModelDemand { per_s, prompt_tokens: prompt, computed_tokens: prompt * cached, spread, output_tokens: output };
        let machine = MeanWorker { answers, sequences: 256.0, kv_tokens: 1e6, cost: StepCost { kv_ms: 1e-5, context_ms: 1e-7, ..COST }, ..BOTH };
        // out of reach is another question, with another answer
        let targets = Targets { ttft_ms: Some(ttft), tpot_ms: Some(tpot) };
        let reached = |needs: &Needs| (needs.ttft_out_of_reach, needs.tpot_out_of_reach);
        let before = Needs::of(&asked, &machine, targets, 1);
        let (mut asked, mut machine) = (asked, machine);
        match which {
            0 => asked.per_s *= more,
            1 => machine.cost.row_ms *= more,
            2 => machine.cost.prefill_ms *= more,
            _ => machine.cost.fixed_ms *= more,
        }
        let after = Needs::of(&asked, &machine, targets, 1);
        prop_assume!(reached(&before) == reached(&after));
        prop_assert!(after.workers >= before.workers, "{:?} {:?}", before, after);
    }
}

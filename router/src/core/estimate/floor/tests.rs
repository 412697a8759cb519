use proptest::prelude::*;

use super::super::{DecodeLeg, Demand, PromptQueue, QueuedPrompt, of_role};
use super::*;
use crate::core::frame::{QueueRule, StepCost};

/// A worker in some state, and its queue.
#[derive(Debug, Clone)]
struct State {
    role: Role,
    worker_load: WorkerLoad,
    queue: PromptQueue,
    began_ms: f64,
}

const NOW_MS: f64 = 50_000.0;

fn prompt() -> impl Strategy<Value = QueuedPrompt> {
    (0..500_u32, 0..5_000_u32, 0..3_000_u32, 1..3_u32).prop_map(|(running, left, from, prompts)| {
        QueuedPrompt { running, left, from, prompts, awaits: None }
    })
}

fn state() -> impl Strategy<Value = State> {
    let role = prop::sample::select(vec![Role::Both, Role::Decode, Role::Prefill]);
    let cost = (0.0..20.0, 0.001..0.5, 0.0..1e-4, 0.0..0.5, 0.0..1e-4).prop_map(
        |(fixed_ms, prefill_ms, context_ms, row_ms, kv_ms)| StepCost {
            fixed_ms,
            prefill_ms,
            context_ms,
            row_ms,
            kv_ms,
        },
    );
    let rows = (0..20_u32, 0..5_u32, 1..24_u32, 0..40_000_u32, 0..3_000_u32);
    let pool = (0..1_000_u32, 0..1_000_u32, 0.0..0.9, 1.0..3.0, 0.0..2.0);
    let rule = prop::sample::select(vec![QueueRule::Fifo, QueueRule::Halves]);
    let queue = prop_oneof![Just(vec![]), prop::collection::vec(prompt(), 1..4)];
    let room_ms = prop::option::weighted(0.2, 0.0..500.0);
    let moment = (0.0..60.0, any::<bool>(), 0.0..3_000.0);
    (role, cost, rows, pool, (rule, queue, room_ms), moment).prop_map(
        |(role, cost, rows, pool, (rule, prompts, room_ms), (ago_ms, backlog_runs, foreign))| {
            let (rows, more, slots, kv_tokens, arriving) = rows;
            let (used, cached, reuse, accepted, pressure) = pool;
            let waiting: u32 = prompts.iter().map(|prompt: &QueuedPrompt| prompt.prompts).sum();
            let tokens: u32 = prompts.iter().map(|prompt| prompt.left + prompt.running).sum();
            let queue = PromptQueue { rule, prompts, awaits: None, room_ms };
            let occupied = f64::from(rows + waiting + more);
            let began_ms = NOW_MS - ago_ms;
            let mut worker_load = WorkerLoad {
                step_tokens: 2_048.0,
                slots: slots.into(),
                occupied,
                rows: rows.into(),
                kv_tokens: kv_tokens.into(),
                // where no prompt is known, somebody else's may be
                backlog_tokens: if waiting == 0 && ago_ms > 40.0 { foreign } else { tokens.into() },
                arriving_tokens: arriving.into(),
                backlog_runs,
                blocks_used: used.into(),
                blocks: 1_000.0,
                blocks_cached: cached.min(1_000 - used).into(),
                reuse,
                accepted,
                pressure,
                ..WorkerLoad::idle(cost)
            };
            worker_load.elapsed_ms = worker_load.elapsed_ms(began_ms, NOW_MS);
            State { role, worker_load, queue, began_ms }
        },
    )
}

fn demand() -> impl Strategy<Value = Demand> {
    (1..4_000_u32, 0.0..1.0_f64, 0.0..600.0).prop_map(|(prompt_tokens, cached, output_tokens)| {
        Demand {
            prompt_tokens: prompt_tokens.into(),
            cached_tokens: (f64::from(prompt_tokens - 1) * cached).floor(),
            output_tokens,
            block_tokens: 16.0,
        }
    })
}

fn floors(states: &[State], demand: &Demand, pressure: [f64; 2], reuse: f64) -> CostFloors {
    let mut table = FloorTable::default();
    for (place, state) in states.iter().enumerate() {
        table.set(
            place,
            &WorkerStanding {
                role: state.role,
                worker_load: &state.worker_load,
                began_ms: state.began_ms,
                has_queue: !state.queue.prompts.is_empty(),
                waiting: state.queue.waiting(),
                in_group: false,
            },
        );
    }
    let asked = FloorsAsked {
        prompt_tokens: demand.prompt_tokens,
        output_tokens: demand.output_tokens,
        block_tokens: demand.block_tokens,
        pressure,
        reuse,
        now_ms: NOW_MS,
        splits: true,
    };
    let (mut floors, mut has) = (CostFloors::default(), TokensThere::default());
    for (cached, with_coming) in has.of_all(states.len()) {
        (*cached, *with_coming) = (demand.cached_tokens, demand.cached_tokens);
    }
    table.floors(&asked, &has, &mut floors);
    floors
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// And where nothing waits there, there is room and prompts take one step, it is the estimate.
    #[test]
    fn no_floor_is_above_its_estimate(
        mut states in prop::collection::vec(state(), 1..10),
        demand in demand(),
        pressure in prop::array::uniform2(0.0..3.0),
        reuse in 0.0..1.0,
    ) {
        for state in &mut states {
            state.worker_load.pressure = pressure[usize::from(state.role != Role::Prefill)];
            state.worker_load.reuse = reuse;
        }
        let floors = floors(&states, &demand, pressure, reuse);
        prop_assert!(!floors.has_nonsense());
        for (place, State { role, worker_load, queue, .. }) in states.iter().enumerate() {
            let [total_ms, ttft_ms] = [floors.total_ms(place), floors.ttft_ms(place)];
            let leg_ms = floors.decode_leg_ms(place);
            let estimate = of_role(*role, worker_load, queue, &demand);
            prop_assert!(total_ms <= estimate.total_ms(), "{total_ms} {estimate:?}");
            prop_assert!(ttft_ms <= estimate.ttft_ms(), "{ttft_ms} {estimate:?}");
            let leg = DecodeLeg::new(worker_load, queue, &demand, 0.0, &estimate);
            let decodes = *role != Role::Prefill;
            if decodes {
                prop_assert!(leg_ms <= leg.base_ms(), "{leg_ms} {leg:?}");
            }
            let uncached = demand.prompt_tokens - demand.cached_tokens;
            let one_step = uncached <= worker_load.step_tokens - worker_load.rows;
            let fits = demand.prompt_tokens / 16.0 + worker_load.blocks_used <= worker_load.blocks;
            let alone = queue.is_empty() && worker_load.backlog_tokens == 0.0;
            let close = |floor_ms: f64, ms: f64| floor_ms >= ms * (1.0 - 1e-8);
            if alone && one_step && fits && worker_load.occupied < worker_load.slots {
                prop_assert!(close(total_ms, estimate.total_ms()), "{total_ms} {estimate:?}");
                prop_assert!(close(ttft_ms, estimate.ttft_ms()), "{ttft_ms} {estimate:?}");
                prop_assert!(!decodes || close(leg_ms, leg.base_ms()), "{leg_ms} {leg:?}");
            }
        }
    }
}

#[test]
fn nobody_is_told_apart_by_what_no_replay_comes_to_the_end_of() {
    let cost =
        StepCost { fixed_ms: 1.0, prefill_ms: 1.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0 };
    let of = |backlog_tokens: f64, in_group: bool, row_ms: f64| {
        let cost = StepCost { row_ms, ..cost };
        let worker_load = WorkerLoad { backlog_tokens, ..WorkerLoad::idle(cost) };
        let (role, began_ms, has_queue, waiting) = (Role::Both, 0.0, true, 1.0);
        let worker_load = &worker_load;
        WorkerStanding { role, worker_load, began_ms, has_queue, waiting, in_group }.terms()
    };
    let nothing = [0.0; TERMS];
    assert_ne!(of(500_000.0, false, 0.0), nothing);
    assert_eq!(of(500_001.0, false, 0.0), nothing);
    assert_eq!(of(0.0, true, 0.0), nothing, "others make its steps longer");
    assert_eq!(of(0.0, false, f64::NAN), nothing);
}

#[test]
fn a_cost_that_is_no_number_is_seen_wherever_it_is() {
    let cost =
        StepCost { fixed_ms: 1.0, prefill_ms: 1.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.1 };
    let with = |kv_tokens: f64| State {
        role: Role::Both,
        worker_load: WorkerLoad { kv_tokens, ..WorkerLoad::idle(cost) },
        queue: PromptQueue::default(),
        began_ms: 0.0,
    };
    let demand =
        Demand { prompt_tokens: 9.0, cached_tokens: 0.0, output_tokens: 9.0, block_tokens: 16.0 };
    let of = |states: &[State]| floors(states, &demand, [0.0; 2], 0.0);
    let sane: Vec<State> = (0..LANES + 1).map(|_| with(1.0)).collect();
    for place in 0..sane.len() {
        let mut states = sane.clone();
        states[place] = with(f64::NAN);
        assert!(of(&states).has_nonsense(), "{place}");
    }
    let mut floors = of(&sane);
    assert!(!floors.has_nonsense());
    floors.raise(3, &Estimate { decode_ms: f64::NAN, ..Estimate::default() });
    assert!(floors.has_nonsense());
}

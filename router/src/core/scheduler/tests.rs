//! The scheduler's book-keeping: what is booked is given back, what is promised is checked, what is announced is counted.

mod apply;
mod claims;
mod credit;
mod split;

use proptest::prelude::*;

use super::*;
use crate::core::candidate::{Candidate, Exclusion};
use crate::core::cost::StepFeatures;
use crate::core::decision::NoPlace;
use crate::core::frame::Load;

const BLOCK: u32 = 16;
const COST: StepCost =
    StepCost { fixed_ms: 5.0, prefill_ms: 0.1, context_ms: 0.0, row_ms: 0.1, kv_ms: 1e-5 };

fn capacity() -> Capacity {
    Capacity {
        blocks: 1000,
        sequences: 8,
        batched_tokens: 2048,
        waiting: 8,
        host_blocks: 100,
        disk_blocks: 0,
    }
}

fn scheduler(workers: u32) -> Scheduler {
    let rules = RoutingRules {
        policy: PolicyName::Kv,
        shadow: Some(PolicyName::RoundRobin),
        worker_queue_ms: 1e6,
        seed: 7,
    };
    let mut scheduler = Scheduler::new(rules, BLOCK);
    for id in 0..workers {
        join(&mut scheduler, id);
    }
    scheduler
}

fn join(scheduler: &mut Scheduler, id: u32) {
    join_as(scheduler, id, Role::Both);
}

fn join_as(scheduler: &mut Scheduler, id: u32, role: Role) {
    join_with(scheduler, id, role, capacity());
}

fn join_with(scheduler: &mut Scheduler, id: u32, role: Role, capacity: Capacity) {
    scheduler.join(
        Joining {
            id: WorkerId(id),
            name: format!("w{id}").into(),
            role,
            kv_block_bytes: 4 << 20,
            index_room: capacity.tiers(),
            capacity,
            group: None,
            step_prior: Some(COST),
        },
        (),
    );
    scheduler.snapshot_begins(WorkerId(id));
    scheduler.snapshot_complete(WorkerId(id));
    scheduler.set_open(WorkerId(id), true);
}

/// One that says this of its speed.
fn join_unknown(scheduler: &mut Scheduler, id: u32, step_prior: Option<StepCost>) {
    scheduler.join(
        Joining {
            id: WorkerId(id),
            name: format!("w{id}").into(),
            role: Role::Both,
            kv_block_bytes: 0,
            index_room: capacity().tiers(),
            capacity: capacity(),
            group: None,
            step_prior,
        },
        (),
    );
    scheduler.set_open(WorkerId(id), true);
}

/// Keys of prompt `n`; the first `shared` blocks are those of all prompts.
fn keys(n: u64, blocks: u32, shared: u32) -> Arc<[u64]> {
    let key = |i: u32| if i < shared { u64::from(i) } else { (n << 32) | u64::from(i) };
    (0..blocks).map(|i| (key(i) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

fn want(request: u64, keys: &Arc<[u64]>) -> PlacementRequest {
    PlacementRequest {
        request: RequestId(request),
        prefill_request: RequestId(u64::MAX - request),
        name: format!("request-{request}"),
        prompt_tokens: u32::try_from(keys.len()).unwrap() * BLOCK + 3,
        max_tokens: 50,
        keys: Arc::clone(keys),
        reuses: true,
        session: None,
        tenant: 0,
        priority: 0,
        yields: false,
        deadline_ms: None,
        excluded: Vec::new(),
        resumes: false,
    }
}

fn report(number: u64, prefill_tokens: u32, load: Load) -> Step {
    let ms = COST.fixed_ms + COST.prefill_ms * f64::from(prefill_tokens);
    Step {
        step: number,
        ms,
        prefill_tokens,
        prefill_context: 0,
        decode_rows: 0,
        kv_tokens: 0,
        waiting_tokens: 0,
        drafted: 0,
        accepted: 0,
        load,
        outputs: Vec::new(),
    }
}

fn chosen(placement: &Placement) -> &Candidate {
    placement.decision.chosen().unwrap().0
}

#[test]
fn what_a_worker_announced_is_counted_on_but_never_the_last_token() {
    let mut scheduler = scheduler(3);
    let keys = keys(1, 10, 0);
    assert_eq!(scheduler.stored(WorkerId(1), Tier::Device, &keys), None);
    let mut want = want(1, &keys);
    let placement = scheduler.place(&want, 0.0).unwrap();
    assert_eq!((placement.worker, chosen(&placement).held_tokens), (WorkerId(1), 160));
    want.request = RequestId(2);
    want.prompt_tokens = 160; // the last block holds the last token
    let placement = scheduler.place(&want, 0.0).unwrap();
    assert_eq!(chosen(&placement).held_tokens, 144);
}

#[test]
fn a_burst_with_one_prefix_stays_together_before_anything_is_stored() {
    let mut scheduler = scheduler(4);
    let first = scheduler.place(&want(1, &keys(1, 60, 58)), 0.0).unwrap().worker;
    for n in 2..5 {
        let placement = scheduler.place(&want(n, &keys(n, 60, 58)), 80.0).unwrap();
        assert_eq!(placement.worker, first);
        assert_eq!((chosen(&placement).held_tokens, chosen(&placement).cached_tokens), (0, 928));
    }
}

#[test]
fn a_prediction_ends_with_its_leg_and_what_the_worker_announced_stays() {
    let mut scheduler = scheduler(2);
    let keys = keys(1, 20, 0);
    let worker = scheduler.place(&want(1, &keys), 0.0).unwrap().worker;
    let cached = |scheduler: &mut Scheduler, request| {
        let placement = scheduler.place(&want(request, &keys), 0.0).unwrap();
        scheduler.end(placement.request, LegOutput::default(), 0.0).unwrap();
        let candidates = &placement.decision.candidates;
        candidates.iter().find(|c| c.id == worker).unwrap().cached_tokens
    };
    assert_eq!(cached(&mut scheduler, 2), 320);
    scheduler.end(RequestId(1), LegOutput::default(), 1.0).unwrap();
    assert_eq!(cached(&mut scheduler, 3), 0, "rolled back");
    let worker_now = scheduler.place(&want(4, &keys), 0.0).unwrap().worker;
    assert_eq!(scheduler.stored(worker_now, Tier::Device, &keys), None);
    assert!(scheduler.begun(RequestId(4), 0, 9.0).is_some());
    scheduler.end(RequestId(4), LegOutput { tokens: 7, complete: true }, 10.0).unwrap();
    let placement = scheduler.place(&want(5, &keys), 11.0).unwrap();
    assert_eq!((placement.worker, chosen(&placement).held_tokens), (worker_now, 320));
}

#[test]
fn a_prediction_lasts_as_long_as_one_of_its_legs() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 20, 0);
    let mut cached = |give_up: Option<u64>, request| {
        give_up.map(|leg| scheduler.end(RequestId(leg), LegOutput::default(), 0.0).unwrap());
        chosen(&scheduler.place(&want(request, &keys), 0.0).unwrap()).cached_tokens
    };
    assert_eq!([cached(None, 1), cached(None, 2)], [0, 320]);
    assert_eq!(cached(Some(1), 3), 320, "the second one computes it now");
    assert_eq!([cached(Some(2), 4), cached(Some(3), 5)], [320, 320]);
}

#[test]
fn a_lease_runs_out_when_the_first_token_is_overdue() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 20, 0);
    let placement = scheduler.place(&want(1, &keys), 0.0).unwrap();
    assert_eq!(scheduler.expire_leases(9_999.0), 0);
    assert_eq!(scheduler.expire_leases(10_000.0), 1);
    assert_eq!(scheduler.expire_leases(20_000.0), 0, "once");
    let again = scheduler.place(&want(2, &keys), 20_000.0).unwrap();
    assert_eq!(chosen(&again).cached_tokens, 0);
    scheduler.end(placement.request, LegOutput::default(), 20_001.0).unwrap();
    let third = scheduler.place(&want(3, &keys), 20_002.0).unwrap();
    assert_eq!(chosen(&third).cached_tokens, 320, "the second leg's own prediction is untouched");
}

#[test]
fn tiers_are_kept_apart_and_only_the_device_counts() {
    let mut scheduler = scheduler(1);
    let keys = keys(1, 20, 0);
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Host, &keys), None);
    assert_eq!(
        scheduler.stored(WorkerId(0), Tier::Disk, &keys),
        None,
        "not announced: passed over"
    );
    assert_eq!(scheduler.stored(WorkerId(0), Tier::Device, &keys[..5]), None);
    let placement = scheduler.place(&want(1, &keys), 0.0).unwrap();
    let candidate = chosen(&placement);
    assert_eq!((candidate.held_tokens, candidate.lower_tier_tokens), (80, 320));
    scheduler.cleared(WorkerId(0), Tier::Host);
    let placement = scheduler.place(&want(2, &keys), 0.0).unwrap();
    assert_eq!(chosen(&placement).lower_tier_tokens, 0);
    assert_eq!(chosen(&placement).held_tokens, 80);
}

#[test]
fn a_backlog_shrinks_with_the_steps_and_ends_with_the_first_token() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).unwrap();
    scheduler.place(&want(2, &keys(2, 100, 0)), 0.0).unwrap();
    let backlog = |scheduler: &Scheduler| scheduler.view(WorkerId(0)).unwrap().backlog_tokens;
    assert_eq!(backlog(&scheduler), 2 * 1603);
    let running = Load { running: 2, ..Load::default() };
    assert_eq!(
        scheduler.step(WorkerId(0), &report(1, 1000, running), Given::default(), 100.0),
        None
    );
    assert_eq!(backlog(&scheduler), 2 * 1603 - 1000);
    scheduler.begun(RequestId(1), 0, 160.0).unwrap();
    assert_eq!(backlog(&scheduler), 1603);
    scheduler.end(RequestId(2), LegOutput::default(), 170.0).unwrap();
    assert_eq!(backlog(&scheduler), 0);
}

#[test]
fn a_worker_with_too_long_a_queue_gets_no_more() {
    let rules =
        RoutingRules { policy: PolicyName::Kv, shadow: None, worker_queue_ms: 300.0, seed: 1 };
    let mut scheduler = Scheduler::new(rules, BLOCK);
    join(&mut scheduler, 0);
    assert!(scheduler.place(&want(1, &keys(1, 150, 0)), 0.0).is_ok());
    assert!(scheduler.place(&want(2, &keys(2, 100, 0)), 0.0).is_ok());
    let refused = scheduler.place(&want(3, &keys(3, 100, 0)), 0.0).unwrap_err();
    assert_eq!(refused.no_place(), NoPlace::AllFull);
    assert_eq!(refused.candidates[0].excluded, Some(Exclusion::Backlog));
    assert_eq!(scheduler.legs(), 2);
}

#[test]
fn ranks_of_a_group_cost_what_the_slowest_of_them_costs() {
    let mut scheduler = scheduler(0);
    for id in 0..3 {
        scheduler.join(
            Joining {
                id: WorkerId(id),
                name: format!("w{id}").into(),
                role: Role::Both,
                kv_block_bytes: 0,
                index_room: capacity().tiers(),
                capacity: capacity(),
                group: (id < 2).then(|| "ep".into()),
                step_prior: Some(COST),
            },
            (),
        );
        scheduler.snapshot_complete(WorkerId(id));
        scheduler.set_open(WorkerId(id), true);
    }
    let busy = Load { running: 7, ..Load::default() };
    let step = Step { kv_tokens: 10_000_000, decode_rows: 7, ms: 105.7, ..report(1, 0, busy) };
    let _ = scheduler.step(WorkerId(0), &step, Given::default(), 0.0);
    let placement = scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    assert_eq!(placement.worker, WorkerId(2), "rank 1 is idle, but waits for rank 0 at each step");
    let [_, rank, alone] = [0, 1, 2].map(|i| placement.decision.estimates[i]);
    assert!(rank.decode_ms > 5.0 * alone.decode_ms);
    assert!(rank.interference_ms > alone.interference_ms);
}

#[test]
fn a_rank_waits_for_the_slowest_of_the_others_in_whatever_order_they_joined() {
    // of each rank, by its rows: the longest step and all rows of the others
    let groups = |rows: [u32; 3]| {
        let mut scheduler = scheduler(0);
        for (id, running) in (0..).zip(rows) {
            scheduler.join(
                Joining {
                    id: WorkerId(id),
                    name: format!("w{id}").into(),
                    role: Role::Both,
                    kv_block_bytes: 0,
                    index_room: capacity().tiers(),
                    capacity: capacity(),
                    group: Some("ep".into()),
                    step_prior: Some(COST),
                },
                (),
            );
            scheduler.set_open(WorkerId(id), true);
            let load = Load { running, ..Load::default() };
            let kv_tokens = u64::from(running) * 1_000_000;
            let mut step = Step { decode_rows: running, kv_tokens, ..report(1, 0, load) };
            step.ms = COST.step_ms(&StepFeatures::of(&step));
            let _ = scheduler.step(WorkerId(id), &step, Given::default(), 0.0);
        }
        let placement = scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
        let of = |candidate: &Candidate| {
            (candidate.worker_load.group_ms, candidate.worker_load.group_rows)
        };
        let candidates = &placement.decision.candidates;
        let mut groups: Vec<_> = rows.into_iter().zip(candidates.iter().map(of)).collect();
        groups.sort_by_key(|(running, _)| *running);
        groups.into_iter().map(|(_, group)| group).collect::<Vec<_>>()
    };
    let [idle, some, most] = groups([7, 3, 1])[..] else { panic!("three ranks") };
    assert_eq!([idle.1, some.1, most.1], [10.0, 8.0, 4.0]);
    assert_eq!(idle.0, some.0, "both wait for the one with most rows");
    assert!(most.0 > 0.0 && most.0 < some.0, "which waits for {} ms, not {}", most.0, some.0);
    for rows in [[3, 7, 1], [1, 3, 7], [3, 1, 7], [7, 1, 3], [1, 7, 3]] {
        let [a, b, c] = groups(rows)[..] else { panic!("three ranks") };
        for (got, expected) in [(a, idle), (b, some), (c, most)] {
            assert!(
                (got.0 - expected.0).abs() < 1e-6 * expected.0,
                "{rows:?}: {got:?}, {expected:?}"
            );
            assert_eq!(got.1, expected.1, "{rows:?}");
        }
    }
}

#[test]
fn a_decision_sees_what_is_left_of_a_deadline_and_of_an_answer() {
    let mut scheduler = scheduler(1);
    let hurried =
        PlacementRequest { deadline_ms: Some(2_000.0), max_tokens: 3, ..want(1, &keys(1, 4, 0)) };
    let ask = scheduler.place(&hurried, 500.0).unwrap().decision.ask.clone();
    assert_eq!((ask.deadline_ms, ask.output_tokens), (Some(1_500.0), 3.0));
    assert_eq!(ask.block_bytes, 0, "nothing has to be moved where nobody only computes prompts");
}

#[test]
fn only_a_queue_of_prompts_is_a_long_queue_and_only_for_kv() {
    let with = |policy| {
        let rules = RoutingRules { policy, shadow: None, worker_queue_ms: 1.0, seed: 1 };
        let mut scheduler = Scheduler::new(rules, BLOCK);
        join_with(&mut scheduler, 0, Role::Both, Capacity { sequences: 1, ..capacity() });
        assert!(scheduler.place(&want(1, &keys(1, 100, 0)), 0.0).is_ok());
        scheduler
    };
    let mut kv = with(PolicyName::Kv);
    let second = want(2, &keys(2, 100, 0));
    let refused = kv.place(&second, 0.0).unwrap_err();
    assert_eq!(refused.candidates[0].excluded, Some(Exclusion::Backlog));
    assert!(with(PolicyName::LeastLoaded).place(&second, 0.0).is_ok());
    kv.begun(RequestId(1), 0, 200.0).unwrap();
    assert!(kv.place(&second, 200.0).is_ok(), "it waits for the row, and nowhere better");
}

/// Reports of steps that cost `times` what `COST` says.
fn teach(scheduler: &mut Scheduler, id: u32, times: f64, steps: std::ops::Range<u64>) {
    for number in steps {
        let (tokens, rows) = (37 * number % 2_000, number % 8);
        let mut step = report(number, u32::try_from(tokens).unwrap(), Load::default());
        step.decode_rows = u32::try_from(rows).unwrap();
        step.kv_tokens = rows * (100 + 91 * number % 3_000);
        step.ms = times * COST.step_ms(&StepFeatures::of(&step));
        let _ = scheduler.step(WorkerId(id), &step, Given::default(), 0.0);
    }
}

/// What a full step of prompts is thought to take, by what it takes.
fn believed(scheduler: &Scheduler, id: u32, times: f64) -> f64 {
    let features = StepFeatures { prefill_tokens: 2_048.0, ..StepFeatures::default() };
    let cost = scheduler.view(WorkerId(id)).unwrap().cost;
    cost.step_ms(&features) / (times * COST.step_ms(&features))
}

#[test]
fn a_guess_is_no_knowledge_of_peers_and_what_was_learnt_is() {
    let mut scheduler = scheduler(0);
    let joins = |scheduler: &mut Scheduler, id| {
        join_unknown(scheduler, id, None);
    };
    joins(&mut scheduler, 0);
    teach(&mut scheduler, 0, 0.01, 1..10);
    for id in 1..4 {
        joins(&mut scheduler, id); // nobody knows anything yet
        teach(&mut scheduler, id, 0.01, 1..200);
        let believed = believed(&scheduler, id, 0.01);
        assert!((0.95..1.05).contains(&believed), "worker {id}: {believed} of its own speed");
    }
    joins(&mut scheduler, 4);
    let believed = believed(&scheduler, 4, 0.01);
    assert!((0.9..1.1).contains(&believed), "it begins with what is known of others: {believed}");
}

#[test]
fn accepted_drafts_are_learnt() {
    let mut scheduler = scheduler(1);
    for n in 1..200 {
        let step =
            Step { decode_rows: 10, drafted: 20, accepted: 9, ..report(n, 0, Load::default()) };
        let _ = scheduler.step(WorkerId(0), &step, Given { rows: 10, tokens: 19 }, 0.0);
    }
    let accepted = scheduler.view(WorkerId(0)).unwrap().accepted;
    assert!((accepted - 1.9).abs() < 0.01, "{accepted}");
}

#[test]
fn answers_teach_how_long_answers_are() {
    let mut scheduler = scheduler(1);
    for n in 0..400 {
        let placement =
            scheduler.place(&PlacementRequest { max_tokens: 4000, ..want(n, &keys(n, 1, 0)) }, 0.0);
        let placement = placement.unwrap();
        if n == 399 {
            let expected = placement.decision.ask.output_tokens;
            assert!((expected - 40.0).abs() < 1.0, "{expected}");
        }
        scheduler.end(RequestId(n), LegOutput { tokens: 40, complete: true }, 1.0);
    }
}

#[test]
fn ten_thousand_workers_come_and_go_and_leave_nothing() {
    let mut scheduler = scheduler(0);
    let mut sizes = Vec::new();
    for id in 0..10_000 {
        join(&mut scheduler, id);
        let keys = keys(id.into(), 50, 0);
        assert_eq!(scheduler.stored(WorkerId(id), Tier::Device, &keys), None);
        scheduler.place(&want(id.into(), &keys), 0.0).unwrap();
        if id >= 20 {
            scheduler.leave(WorkerId(id - 20), 0.0);
        }
        sizes.push(scheduler.index_size().1);
    }
    assert!(scheduler.legs() <= 21);
    let most = |range: std::ops::Range<usize>| *sizes[range].iter().max().unwrap();
    assert!(
        most(5_000..10_000) <= 2 * most(100..5_000),
        "{} {}",
        most(5_000..10_000),
        most(100..5_000)
    );
}

#[test]
fn calls_about_nobody_change_nothing() {
    let mut scheduler = scheduler(1);
    let nobody = WorkerId(77);
    let keys = keys(1, 3, 0);
    assert_eq!(scheduler.stored(nobody, Tier::Device, &keys), None);
    assert_eq!(scheduler.removed(nobody, Tier::Device, &keys), 0);
    assert_eq!(
        scheduler.step(nobody, &report(1, 10, Load::default()), Given::default(), 0.0),
        None
    );
    scheduler.cleared(nobody, Tier::Device);
    assert!(scheduler.leave(nobody, 0.0).is_none());
    assert!(scheduler.begun(RequestId(9), 0, 0.0).is_none());
    assert!(scheduler.end(RequestId(9), LegOutput::default(), 0.0).is_none());
    assert_eq!(
        scheduler.removed(WorkerId(0), Tier::Device, &keys),
        3,
        "unknown blocks are counted"
    );
}

#[derive(Debug, Clone)]
enum Event {
    Place(u64, u32),
    Alone(usize),
    Transferred(u32, u32, bool),
    Begin(usize),
    End(usize),
    Store(u32, u64),
    Remove(u32, u64),
    Leave(u32),
    Resync(u32),
    Tick,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..6u64, 1..30u32).prop_map(|(n, blocks)| Event::Place(n, blocks)),
        3 => (0..100usize).prop_map(Event::Begin),
        1 => (0..100usize).prop_map(Event::Alone),
        1 => (0..5u32, 0..5u32, any::<bool>()).prop_map(|(to, from, well)| Event::Transferred(to, from, well)),
        3 => (0..100usize).prop_map(Event::End),
        2 => (0..4u32, 0..6u64).prop_map(|(w, n)| Event::Store(w, n)),
        2 => (0..4u32, 0..6u64).prop_map(|(w, n)| Event::Remove(w, n)),
        1 => (0..4u32).prop_map(Event::Leave),
        1 => (0..4u32).prop_map(Event::Resync),
        1 => Just(Event::Tick),
    ]
}

proptest! {
    /// Whatever happens in whatever order: once all legs ended, nothing is booked anywhere, and what counts as held is what
    /// was announced.
    #[test]
    fn nothing_stays_booked(
        events in proptest::collection::vec(event(), 1..120),
        roles in proptest::collection::vec(split::role(), 4),
        policy in proptest::sample::select(PolicyName::ALL.to_vec()),
    ) {
        let mut scheduler = split::scheduler_of(policy, &roles);
        let (mut open, mut now_ms, mut next) = (Vec::new(), 0.0, 0);
        for event in events {
            now_ms += 700.0;
            match event {
                Event::Place(n, blocks) => {
                    next += 1;
                    if let Ok(placement) = scheduler.place(&want(next, &keys(n, blocks, 3)), now_ms) {
                        open.push(placement.request);
                        open.extend(placement.prefill.map(|prefill| prefill.request));
                    }
                }
                Event::Alone(i) if !open.is_empty() => scheduler.alone(open[i % open.len()], now_ms),
                Event::Transferred(to, from, true) => {
                    scheduler.transferred(WorkerId(to), &format!("w{from}"), 1 << 20, 5.0, now_ms);
                }
                Event::Transferred(to, from, false) => {
                    scheduler.transfer_failed(WorkerId(to), &format!("w{from}"), now_ms);
                }
                Event::Begin(i) if !open.is_empty() => {
                    let _ = scheduler.begun(open[i % open.len()], 0, now_ms);
                }
                Event::End(i) if !open.is_empty() => {
                    let request = open.swap_remove(i % open.len());
                    scheduler.end(request, LegOutput { tokens: 5, complete: true }, now_ms);
                    prop_assert!(scheduler.end(request, LegOutput { tokens: 5, complete: true }, now_ms).is_none(), "twice");
                }
                Event::Begin(_) | Event::End(_) | Event::Alone(_) => {}
                Event::Store(worker, n) => {
                    let _ = scheduler.stored(WorkerId(worker), Tier::Device, &keys(n, 25, 3));
                }
                Event::Remove(worker, n) => {
                    scheduler.removed(WorkerId(worker), Tier::Device, &keys(n, 25, 3)[10..]);
                }
                Event::Leave(worker) => {
                    scheduler.leave(WorkerId(worker), now_ms);
                }
                Event::Resync(worker) => {
                    scheduler.withdraw(WorkerId(worker), Withdrawal::Lost);
                    scheduler.snapshot_begins(WorkerId(worker));
                    scheduler.snapshot_complete(WorkerId(worker));
                }
                Event::Tick => {
                    scheduler.expire_leases(now_ms);
                }
            }
        }
        for request in open {
            scheduler.end(request, LegOutput::default(), now_ms);
        }
        prop_assert_eq!(scheduler.legs(), 0);
        for worker in &scheduler.workers {
            prop_assert_eq!((worker.booked_requests, worker.booked_tokens), (0, 0));
            prop_assert_eq!((worker.backlog_tokens, worker.arriving_tokens, worker.pinned), (0, 0, 0));
            prop_assert_eq!(worker.worker_load(BLOCK, now_ms).blocks_used, 0.0);
            prop_assert_eq!(scheduler.holdings.booked(&worker.places), 0);
        }
    }
}

#[test]
fn a_busy_fleet_holds_work_dearer_than_an_idle_one() {
    let mut pressure = pressure::Pressure::default();
    assert_eq!(pressure.at(2, 0.0), 0.0);
    let mut now_ms = 0.0;
    while now_ms < 300_000.0 {
        now_ms += 100.0;
        pressure.computed(100.0, now_ms); // one of two workers is always at it
    }
    assert!((pressure.at(2, now_ms) - 1.0).abs() < 0.05, "{}", pressure.at(2, now_ms));
    assert!(pressure.at(1, now_ms) >= 8.9, "bounded");
    assert!(pressure.at(2, now_ms + 300_000.0) < 0.01, "it is forgotten");
}

#[test]
fn a_prompt_that_has_to_be_computed_is_promised_nothing() {
    let mut scheduler = scheduler(2);
    let keys = keys(1, 40, 0);
    assert_eq!(scheduler.stored(WorkerId(1), Tier::Device, &keys), None);
    for n in 0..10 {
        let placed =
            scheduler.place(&PlacementRequest { reuses: false, ..want(n, &keys) }, 0.0).unwrap();
        assert_eq!((chosen(&placed).held_tokens, chosen(&placed).cached_tokens), (0, 0));
        assert_eq!(scheduler.begun(RequestId(n), 0, 1.0).unwrap().withdrawn, None);
        scheduler.end(RequestId(n), LegOutput::default(), 1.0);
    }
}

#[test]
fn counters_that_ran_backwards_make_no_absurd_time() {
    let mut scheduler = scheduler(1);
    let load = Load { running: u32::MAX, waiting: u32::MAX, ..Load::default() };
    let broken = Step { waiting_tokens: u64::MAX, kv_tokens: u64::MAX, ..report(1, 0, load) };
    let _ = scheduler.step(WorkerId(0), &broken, Given::default(), 0.0);
    let soonest = scheduler.soonest_ms(&want(1, &keys(1, 4, 0)), 0.0);
    assert!(soonest.is_none_or(f64::is_finite), "{soonest:?}");
}

#[test]
fn an_idle_worker_is_not_held_to_what_it_read_last() {
    let mut scheduler = scheduler(2);
    let running = Load { running: 64, ..Load::default() };
    let heavy = Step { kv_tokens: 900_000, decode_rows: 64, ms: 20.0, ..report(1, 0, running) };
    let _ = scheduler.step(WorkerId(0), &heavy, Given::default(), 0.0);
    let _ = scheduler.step(
        WorkerId(0),
        &Step { load: Load::default(), ..heavy },
        Given::default(),
        1.0,
    );
    let placed = scheduler.place(&want(1, &keys(1, 4, 0)), 2.0).unwrap();
    let kv_tokens = placed.decision.candidates.iter().map(|c| c.worker_load.kv_tokens);
    assert_eq!(kv_tokens.collect::<Vec<_>>(), [0.0, 0.0]);
}

#[test]
fn a_lost_worker_returns_its_legs_with_what_they_got() {
    let mut scheduler = scheduler(1);
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    let ((), ended) = scheduler.leave(WorkerId(0), 0.0).unwrap();
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].block_seconds, 0.0);
    assert!(ended[0].expected_block_seconds > 0.0);
    assert_eq!(scheduler.legs(), 0);
}

#[test]
fn whoever_does_not_yield_finds_the_prompts_of_those_who_do_behind_its_own() {
    let mut scheduler = scheduler(1);
    let ask = |n: u64, yields: bool| PlacementRequest { yields, ..want(n, &keys(n, 4, 0)) };
    for n in 1..=7 {
        scheduler.place(&ask(n, n <= 6), 0.0).unwrap();
    }
    let both = |scheduler: &Scheduler| {
        let worker = &scheduler.workers[0];
        let all = worker.worker_load(BLOCK, 0.0);
        (all, worker.load_before_yielding(&all))
    };
    let (all, before) = both(&scheduler);
    assert_eq!((all.backlog_tokens, before.backlog_tokens), (7.0 * 67.0, 67.0));
    assert!((before.backlog_context - all.backlog_context / 7.0).abs() < 1e-6);
    // of eight batch rows those who yield keep four
    assert_eq!((all.slots, all.occupied, before.occupied), (8.0, 7.0, 5.0));
    for n in 1..=3 {
        scheduler.end(RequestId(n), LegOutput::default(), 1.0);
    }
    let (all, before) = both(&scheduler);
    assert_eq!((all.occupied, before.occupied), (4.0, 4.0));
    assert_eq!((all.backlog_tokens, before.backlog_tokens), (4.0 * 67.0, 67.0));
}

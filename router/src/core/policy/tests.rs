//! What holds for every policy, and what each of them promises.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::session_hash::load_bound;
use super::*;
use crate::core::candidate::{Ask, Exclusion, WorkerId, digest};
use crate::core::decision::{Chooser, Decision, NoPlace, decide};
use crate::core::estimate::WorkerLoad;
use crate::core::frame::{Role, StepCost};

const COST: StepCost =
    StepCost { fixed_ms: 5.0, prefill_ms: 0.1, context_ms: 1e-6, row_ms: 0.1, kv_ms: 1e-4 };

fn worker_load(occupied: u32, sequences: u32) -> WorkerLoad {
    WorkerLoad {
        step_tokens: 2048.0,
        slots: sequences.into(),
        occupied: occupied.into(),
        rows: occupied.into(),
        kv_tokens: f64::from(occupied) * 1000.0,
        ..WorkerLoad::idle(COST)
    }
}

fn worker(id: u32, occupied: u32) -> Candidate {
    Candidate {
        occupied,
        booked_tokens: u64::from(occupied) * 100,
        ..Candidate::with(id, Role::Both, worker_load(occupied, 64))
    }
}

fn fleet(n: u32) -> Vec<Candidate> {
    (0..n).map(|id| worker(id, 0)).collect()
}

fn ask(session: Option<&str>) -> Ask {
    Ask {
        prompt_tokens: 1000,
        max_tokens: 100,
        output_tokens: 100.0,
        block_tokens: 16,
        block_bytes: 0,
        session: session.map(digest),
        deadline_ms: None,
    }
}

fn chooser(policy: PolicyName) -> Chooser {
    Chooser::new(policy, 1)
}

fn choose(workers: &[Candidate], ask: Ask, chooser: &mut Chooser) -> Decision {
    decide("request".into(), 0.0, ask, workers.to_vec(), chooser, None)
}

/// Places `n` requests of sessions `0..` one after the other, without what that does to the load.
fn place(workers: &[Candidate], policy: PolicyName, n: usize) -> Vec<WorkerId> {
    let mut chooser = chooser(policy);
    let session = |i: usize| format!("session-{i}");
    (0..n).map(|i| choose(workers, ask(Some(&session(i))), &mut chooser).winner.unwrap()).collect()
}

/// The same, and each request stays.
fn fill(workers: &mut [Candidate], policy: PolicyName, n: usize) -> Vec<WorkerId> {
    let mut chooser = chooser(policy);
    let mut winners = Vec::new();
    for i in 0..n {
        let ask = ask(Some(&format!("session-{i}")));
        let winner = choose(workers, ask, &mut chooser).winner.unwrap();
        let chosen = workers.iter_mut().find(|worker| worker.id == winner).unwrap();
        chosen.occupied += 1;
        chosen.booked_tokens += 100;
        chosen.worker_load = worker_load(chosen.occupied, chosen.sequences);
        winners.push(winner);
    }
    winners
}

fn any_policy() -> impl Strategy<Value = PolicyName> {
    proptest::sample::select(PolicyName::ALL.to_vec())
}

/// Workers in any state.
fn any_fleet() -> impl Strategy<Value = Vec<Candidate>> {
    let excluded = proptest::option::of(proptest::sample::select(vec![
        Exclusion::Closed,
        Exclusion::Failed,
        Exclusion::Full,
        Exclusion::Backlog,
    ]));
    let state = (excluded, 0..70u32, 0..63u32, 0..50_000u32);
    proptest::collection::vec(state, 0..12).prop_map(|states| {
        (0..)
            .zip(states)
            .map(|(id, (excluded, occupied, cached, backlog))| {
                let mut worker = worker(id, occupied);
                worker.excluded = excluded;
                worker.cached_tokens = cached * 16;
                worker.worker_load.backlog_tokens = backlog.into();
                worker
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn only_workers_that_are_not_excluded_are_chosen(
        workers in any_fleet(),
        policy in any_policy(),
        session in "[a-c]?",
        deadline_ms in proptest::option::of(0.0..1e4f64),
    ) {
        let session = (!session.is_empty()).then_some(session.as_str());
        let ask = Ask { deadline_ms, ..ask(session) };
        let decision = choose(&workers, ask, &mut chooser(policy));
        match decision.winner {
            Some(winner) => {
                let chosen = workers.iter().find(|worker| worker.id == winner).unwrap();
                prop_assert_eq!(chosen.excluded, None);
                prop_assert_eq!(&decision.chosen().unwrap().0.id, &winner);
            }
            None => prop_assert!(workers.iter().all(|worker| worker.excluded.is_some())),
        }
    }

    #[test]
    fn the_same_inputs_give_the_same_choices(workers in any_fleet(), policy in any_policy()) {
        let (mut one, mut two) = (chooser(policy), chooser(policy));
        for _ in 0..4 {
            let decision = choose(&workers, ask(Some("s")), &mut one);
            prop_assert_eq!(&decision, &choose(&workers, ask(Some("s")), &mut two));
        }
    }

    #[test]
    fn no_policy_leaves_a_free_fleet_uneven(policy in any_policy(), n in 2..9u32) {
        let mut workers = fleet(n);
        fill(&mut workers, policy, 32 * n as usize);
        let most = workers.iter().map(|worker| worker.occupied).max().unwrap();
        prop_assert!(most <= 48, "one of {n} workers got {most} of 32 each");
    }
}

#[test]
fn round_robin_takes_turns_whoever_comes_and_goes() {
    let mut chooser = chooser(PolicyName::RoundRobin);
    let mut workers = fleet(3);
    let mut next =
        |workers: &[Candidate]| choose(workers, ask(None), &mut chooser).winner.unwrap().0;
    assert_eq!([next(&workers), next(&workers)], [0, 1]);
    workers.remove(1);
    assert_eq!(next(&workers), 2);
    workers.push(worker(7, 0));
    assert_eq!([next(&workers), next(&workers), next(&workers)], [7, 0, 2]);
}

#[test]
fn least_loaded_goes_by_share_then_tokens_then_turns() {
    let mut workers = vec![worker(0, 10), worker(1, 10), worker(2, 10)];
    workers[1].sequences = 128; // half as full
    assert_eq!(place(&workers, PolicyName::LeastLoaded, 1), [WorkerId(1)]);
    workers[1].sequences = 64;
    workers[2].booked_tokens = 10;
    assert_eq!(place(&workers, PolicyName::LeastLoaded, 1), [WorkerId(2)]);
    workers[2].booked_tokens = workers[0].booked_tokens;
    let turns = place(&workers, PolicyName::LeastLoaded, 4);
    assert_eq!(turns, [0, 1, 2, 0].map(WorkerId));
}

#[test]
fn power_of_two_never_takes_the_fuller_of_its_two() {
    let workers = vec![worker(0, 60), worker(1, 0)];
    assert_eq!(place(&workers, PolicyName::PowerOfTwo, 32), [WorkerId(1); 32]);
}

#[test]
fn a_session_keeps_its_worker_and_only_those_of_a_lost_worker_move() {
    let workers = fleet(8);
    let before = place(&workers, PolicyName::SessionHash, 200);
    assert_eq!(before, place(&workers, PolicyName::SessionHash, 200));
    let left: Vec<Candidate> = workers.into_iter().filter(|worker| worker.id.0 != 3).collect();
    let after = place(&left, PolicyName::SessionHash, 200);
    for (before, after) in before.iter().zip(&after) {
        assert!(before.0 == 3 || before == after);
    }
    assert_eq!(before.iter().collect::<HashSet<_>>().len(), 8);
}

#[test]
fn a_session_leaves_a_worker_over_the_load_bound() {
    let mut workers = fleet(4);
    let own = place(&workers, PolicyName::SessionHash, 1)[0];
    for worker in &mut workers {
        *worker = self::worker(worker.id.0, if worker.id == own { 20 } else { 8 });
    }
    let estimates = vec![Estimate::default(); 4];
    let open: Vec<Choosable<'_>> = workers
        .iter()
        .zip(&estimates)
        .map(|(candidate, estimate)| Choosable { candidate, estimate })
        .collect();
    assert_eq!(load_bound(&open), 15); // (44 + 1) * 1.25 / 4, rounded up
    assert_ne!(place(&workers, PolicyName::SessionHash, 1)[0], own);
}

#[test]
fn a_session_leaves_a_worker_that_is_at_the_load_bound() {
    let bound = |occupied: &[u32]| {
        let workers: Vec<_> = (0..).zip(occupied).map(|(id, n)| worker(id, *n)).collect();
        let estimate = Estimate::default();
        let choosable = |candidate| Choosable { candidate, estimate: &estimate };
        load_bound(&workers.iter().map(choosable).collect::<Vec<_>>())
    };
    assert_eq!(bound(&[0, 0, 0, 0]), 4, "idle");
    assert_eq!(bound(&[3, 4, 4, 4]), 5); // (15 + 1) * 1.25 / 4
    let own = place(&fleet(4), PolicyName::SessionHash, 1)[0];
    let with = |own_occupied: u32| {
        let others = |id: u32| worker(id, if id == own.0 { own_occupied } else { 4 });
        place(&(0..4).map(others).collect::<Vec<_>>(), PolicyName::SessionHash, 1)[0]
    };
    assert_eq!(bound(&[6, 4, 4, 4]), 6);
    assert_ne!(with(6), own);
    assert_eq!(with(5), own);
}

/// An idle worker whose steps cost so many times as much for prompts, and for answers.
fn at_cost(id: u32, prompts: f64, answers: f64) -> Candidate {
    let cost = StepCost {
        prefill_ms: COST.prefill_ms * prompts,
        row_ms: COST.row_ms * answers,
        context_ms: 0.0,
        ..COST
    };
    Candidate::with(id, Role::Both, WorkerLoad::idle(cost))
}

#[test]
fn costs_that_differ_by_less_than_a_millionth_are_equal() {
    for (more, turns) in [(1e-7, [0, 1]), (1e-4, [0, 0])] {
        let workers = [at_cost(0, 1.0, 1.0), at_cost(1, 1.0 + more, 1.0 + more)];
        let mut chooser = chooser(PolicyName::Kv);
        let two = [0, 1].map(|_| choose(&workers, ask(None), &mut chooser).winner.unwrap().0);
        assert_eq!(two, turns, "{more}");
    }
}

#[test]
fn a_deadline_is_met_to_the_moment_and_missed_as_little_as_may_be() {
    // the first one is a hair later and costs less
    let workers = [at_cost(0, 1.0 + 1e-7, 1.0), at_cost(1, 1.0, 20.0)];
    let winner = |deadline_ms: Option<f64>| {
        let ask = Ask { deadline_ms, ..ask(None) };
        choose(&workers, ask, &mut chooser(PolicyName::Kv)).winner.unwrap().0
    };
    let soonest_ms = workers[1].estimate(&ask(None)).ttft_ms();
    assert_eq!(winner(None), 0);
    assert_eq!(winner(Some(soonest_ms)), 1, "only that one is in time");
    assert_eq!(winner(Some(1.0)), 0, "both are as late");
}

#[test]
fn kv_goes_where_the_prompt_is_cached_until_the_queue_there_costs_more() {
    let mut workers = fleet(4);
    workers[2].cached_tokens = 992;
    assert_eq!(place(&workers, PolicyName::Kv, 1), [WorkerId(2)]);
    workers[2].worker_load.backlog_tokens = 500.0;
    workers[2].worker_load.occupied = 1.0;
    assert_eq!(place(&workers, PolicyName::Kv, 1), [WorkerId(2)]);
    workers[2].worker_load.backlog_tokens = 1200.0;
    assert_ne!(place(&workers, PolicyName::Kv, 1), [WorkerId(2)]);
}

#[test]
fn equal_costs_rotate_and_a_session_breaks_the_tie() {
    let workers = fleet(4);
    let mut chooser = chooser(PolicyName::Kv);
    let turns: Vec<_> =
        (0..8).map(|_| choose(&workers, ask(None), &mut chooser).winner.unwrap().0).collect();
    assert_eq!(turns, [0, 1, 2, 3, 0, 1, 2, 3]);
    let sessions = place(&workers, PolicyName::Kv, 100);
    assert_eq!(sessions, place(&workers, PolicyName::SessionHash, 100));
    let counts = sessions.iter().fold(HashMap::new(), |mut counts, id| {
        *counts.entry(*id).or_insert(0) += 1;
        counts
    });
    assert_eq!(counts.len(), 4);
}

#[test]
fn kv_meets_a_deadline_before_it_saves_work() {
    let mut workers = fleet(2);
    workers[0].cached_tokens = 992;
    workers[0].worker_load.backlog_tokens = 700.0;
    workers[0].worker_load.occupied = 1.0;
    workers[1].worker_load.occupied = 30.0; // interference with many, but soon
    workers[1].worker_load.rows = 30.0;
    let mut chooser = chooser(PolicyName::Kv);
    let decision = choose(&workers, ask(None), &mut chooser);
    assert_eq!(decision.winner, Some(WorkerId(0)));
    let [slow, soon] = [0, 1].map(|i| decision.estimates[i].ttft_ms());
    assert!(soon > slow, "{soon} {slow}: the deadline below would tell nothing");
    workers[0].worker_load.backlog_tokens = 1500.0;
    let late = Ask { deadline_ms: Some(soon * 1.01), ..ask(None) };
    assert_eq!(choose(&workers, late, &mut chooser).winner, Some(WorkerId(1)));
    let hopeless = Ask { deadline_ms: Some(1.0), ..ask(None) };
    assert_eq!(choose(&workers, hopeless, &mut chooser).winner, Some(WorkerId(1)));
}

#[test]
fn what_stands_against_a_placement_is_named() {
    let with = |exclusions: &[Exclusion]| {
        let mut workers = fleet(u32::try_from(exclusions.len()).unwrap());
        for (worker, why) in workers.iter_mut().zip(exclusions) {
            worker.excluded = Some(*why);
        }
        choose(&workers, ask(None), &mut chooser(PolicyName::Kv)).no_place()
    };
    assert_eq!(with(&[]), NoPlace::NoneOpen);
    assert_eq!(with(&[Exclusion::Closed; 2]), NoPlace::NoneOpen);
    assert_eq!(with(&[Exclusion::Closed, Exclusion::Failed]), NoPlace::AllExcluded);
    assert_eq!(with(&[Exclusion::Failed, Exclusion::Full]), NoPlace::AllFull);
    assert_eq!(with(&[Exclusion::Closed, Exclusion::Backlog]), NoPlace::AllFull);
}

#[test]
fn names_are_read_as_they_are_written() {
    for policy in PolicyName::ALL {
        assert_eq!(policy.as_str().parse(), Ok(policy));
        assert_eq!(Policy::new(policy).name(), policy);
    }
    assert_eq!("random".parse::<PolicyName>(), Err(()));
}

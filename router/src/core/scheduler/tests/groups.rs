//! Ranks of an expert-parallel group, which step in time with each other.

use super::*;

fn join_rank(scheduler: &mut Scheduler, id: u32, group: &str) {
    let group = Some(GroupRank { group: group.into(), rank: id });
    scheduler.join(Joining { group, ..joining(id) }, ());
    scheduler.set_open(WorkerId(id), true);
}

#[test]
fn ranks_of_a_group_cost_what_the_slowest_of_them_costs() {
    let mut scheduler = scheduler(0);
    for id in 0..3 {
        let group = (id < 2).then(|| GroupRank { group: "ep".into(), rank: id });
        scheduler.join(Joining { group, ..joining(id) }, ());
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
            join_rank(&mut scheduler, id, "ep");
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
fn a_long_step_teaches_of_the_rank_that_made_it_long() {
    // of a rank with 7 rows, in steps with such ranks
    let learns = |others: &[(&str, u32)], waited_us: u32| {
        let mut scheduler = scheduler(0);
        join_rank(&mut scheduler, 0, "ep");
        for (id, (group, running)) in (1..).zip(others) {
            join_rank(&mut scheduler, id, group);
            // a sign of life: it tells of rows, and teaches nothing
            let load = Load { running: *running, ..Load::default() };
            let _ = scheduler.step(WorkerId(id), &report(0, 0, load), Given::default(), 0.0);
        }
        let load = Load { running: 7, ..Load::default() };
        let step = Step { decode_rows: 7, ms: 90.0, waited_us, ..report(1, 0, load) };
        let _ = scheduler.step(WorkerId(0), &step, Given::default(), 0.0);
        scheduler.view(WorkerId(0)).unwrap().steps_learnt == 1
    };
    assert!(learns(&[("ep", 6)], 0), "the others wait for it");
    assert!(learns(&[("ep", 7)], 0), "nobody waits for anybody");
    assert!(!learns(&[("ep", 8)], 0), "it waits for the other one");
    assert!(!learns(&[("ep", 6), ("ep", 8)], 0) && !learns(&[("ep", 8), ("ep", 6)], 0));
    assert!(learns(&[("ep", 8)], 1), "it says how long it waited");
    assert!(learns(&[("another", 8)], 0), "which steps by itself");
}

#[test]
fn ranks_began_their_step_together_and_wait_for_the_prompts_that_take_longest() {
    let mut scheduler = scheduler(0);
    (0..3).for_each(|id| join_rank(&mut scheduler, id, "ep"));
    let seen = |scheduler: &mut Scheduler, now_ms: f64| {
        let weighed = scheduler.candidates_at(&want(99, &keys(99, 1, 0)), now_ms);
        weighed.candidates.iter().map(|rank| rank.worker_load).collect::<Vec<_>>()
    };
    assert!(seen(&mut scheduler, 500.0).iter().all(|load| load.elapsed_ms == 0.0), "nobody works");
    // 2,035 tokens on the first rank, in one long step, and 6,403 on the second, in four shorter ones
    for (id, blocks) in [(0, 127), (1, 400)] {
        let excluded = (0..3).filter(|other| *other != id).map(WorkerId).collect();
        let n = u64::from(id);
        let request = PlacementRequest { excluded, ..want(n, &keys(n, blocks, 0)) };
        scheduler.place(&request, 100.0 * (n as f64 + 1.0)).unwrap();
    }
    let loads = seen(&mut scheduler, 260.0);
    assert_eq!(loads.iter().map(|load| load.elapsed_ms).collect::<Vec<_>>(), [60.0; 3]);
    let steps: Vec<f64> = loads.iter().map(|load| load.group_prompt_steps).collect();
    assert_eq!(steps, [4.0, 1.0, 4.0]);
    assert!(
        seen(&mut scheduler, 10.0).iter().all(|load| load.elapsed_ms == 0.0),
        "a clock that ran back"
    );
}

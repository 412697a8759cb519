//! What is asked of a model, and of which of its workers.

use super::learning::teach;
use super::split::scheduler_of;
use super::*;
use crate::core::scheduler::demand::{ModelDemand, RoleFleet, Targets, WaitingPrompts};

fn close(value: f64, expected: f64) {
    assert!((value - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{value}, not {expected}");
}

fn role(scheduler: &Scheduler, role: Role) -> RoleFleet {
    scheduler.roles().into_iter().find(|fleet| fleet.role == role).expect("there is one")
}

/// One request a second of a thousand tokens.
const DEMAND: ModelDemand = ModelDemand {
    per_s: 1.0,
    prompt_tokens: 1_000.0,
    computed_tokens: 1_000.0,
    spread: 1.0,
    output_tokens: 100.0,
};

/// Share of its time that one worker of this role would be busy.
fn busy(scheduler: &Scheduler, of: Role) -> f64 {
    let mut fleet = role(scheduler, of);
    fleet.workers = 1;
    let needs = fleet.needs(&DEMAND, Targets::default()).expect("its steps are known");
    needs.now.expect("there is one").utilisation
}

#[test]
fn steps_are_known_after_fifty_and_workers_count_while_they_take_work() {
    let mut scheduler = scheduler(0);
    assert!(scheduler.roles().is_empty());
    join(&mut scheduler, 0);
    join(&mut scheduler, 1);
    let needs =
        |scheduler: &Scheduler| role(scheduler, Role::Both).needs(&DEMAND, Targets::default());
    teach(&mut scheduler, 1, 1.0, 1..50);
    assert_eq!((role(&scheduler, Role::Both).workers, needs(&scheduler)), (2, None));
    teach(&mut scheduler, 1, 1.0, 50..200);
    assert_eq!(scheduler.roles().len(), 1);
    // 100 ms of a prompt and 100 rows of 0.1 ms and some of their KV
    let one = needs(&scheduler).expect("one is enough to know");
    let now = one.now.expect("there are two").utilisation;
    assert!((0.05..0.06).contains(&now), "{now}");
    scheduler.set_open(WorkerId(1), false);
    assert_eq!(role(&scheduler, Role::Both).workers, 1, "its steps are known all the same");
    assert!(needs(&scheduler).is_some());
}

#[test]
fn workers_of_different_speed_count_by_their_mean() {
    let mut scheduler = scheduler(2);
    teach(&mut scheduler, 0, 1.0, 1..400);
    let alone = busy(&scheduler, Role::Both);
    teach(&mut scheduler, 1, 3.0, 1..400);
    let both = busy(&scheduler, Role::Both);
    assert!((1.9..2.1).contains(&(both / alone)), "{alone} {both}");
}

#[test]
fn prompts_are_the_work_of_those_who_compute_them() {
    use Role::{Both, Decode, Prefill};
    let mut scheduler = scheduler_of(PolicyName::RoundRobin, &[Prefill, Decode, Both]);
    (0..3).for_each(|id| teach(&mut scheduler, id, 1.0, 1..400));
    let roles: Vec<_> = scheduler.roles().iter().map(|one| (one.role, one.workers)).collect();
    assert_eq!(roles, [(Prefill, 1), (Decode, 2)]);
    close(busy(&scheduler, Prefill), 0.0);
    let whole = busy(&scheduler, Decode);
    // each further prompt is computed apart
    for n in 0..30 {
        let want = want(n, &keys(n, 4, 0));
        assert!(scheduler.place(&want, 0.0).unwrap().prefill.is_some());
        scheduler.end(want.request, LegOutput::default(), 0.0).unwrap();
        scheduler.end(want.prefill_request, LegOutput::default(), 0.0).unwrap();
    }
    let apart = 1.0 - 0.98_f64.powi(30);
    // 100 ms of prompts and a step for them
    assert!((0.98..1.02).contains(&(busy(&scheduler, Prefill) / (0.105 * apart))));
    assert!((0.98..1.02).contains(&((whole - busy(&scheduler, Decode)) / (0.1 * apart))));
    scheduler.leave(WorkerId(0), 0.0);
    assert_eq!(scheduler.roles()[0].role, Both, "nobody does nothing else any more");
    close(busy(&scheduler, Both), whole);
}

#[test]
fn what_waits_and_what_is_cached_are_part_of_what_is_asked() {
    let mut scheduler = scheduler(1);
    let nobody = WaitingPrompts::default();
    let asked = scheduler.asked(nobody, 0.0);
    assert_eq!((asked.per_s, asked.prompt_tokens, asked.output_tokens), (0.0, 0.0, 256.0));
    for n in 0..300 {
        scheduler.arrived(100, f64::from(n) * 1e3);
    }
    let asked = scheduler.asked(nobody, 299e3);
    assert!((0.9..1.1).contains(&asked.per_s), "{asked:?}");
    close(asked.computed_tokens, 100.0);
    let waiting = WaitingPrompts { requests: 120, tokens: 120 * 400 };
    let more = scheduler.asked(waiting, 299e3);
    close(more.per_s, asked.per_s + 2.0);
    close(more.per_s * more.prompt_tokens, asked.per_s * 100.0 + 800.0);
    // of the prompts that began, a quarter was to be computed
    for n in 0..400 {
        let want = want(n, &keys(n, 4, 0));
        scheduler.place(&want, 300e3).unwrap();
        scheduler.begun(want.request, want.prompt_tokens * 3 / 4, 300e3).unwrap();
        scheduler.end(want.request, LegOutput { tokens: 40, complete: true }, 300e3).unwrap();
    }
    let cached = scheduler.asked(nobody, 300e3);
    assert!((0.24..0.28).contains(&(cached.computed_tokens / cached.prompt_tokens)), "{cached:?}");
    assert!((40.0..45.0).contains(&cached.output_tokens), "{cached:?}");
}

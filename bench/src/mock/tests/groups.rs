//! Ranks of mock groups, with a real router: their steps, their losses, and their return.

use super::*;

/// Steps of 2 ms and 0.5 ms a prompt token, so that ranks differ.
const RANKS: &str =
    "--cost 2,0.5,0,0.1,0 --block-tokens 16 --blocks 256 --noise 0 --group-deadline 200";

async fn group(flags: &str) -> (Stack, Running) {
    let stack = router(None).await;
    let fleet = fleet(&stack.workers, &format!("{RANKS} {flags}"));
    until("both ranks", || stack.ready() == 2).await;
    (stack, fleet)
}

fn prompt(number: u32) -> Value {
    let prompt: Vec<u32> = (1_000 * number..1_000 * number + 100).collect();
    json!({"model": "mock", "prompt": prompt, "max_tokens": 8, "seed": number})
}

#[tokio::test]
async fn a_rank_without_work_steps_with_the_others_and_says_that_it_waited() {
    let (stack, fleet) = group("--workers 2 --ep 2").await;
    let answer = stack.complete(&prompt(1)).await;
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    let waited = |rank: usize| {
        let groups = &stack.app.fleet.workers()["groups"][0];
        groups["ranks"][rank]["waited_seconds"].as_f64().unwrap()
    };
    // one prompt of 100 tokens on one of two ranks: the other waits 50 ms, and is not waited for
    until("what was waited", || waited(0).max(waited(1)) > 0.05).await;
    assert_eq!(waited(0).min(waited(1)), 0.0);
    let report = serde_json::to_value(fleet.report()).unwrap();
    assert_eq!(report["groups"]["rounds"], 8);
    assert!(report["groups"]["step_skew"].as_f64().unwrap() > 0.0);
}

fn groups(stack: &Stack) -> Vec<(u64, bool)> {
    let workers = stack.app.fleet.workers();
    let of = |group: &Value| (group["epoch"].as_u64().unwrap(), group["whole"] == true);
    let mut groups: Vec<_> = workers["groups"].as_array().unwrap().iter().collect();
    groups.sort_by_key(|group| group["id"].as_str().unwrap());
    groups.into_iter().map(of).collect()
}

/// A fault of one rank of the first group: the group starts anew as a whole, and all requests meanwhile are answered as they
/// would have been.
async fn survives(fault: &str) {
    let stack = router(None).await;
    let fleet = fleet(&stack.workers, &format!("{RANKS} --workers 4 --ep 2"));
    until("all ranks", || stack.ready() == 4).await;
    let before = groups(&stack);
    let undisturbed = stack.complete(&prompt(1)).await;
    fleet.fleet.faults.send(fault.parse().unwrap()).unwrap();
    let serve = async {
        while groups(&stack).first().is_none_or(|group| group.0 == before[0].0) {
            // prompts of their own, so that all ranks get some
            for number in 2..6 {
                stack.complete(&prompt(number)).await;
            }
            let answer = stack.complete(&prompt(1)).await;
            assert_eq!(answer["choices"], undisturbed["choices"], "{fault}");
        }
    };
    timeout(IN_TIME, serve).await.unwrap_or_else(|_| panic!("{fault}: {:?}", groups(&stack)));
    until("all ranks", || stack.ready() == 4).await;
    let after = groups(&stack);
    assert!(after[0].0 > before[0].0 && after.iter().all(|group| group.1), "{fault}: {after:?}");
    assert_eq!(after[1], before[1], "{fault}: the other group noticed nothing");
}

#[tokio::test]
async fn a_group_with_a_dead_rank_starts_anew() {
    survives("w1:die").await;
}

#[tokio::test]
async fn a_group_with_a_frozen_rank_starts_anew() {
    survives("w0:freeze").await;
}

#[tokio::test]
async fn a_group_with_a_rank_that_stands_still_in_a_step_starts_anew() {
    survives("w1:stall=agree").await;
    survives("w0:stall=combine").await;
}

#[tokio::test]
async fn a_group_with_a_rank_that_is_refused_starts_anew_until_all_fit() {
    for fault in ["w1:wrong-size", "w0:wrong-weights"] {
        let stack = router(None).await;
        let flags = format!("{RANKS} --workers 2 --ep 2 --fault {fault}");
        let _fleet = fleet(&stack.workers, &flags);
        until("both ranks", || stack.ready() == 2).await;
        let refused = stack.app.render_metrics();
        assert!(refused.contains("refused_mismatch"), "{fault}: {refused}");
        stack.complete(&prompt(3)).await;
    }
}

#[tokio::test]
async fn a_late_rank_is_waited_for() {
    let stack = router(None).await;
    let flags = format!("{RANKS} --workers 2 --ep 2 --fault w1:die@0-8s");
    let _fleet = fleet(&stack.workers, &flags);
    until("one rank", || stack.worker("w0")["state"] == "incomplete").await;
    until("both ranks", || stack.ready() == 2).await;
    stack.complete(&prompt(4)).await;
}

#[tokio::test]
async fn a_drained_group_leaves_as_a_whole() {
    let (stack, mut running) = group("--workers 2 --ep 2").await;
    let order = headrace_router::fleet::DrainOrder { budget: IN_TIME, migration: 0 };
    stack.app.fleet.drain("w1", order).unwrap();
    timeout(IN_TIME, running.ended()).await.unwrap().unwrap();
    until("both are gone", || stack.app.fleet.workers()["workers"] == json!([])).await;
}

#[test]
fn workers_are_whole_groups() {
    let args = Flags::parse_from(["mock", "--router", "x", "--workers", "6", "--ep", "4"]).mock;
    let error = args.roles.roles().unwrap_err().to_string();
    assert!(error.contains("a multiple of the 4 ranks"), "{error}");
}

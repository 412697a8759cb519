//! Requests that come together and would wait in a worker are placed together, the longest prompt first; and none of them is
//! lost, whatever becomes of the others and of the worker.

use std::sync::Arc;

use headrace_router::app::App;
use headrace_router::core::frame::{Finish, StepCost};
use headrace_router::request::{Answer, Job};

use super::caching::*;
use super::requests::{answer, next};
use super::routing::waits;
use crate::fake_worker::*;

/// A router that gathers for so long, with a worker whose steps take ten times as long and that has one to do.
async fn computing(gather_ms: f64) -> (Arc<App>, FakeWorker, Answer) {
    let app =
        start_router(|args| (args.gather_ms, args.worker_queue_ms) = (gather_ms, 1_000_000)).await;
    let mut worker = taking("w0", 10.0 * gather_ms).ready(&app).await;
    let first = answer(&app, ask(&prompt(1, 3))).await.unwrap();
    worker.submitted().await;
    (app, worker, first)
}

/// A worker whose steps take so long: it says so, and no heartbeat says otherwise.
fn taking(name: &str, fixed_ms: f64) -> Behaviour {
    let mut worker = Behaviour::new(name);
    let (prefill_ms, context_ms, row_ms, kv_ms) = (0.0, 0.0, 0.0, 0.0);
    worker.hello.step_prior = Some(StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms });
    Behaviour { lives: false, ..worker }
}

/// How many requests were on the worker when each of these was placed there.
fn placed_behind<const N: usize>(jobs: &[Job; N]) -> [u32; N] {
    std::array::from_fn(|i| chosen(&jobs[i].request_trace).occupied)
}

#[tokio::test]
async fn the_longest_prompt_of_a_moment_goes_first() {
    let (app, mut worker, _first) = computing(500.0).await;
    let jobs = [2, 40, 1, 20].map(|blocks| ask(&prompt(2 + blocks, blocks)));
    let mut waiting = Vec::new();
    for (n, job) in jobs.iter().enumerate() {
        waiting.push(waits(&app, n + 1, job.clone()).await);
    }
    for waiting in waiting {
        in_time("its place", waiting).await.unwrap().unwrap();
        worker.submitted().await;
    }
    assert_eq!(placed_behind(&jobs), [3, 1, 4, 2]);
    assert_eq!(metric(&app, "headrace_queue_requests", ""), 0.0);
}

#[tokio::test]
async fn one_by_itself_is_placed_when_the_time_is_over_and_its_answer_comes() {
    let (app, mut worker, _first) = computing(20.0).await;
    let waiting = waits(&app, 1, ask(&prompt(2, 5))).await;
    let mut answer = in_time("its place", waiting).await.unwrap().unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), Some(Finish::Length));
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "a");
    assert!(next(&mut answer).await.is_none());
}

#[tokio::test]
async fn who_leaves_is_not_placed_and_the_others_are() {
    let (app, mut worker, first) = computing(500.0).await;
    let jobs = [40, 5].map(|blocks| ask(&prompt(blocks, blocks)));
    let leaves = waits(&app, 1, jobs[0].clone()).await;
    let stays = waits(&app, 2, jobs[1].clone()).await;
    leaves.abort();
    let stays = in_time("its place", stays).await.unwrap().unwrap();
    let submit = worker.submitted().await;
    assert_eq!(submit.tokens.len(), 4 * (BLOCK * 5 + 3) as usize);
    assert!(jobs[0].request_trace.decisions().is_empty());
    assert_eq!(metric(&app, "headrace_cancels_total", "queue"), 1.0);
    drop((first, stays));
    all_is_given_back(&app).await;
}

#[tokio::test]
async fn those_whose_worker_dies_meanwhile_are_placed_on_the_next_one() {
    let (app, worker, first) = computing(500.0).await;
    let jobs = [5, 40].map(|blocks| ask(&prompt(blocks, blocks)));
    let waiting = [waits(&app, 1, jobs[0].clone()).await, waits(&app, 2, jobs[1].clone()).await];
    drop((first, worker));
    let _other = taking("w1", 1.0).ready(&app).await;
    let mut answers = Vec::new();
    for waiting in waiting {
        answers.push(in_time("its place", waiting).await.unwrap().unwrap());
    }
    assert!(jobs.iter().all(|job| *chosen(&job.request_trace).name == *"w1"));
    assert_eq!(placed_behind(&jobs), [1, 0]);
    drop(answers);
    all_is_given_back(&app).await;
}

//! `/scale`: what is asked of each model, and how many workers that takes.

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::*;
use serde_json::{Value, json};

use super::super::client::{TestRouter, args};
use crate::fake_worker::*;

/// Steps after which the router knows what they cost.
const KNOWN: u64 = 60;

async fn scale(router: &TestRouter) -> Value {
    let reply = router.get("/scale").await;
    assert_eq!(reply.status, 200);
    reply.json()
}

/// Prompts of a few tokens, alone in a step of 10 ms, and rows that take as long.
async fn knows_steps(router: &TestRouter, worker: &FakeWorker, name: &str) {
    for number in 1..=KNOWN {
        let mut told = Step { step: number, ms: 10.0, ..step(vec![]) };
        if number % 2 == 0 {
            (told.prefill_tokens, told.decode_rows) = (8, 0);
        } else {
            (told.prefill_tokens, told.decode_rows) = (0, 1);
        }
        worker.send(Frame::Step(told));
    }
    let learnt = || of_worker(&router.app, name)["steps_learnt"].as_u64();
    until("its steps are known", || learnt() >= Some(KNOWN - 1)).await;
}

#[tokio::test]
async fn nothing_is_said_of_workers_whose_steps_are_not_known() {
    let router = TestRouter::start(args()).await;
    assert_eq!(
        scale(&router).await,
        json!({"models": [], "slo": {"ttft_ms": null, "tpot_ms": null}})
    );
    let _worker = Behaviour::new("w").ready(&router.app).await;
    let scaled = scale(&router).await;
    let role = &scaled["models"][0]["roles"][0];
    assert_eq!(
        (&role["role"], &role["workers"], &role["needed_workers"], &role["because"]),
        (&json!("both"), &json!(1), &Value::Null, &json!("steps_not_known"))
    );
    let page = router.app.render_metrics();
    let labels = format!(r#"{{model="{MODEL}",role="both"}}"#);
    assert!(page.contains(&format!("headrace_scale_workers{labels} 1")), "{page}");
    assert!(!page.contains("headrace_scale_needed_workers{"), "{page}");
}

#[tokio::test]
async fn what_is_asked_and_what_it_takes_follow_from_requests_and_steps() {
    let args = RouterArgs { ttft_deadline_ms: 60_000, slo_tpot_ms: 500.0, ..args() };
    let mut silent = Behaviour::says("w", "abc");
    silent.lives = false; // no heartbeat comes between the steps of this test
    let (router, worker) = TestRouter::with(silent, args).await;
    knows_steps(&router, &worker, "w").await;
    for _ in 0..5 {
        let body = json!({"model": MODEL, "prompt": "Hello", "max_tokens": 9}).to_string();
        assert_eq!(router.post("/v1/completions", body).await.status, 200);
    }
    let scale = scale(&router).await;
    assert_eq!(scale["slo"], json!({"ttft_ms": 60_000.0, "tpot_ms": 500.0}));
    let (model, role) = (&scale["models"][0], &scale["models"][0]["roles"][0]);
    let demand = &model["demand"];
    assert_eq!((&model["model"], &demand["waiting"]), (&json!(MODEL), &json!(0)));
    assert_eq!(demand["prompt_tokens"], 4.0);
    // five in the first ten seconds, of a window of 30 s or 300 s
    let per_s = demand["requests_per_s"].as_f64().unwrap();
    assert!((0.3..=0.5).contains(&per_s), "{per_s}");
    assert_eq!(
        (&role["workers"], &role["needed_workers"], &role["because"]),
        (&json!(1), &json!(1), &json!("one_is_enough"))
    );
    assert_eq!((&role["out_of_reach"], &role["ranks_of_a_group"]), (&json!([]), &json!(1)));
    let busy = role["utilisation"].as_f64().unwrap();
    assert!(0.0 < busy && busy < 0.85, "{busy}");
    let labels = format!(r#"{{model="{MODEL}",role="both"}}"#);
    for name in ["workers", "needed_workers", "predicted_queue_seconds", "utilisation"] {
        assert!(router.app.render_metrics().contains(&format!("headrace_scale_{name}{labels} ")));
    }
}

#[tokio::test]
async fn limits_that_no_worker_keeps_are_named() {
    let args = RouterArgs { ttft_deadline_ms: 1, slo_tpot_ms: 0.001, ..args() };
    let mut silent = Behaviour::new("w");
    silent.lives = false;
    let (router, worker) = TestRouter::with(silent, args).await;
    knows_steps(&router, &worker, "w").await;
    let scaled = scale(&router).await;
    let role = &scaled["models"][0]["roles"][0];
    assert_eq!(role["out_of_reach"], json!(["ttft", "tpot"]));
    assert_eq!(role["needed_workers"], 1);
}

#[tokio::test]
async fn what_was_refused_was_asked_for_too() {
    let args = RouterArgs { ttft_deadline_ms: 1, ..args() };
    let mut silent = Behaviour::new("w");
    silent.lives = false;
    let (router, worker) = TestRouter::with(silent, args).await;
    knows_steps(&router, &worker, "w").await;
    let body = json!({"model": MODEL, "prompt": "Hello", "max_tokens": 9}).to_string();
    assert_eq!(router.post("/v1/completions", body).await.status, 429);
    let scale = scale(&router).await;
    assert!(scale["models"][0]["demand"]["requests_per_s"].as_f64().unwrap() > 0.0);
}

#[tokio::test]
async fn ranks_are_needed_by_whole_groups() {
    let mut rank = Behaviour::new("w");
    rank.lives = false;
    rank.hello.group =
        Some(Group { id: "g".into(), rank: 0, size: 4, epoch: 1, transport: "gloo".into() });
    let router = TestRouter::start(args()).await;
    let worker = rank.join(&router.app).await.unwrap();
    knows_steps(&router, &worker, "w").await;
    let scaled = scale(&router).await;
    let role = &scaled["models"][0]["roles"][0];
    assert_eq!(
        (&role["workers"], &role["needed_workers"], &role["needed_groups"]),
        (&json!(0), &json!(4), &json!(1))
    );
    assert_eq!(role["utilisation"], Value::Null, "nobody works yet");
}

//! `/metrics` by model and by worker: what is counted for whom, what strangers cannot add to, and vLLM's names.

use std::collections::BTreeSet;

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::*;
use serde_json::json;

use super::super::client::{TestRouter, args};
use crate::fake_worker::*;

/// Tokens of "Hello", as the tests' model cuts it.
const PROMPT: f64 = 4.0;

/// The series of a page: the samples without their values, but for what grows by itself.
fn series(router: &TestRouter) -> BTreeSet<String> {
    let page = router.app.render_metrics();
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
}

fn sample(router: &TestRouter, series: &str) -> f64 {
    let page = router.app.render_metrics();
    let found = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("{series} of {page}")).parse().unwrap()
}

async fn ask(router: &TestRouter, model: &str) -> u16 {
    let body = json!({"model": model, "prompt": "Hello", "max_tokens": 9});
    router.post("/v1/completions", body.to_string()).await.status
}

fn of_model(worker: &str, model: &str) -> Behaviour {
    let mut behaviour = Behaviour::says(worker, "abc");
    behaviour.hello.model = model.into();
    behaviour
}

#[tokio::test]
async fn requests_count_for_their_model_and_their_worker() {
    let (router, _a) = TestRouter::with(of_model("w-a", "a"), args()).await;
    let _b = of_model("w-b", "b").ready(&router.app).await;
    for (model, status) in [("a", 200), ("a", 200), ("b", 200), ("none", 404)] {
        assert_eq!(ask(&router, model).await, status, "{model}");
    }
    until("all ends are counted", || metric(&router.app, "headrace_requests_total", "") == 4.0)
        .await;
    for (name, value) in [
        (r#"headrace_requests_total{model="a",outcome="finished"}"#, 2.0),
        (r#"headrace_requests_total{model="b",outcome="finished"}"#, 1.0),
        (r#"headrace_requests_total{model="unknown",outcome="unknown_model"}"#, 1.0),
        (r#"headrace_finish_reasons_total{model="a",reason="stop"}"#, 2.0),
        (r#"headrace_completion_tokens_total{model="a"}"#, 8.0), // three letters and the stop token
        (r#"headrace_completion_tokens_total{model="b"}"#, 4.0),
        (r#"headrace_prompt_tokens_total{model="a"}"#, 2.0 * PROMPT),
        (r#"headrace_request_prompt_tokens_sum{model="b"}"#, PROMPT),
        (r#"headrace_request_output_tokens_count{model="a"}"#, 2.0),
        (r#"headrace_request_output_tokens_bucket{le="2.0",model="a"}"#, 0.0),
        (r#"headrace_request_output_tokens_bucket{le="5.0",model="a"}"#, 2.0),
        (r#"headrace_ttft_seconds_count{model="a"}"#, 2.0),
        (r#"headrace_tpot_seconds_count{model="b"}"#, 1.0),
        (r#"headrace_itl_seconds_count{model="a"}"#, 6.0),
        (r#"headrace_request_seconds_count{model="b"}"#, 1.0),
        (r#"headrace_queue_seconds_count{model="a"}"#, 2.0),
        (r#"headrace_worker_output_tokens_total{worker="w-a",model="a"}"#, 8.0),
        (r#"headrace_worker_ttft_seconds_count{worker="w-a",model="a"}"#, 2.0),
        (r#"headrace_worker_itl_seconds_count{worker="w-b",model="b"}"#, 3.0),
    ] {
        assert_eq!(sample(&router, name), value, "{name}");
    }
}

#[tokio::test]
async fn hundreds_of_names_that_nobody_serves_add_no_series() {
    let (router, _worker) = TestRouter::with(of_model("w", "served"), args()).await;
    assert_eq!(ask(&router, "served").await, 200);
    assert_eq!(ask(&router, "not served").await, 404);
    let counted = || metric(&router.app, "headrace_requests_total", "unknown_model");
    until("it is counted", || counted() == 1.0).await;
    until("the other one is", || {
        metric(&router.app, "headrace_requests_total", r#"outcome="finished""#) == 1.0
    })
    .await;
    let before = series(&router);
    let mut connection = router.connect().await;
    for number in 0..300 {
        let body = json!({"model": format!("m-{number}\"\n"), "prompt": "Hello"}).to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
        connection.request(head, body.as_bytes()).await;
        assert_eq!(connection.reply().await.status, 404);
    }
    until("all are counted", || counted() == 301.0).await;
    assert_eq!(series(&router), before);
}

#[tokio::test]
async fn series_of_a_worker_end_with_it_and_those_of_its_model_go_on() {
    let (router, one) = TestRouter::with(of_model("one", "m"), args()).await;
    assert_eq!(ask(&router, "m").await, 200);
    until("it is counted", || {
        metric(&router.app, "headrace_worker_output_tokens_total", r#"worker="one""#) == 4.0
    })
    .await;
    let fleet_before = router.app.metrics.models.tokens();
    one.leaves(&router.app).await;
    assert!(!series(&router).iter().any(|name| name.contains(r#"worker="one""#)));
    assert_eq!(sample(&router, r#"headrace_completion_tokens_total{model="m"}"#), 4.0);
    let _two = of_model("two", "m").ready(&router.app).await;
    assert_eq!(ask(&router, "m").await, 200);
    until("it is counted", || {
        metric(&router.app, "headrace_worker_output_tokens_total", r#"worker="two""#) == 4.0
    })
    .await;
    assert_eq!(sample(&router, r#"headrace_completion_tokens_total{model="m"}"#), 8.0);
    assert_eq!(router.app.metrics.models.tokens().output, fleet_before.output + 4);
}

#[tokio::test]
async fn steps_and_preemptions_are_what_workers_tell() {
    let mut silent = Behaviour::new("w");
    silent.lives = false; // no heartbeat comes before the frames of this test
    let (router, worker) = TestRouter::with(silent, args()).await;
    let told = |number, ms, preemptions| Step {
        step: number,
        ms,
        prefill_tokens: 10,
        load: Load { preemptions, ..Load::default() },
        ..step(vec![])
    };
    let of_worker = |name: &str| format!(r#"{name}{{worker="w",model="{MODEL}"}}"#);
    let preemptions = of_worker("headrace_worker_preemptions_total");
    // it may have preempted a thousand times before this router knew it: the first frame says from where to count
    for (number, ms, so_far) in [
        (5, 3.0, 1_000),
        (6, 3.0, 1_002),
        (6, 3.0, 1_002), // a heartbeat
        (7, f64::MAX, 1_002),
        (8, 30.0, 7), // fewer than before: nonsense
        (9, 30.0, 8),
    ] {
        worker.send(Frame::Step(told(number, ms, so_far)));
    }
    let steps = of_worker("headrace_worker_step_duration_seconds_count");
    until("all steps came", || sample(&router, &steps) == 4.0).await;
    assert_eq!(sample(&router, &preemptions), 3.0);
    let of_model = format!(r#"headrace_preemptions_total{{model="{MODEL}"}}"#);
    assert_eq!(sample(&router, &of_model), 3.0);
    let computed = of_worker("headrace_worker_prompt_tokens_total");
    assert_eq!(sample(&router, &computed), 40.0);
    let page = router.app.render_metrics();
    let labels = format!(r#"{{le="0.005",worker="w",model="{MODEL}"}}"#);
    let quick = format!("headrace_worker_step_duration_seconds_bucket{labels} 1");
    assert!(page.lines().any(|line| line == quick), "{quick} of {page}");
}

#[tokio::test]
async fn vllms_names_come_with_a_flag_and_say_the_same() {
    let (router, _worker) = TestRouter::with(of_model("w", "m"), args()).await;
    assert!(!router.app.render_metrics().contains("vllm:"));
    let args = RouterArgs { metrics_compat: Some("vllm".into()), ..args() };
    let mut behaviour = of_model("w", "m");
    behaviour.hello.capacity.blocks = 100;
    let (router, worker) = TestRouter::with(behaviour, args).await;
    let load = Load { blocks_used: 25, running: 3, waiting: 2, ..Load::default() };
    worker.send(Frame::Step(Step { load, ..step(vec![]) }));
    assert_eq!(ask(&router, "m").await, 200);
    let of_m = |name: &str| sample(&router, &format!(r#"{name}{{model_name="m"}}"#));
    until("it is counted", || of_m("vllm:request_generation_tokens_count") == 1.0).await;
    until("the load came", || of_m("vllm:num_requests_running") == 3.0).await;
    for (name, value) in [
        ("vllm:num_requests_waiting", 2.0),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:gpu_cache_usage_perc", 0.25),
        ("vllm:prompt_tokens_total", PROMPT),
        ("vllm:generation_tokens_total", 4.0),
        ("vllm:prefix_cache_queries_total", PROMPT),
        ("vllm:prefix_cache_hits_total", 0.0),
        ("vllm:num_preemptions_total", 0.0),
        ("vllm:time_to_first_token_seconds_count", 1.0),
        ("vllm:inter_token_latency_seconds_count", 3.0),
        ("vllm:time_per_output_token_seconds_count", 3.0),
        ("vllm:request_time_per_output_token_seconds_count", 1.0),
        ("vllm:e2e_request_latency_seconds_count", 1.0),
        ("vllm:request_queue_time_seconds_count", 1.0),
        ("vllm:request_prompt_tokens_sum", PROMPT),
    ] {
        assert_eq!(of_m(name), value, "{name}");
    }
    for (reason, count) in [("stop", 1.0), ("abort", 0.0), ("error", 0.0)] {
        let labels = format!(r#"{{model_name="m",finished_reason="{reason}"}}"#);
        assert_eq!(sample(&router, &format!("vllm:request_success_total{labels}")), count);
    }
    let page = router.app.render_metrics();
    let blocks = r#"vllm:cache_config_info{model_name="m",block_size="#;
    assert!(page.contains(blocks) && page.contains(r#"num_gpu_blocks="100"} 1"#), "{page}");
}

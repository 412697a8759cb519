//! Workers that join and leave by the hundred, with blocks and requests on them: nothing of them stays.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use headrace_router::app::App;
use headrace_router::core::frame::*;
use headrace_router::fleet::DrainOrder;
use headrace_router::request::answer;

use super::caching::*;
use crate::fake_worker::*;

const WAVES: u32 = 12;
const WAVE: u32 = 50;
const BLOCKS: u32 = 100;

/// A wave of workers that join at once, hold a prompt each, and are gone in the middle of a request: by death, by a newer life,
/// or in good order. What the router knew of blocks while they were there, and its memory for that.
async fn wave(app: &Arc<App>, n: u32) -> (f64, f64) {
    let (name, text) = (|i| format!("w{n}-{i}"), |i| prompt(WAVE * n + i, BLOCKS));
    let join = |i| async move {
        let worker = Caching::ready(app, &name(i)).await;
        worker.send(Frame::Blocks(Blocks {
            stored: run(&worker.keys(&text(i), b"")),
            epoch: worker.epoch,
            sequence: 1,
            removed: Vec::new(),
            cleared: false,
            tier: 0,
        }));
        worker
    };
    let mut workers = join_all((0..WAVE).map(join)).await;
    let all = f64::from(WAVE * BLOCKS);
    let announced = || metric(app, "headrace_worker_blocks_indexed", "");
    until("all blocks", || announced() == all).await;
    let mut answers = Vec::new();
    for i in (0..WAVE).step_by(5) {
        let job = ask(&text(i));
        answers.push(answer(app, job.clone()).await.unwrap());
        let chosen = chosen(&job.journey);
        assert_eq!((&*chosen.name, chosen.held_tokens), (&*name(i), BLOCKS * BLOCK));
    }
    let seen = (metric(app, "headrace_index_blocks", ""), metric(app, "headrace_index_bytes", ""));
    for i in (0..WAVE).step_by(3) {
        workers.push(Caching::ready(app, &name(i)).await);
        let order = DrainOrder { budget: Duration::from_secs(1), hand_over: 0 };
        app.fleet.drain(&name((i + 1) % WAVE), order).unwrap();
    }
    drop(answers);
    drop(workers);
    until("all are gone", || app.fleet.workers()["workers"].as_array().unwrap().is_empty()).await;
    all_is_given_back(app).await;
    assert_eq!(announced(), 0.0);
    seen
}

#[tokio::test]
async fn hundreds_of_workers_come_and_go_and_neither_memory_nor_metrics_grow() {
    let app = start_router(|_| {}).await;
    let steady = Caching::holding(&app, "steady", &prompt(0, 3)).await;
    drop(steady);
    until("it is gone", || state_of(&app, "steady").is_empty()).await;
    let mut seen = Vec::new();
    let mut lines = Vec::new();
    for n in 1..=WAVES {
        seen.push(wave(&app, n).await);
        let metrics = app.render_metrics();
        assert!(!metrics.contains(&format!("\"w{n}-")), "no line of a worker that is gone");
        lines.push(metrics.lines().count());
    }
    assert_eq!(lines[1], lines[WAVES as usize - 1]);
    assert!(metric(&app, "headrace_links_total", "") > f64::from(WAVES * WAVE));
    assert_eq!(metric(&app, "headrace_workers", ""), 0.0);
    let most =
        |of: &[(f64, f64)]| of.iter().fold((0.0_f64, 0.0_f64), |a, b| (a.0.max(b.0), a.1.max(b.1)));
    let (early, late) = seen.split_at(4);
    let ((blocks, bytes), (blocks_later, bytes_later)) = (most(early), most(late));
    assert!(blocks_later <= 1.5 * blocks && bytes_later <= 1.5 * bytes, "{seen:?}");
    // one that comes now is served
    let mut last = Caching::holding(&app, "last", &prompt(1, BLOCKS)).await;
    assert_eq!(
        honestly(&app, &mut [&mut last], &prompt(1, BLOCKS)).await,
        ("last".into(), BLOCKS * BLOCK)
    );
}

#[tokio::test]
async fn names_of_models_are_bounded() {
    let app = start_router(|args| args.circuit_breaks = 0).await;
    let mut refused = 0;
    for n in 0..300 {
        let mut behaviour = Behaviour::new("w");
        behaviour.hello.model = format!("model-{n}");
        if let Err(refuse) = behaviour.join(&app).await {
            assert_eq!((refuse.field.as_str(), refuse.got), ("model", format!("model-{n}")));
            refused += 1;
        }
    }
    assert_eq!(refused, 300 - 256);
    let reason = "refused_model";
    until(reason, || metric(&app, "headrace_link_errors_total", reason) == 44.0).await;
}

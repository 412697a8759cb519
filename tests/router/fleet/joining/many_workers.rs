//! Workers that join and leave by the hundred, with blocks and requests on them: nothing of them stays.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use headrace_router::app::App;
use headrace_router::core::frame::*;
use headrace_router::fleet::DrainOrder;

use super::super::caching::*;
use super::super::requests::answer;
use crate::fake_worker::*;

const WAVES: u32 = 12;
const WAVE: u32 = 50;
const BLOCKS: u32 = 100;

/// A wave of workers that join at once, hold a prompt each, and are gone in the middle of a request: by death, some with a
/// newer life after it, or in good order. What the router knew of blocks while they were there, and its memory for that.
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
        let chosen = chosen(&job.request_trace);
        assert_eq!((&*chosen.name, chosen.held_tokens), (&*name(i), BLOCKS * BLOCK));
    }
    let seen = (metric(app, "headrace_index_blocks", ""), metric(app, "headrace_index_bytes", ""));
    for i in (0..WAVE).step_by(3) {
        // another one stands in its place, and it is gone
        let newer = Caching::ready(app, &format!("w{n}-{i}-newer")).await;
        workers[i as usize] = newer;
        until("its former life is gone", || state_of(app, &name(i)).is_empty()).await;
        workers.push(Caching::ready(app, &name(i)).await);
        let order = DrainOrder { budget: Duration::from_secs(1), migration: 0 };
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

/// A worker of a model of its own.
fn of_model(n: u32) -> Behaviour {
    let mut behaviour = Behaviour::new(&format!("w{n}"));
    behaviour.hello.model = format!("model-{n}");
    behaviour
}

#[tokio::test]
async fn names_of_models_are_bounded_and_free_once_nobody_has_them() {
    let app = start_router(|args| {
        args.circuit_breaks = 0;
        args.secret = Some("open sesame".into());
    })
    .await;
    let proved = |n| Behaviour { secret: Some("open sesame".into()), ..of_model(n) };
    let join = |n| proved(n).join(&app);
    let mut workers: Vec<_> = join_all((0..256).map(join)).await;
    assert!(workers.iter().all(Result::is_ok));
    let refuse = proved(300).join(&app).await.unwrap_err();
    assert_eq!(refuse.reason, RefuseReason::TooManyModels);
    assert_eq!((refuse.field.as_str(), refuse.got.as_str()), ("model", "model-300"));
    until("the reason", || {
        metric(&app, "headrace_link_errors_total", "refused_too_many_models") == 1.0
    })
    .await;
    // nobody has asked for it: it is free at once
    workers.truncate(255);
    until("its worker is gone", || state_of(&app, "w255").is_empty()).await;
    let _other = proved(301).ready(&app).await;
    let page = app.render_metrics();
    assert!(page.contains(r#"{model="model-301"}"#) && !page.contains(r#"{model="model-255"}"#));
    assert!(proved(302).join(&app).await.is_err());
}

#[tokio::test]
async fn so_many_workers_have_series_of_their_own_and_the_others_share_one_that_never_falls() {
    let app = start_router(|args| args.circuit_breaks = 0).await;
    let join = |n| Behaviour::new(&format!("w{n}")).join(&app);
    let mut workers = join_all((0..258).map(join)).await;
    let name = "headrace_worker_output_tokens_total";
    let shown = || {
        let page = app.render_metrics();
        let samples = page.lines().filter(|line| line.starts_with(name));
        samples.map(|line| line.split('"').nth(1).unwrap().to_owned()).collect::<Vec<_>>()
    };
    until("all are heard of", || shown().contains(&"other".to_owned())).await;
    assert_eq!(shown().len(), 257);
    let others = || metric(&app, "headrace_worker_preemptions_total", r#"worker="other""#);
    for worker in &workers {
        for preemptions in [0, 2] {
            let load = Load { preemptions, ..Load::default() };
            worker.as_ref().unwrap().send(Frame::Step(Step { load, ..step(vec![]) }));
        }
    }
    until("they told", || others() == 4.0).await;
    let own = metric(&app, "headrace_worker_preemptions_total", "");
    assert!(own >= 4.0, "{own}");
    workers.clear();
    until("all are gone", || shown() == ["other"]).await;
    assert_eq!(others(), 4.0);
}

#[tokio::test]
async fn a_host_without_a_secret_brings_so_many_models_and_those_that_left_count_no_more() {
    let app = start_router(|args| args.circuit_breaks = 0).await;
    let mut workers: Vec<_> = join_all((0..64).map(|n| of_model(n).join(&app))).await;
    assert!(workers.iter().all(Result::is_ok));
    let refuse = of_model(64).join(&app).await.unwrap_err();
    assert_eq!(refuse.reason, RefuseReason::TooManyModels);
    assert_eq!((refuse.field.as_str(), refuse.got.as_str()), ("model", "model-64"));
    assert!(refuse.message.contains("--secret-file"), "{refuse:?}");
    // another worker of a model that is there is welcome
    let mut more = of_model(7);
    more.hello.worker = "more".into();
    let _more = more.join(&app).await.unwrap();
    workers.remove(9).unwrap().leaves(&app).await;
    let _next = of_model(64).join(&app).await.unwrap();
    // hundreds of names that come and go
    drop(workers);
    for n in 100..500 {
        of_model(n).join(&app).await.unwrap().leaves(&app).await;
    }
    let _last = of_model(1000).ready(&app).await;
}

#[tokio::test]
async fn what_workers_announce_is_bounded_for_each_and_for_all() {
    let app = start_router(|args| {
        args.max_index_blocks = 8 * 50;
        args.circuit_breaks = 0;
    })
    .await;
    let sound = Caching::holding(&app, "sound", &prompt(1, 40)).await;
    let mut strangers = Vec::new();
    for n in 0..20 {
        let name = format!("stranger-{n}");
        let mut stranger = Caching::ready(&app, &name).await; // it says that it has room for 1,024
        let keys: Vec<u64> =
            (0..1024).map(|i| (1024 * n + i + 1_u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        for part in keys.chunks(30) {
            stranger.stores(part);
        }
        until("it is over its share", || stranger.withdrawn(&app) == "over_share").await;
        assert_eq!(of_worker(&app, &name)["blocks_indexed"], 0);
        assert_eq!(state_of(&app, &name), "ready", "it serves");
        strangers.push(stranger);
    }
    assert!(metric(&app, "headrace_index_blocks", "") <= 400.0);
    assert_eq!(metric(&app, "headrace_blocks_lost_total", "over_share"), 20.0);
    assert_eq!(metric(&app, "headrace_resyncs_total", ""), 0.0, "it would not fit again");
    assert_eq!((sound.withdrawn(&app).as_str(), state_of(&app, "sound").as_str()), ("", "ready"));
    assert_eq!(of_worker(&app, "sound")["blocks_indexed"], 40);
    // their room is free once they are gone
    let names: Vec<String> = strangers.iter().map(|stranger| stranger.name.clone()).collect();
    drop(strangers);
    until("they are gone", || names.iter().all(|name| state_of(&app, name).is_empty())).await;
    let next = Caching::holding(&app, "next", &prompt(2, 45)).await;
    assert_eq!(next.withdrawn(&app), "");
}

#[tokio::test]
async fn descriptions_are_bounded_for_all_models_together() {
    let bytes = doc().to_string().len();
    let app = start_router(|args| args.max_description_bytes = bytes + bytes / 2).await;
    let first = Behaviour::new("w1").ready(&app).await;
    let other = |name: &str| {
        let mut other = Behaviour::new(name);
        other.hello.model = "other".into();
        other.hello.fingerprints.tokenizer = "other".into();
        other
    };
    let mut second = other("w2").join(&app).await.unwrap();
    second.closed().await;
    until("the reason", || metric(&app, "headrace_link_errors_total", "\"model\"") == 1.0).await;
    assert_eq!(state_of(&app, "w1"), "ready");
    assert_eq!(metric(&app, "headrace_description_bytes", ""), bytes as f64);
    // a second model with the same tokenizer takes nothing more
    let mut same = Behaviour::new("w3");
    same.hello.model = "same".into();
    let _same = same.ready(&app).await;
    drop(first);
    until("it is gone", || state_of(&app, "w1").is_empty()).await;
    assert_eq!(metric(&app, "headrace_description_bytes", ""), bytes as f64);
}

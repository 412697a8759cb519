//! Links that break: garbage, gaps, silence, full sockets; and workers that leave in good order.

use std::time::Duration;

use headrace_router::core::frame::*;
use tokio::time::sleep;

use crate::fake_worker::*;

#[tokio::test]
async fn whatever_breaks_the_protocol_closes_the_link_with_its_reason() {
    let delta = |epoch, sequence| {
        let (stored, removed) = (Vec::new(), Vec::new());
        Frame::Blocks(Blocks { epoch, sequence, stored, removed, cleared: false, tier: 0 })
    };
    let frame = |frame: Frame| {
        let mut body = Vec::new();
        headrace_router::fleet::codec::encode(&frame, &mut body).unwrap();
        [&u32::try_from(body.len()).unwrap().to_le_bytes()[..], &body].concat()
    };
    let behaviour = Behaviour::new("w1");
    let epoch = behaviour.hello.epoch;
    let cases = [
        (b"garbage!".to_vec(), "frame_too_long"),
        (vec![1, 0, 0, 0, 0xc1], "frame_malformed"),
        (vec![2, 0, 0, 0, 0x91, 99], "frame_unknown"),
        ((65_u32 << 20).to_le_bytes().to_vec(), "frame_too_long"),
        (frame(Frame::Hello(hello("w1"))), "frame_unexpected"),
        (frame(Frame::Ping(Ping { nonce: 1 })), "frame_unexpected"),
        (
            frame(Frame::Snapshot(Snapshot { epoch, sequence: 9, hashes: vec![7], last: true })),
            "block_keys",
        ),
    ];
    let app = start_router(|_| {}).await;
    for (bytes, reason) in cases {
        let before = metric(&app, "headrace_link_errors_total", reason);
        let mut worker = behaviour.clone().ready(&app).await;
        worker.send_raw(&bytes);
        worker.closed().await;
        until(reason, || metric(&app, "headrace_link_errors_total", reason) > before).await;
        until("w1 is gone", || state_of(&app, "w1").is_empty()).await;
    }
    // it dials again and is welcome
    let worker = behaviour.ready(&app).await;
    worker.send(delta(epoch, 1));
    worker.send(delta(epoch, 2));
    let step =
        Step { load: Load { blocks_used: 5, blocks_cached: 6, ..Load::default() }, ..step(vec![]) };
    worker.send(Frame::Step(step));
    until("the load", || of_worker(&app, "w1")["blocks_used"] == 5).await;
    assert_eq!(of_worker(&app, "w1")["blocks_cached"], 6);
    assert_eq!(of_worker(&app, "w1")["blocks_total"], 1024);
    assert_eq!(metric(&app, "headrace_worker_blocks_used", "w1"), 5.0);
}

#[tokio::test]
async fn a_silent_worker_is_suspect_then_asked_then_dropped() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour { lives: false, ..Behaviour::new("w1") }.ready(&app).await;
    tokio::time::pause();
    until("it is suspect", || state_of(&app, "w1") == "suspect").await;
    assert!(!app.fleet.ready());
    until("it is asked", || worker.so_far().iter().any(|event| matches!(event, Event::Ping))).await;
    worker.send(Frame::Step(step(vec![])));
    until("it is trusted again", || state_of(&app, "w1") == "ready").await;
    worker.closed().await;
    until("the reason", || metric(&app, "headrace_link_errors_total", "silent") > 0.0).await;
    assert_eq!(state_of(&app, "w1"), "");
}

#[tokio::test]
async fn heartbeats_keep_a_worker_ready() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    tokio::time::pause();
    for _ in 0..40 {
        sleep(Duration::from_secs(1)).await;
        assert_eq!(state_of(&app, "w1"), "ready");
    }
    assert!(!worker.so_far().iter().any(|event| matches!(event, Event::Closed)));
}

#[tokio::test]
async fn a_worker_that_says_bye_or_is_drained_gets_nothing_new() {
    let app = start_router(|_| {}).await;
    let one = Behaviour::new("w1").ready(&app).await;
    one.send(Frame::Bye(Bye { reason: "spot instance".into() }));
    until("w1 drains", || state_of(&app, "w1") == "draining").await;
    assert!(!app.fleet.ready());
    let mut two = Behaviour::new("w2").ready(&app).await;
    assert!(app.fleet.drain("w2", Duration::from_millis(1500)));
    assert!(matches!(two.event().await, Event::Drain(1500)));
    assert_eq!(state_of(&app, "w2"), "draining");
    assert!(!app.fleet.drain("nobody", Duration::ZERO));
}

#[tokio::test]
async fn a_reconnect_storm_leaves_one_worker_and_nothing_else() {
    let app = start_router(|_| {}).await;
    let mut last = Behaviour::new("w1").ready(&app).await;
    for _ in 0..100 {
        last = Behaviour::new("w1").join(&app).await.unwrap();
    }
    until("the last one is ready", || state_of(&app, "w1") == "ready").await;
    assert_eq!(app.fleet.workers()["workers"].as_array().unwrap().len(), 1);
    until("all others are gone", || metric(&app, "headrace_link_errors_total", "") >= 100.0).await;
    assert!(!last.so_far().iter().any(|event| matches!(event, Event::Closed)));
}

//! Links that break: garbage, gaps, silence, full sockets; and workers that leave in good order.

use std::time::Duration;

use headrace_router::core::frame::*;
use tokio::time::sleep;

use super::caching::{ask, prompt};
use super::requests::{answer, next};
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
    let raw = |body: &[u8]| [&u32::try_from(body.len()).unwrap().to_le_bytes()[..], body].concat();
    let behaviour = Behaviour::new("w1");
    let epoch = behaviour.hello.epoch;
    let cases = [
        (raw(b"\x94\x09\x07\xa7sulking\xa0"), "frame_malformed"), // a kind that is none
        (raw(b"\x95\x09\x07\xaaqueue_full\xa0\xc3"), "frame_malformed"), // as in version 1
        (raw(b"\x98\x0b\x07\xa1w\xa6pigeon\x00\x00\xcb\0\0\0\0\0\0\0\0\xc0"), "frame_malformed"),
        (raw(b"\x92\x01\x01"), "frame_unexpected"), // a Hello of version 1, now
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
    let app = start_router(|args| args.circuit_breaks = 100).await;
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
async fn a_frame_that_comes_for_long_is_heard_and_one_that_drips_is_not() {
    // long enough for the model to be read before a worker that never beats is suspect
    let app = start_router(|args| args.heartbeat_ms = 1000).await;
    let worker = Behaviour { lives: false, ..Behaviour::new("w1") }.ready(&app).await;
    tokio::time::pause();
    worker.send_raw(&(8_u32 << 20).to_le_bytes());
    for _ in 0..64 {
        worker.send_raw(&[0; 64 << 10]);
        sleep(Duration::from_millis(200)).await;
        assert_eq!(state_of(&app, "w1"), "ready");
    }
    assert_eq!(metric(&app, "headrace_suspects_total", ""), 0.0);
    let mut drops = 0;
    while state_of(&app, "w1") == "ready" && drops < 64 {
        worker.send_raw(&[0]);
        sleep(Duration::from_millis(200)).await;
        drops += 1;
    }
    assert_eq!(state_of(&app, "w1"), "suspect", "after {drops} bytes");
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
}

#[tokio::test]
async fn a_worker_that_dials_again_and_again_is_held_off_and_let_in_again() {
    let app = start_router(|args| args.circuit_breaks = 3).await;
    let other = Behaviour::new("calm").ready(&app).await;
    for _ in 0..4 {
        drop(Behaviour::new("w1").join(&app).await.unwrap());
        until("w1 is gone", || state_of(&app, "w1").is_empty()).await;
    }
    until("it is open", || metric(&app, "headrace_circuits_open", "") == 1.0).await;
    assert_eq!(metric(&app, "headrace_circuits_opened_total", ""), 1.0);
    for _ in 0..50 {
        let refuse = Behaviour::new("w1").join(&app).await.unwrap_err();
        assert_eq!(refuse.reason, RefuseReason::Circuit);
        assert!(matches!(refuse.retry_after_ms, Some(1..=1000)), "{refuse:?}");
    }
    assert_eq!(metric(&app, "headrace_link_errors_total", "refused_circuit"), 50.0);
    assert_eq!((state_of(&app, "w1").as_str(), state_of(&app, "calm").as_str()), ("", "ready"));
    // one probe is let in after the pause; if it breaks as well, the pause is longer
    let probe = async || {
        loop {
            match Behaviour::new("w1").join(&app).await {
                Ok(worker) => return worker,
                Err(refuse) => {
                    sleep(Duration::from_millis(refuse.retry_after_ms.unwrap().into())).await;
                }
            }
        }
    };
    drop(in_time("the probe", probe()).await);
    until("it is open", || metric(&app, "headrace_circuits_opened_total", "") == 2.0).await;
    let refuse = Behaviour::new("w1").join(&app).await.unwrap_err();
    assert!(matches!(refuse.retry_after_ms, Some(1001..=2000)), "{refuse:?}");
    drop(other);
}

#[tokio::test]
async fn workers_that_leave_in_good_order_may_come_back_at_once() {
    let app = start_router(|args| args.circuit_breaks = 1).await;
    for _ in 0..20 {
        let worker = Behaviour::new("w1").ready(&app).await;
        worker.send(Frame::Bye(Bye { reason: "a new version".into() }));
        until("w1 drains", || state_of(&app, "w1") == "draining").await;
        drop(worker);
        until("w1 is gone", || state_of(&app, "w1").is_empty()).await;
    }
    assert_eq!(metric(&app, "headrace_circuits_opened_total", ""), 0.0);
}

#[tokio::test]
async fn a_second_link_of_the_same_start_is_refused_while_the_first_one_lives() {
    let app = start_router(|_| {}).await;
    let behaviour = Behaviour::new("w1");
    let mut first = behaviour.clone().ready(&app).await;
    let refuse = behaviour.clone().join(&app).await.unwrap_err();
    assert_eq!(refuse.reason, RefuseReason::AlreadyJoined);
    assert_eq!((&refuse.router, refuse.retry_after_ms), (&first.welcome.router, None));
    assert!(!first.so_far().iter().any(|event| matches!(event, Event::Closed)), "it goes on");
}

#[tokio::test]
async fn the_name_of_a_living_worker_is_given_to_nobody() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = answer(&app, ask(&prompt(1, 2))).await.unwrap();
        let request = worker.submitted().await.request;
        worker.gives(request, &letters("a"), None);
        next(&mut stream).await.unwrap().unwrap();
        streams.push(stream);
    }
    for n in 0..20 {
        // whatever it says of itself
        let mut stranger = Behaviour::new("w1");
        stranger.hello.epoch += n << 32;
        stranger.hello.model = if n % 2 == 0 { MODEL.into() } else { "another".into() };
        let refuse = stranger.join(&app).await.unwrap_err();
        let expected = (RefuseReason::NameTaken, Some(1000));
        assert_eq!((refuse.reason, refuse.retry_after_ms), expected);
    }
    assert_eq!(state_of(&app, "w1"), "ready");
    let cancelled = |event: &Event| matches!(event, Event::Cancel(_) | Event::Closed);
    assert!(!worker.so_far().iter().any(cancelled), "its streams go on");
    assert_eq!(metric(&app, "headrace_resumes_total", ""), 0.0);
    // a later life of the worker itself gets it, as soon as this one has ended
    drop(worker);
    let mut next_life = Behaviour::new("w1").join_when_free(&app).await;
    for mut stream in streams {
        tokio::spawn(async move { next(&mut stream).await });
        assert!(next_life.submitted().await.resume.is_some(), "nothing is lost");
    }
}

#[tokio::test]
async fn a_link_that_is_dead_and_does_not_know_it_is_replaced_after_four_heartbeats() {
    // it is ready for three heartbeats, in which this test has to have a turn
    let app = start_router(|args| args.heartbeat_ms = 1_000).await;
    let mut first = Behaviour { lives: false, ..Behaviour::new("w1") }.ready(&app).await;
    let refuse = Behaviour::new("w1").join(&app).await.unwrap_err();
    let expected = (RefuseReason::NameTaken, Some(1_000));
    assert_eq!((refuse.reason, refuse.retry_after_ms), expected);
    let _second = Behaviour::new("w1").join_when_free(&app).await;
    let mut pings = 0;
    while let Some(event) = first.events_until_closed().await {
        pings += u32::from(matches!(event, Event::Ping));
    }
    assert!(pings > 0, "it was asked before");
    until("the reason", || metric(&app, "headrace_link_errors_total", "replaced") == 1.0).await;
}

#[tokio::test]
async fn a_second_link_replaces_one_that_has_gone_silent() {
    // it is suspect for seven heartbeats, in which this test has to have a turn
    let app = start_router(|args| args.heartbeat_ms = 1_000).await;
    let behaviour = Behaviour { lives: false, ..Behaviour::new("w1") };
    let mut first = behaviour.clone().ready(&app).await;
    until("it is suspect", || state_of(&app, "w1") == "suspect").await;
    let _second = behaviour.join_when_free(&app).await;
    first.closed().await;
}

#[tokio::test]
async fn a_reconnect_storm_leaves_one_worker_and_nothing_else() {
    let app = start_router(|args| args.circuit_breaks = 0).await;
    let mut last = Behaviour::new("w1").ready(&app).await;
    for _ in 0..100 {
        drop(last);
        last = Behaviour::new("w1").join_when_free(&app).await;
    }
    until("the last one is ready", || state_of(&app, "w1") == "ready").await;
    assert_eq!(app.fleet.workers()["workers"].as_array().unwrap().len(), 1);
    until("all others are gone", || {
        metric(&app, "headrace_link_errors_total", "\"closed\"") == 100.0
    })
    .await;
    assert!(!last.so_far().iter().any(|event| matches!(event, Event::Closed)));
}

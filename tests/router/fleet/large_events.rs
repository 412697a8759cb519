//! Events of hundreds of thousands of blocks: all of them count in the end, and nobody waits for them.

use std::sync::Arc;
use std::time::Duration;

use headrace_router::app::App;
use headrace_router::core::frame::*;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::caching::*;
use super::requests::{answer, job, next};
use crate::fake_worker::*;

const BLOCKS: u64 = 300_000;

fn random(blocks: std::ops::Range<u64>) -> Vec<u64> {
    blocks.map(|block| (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// A worker of another model with much room, and one that answers.
async fn start() -> (Arc<App>, Caching, FakeWorker) {
    let app = start_router(|_| {}).await;
    let mut large = Behaviour::new("large");
    large.hello.model = "large".into();
    large.hello.capacity.blocks = 1 << 20;
    let large = Caching::ready_as(&app, large).await;
    let other = Behaviour::says("other", "ab").ready(&app).await;
    (app, large, other)
}

fn indexed(app: &App) -> u64 {
    of_worker(app, "large")["blocks_indexed"].as_u64().unwrap_or_default()
}

/// Looks between any two turns of the router's tasks: they and the test share one thread.
async fn seen(app: &App, is_so: impl Fn(u64) -> bool) -> u64 {
    let looks = async {
        loop {
            let blocks = indexed(app);
            if is_so(blocks) {
                return blocks;
            }
            yield_now().await;
        }
    };
    in_time("the blocks", looks).await
}

async fn served(app: &Arc<App>) {
    let mut answer = answer(app, job()).await.unwrap();
    let mut text = String::new();
    while let Some(part) = next(&mut answer).await {
        text.push_str(&part.unwrap().text);
    }
    assert_eq!(text, "ab");
}

#[tokio::test]
async fn others_are_served_while_a_large_event_is_applied() {
    let (app, mut large, _other) = start().await;
    large.stores(&random(0..BLOCKS));
    seen(&app, |blocks| blocks > 0).await;
    served(&app).await;
    let so_far = indexed(&app);
    assert!(so_far < BLOCKS, "all of it was applied before anybody else had a turn");
    assert_eq!(seen(&app, |blocks| blocks >= BLOCKS).await, BLOCKS);

    large.removes(&random(0..BLOCKS - 7));
    let some = seen(&app, |blocks| blocks < BLOCKS).await;
    assert!(some > 7, "in one go");
    served(&app).await;
    assert_eq!(seen(&app, |blocks| blocks <= 7).await, 7);
    assert_eq!(metric(&app, "headrace_blocks_removed_unknown_total", ""), 0.0);

    let part = |blocks, last| Snapshot { last, ..large.snapshot(&random(blocks)) };
    let next = Snapshot { sequence: large.sequence + 1, ..part(0..BLOCKS / 2, false) };
    let sequence = next.sequence;
    large.send(Frame::Snapshot(next));
    large.send(Frame::Snapshot(Snapshot { sequence, ..part(BLOCKS / 2..BLOCKS, true) }));
    seen(&app, |blocks| blocks > BLOCKS / 2).await;
    assert_eq!(large.withdrawn(&app), "no_snapshot", "it counts when it is whole");
    served(&app).await;
    assert_eq!(seen(&app, |blocks| blocks >= BLOCKS).await, BLOCKS);
    large.credited(&app).await;
}

#[tokio::test]
async fn a_worker_that_goes_in_the_midst_of_a_large_event_leaves_nothing() {
    let (app, mut large, _other) = start().await;
    large.stores(&random(0..BLOCKS));
    let so_far = seen(&app, |blocks| blocks > 0).await;
    assert!(so_far < BLOCKS);
    drop(large);
    served(&app).await;
    until("it is gone", || state_of(&app, "large").is_empty()).await;
    assert_eq!(metric(&app, "headrace_index_blocks", ""), 0.0);
    let mut again = Behaviour::new("large");
    again.hello.model = "large".into();
    let mut again = Caching::ready_as(&app, again).await;
    again.stores(&random(0..40));
    again.indexed(&app, 40).await;
}

#[tokio::test]
async fn blocks_come_at_a_bounded_rate_in_order_and_whoever_waits_for_that_is_not_silent() {
    let app = start_router(|args| args.heartbeat_ms = 100).await;
    let mut large = Behaviour::new("large");
    large.hello.capacity.blocks = 1 << 21;
    let mut large = Caching::ready_as(&app, large).await;
    let begin = Instant::now();
    for known in [1, 2] {
        large.removes(&random(10..1 << 20)); // what is not there costs as much
        large.stores(&random(0..known));
    }
    until("all of them", || {
        assert_eq!(state_of(&app, "large"), "ready");
        indexed(&app) == 2
    })
    .await;
    // half of it at once, the other half at 2^21 a second
    assert!(begin.elapsed() >= Duration::from_millis(500), "{:?}", begin.elapsed());
    assert_eq!(metric(&app, "headrace_suspects_total", ""), 0.0);
    assert_eq!(metric(&app, "headrace_link_errors_total", ""), 0.0);
    assert_eq!(metric(&app, "headrace_resyncs_total", ""), 0.0, "in order");
}

#[tokio::test]
async fn a_large_event_that_does_not_fit_costs_the_credit_and_no_more() {
    let app = start_router(|args| args.max_index_blocks = 1 << 20).await;
    let mut large = Behaviour::new("large");
    large.hello.capacity.blocks = 1 << 26;
    let mut large = Caching::ready_as(&app, large).await;
    let behind = prompt(1, 3);
    large.stores(&random(0..BLOCKS));
    large.stores(&random(BLOCKS..2 * BLOCKS));
    until("it is too much", || large.withdrawn(&app) == "over_share").await;
    assert_eq!(indexed(&app), 0);
    let job = ask(&behind);
    assert_eq!(super::caching::served(&app, &mut [&mut large], job, |cached| cached).await.1, 0);
    assert_eq!(metric(&app, "headrace_link_errors_total", ""), 0.0);
    assert_eq!(metric(&app, "headrace_resyncs_total", ""), 0.0);
}

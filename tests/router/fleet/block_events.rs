//! Block events with a gap: the worker is asked for its snapshot again, and its requests notice nothing.

use headrace_router::core::frame::*;
use headrace_router::request::answer;

use super::requests::{job, next};
use crate::fake_worker::*;

fn delta(epoch: u64, sequence: u64, stored: usize) -> Frame {
    let stored = vec![StoredRun { parent: None, hashes: vec![1; 8 * stored] }];
    let removed = Vec::new();
    Frame::Blocks(Blocks { epoch, sequence, stored, removed, cleared: false, tier: 0 })
}

#[tokio::test]
async fn a_gap_in_block_events_costs_no_request_and_heals() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let epoch = of_worker(&app, "w1")["epoch"].as_u64().unwrap();
    let mut answer = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.send(delta(epoch, 1, 2));
    until("the blocks", || of_worker(&app, "w1")["blocks_announced"] == 2).await;
    worker.send(delta(epoch, 1, 2));
    worker.send(delta(epoch + 1, 2, 2));
    let ignored = |reason| metric(&app, "headrace_block_events_ignored_total", reason);
    until("both are counted", || ignored("replayed") + ignored("epoch") == 2.0).await;
    worker.send(delta(epoch, 3, 2));
    let Event::Resync(reason) = worker.event().await else { panic!("a Resync") };
    assert_eq!(reason, "block events 3 after 1");
    assert_eq!(of_worker(&app, "w1")["blocks_announced"], 0);
    assert_eq!(metric(&app, "headrace_blocks_lost_total", "sequence"), 1.0);
    assert_eq!(state_of(&app, "w1"), "ready", "it works on, without credit");
    let hashes = vec![1; 40];
    worker.send(Frame::Snapshot(Snapshot { epoch, sequence: 3, hashes, last: true }));
    worker.send(delta(epoch, 4, 1));
    until("the blocks again", || of_worker(&app, "w1")["blocks_announced"] == 6).await;
    worker.gives(request, &letters("hi"), Some(Finish::Length));
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "hi");
}

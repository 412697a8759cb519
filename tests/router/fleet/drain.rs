//! Drains: what leaves is handed over, what runs may end, and whoever does not answer holds nobody up.

use std::time::Duration;

use headrace_router::app::App;
use headrace_router::core::frame::*;
use headrace_router::fleet::{DrainError, DrainOrder};
use serde_json::{Value, json};

use crate::fake_worker::*;

const HASH: u8 = 7;

/// A worker whose KV can be pulled.
fn movable(name: &str) -> Behaviour {
    let mut behaviour = Behaviour::new(name);
    behaviour.hello.transfer = vec![format!("tcp:{name}:1")];
    behaviour.hello.kv_block_bytes = 4096;
    behaviour
}

fn order(budget_ms: u64, migration: u32) -> DrainOrder {
    DrainOrder { budget: Duration::from_millis(budget_ms), migration }
}

fn name(block: u8) -> [u8; NAME_BYTES] {
    let mut name = [HASH; NAME_BYTES];
    name[0] = block;
    name
}

/// Two chains: 0-1-2 and 3-4.
fn offer() -> Offer {
    Offer {
        ticket: vec![9; 16],
        names: (0..5).flat_map(name).collect(),
        parents: vec![-1, 0, 1, -1, 3],
        hits: vec![5, 5, 2, 4, 4],
        lease_ms: 10_000,
    }
}

async fn drain_asked(worker: &mut FakeWorker) -> Drain {
    loop {
        match worker.event().await {
            Event::Drain(drain) => return drain,
            Event::Closed => panic!("the link closed before a drain"),
            _ => {}
        }
    }
}

async fn fetch_asked(worker: &mut FakeWorker) -> Fetch {
    loop {
        match worker.event().await {
            Event::Fetch(fetch) => return fetch,
            Event::Closed => panic!("the link closed before a fetch"),
            _ => {}
        }
    }
}

/// The target announces what it fetched, and says that it has it.
fn pulls(worker: &FakeWorker, fetch: &Fetch, epoch: u64) {
    let keys: Vec<u8> =
        fetch.names.chunks(NAME_BYTES).flat_map(|name| name[..8].to_vec()).collect();
    let stored = vec![StoredRun { parent: None, hashes: keys }];
    let (removed, cleared, tier) = (Vec::new(), false, 0);
    worker.send(Frame::Blocks(Blocks { epoch, sequence: 1, stored, removed, cleared, tier }));
    worker.send(Frame::Transferred(transferred(fetch, None)));
}

fn transferred(fetch: &Fetch, error: Option<TransferFailure>) -> Transferred {
    let blocks = if error.is_none() { u32::try_from(fetch.offset.len()).unwrap() } else { 0 };
    Transferred {
        request: fetch.request,
        worker: fetch.kv_from.worker.clone(),
        backend: Some(TransferBackend::Tcp),
        blocks,
        bytes: u64::from(blocks) * 4096,
        ms: 2.0,
        error,
    }
}

fn state(app: &App, worker: &str) -> Value {
    app.fleet.drain_state(worker).unwrap()
}

async fn over(app: &App, worker: &str) -> Value {
    until("the end of the drain", || state(app, worker)["phase"] == "done").await;
    state(app, worker)
}

#[tokio::test]
async fn the_hottest_blocks_go_to_those_who_stay_before_the_worker_leaves() {
    let app = start_router(|_| {}).await;
    let mut leaving = movable("w1").ready(&app).await;
    let targets = [movable("w2"), movable("w3")];
    let epochs = targets.clone().map(|target| target.hello.epoch);
    let [two, three] = targets;
    let mut targets = [two.ready(&app).await, three.ready(&app).await];
    let begun = app.fleet.drain("w1", order(5_000, 100)).unwrap();
    assert_eq!((&begun["phase"], &begun["worker"]), (&json!("offering"), &json!("w1")));
    assert_eq!(state_of(&app, "w1"), "draining");
    assert_eq!(app.fleet.drain("w1", order(1, 1)).unwrap_err(), DrainError::Already);
    let Drain { budget_ms, migration } = drain_asked(&mut leaving).await;
    let migration = migration.unwrap();
    assert_eq!((budget_ms, migration.blocks), (5_000, 100));
    leaving.send(Frame::Bye(Bye { reason: "the router asked for it".into() }));
    leaving.send(Frame::Offer(offer()));
    let mut places = Vec::new();
    for (target, epoch) in targets.iter_mut().zip(epochs) {
        let fetch = fetch_asked(target).await;
        assert_eq!((&fetch.kv_from.worker, &fetch.ticket), (&"w1".into(), &vec![9; 16]));
        assert_eq!(fetch.kv_from.transfer, ["tcp:w1:1"]);
        assert_eq!(fetch.kv_from.pull_key, migration.pull_key, "as the offer's ticket is");
        assert_eq!(fetch.kv_from.timeout_ms, 2_500, "half of the budget is for requests");
        let names: Vec<u8> =
            fetch.offset.iter().flat_map(|&at| name(u8::try_from(at).unwrap())).collect();
        assert_eq!(fetch.names, names);
        assert_eq!(
            fetch.parents,
            (-1..).take(fetch.offset.len()).collect::<Vec<i32>>(),
            "one chain"
        );
        places.push(fetch.offset.clone());
        pulls(target, &fetch, epoch);
    }
    places.sort();
    assert_eq!(places, [vec![0, 1, 2], vec![3, 4]], "each chain whole to one of them");
    let second = drain_asked(&mut leaving).await;
    assert_eq!(second.migration, None, "the pins may go");
    assert!(second.budget_ms > 0 && second.budget_ms <= 5_000);
    drop(leaving);
    let done = over(&app, "w1").await;
    let migration = &done["hand_over"];
    assert_eq!(migration["outcome"], "done", "{done}");
    assert_eq!(
        (&migration["blocks_offered"], &migration["blocks_handed_over"]),
        (&json!(5), &json!(5))
    );
    assert_eq!((&migration["hits_offered"], &migration["hits_kept"]), (&json!(20), &json!(20)));
    assert_eq!(migration["hit_rate_kept"], 1.0);
    assert_eq!(migration["successors"].as_array().unwrap().len(), 2);
    assert_eq!(done["left_in_time"], true);
    assert_eq!(done["requests"], json!({"running": 0, "finished": 0, "moved": 0}));
    assert_eq!(metric(&app, "headrace_drains_total", "left"), 1.0);
    assert_eq!(metric(&app, "headrace_drain_blocks_handed_over_total", ""), 5.0);
}

#[tokio::test]
async fn a_successor_that_fails_or_dies_or_says_nothing_costs_its_share_only() {
    for fate in ["fails", "dies", "says nothing"] {
        let app = start_router(|_| {}).await;
        let mut leaving = movable("w1").ready(&app).await;
        let mut target = movable("w2").ready(&app).await;
        app.fleet.drain("w1", order(300, 100)).unwrap();
        leaving.send(Frame::Offer(offer()));
        let fetch = fetch_asked(&mut target).await;
        assert_eq!(fetch.offset, [0, 1, 2, 3, 4]);
        match fate {
            "fails" => target
                .send(Frame::Transferred(transferred(&fetch, Some(TransferFailure::Checksum)))),
            "dies" => target = movable("w3").ready(&app).await,
            _ => {
                assert_eq!(target.cancelled().await, fetch.request, "nobody waits for it any more");
            }
        }
        while drain_asked(&mut leaving).await.migration.is_some() {}
        drop(leaving);
        let done = over(&app, "w1").await;
        let error = &done["hand_over"]["successors"][0]["error"];
        let expected = match fate {
            "fails" => "checksum",
            "dies" => "lost",
            _ => "timeout",
        };
        assert_eq!(error, expected);
        assert_eq!(done["hand_over"]["hit_rate_kept"], 0.0);
        drop(target);
    }
}

#[tokio::test]
async fn blocks_of_the_same_role_stay_with_that_role() {
    let app = start_router(|_| {}).await;
    let with = |name: &str, role| {
        let mut behaviour = movable(name);
        behaviour.hello.role = role;
        behaviour
    };
    let leaving = with("p1", Role::Prefill).ready(&app).await;
    let mut same = with("p2", Role::Prefill).ready(&app).await;
    let mut other = with("d1", Role::Decode).ready(&app).await;
    app.fleet.drain("p1", order(5_000, 100)).unwrap();
    leaving.send(Frame::Offer(offer()));
    assert_eq!(fetch_asked(&mut same).await.offset.len(), 5);
    assert!(!other.so_far().iter().any(|event| matches!(event, Event::Fetch(_))));
    drop(leaving);
}

#[tokio::test]
async fn a_worker_that_offers_nothing_or_cannot_leaves_all_the_same() {
    let app = start_router(|_| {}).await;
    let _successor = movable("successor").ready(&app).await;
    // asked for nothing; cannot; has nothing; is gone; is alone with its kind of blocks
    let mut one = movable("w1").ready(&app).await;
    app.fleet.drain("w1", order(5_000, 0)).unwrap();
    assert_eq!(drain_asked(&mut one).await.migration, None);
    drop(one);
    assert_eq!(over(&app, "w1").await["hand_over"]["outcome"], "not_asked");
    let mut two = Behaviour::new("w2").ready(&app).await;
    app.fleet.drain("w2", order(5_000, 10)).unwrap();
    assert_eq!(drain_asked(&mut two).await.migration, None);
    drop(two);
    assert_eq!(over(&app, "w2").await["hand_over"]["outcome"], "cannot_move");
    let three = movable("w3").ready(&app).await;
    app.fleet.drain("w3", order(5_000, 10)).unwrap();
    let nothing = Offer { names: vec![], parents: vec![], hits: vec![], ..offer() };
    three.send(Frame::Offer(nothing));
    until("the answer", || state(&app, "w3")["hand_over"]["outcome"] == "nothing_cached").await;
    drop(three);
    assert_eq!(over(&app, "w3").await["hand_over"]["hit_rate_kept"], Value::Null);
    let four = movable("w4").ready(&app).await;
    app.fleet.drain("w4", order(5_000, 10)).unwrap();
    drop(four);
    assert_eq!(over(&app, "w4").await["hand_over"]["outcome"], "worker_lost");
    let mut fifth = movable("w5");
    fifth.hello.kv_block_bytes = 8192;
    let fifth = fifth.ready(&app).await;
    app.fleet.drain("w5", order(5_000, 10)).unwrap();
    fifth.send(Frame::Offer(offer()));
    until("the answer", || state(&app, "w5")["hand_over"]["outcome"] == "no_successor").await;
    drop(fifth);
    over(&app, "w5").await;
}

#[tokio::test]
async fn no_offer_is_waited_for_for_long_and_a_late_one_harms_nobody() {
    let app = start_router(|_| {}).await;
    let mut leaving = movable("w1").ready(&app).await;
    app.fleet.drain("w1", order(200, 10)).unwrap();
    until("the answer", || state(&app, "w1")["hand_over"]["outcome"] == "no_offer").await;
    leaving.send(Frame::Offer(offer()));
    while drain_asked(&mut leaving).await.migration.is_some() {}
    assert_eq!(state_of(&app, "w1"), "draining", "its link is still there");
    drop(leaving);
    over(&app, "w1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_orders_that_come_at_once_one_begins_a_drain() {
    let app = start_router(|_| {}).await;
    for round in 0..20 {
        let name = format!("w{round}");
        let worker = movable(&name).ready(&app).await;
        let together = std::sync::Arc::new(std::sync::Barrier::new(4));
        let orders = [(); 4].map(|()| {
            let (app, name, together) = (app.clone(), name.clone(), together.clone());
            tokio::task::spawn_blocking(move || {
                together.wait();
                app.fleet.drain(&name, order(5_000, 0)).is_ok()
            })
        });
        let mut begun = 0;
        for order in orders {
            begun += u32::from(order.await.unwrap());
        }
        assert_eq!(begun, 1);
        drop(worker);
        over(&app, &name).await;
    }
}

#[tokio::test]
async fn an_offer_that_nobody_asked_for_closes_the_link() {
    let app = start_router(|_| {}).await;
    let mut worker = movable("w1").ready(&app).await;
    worker.send(Frame::Offer(offer()));
    worker.closed().await;
    until("the reason", || metric(&app, "headrace_link_errors_total", "frame_unexpected") > 0.0)
        .await;
}

#[tokio::test]
async fn a_worker_that_does_not_leave_in_time_is_hung_up_on() {
    let app = start_router(|_| {}).await;
    let mut worker = movable("w1").ready(&app).await;
    app.fleet.drain("w1", order(100, 0)).unwrap();
    worker.closed().await;
    let done = over(&app, "w1").await;
    assert_eq!(done["left_in_time"], false);
    assert_eq!(metric(&app, "headrace_drains_total", "late"), 1.0);
    assert_eq!(metric(&app, "headrace_link_errors_total", "drain_late"), 1.0);
    assert_eq!(app.fleet.drain("w1", order(1, 1)).unwrap_err(), DrainError::Unknown);
    // it comes back by the same name, and may be drained again
    let again = movable("w1").ready(&app).await;
    app.fleet.drain("w1", order(5_000, 0)).unwrap();
    drop(again);
    assert_eq!(over(&app, "w1").await["left_in_time"], true);
}

#[tokio::test]
async fn each_drain_has_a_key_of_its_own_that_nobody_else_sees() {
    let app = start_router(|_| {}).await;
    let mut keys = Vec::new();
    for name in ["w1", "w2"] {
        let mut leaving = movable(name).ready(&app).await;
        let mut target = movable(&format!("{name}-stays")).ready(&app).await;
        app.fleet.drain(name, order(5_000, 100)).unwrap();
        let key = drain_asked(&mut leaving).await.migration.unwrap().pull_key;
        leaving.send(Frame::Offer(offer()));
        assert_eq!(fetch_asked(&mut target).await.kv_from.pull_key, key);
        let bytes = json!(key).to_string();
        for shown in [state(&app, name), app.fleet.workers()] {
            assert!(!shown.to_string().contains(bytes.trim_matches(['[', ']'])), "{shown}");
        }
        keys.push(key);
        drop((leaving, target));
        over(&app, name).await;
    }
    assert_ne!(keys[0], keys[1]);
}

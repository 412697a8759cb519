//! Ranks of expert-parallel groups: all of them take requests or none does, and who loses one loses all.

use std::sync::Arc;
use std::time::Duration;

use headrace_router::app::App;
use headrace_router::config::{Config, RouterArgs};
use headrace_router::core::frame::*;
use headrace_router::fleet::DrainOrder;
use headrace_router::request::FinishReason;
use headrace_router::server::Server;

use super::requests::{answer, job, next, resumed, while_waiting, whole};
use crate::fake_worker::*;

fn rank(worker: &str, group: Group) -> Behaviour {
    let mut behaviour = Behaviour::new(worker);
    behaviour.hello.group = Some(group);
    behaviour
}

async fn router() -> Arc<App> {
    start_router(|args| {
        args.heartbeat_ms = 100;
        args.queue_timeout_ms = 5_000;
    })
    .await
}

/// Both ranks of a group of two.
async fn group(app: &App) -> [FakeWorker; 2] {
    let zero = rank("r0", rank_of("ep", 0, 2)).join(app).await.unwrap();
    let one = rank("r1", rank_of("ep", 1, 2)).ready(app).await;
    until("both are ready", || state_of(app, "r0") == "ready").await;
    [zero, one]
}

/// Why it may not join.
fn refused(result: Result<FakeWorker, Box<Refuse>>) -> Box<Refuse> {
    result.err().unwrap()
}

#[tokio::test]
async fn ranks_take_requests_when_all_of_one_start_are_there() {
    let app = router().await;
    let _zero = rank("r0", rank_of("ep", 0, 2)).join(&app).await.unwrap();
    until("it waits for the other", || state_of(&app, "r0") == "incomplete").await;
    assert!(!app.fleet.ready());
    assert_eq!(metric(&app, "headrace_workers", "incomplete"), 1.0);
    // ranks of another start do not make it whole
    let later = Group { epoch: 2, ..rank_of("other", 1, 2) };
    let _stranger = rank("stranger", later).join(&app).await.unwrap();
    until("it waits, too", || state_of(&app, "stranger") == "incomplete").await;
    assert_eq!(metric(&app, "headrace_group_whole", "ep"), 0.0);
    let _one = rank("r1", rank_of("ep", 1, 2)).ready(&app).await;
    assert_eq!([state_of(&app, "r0"), state_of(&app, "stranger")], ["ready", "incomplete"]);
    assert_eq!(metric(&app, "headrace_group_whole", "ep"), 1.0);
}

#[tokio::test]
async fn a_rank_that_does_not_fit_its_group_is_refused_by_field() {
    let app = router().await;
    let _ranks = group(&app).await;
    type Change = fn(&mut Hello);
    let cases: [(&str, &str, RefuseReason, Change); 6] = [
        ("group.rank", "1", RefuseReason::Mismatch, |_| {}),
        ("group.size", "3", RefuseReason::Mismatch, |h| h.group = Some(rank_of("ep", 2, 3))),
        ("model", "another", RefuseReason::Mismatch, |h| h.model = "another".into()),
        ("role", "decode", RefuseReason::Mismatch, |h| h.role = Role::Decode),
        ("fingerprints.weights", "others", RefuseReason::Mismatch, |h| {
            h.fingerprints.weights = "others".into();
        }),
        ("group.epoch", "0", RefuseReason::Superseded, |h| {
            h.group = Some(Group { epoch: 0, ..rank_of("ep", 1, 2) });
        }),
    ];
    for (field, got, reason, change) in cases {
        let mut late = rank("late", rank_of("ep", 1, 2));
        change(&mut late.hello);
        let refuse = refused(late.join(&app).await);
        assert_eq!((refuse.field.as_str(), refuse.got.as_str()), (field, got));
        assert_eq!((refuse.reason, refuse.retry_after_ms), (reason, None), "{field}");
        assert!(!refuse.expected.is_empty() && !refuse.message.is_empty(), "{field}");
    }
    // a group of another name, and one of another model that started at another time, have nothing to do with it
    let _other = rank("other", rank_of("ep-2", 1, 2)).join(&app).await.unwrap();
    let mut namesake = rank("namesake", Group { epoch: 9, ..rank_of("ep", 0, 1) });
    namesake.hello.model = "another".into();
    let _namesake = namesake.join(&app).await.unwrap();
    assert_eq!([state_of(&app, "r0"), state_of(&app, "r1")], ["ready", "ready"]);
}

#[tokio::test]
async fn a_later_start_of_a_group_ends_the_one_before() {
    let app = router().await;
    let [mut zero, mut one] = group(&app).await;
    // one rank comes under its old name, while the link of its former life is still open
    let again = |worker, number| rank(worker, Group { epoch: 2, ..rank_of("ep", number, 2) });
    let _new_zero = again("r0", 0).join(&app).await.unwrap();
    zero.closed().await;
    one.closed().await;
    until("r1 is gone", || state_of(&app, "r1").is_empty()).await;
    let _new_one = again("new", 1).ready(&app).await;
    assert_eq!(state_of(&app, "r0"), "ready");
    let stale = refused(rank("r1", rank_of("ep", 1, 2)).join(&app).await);
    assert_eq!(stale.reason, RefuseReason::Superseded);
    assert_eq!(metric(&app, "headrace_groups_lost_total", ""), 0.0, "it was replaced");
}

/// How a rank is lost.
enum Loss {
    Death,
    Silence,
}

async fn an_answer_survives_the_loss_of_another_rank(loss: Loss) {
    let app = router().await;
    let [mut zero, mut one] = group(&app).await;
    let mut answer = answer(&app, job()).await.unwrap();
    let (on_zero, before) = tokio::select! {
        submit = zero.submitted() => (true, submit),
        submit = one.submitted() => (false, submit),
    };
    let (mut with, without) = if on_zero { (zero, one) } else { (one, zero) };
    with.gives(before.request, &letters("ab"), None);
    let mut seen = String::new();
    while seen.len() < 2 {
        seen.push_str(&next(&mut answer).await.unwrap().unwrap().text);
    }
    let mut elsewhere = Behaviour::new("elsewhere").ready(&app).await;
    match loss {
        Loss::Death => drop(without),
        Loss::Silence => {
            without.freeze();
            tokio::spawn(async move {
                let _keeps_its_link = without;
                std::future::pending::<()>().await;
            });
        }
    }
    let after = while_waiting(&mut answer, elsewhere.submitted()).await;
    assert_eq!(resumed(&after), letters("ab"));
    assert_eq!((&after.tokens, &after.sampling), (&before.tokens, &before.sampling));
    assert_eq!(with.cancelled().await, before.request, "who is left is told to stop");
    elsewhere.gives(after.request, &letters("cd"), None);
    elsewhere.gives(after.request, &[EOS], Some(Finish::Stop));
    let (texts, _) = whole(answer).await;
    assert_eq!(texts, [("cd".into(), Some(FinishReason::Stop))]);
    assert_eq!(metric(&app, "headrace_groups_lost_total", ""), 1.0);
    assert_eq!(metric(&app, "headrace_legs_total", "group_lost"), 1.0);
    let left = if on_zero { "r0" } else { "r1" };
    assert_eq!(state_of(&app, left), "incomplete");
    until("nothing stays booked", || of_worker(&app, left)["booked_requests"] == 0).await;
}

#[tokio::test]
async fn who_loses_a_rank_to_death_goes_on_elsewhere() {
    an_answer_survives_the_loss_of_another_rank(Loss::Death).await;
}

#[tokio::test]
async fn who_loses_a_rank_to_silence_goes_on_elsewhere() {
    an_answer_survives_the_loss_of_another_rank(Loss::Silence).await;
}

#[tokio::test]
async fn a_rank_that_dials_again_makes_its_group_whole() {
    let app = router().await;
    let [_zero, one] = group(&app).await;
    drop(one);
    until("r0 waits", || state_of(&app, "r0") == "incomplete").await;
    assert_eq!(metric(&app, "headrace_group_ranks", "ep"), 1.0);
    let _one = rank("r1", rank_of("ep", 1, 2)).join_when_free(&app).await;
    until("both are ready", || [state_of(&app, "r0"), state_of(&app, "r1")] == ["ready", "ready"])
        .await;
    assert_eq!(metric(&app, "headrace_groups_lost_total", ""), 1.0);
}

#[tokio::test]
async fn a_group_that_loses_all_its_ranks_is_lost_once() {
    let app = router().await;
    let [zero, one] = group(&app).await;
    drop((zero, one));
    until("both are gone", || app.fleet.workers()["workers"] == serde_json::json!([])).await;
    assert_eq!(metric(&app, "headrace_groups_lost_total", ""), 1.0);
}

async fn told_to_drain(worker: &mut FakeWorker) -> Drain {
    loop {
        match worker.event().await {
            Event::Drain(drain) => return drain,
            Event::Closed => panic!("the link closed before a drain"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn who_drains_a_rank_drains_its_group() {
    let app = router().await;
    let [mut zero, mut one] = group(&app).await;
    let order = DrainOrder { budget: Duration::from_secs(7), migration: 0 };
    app.fleet.drain("r1", order).unwrap();
    let told = [told_to_drain(&mut zero).await, told_to_drain(&mut one).await];
    assert_eq!(told.map(|drain| drain.budget_ms), [7_000, 7_000]);
    assert_eq!([state_of(&app, "r0"), state_of(&app, "r1")], ["draining", "draining"]);
    drop((zero, one));
    until("both are gone", || app.fleet.workers()["workers"] == serde_json::json!([])).await;
    assert_eq!(metric(&app, "headrace_groups_lost_total", ""), 0.0, "that was in good order");
}

#[tokio::test]
async fn a_rank_that_says_goodbye_takes_its_group_along() {
    let app = router().await;
    let [mut zero, one] = group(&app).await;
    one.send(Frame::Bye(Bye { reason: "it was told to".into() }));
    told_to_drain(&mut zero).await;
    assert_eq!([state_of(&app, "r0"), state_of(&app, "r1")], ["draining", "draining"]);
}

#[tokio::test]
async fn what_ranks_do_and_wait_is_told_apart() {
    let app = router().await;
    let [zero, one] = group(&app).await;
    // of steps of 10 ms the one works all the time, and the other 4 ms
    for number in 2..4 {
        for (worker, waited_us) in [(&zero, 0), (&one, 6_000)] {
            let worked = Step { step: number, ms: 10.0, waited_us, ..step(vec![]) };
            worker.send(Frame::Step(Step { decode_rows: 1, ..worked }));
        }
    }
    let waited = || metric(&app, "headrace_rank_waited_seconds_total", "r1");
    until("both said so", || (waited() - 0.012).abs() < 1e-9).await;
    until("rank 0, too", || metric(&app, "headrace_rank_work_seconds_total", "r0") > 0.02).await;
    let group = &app.fleet.workers()["groups"][0];
    assert_eq!(
        (&group["id"], &group["size"], &group["present"]),
        (&"ep".into(), &2.into(), &2.into())
    );
    assert_eq!(group["ranks"][1]["worker"], "r1");
    // a little of the heartbeat's 1 ms before is in it
    let skew = group["step_skew"].as_f64().unwrap();
    assert!(skew > 0.0 && skew < 3.0 / 7.0, "{skew}");
    assert!(metric(&app, "headrace_group_waited_share", "ep") > 0.2);
}

#[tokio::test]
async fn what_a_rank_did_beside_steps_is_counted() {
    let app = router().await;
    let [_zero, one] = group(&app).await;
    let totals = GroupTotals {
        held_rounds: 12,
        held_ms: 1_500.0,
        waves: 3,
        slots: 2,
        bytes: 1 << 20,
        refused: 1,
        gain_s: 2.5,
        cost_s: 1.25,
        spent_s: 0.75,
    };
    one.send(Frame::GroupTotals(totals.clone()));
    let of_one = |name: &str| metric(&app, &format!("headrace_rank_{name}_total"), "r1");
    until("it is counted", || of_one("held_rounds") == 12.0).await;
    let told = ["expert_waves", "expert_slots", "expert_bytes", "expert_refusals"].map(of_one);
    assert_eq!(told, [3.0, 2.0, f64::from(1 << 20), 1.0]);
    let times =
        ["held_seconds", "expert_gain_seconds", "expert_cost_seconds", "expert_spent_seconds"];
    assert_eq!(times.map(of_one), [1.5, 2.5, 1.25, 0.75]);

    let (held_ms, gain_s, cost_s, spent_s) = (-1.0, f64::INFINITY, f64::NAN, -1.0);
    let nonsense = GroupTotals { held_rounds: 13, held_ms, gain_s, cost_s, spent_s, ..totals };
    one.send(Frame::GroupTotals(nonsense));
    until("it is counted", || of_one("held_rounds") == 13.0).await;
    assert_eq!(times.map(of_one), [0.0; 4], "times that cannot be");
    assert_eq!(metric(&app, "headrace_rank_held_rounds_total", "r0"), 0.0);
}

#[tokio::test]
async fn no_group_is_lost_where_the_router_leaves() {
    let args = RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() };
    let server = Server::start(Config::try_from(args).unwrap()).await.unwrap();
    let (stopper, app) = (server.stopper(), server.app().clone());
    let serving = tokio::spawn(server.serve());
    let _ranks = group(&app).await;
    stopper.stop();
    serving.await.unwrap();
    until("both are gone", || app.fleet.workers()["workers"] == serde_json::json!([])).await;
    assert_eq!(metric(&app, "headrace_groups_lost_total", ""), 0.0);
}

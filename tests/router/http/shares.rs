//! Many choices or grammars of one tenant, and one answer of another.

use futures_util::future::select_all;
use headrace_router::config::RouterArgs;
use headrace_router::core::frame::Finish;

use super::client::{Connection, TestRouter, args};
use crate::fake_worker::{Behaviour, EOS, MODEL, letters, metric, until};

async fn ask(router: &TestRouter, headers: &str, n: usize) -> Connection {
    ask_for(router, headers, &format!(r#""n": {n}, "temperature": 1"#)).await
}

async fn ask_for(router: &TestRouter, headers: &str, fields: &str) -> Connection {
    let mut connection = router.connect().await;
    let body = format!(r#"{{"model": "{MODEL}", "prompt": "x", {fields}}}"#);
    let head = format!("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json{headers}");
    connection.request(&head, body.as_bytes()).await;
    connection
}

/// A request with a grammar that nobody sent before.
async fn ask_with_grammar(router: &TestRouter, headers: &str, number: u32) -> Connection {
    let fields =
        format!(r#""max_tokens": {number}, "guided_regex": "([a-z]{{1,40}}){{1,{number}}}""#);
    ask_for(router, headers, &fields).await
}

const GREEDY: &str = "\r\nX-Headrace-Tenant: greedy";
const MODEST: &str = "\r\nX-Headrace-Tenant: modest";

#[tokio::test]
async fn requests_of_many_choices_leave_places_and_go_behind_others() {
    let args = RouterArgs { max_streams: 128, ..args() };
    let mut behaviour = Behaviour::new("w");
    behaviour.hello.capacity.sequences = 8;
    behaviour.hello.capacity.waiting = 16;
    let (router, mut worker) = TestRouter::with(behaviour, args).await;
    let streams = || metric(&router.app, "headrace_streams", "");
    let (mut greedy, mut taken) = (Vec::new(), Vec::new());
    for i in 1..=7 {
        greedy.push(ask(&router, GREEDY, 16).await);
        until("they are in flight", || streams() == f64::from(16 * i)).await;
        while taken.len() < 16 {
            taken.push(worker.submitted().await.priority); // the first ones come first
        }
    }
    let mut refused = ask(&router, GREEDY, 16).await;
    let reply = refused.reply().await;
    assert_eq!((reply.status, reply.header("retry-after")), (429, Some("1")));
    let message = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("answers of this tenant in flight"), "{message}");

    // all that the worker has taken of them: but for a few, at low priority, and not to its last place
    while taken.len() < 20 {
        taken.push(worker.submitted().await.priority);
    }
    assert_eq!(taken.iter().filter(|priority| **priority == 0).count(), 8, "{taken:?}");
    assert!(taken.iter().all(|priority| *priority == 0 || *priority == -1), "{taken:?}");
    let mut modest = ask(&router, MODEST, 1).await;
    let submit = worker.submitted().await;
    assert_eq!(submit.priority, 0);
    worker.gives(submit.request, &[letters("a"), vec![EOS]].concat(), Some(Finish::Stop));
    assert_eq!(modest.reply().await.status, 200);

    drop(greedy);
    until("all is given back", || streams() == 0.0).await;
    worker.cancelled().await;
}

#[tokio::test]
async fn who_says_nothing_is_known_by_its_address() {
    let args = RouterArgs { tenant_streams: 2, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let _first = ask(&router, "", 2).await;
    worker.submitted().await;
    assert_eq!(ask(&router, "", 1).await.reply().await.status, 429);
    let _other = ask(&router, MODEST, 1).await;
    until("the other one is in flight", || metric(&router.app, "headrace_streams", "") == 3.0)
        .await;
}

#[tokio::test]
async fn grammars_of_one_tenant_that_wait_are_bounded_and_hold_up_no_other() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let turned_away = || metric(&router.app, "headrace_grammar_turned_away_total", "");
    let mut greedy = Vec::new();
    while turned_away() == 0.0 {
        assert!(greedy.len() < 1_000, "no bound on those that wait");
        greedy.push(ask_with_grammar(&router, GREEDY, 100 + greedy.len() as u32).await);
    }
    let replies = greedy.iter_mut().map(|connection| Box::pin(connection.reply()));
    let (reply, ..) = select_all(replies).await; // the worker answers nobody
    assert_eq!((reply.status, reply.header("retry-after")), (429, Some("1")));
    let message = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("grammars that wait to be checked"), "{message}");

    let _modest = ask_with_grammar(&router, MODEST, 7).await;
    let mut before = 0;
    while worker.submitted().await.max_tokens != 7 {
        before += 1;
    }
    assert!(before < greedy.len() - 1, "all {before} of the other tenant came first");

    drop(greedy);
    until("all is given back", || metric(&router.app, "headrace_streams", "") == 1.0).await;
}

//! Requests through a router that go wrong: their workers die or fail, their clients leave, they wait, they are late.

use std::sync::Arc;
use std::time::Duration;

use headrace_router::core::frame::*;
use headrace_router::error::RouteError;
use headrace_router::prompt::Prompt;
use headrace_router::request::{Delta, FinishReason, Job};
use tokio::time::sleep;

use super::requests::{answer, by_hand, job, next, resumed, while_waiting, whole};
use crate::fake_worker::*;

#[tokio::test]
async fn a_request_moves_on_when_its_worker_dies_before_the_first_delta() {
    let (app, mut first) = by_hand().await;
    let mut answer = answer(&app, job()).await.unwrap();
    let before = first.submitted().await;
    // half a character: nothing that the client could have seen
    let half =
        app.fleet.find(MODEL).unwrap().engine.encode(Prompt::Text("é".into())).await.unwrap();
    first.gives(before.request, &half[..1], None);
    until("it came", || metric(&app, "headrace_completion_tokens_total", "") > 0.0).await;
    let mut second = Behaviour::new("w2").ready(&app).await;
    drop(first);
    let after = while_waiting(&mut answer, second.submitted()).await;
    assert_eq!((&after.tokens, after.sampling.seed), (&before.tokens, before.sampling.seed));
    assert_eq!(resumed(&after), half[..1], "it goes on after the first half");
    second.gives(after.request, &half[1..], None);
    second.gives(after.request, &letters("!"), Some(Finish::Length));
    let (texts, answer) = whole(answer).await;
    assert_eq!(texts, [("é!".into(), Some(FinishReason::Length))]);
    assert_eq!(answer.usage().completion_tokens as usize, half.len() + 1);
    assert_eq!(metric(&app, "headrace_resumes_total", ""), 1.0);
    assert_eq!(metric(&app, "headrace_retries_total", ""), 0.0);
}

#[tokio::test]
async fn a_failure_that_another_worker_may_not_have_is_tried_there_and_only_there() {
    let app = start_router(|args| args.retries = 5).await;
    let mut workers =
        [Behaviour::new("w1").ready(&app).await, Behaviour::new("w2").ready(&app).await];
    let mut answer = answer(&app, job()).await.unwrap();
    let mut tried = Vec::new();
    for _ in 0..2 {
        let [one, two] = &mut workers;
        let (worker, submit) = while_waiting(&mut answer, async {
            tokio::select! {
                submit = one.submitted() => (0, submit),
                submit = two.submitted() => (1, submit),
            }
        })
        .await;
        tried.push(worker);
        let (kind, message) = (FailureKind::QueueFull, "no room".to_owned());
        let failed = Failed { request: submit.request, kind, message };
        workers[worker].send(Frame::Failed(failed));
    }
    tried.sort_unstable();
    assert_eq!(tried, [0, 1], "each of them once");
    match next(&mut answer).await {
        Some(Err(RouteError::WorkerFailed { kind, .. })) => {
            assert_eq!(kind, FailureKind::QueueFull);
        }
        other => panic!("{other:?}"),
    }
    until("nothing stays booked", || {
        of_worker(&app, "w1")["booked_requests"] == 0
            && of_worker(&app, "w2")["booked_requests"] == 0
    })
    .await;
}

#[tokio::test]
async fn a_failure_that_would_only_come_again_is_not_tried_elsewhere() {
    let (app, mut worker) = by_hand().await;
    let mut answer = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    let (kind, message) = (FailureKind::BadToken, "token 9999".to_owned());
    worker.send(Frame::Failed(Failed { request, kind, message }));
    let error = next(&mut answer).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("token 9999"), "{error}");
    assert_eq!(metric(&app, "headrace_retries_total", ""), 0.0);
}

#[tokio::test]
async fn a_worker_that_sends_more_than_asked_for_is_stopped() {
    let app = start_router(|args| args.retries = 0).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let mut answer = answer(&app, Job { max_tokens: Some(2), ..job() }).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "a");
    worker.gives(request, &letters("bcd"), None);
    let error = next(&mut answer).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("max_tokens"), "{error}");
    assert_eq!(worker.cancelled().await, request);
}

#[tokio::test]
async fn a_full_fleet_lets_requests_wait_in_order_of_priority_and_then_refuses() {
    let app = start_router(|args| args.queue_requests = 2).await;
    let mut behaviour = Behaviour::new("w1");
    behaviour.hello.capacity = Capacity { sequences: 1, waiting: 0, ..behaviour.hello.capacity };
    let mut worker = behaviour.ready(&app).await;
    let running = answer(&app, job()).await.unwrap();
    let first = worker.submitted().await.request;
    let place = |priority| {
        let app = Arc::clone(&app);
        tokio::spawn(async move { answer(&app, Job { priority, ..job() }).await })
    };
    let low = place(0);
    until("one waits", || metric(&app, "headrace_queue_requests", "") == 1.0).await;
    assert_eq!(metric(&app, "headrace_queue_tokens", ""), 5.0);
    let high = place(1);
    until("two wait", || metric(&app, "headrace_queue_requests", "") == 2.0).await;
    match answer(&app, job()).await {
        Err(RouteError::Overloaded { what, .. }) => assert!(what.contains("queue")),
        other => panic!("{other:?}"),
    }
    worker.gives(first, &letters("x"), Some(Finish::Length));
    let submit = worker.submitted().await;
    assert_eq!(submit.priority, 1, "the higher one goes first");
    let high = high.await.unwrap().unwrap();
    tokio::time::pause();
    match low.await.unwrap() {
        Err(RouteError::Overloaded { what, .. }) => assert!(what.contains("full"), "{what}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(metric(&app, "headrace_queue_requests", ""), 0.0);
    drop((running, high));
    assert_eq!(worker.cancelled().await, submit.request);
}

#[tokio::test]
async fn too_many_answers_at_once_are_refused() {
    let app = start_router(|args| args.max_streams = 2).await;
    let _worker = Behaviour::new("w1").ready(&app).await;
    let both = answer(&app, Job { n: 2, ..job() }).await.unwrap();
    assert!(matches!(answer(&app, job()).await, Err(RouteError::Overloaded { .. })));
    drop(both);
    answer(&app, job()).await.unwrap();
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_wherever_its_request_is() {
    let app = start_router(|_| {}).await;
    let mut behaviour = Behaviour::new("w1");
    behaviour.hello.capacity = Capacity { sequences: 1, waiting: 0, ..behaviour.hello.capacity };
    let mut worker = behaviour.ready(&app).await;
    // after the submit
    let submitted = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    // in the queue
    let queued = {
        let app = Arc::clone(&app);
        tokio::spawn(async move { answer(&app, job()).await })
    };
    until("it waits", || metric(&app, "headrace_queue_requests", "") == 1.0).await;
    queued.abort();
    until("it left", || metric(&app, "headrace_queue_requests", "") == 0.0).await;
    drop(submitted);
    assert_eq!(worker.cancelled().await, request);
    until("it is freed", || of_worker(&app, "w1")["booked_requests"] == 0).await;
    // in the middle
    let mut streaming = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    next(&mut streaming).await.unwrap().unwrap();
    drop(streaming);
    assert_eq!(worker.cancelled().await, request);
    worker.gives(request, &letters("b"), None); // crosses the cancel
    until("it is freed", || of_worker(&app, "w1")["booked_requests"] == 0).await;
    // after the end
    let mut ended = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), Some(Finish::Length));
    next(&mut ended).await.unwrap().unwrap();
    drop(ended);
    for stage in ["queue", "first_token", "streaming"] {
        assert_eq!(metric(&app, "headrace_cancels_total", stage), 1.0, "{stage}");
    }
    assert_eq!(metric(&app, "headrace_cancels_total", ""), 3.0, "the last one had ended");
    assert!(worker.so_far().is_empty(), "nothing to cancel");
}

#[tokio::test]
async fn a_submit_that_was_given_up_in_the_link_is_never_sent() {
    let app = start_router(|args| args.worker_queue_ms = 1 << 40).await;
    let mut behaviour = Behaviour::new("w1");
    behaviour.hello.capacity.sequences = 100;
    let worker = behaviour.ready(&app).await;
    worker.freeze();
    // more than the socket takes: the last ones wait in the link
    let long = Job { prompt: Prompt::Tokens(vec![3; 4000]), ..job() };
    let mut answers = Vec::new();
    for _ in 0..16 {
        answers.push(answer(&app, long.clone()).await.unwrap());
    }
    drop(answers);
    until("nothing is left that was not sent", || {
        let worker = of_worker(&app, "w1");
        let cancelled = metric(&app, "headrace_cancels_total", "");
        worker["in_flight"] == worker["booked_requests"] && cancelled == 16.0
    })
    .await;
}

#[tokio::test]
async fn a_worker_whose_socket_takes_nothing_is_dropped_and_its_requests_move_on() {
    let app = start_router(|args| {
        args.submit_timeout_ms = 100;
        args.heartbeat_timeout_ms = 60_000; // not what ends it
        args.worker_queue_ms = 1 << 40; // nor this
    })
    .await;
    let mut frozen = Behaviour::new("frozen");
    frozen.hello.capacity.sequences = 4000;
    frozen.hello.context_tokens = 1 << 20;
    let frozen = frozen.ready(&app).await;
    frozen.freeze();
    let long = Job { prompt: Prompt::Tokens(vec![3; 200_000]), ..job() };
    let mut answers = Vec::new();
    let full = loop {
        match answer(&app, long.clone()).await {
            Ok(answer) => answers.push(answer),
            Err(error) => break error,
        }
        if answers.len() > 3 && state_of(&app, "frozen").is_empty() {
            break next(&mut answers[0]).await.unwrap().unwrap_err();
        }
    };
    assert!(
        matches!(full, RouteError::WorkerLost { .. } | RouteError::NoWorker { .. }),
        "{full:?}"
    );
    let stalled = || metric(&app, "headrace_link_errors_total", "write_stalled");
    until("the link is dropped", || stalled() > 0.0).await;
}

#[tokio::test]
async fn every_state_of_a_request_has_a_deadline() {
    let app = start_router(|args| {
        args.first_token_timeout_ms = 120_000;
        args.token_timeout_ms = 60_000;
        args.request_timeout_ms = 200_000;
    })
    .await;
    let mut worker = Behaviour { frees: false, ..Behaviour::new("w1") }.ready(&app).await;
    tokio::time::pause();
    let state = |error: Option<Result<Delta, RouteError>>| match error {
        Some(Err(RouteError::DeadlineExceeded { state, waited })) => (state, waited),
        other => panic!("{other:?}"),
    };
    // the first token
    let mut late = answer(&app, job()).await.unwrap();
    let (what, waited) = state(late.next().await);
    assert_eq!(what, "for the first token");
    assert_eq!(waited.as_secs(), 120);
    let request = worker.cancelled().await;
    assert_eq!(state_of(&app, "w1"), "suspect", "it holds a request and is silent about it");
    worker.send(Frame::Step(Step { step: 2, ..step(vec![]) }));
    until("a step clears it", || state_of(&app, "w1") == "ready").await;
    // the next token
    let mut late = answer(&app, job()).await.unwrap();
    let second = worker.submitted().await.request;
    assert_ne!(second, request);
    worker.gives(second, &letters("a"), None);
    late.next().await.unwrap().unwrap();
    let (what, waited) = state(late.next().await);
    assert_eq!((what, waited.as_secs()), ("for the next token", 60));
    worker.send(Frame::Step(Step { step: 3, ..step(vec![]) }));
    until("a step clears it", || state_of(&app, "w1") == "ready").await;
    // the whole answer
    let mut late = answer(&app, job()).await.unwrap();
    let third = worker.submitted().await.request;
    let error = loop {
        worker.gives(third, &letters("a"), None);
        match late.next().await {
            Some(Ok(_)) => sleep(Duration::from_secs(10)).await,
            error => break state(error).0,
        }
    };
    assert_eq!(error, "for its last token");
    // the worker's own count of the deadline
    let mut late = answer(&app, job()).await.unwrap();
    let fourth = worker.submitted().await.request;
    worker.gives(fourth, &[], Some(Finish::Cancelled));
    assert_eq!(state(late.next().await).0, "for its last token");
}

#[tokio::test]
async fn a_worker_that_freed_a_late_request_is_trusted_again_without_a_step() {
    let app = start_router(|args| {
        args.first_token_timeout_ms = 50;
        args.queue_timeout_ms = 50;
    })
    .await;
    let mut worker = Behaviour { frees: false, ..Behaviour::new("w1") }.ready(&app).await;
    let mut late = answer(&app, job()).await.unwrap();
    let error = next(&mut late).await;
    assert!(matches!(error, Some(Err(RouteError::DeadlineExceeded { .. }))), "{error:?}");
    let request = worker.cancelled().await;
    assert_eq!(state_of(&app, "w1"), "suspect");
    worker.send(Frame::Freed(Freed { request, blocks: 1 })); // an idle engine steps no more
    until("it is trusted again", || state_of(&app, "w1") == "ready").await;
}

#[tokio::test]
async fn an_output_that_says_nothing_does_not_make_its_reader_slow() {
    let app = start_router(|args| {
        args.stall_timeout_ms = 50;
        args.heartbeat_ms = 20;
    })
    .await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let mut answer = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    let reading = tokio::spawn(async move { next(&mut answer).await });
    worker.gives(request, &[], None);
    passes(Duration::from_millis(200)).await; // several times the time-out
    worker.gives(request, &letters("a"), Some(Finish::Length));
    let delta = reading.await.unwrap().unwrap().unwrap();
    assert_eq!((delta.text.as_str(), delta.finish), ("a", Some(FinishReason::Length)));
    assert_eq!(metric(&app, "headrace_stalls_total", ""), 0.0);
}

#[tokio::test]
async fn a_request_that_waits_is_not_given_to_workers_with_another_tokeniser() {
    let app = start_router(|_| {}).await;
    let mut first = Behaviour::new("w1");
    first.hello.capacity = Capacity { sequences: 1, waiting: 0, ..first.hello.capacity };
    let mut first = first.ready(&app).await;
    let _running = answer(&app, job()).await.unwrap();
    first.submitted().await;
    let waiting = tokio::spawn({
        let app = Arc::clone(&app);
        async move { answer(&app, job()).await }
    });
    until("it waits", || metric(&app, "headrace_queue_requests", "") == 1.0).await;
    let mut second = Behaviour::new("w1");
    second.hello.fingerprints.tokenizer = "tokenizer-2".into();
    drop(first);
    let mut second = second.join_when_free(&app).await;
    let error = in_time("its end", waiting).await.unwrap().unwrap_err();
    assert!(matches!(error, RouteError::NoWorker { .. }), "{error:?}");
    assert!(!second.so_far().iter().any(|event| matches!(event, Event::Submit(_))));
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_off() {
    let app = start_router(|args| {
        args.stall_timeout_ms = 50;
        args.heartbeat_ms = 20;
    })
    .await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let mut answer = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    next(&mut answer).await.unwrap().unwrap();
    worker.gives(request, &letters("b"), None);
    assert_eq!(worker.cancelled().await, request);
    assert_eq!(metric(&app, "headrace_stalls_total", ""), 1.0);
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "b", "what had come is not lost");
    assert!(matches!(next(&mut answer).await, Some(Err(RouteError::ClientGone))));
}

#[tokio::test]
async fn tokens_of_many_steps_are_taken_at_once() {
    let (app, mut worker) = by_hand().await;
    let mut answer = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    for letter in letters("coalesced") {
        worker.gives(request, &[letter], None);
    }
    until("all came", || metric(&app, "headrace_completion_tokens_total", "") == 9.0).await;
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "coalesced");
}

#[tokio::test]
async fn a_router_that_shuts_down_takes_nothing_new_and_finishes_what_runs() {
    let (app, mut worker) = by_hand().await;
    let mut running = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    app.fleet.shut_down();
    assert!(!app.fleet.ready());
    assert!(matches!(answer(&app, job()).await, Err(RouteError::ShuttingDown)));
    worker.gives(request, &letters("done"), Some(Finish::Length));
    assert_eq!(next(&mut running).await.unwrap().unwrap().text, "done");
    assert!(next(&mut running).await.is_none());
}

#[tokio::test]
async fn sessions_stay_with_their_worker() {
    let app = start_router(|args| args.policy = "session-hash".into()).await;
    let mut one = Behaviour::says("w1", "1").ready(&app).await;
    let mut two = Behaviour::says("w2", "2").ready(&app).await;
    let mut homes = std::collections::HashSet::new();
    for session in 0..8 {
        let mut texts = std::collections::HashSet::new();
        for _ in 0..3 {
            let job = Job { session: Some(format!("s{session}")), ..job() };
            texts.insert(whole(answer(&app, job).await.unwrap()).await.0.remove(0).0);
        }
        assert_eq!(texts.len(), 1, "{texts:?}");
        homes.extend(texts);
    }
    assert_eq!(homes.len(), 2);
    let submits = |worker: &mut FakeWorker| {
        worker.so_far().into_iter().filter(|event| matches!(event, Event::Submit(_))).count()
    };
    assert_eq!(submits(&mut one) + submits(&mut two), 24);
}

#[tokio::test]
async fn nothing_is_left_after_a_storm_of_requests_that_end_in_every_way() {
    let app = start_router(|args| args.retries = 1).await;
    let small = |name: &str| {
        let mut behaviour = Behaviour::says(name, "some words");
        let capacity = behaviour.hello.capacity;
        behaviour.hello.capacity = Capacity { sequences: 2, waiting: 2, ..capacity };
        behaviour
    };
    let mute = Behaviour { automatic: None, ..small("mute") };
    let _workers = (small("w1").ready(&app).await, small("w2").ready(&app).await);
    let mute = mute.ready(&app).await;
    let mut tasks = Vec::new();
    for i in 0..300_u32 {
        let app = Arc::clone(&app);
        tasks.push(tokio::spawn(async move {
            let job = Job { n: 1 + i % 3, priority: (i % 2) as i8, ..job() };
            let work = async {
                let Ok(mut answer) = answer(&app, job).await else { return };
                for _ in 0..i % 7 {
                    if answer.next().await.is_none() {
                        return;
                    }
                }
            };
            let patience = Duration::from_millis(u64::from(i % 40) * 5);
            let _ = tokio::time::timeout(patience, work).await;
        }));
        if i == 150 {
            tokio::task::yield_now().await;
        }
    }
    until("a third of them ended", || tasks.iter().filter(|task| task.is_finished()).count() > 100)
        .await;
    drop(mute);
    for task in tasks {
        in_time("the end of a request", task).await.unwrap();
    }
    assert_eq!(metric(&app, "headrace_streams", ""), 0.0);
    assert_eq!(metric(&app, "headrace_queue_requests", ""), 0.0);
    assert_eq!(metric(&app, "headrace_queue_tokens", ""), 0.0);
    for worker in ["w1", "w2"] {
        until("all is released", || {
            let worker = of_worker(&app, worker);
            worker["booked_requests"] == 0
                && worker["booked_tokens"] == 0
                && worker["in_flight"] == 0
        })
        .await;
    }
}

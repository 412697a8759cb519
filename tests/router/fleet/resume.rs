//! Answers whose worker dies, falls silent, fails or drains: they go on elsewhere, exactly where they were.

use std::time::Duration;

use headrace_router::core::frame::*;
use headrace_router::error::RouteError;
use headrace_router::prompt::StopStrings;
use headrace_router::request::{Answer, FinishReason, Job};

use super::requests::{answer, job, next, resumed, while_waiting, whole};
use crate::fake_worker::*;

/// The worker that got the request first; the other one is the second.
async fn first_and_second(one: FakeWorker, two: FakeWorker) -> (FakeWorker, FakeWorker, Submit) {
    let (mut one, mut two) = (one, two);
    let (is_one, submit) = tokio::select! {
        submit = one.submitted() => (true, submit),
        submit = two.submitted() => (false, submit),
    };
    if is_one { (one, two, submit) } else { (two, one, submit) }
}

/// An answer on one of two workers, with this text so far.
async fn begun(job: Job, text: &str) -> (App, FakeWorker, FakeWorker, Submit, Answer) {
    let app = start_router(|args| {
        args.heartbeat_ms = 100;
        args.queue_timeout_ms = 5_000;
    })
    .await;
    let one = Behaviour::new("w1").ready(&app).await;
    let two = Behaviour::new("w2").ready(&app).await;
    let mut answer = answer(&app, job).await.unwrap();
    let (first, second, submit) = first_and_second(one, two).await;
    first.gives(submit.request, &letters(text), None);
    let mut seen = String::new();
    while seen.len() < text.len() {
        seen.push_str(&next(&mut answer).await.unwrap().unwrap().text);
    }
    (app, first, second, submit, answer)
}

type App = std::sync::Arc<headrace_router::app::App>;

#[tokio::test]
async fn an_answer_goes_on_where_it_was_when_its_worker_dies() {
    let mut wanted = job();
    wanted.sampling.seed = 77;
    wanted.sampling.temperature = 0.5;
    wanted.priority = -3;
    let (app, first, mut second, before, mut answer) = begun(wanted, "ab").await;
    drop(first);
    let after = while_waiting(&mut answer, second.submitted()).await;
    assert_eq!(resumed(&after), letters("ab"));
    assert_eq!((&after.tokens, &after.sampling), (&before.tokens, &before.sampling));
    assert_eq!((after.max_tokens, &after.stop_ids), (before.max_tokens, &before.stop_ids));
    assert!(after.priority > before.priority, "it goes before those who have seen nothing yet");
    second.gives(after.request, &letters("cd"), None);
    second.gives(after.request, &[EOS], Some(Finish::Stop));
    let (texts, answer) = whole(answer).await;
    assert_eq!(texts, [("cd".into(), Some(FinishReason::Stop))]);
    assert_eq!(answer.usage().completion_tokens, 5, "a, b, c, d and the end");
    assert_eq!(metric(&app, "headrace_resumes_total", ""), 1.0);
    assert_eq!(metric(&app, "headrace_resume_seconds_count", ""), 1.0);
}

#[tokio::test]
async fn drafts_count_across_workers_and_not_beyond_a_stop_string() {
    let wanted = Job { stop: StopStrings::new(&["STOP".into()]), ..job() };
    let (_app, first, mut second, before, mut answer) = begun(wanted, "x").await;
    let drafts = |request, text: &str, drafted, accepted| {
        let output = output(request, letters(text), None);
        Frame::Step(step(vec![Output { drafted, accepted, ..output }]))
    };
    first.send(drafts(before.request, "yz", 3, 1));
    while answer.usage().completion_tokens < 3 {
        next(&mut answer).await.unwrap().unwrap();
    }
    drop(first);
    let after = while_waiting(&mut answer, second.submitted()).await;
    second.send(drafts(after.request, "STOPqrst", 8, 7));
    let (_, answer) = whole(answer).await;
    let usage = answer.usage();
    assert_eq!((usage.completion_tokens, usage.accepted_drafts, usage.rejected_drafts), (7, 5, 6));
}

#[tokio::test]
async fn more_accepted_drafts_than_tokens_or_drafts_are_a_mistake_of_the_worker() {
    for (drafted, accepted) in [(3, 2), (0, 1), (u32::MAX, u32::MAX)] {
        let (_app, first, mut second, before, mut answer) = begun(job(), "a").await;
        let output = output(before.request, letters("b"), None);
        first.send(Frame::Step(step(vec![Output { drafted, accepted, ..output }])));
        let after = while_waiting(&mut answer, second.submitted()).await;
        assert_eq!(resumed(&after), letters("a"));
    }
}

#[tokio::test]
async fn a_stop_string_that_began_on_one_worker_ends_on_the_next() {
    let wanted = Job { stop: StopStrings::new(&["STOP".into()]), ..job() };
    let (_app, first, mut second, before, mut answer) = begun(wanted, "x").await;
    first.gives(before.request, &letters("ST"), None);
    drop(first);
    let after = while_waiting(&mut answer, second.submitted()).await;
    assert_eq!(resumed(&after), letters("xST"));
    second.gives(after.request, &letters("OPy"), None);
    let (texts, answer) = whole(answer).await;
    assert_eq!(texts, [(String::new(), Some(FinishReason::Stop))]);
    assert_eq!(answer.usage().completion_tokens, 5);
    assert_eq!(second.cancelled().await, after.request);
}

#[tokio::test]
async fn each_choice_goes_on_by_itself() {
    let wanted = Job { n: 3, ..job() };
    let app = start_router(|_| {}).await;
    let mut first = Behaviour::new("w1").ready(&app).await;
    let mut answer = answer(&app, wanted).await.unwrap();
    let before = [first.submitted().await, first.submitted().await, first.submitted().await];
    for (i, submit) in before.iter().enumerate() {
        first.gives(submit.request, &letters(&"abc"[..i]), None);
    }
    for _ in 0..2 {
        next(&mut answer).await.unwrap().unwrap(); // of the two that have begun
    }
    let mut second = Behaviour::new("w2").ready(&app).await;
    drop(first);
    let after = while_waiting(&mut answer, async {
        [second.submitted().await, second.submitted().await, second.submitted().await]
    })
    .await;
    let seeds = |all: &[Submit; 3]| all.each_ref().map(|submit| submit.sampling.seed);
    let mut found = after.each_ref().map(|submit| (submit.sampling.seed, resumed(submit).len()));
    found.sort_unstable();
    let seeds = seeds(&before);
    assert_eq!(found, [(seeds[0], 0), (seeds[1], 1), (seeds[2], 2)]);
    for submit in &after {
        second.gives(submit.request, &letters("!"), Some(Finish::Length));
    }
    let (texts, _) = whole(answer).await;
    assert_eq!(texts, vec![("!".to_owned(), Some(FinishReason::Length)); 3]);
}

#[tokio::test]
async fn a_silent_worker_loses_its_answers_within_three_heartbeats_and_keeps_its_link() {
    let (app, mut first, mut second, before, mut answer) = begun(job(), "a").await;
    let name = worker_of(&app);
    first.freeze();
    tokio::time::pause(); // so that only what was waited for counts
    let frozen = tokio::time::Instant::now();
    let after = while_waiting(&mut answer, second.submitted()).await;
    // three heartbeats of 100 ms, and the look that finds them missing
    assert!(frozen.elapsed() <= Duration::from_millis(400), "{:?}", frozen.elapsed());
    tokio::time::resume();
    assert_eq!(resumed(&after), letters("a"));
    assert_eq!(state_of(&app, &name), "suspect");
    assert_eq!(metric(&app, "headrace_suspects_total", ""), 1.0);
    // it wakes up: what it has to say of the request is of no use, and it is told to stop
    first.thaw();
    first.gives(before.request, &letters("b"), None);
    assert_eq!(first.cancelled().await, before.request);
    until("it is trusted again", || state_of(&app, &name) == "ready").await;
    second.gives(after.request, &letters("B"), Some(Finish::Length));
    let (texts, _) = whole(answer).await;
    assert_eq!(texts, [("B".into(), Some(FinishReason::Length))]);
    until("nothing stays booked", || of_worker(&app, &name)["booked_requests"] == 0).await;
}

/// Name of the only worker that has a request.
fn worker_of(app: &App) -> String {
    let busy = |name: &&str| of_worker(app, name)["booked_requests"] != 0;
    ["w1", "w2"].iter().find(|name| busy(name)).unwrap().to_string()
}

#[tokio::test]
async fn a_failure_in_the_middle_is_tried_elsewhere_only_where_that_may_help() {
    for kind in [FailureKind::Draining, FailureKind::BadResume] {
        let (_app, first, mut second, before, mut answer) = begun(job(), "a").await;
        let message = "no time left".to_owned();
        first.send(Frame::Failed(Failed { request: before.request, kind, message }));
        if kind.is_retryable() {
            let after = while_waiting(&mut answer, second.submitted()).await;
            assert_eq!(resumed(&after), letters("a"));
        } else {
            let error = next(&mut answer).await;
            assert!(matches!(error, Some(Err(RouteError::WorkerFailed { .. }))), "{error:?}");
        }
    }
}

#[tokio::test]
async fn an_answer_ends_with_an_error_when_no_worker_comes_back_in_time() {
    let app = start_router(|args| args.queue_timeout_ms = 100).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let mut answer = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "a");
    drop(worker);
    match next(&mut answer).await {
        Some(Err(RouteError::WorkerLost { worker, .. })) => assert_eq!(worker, "w1"),
        other => panic!("{other:?}"),
    }
    assert!(next(&mut answer).await.is_none());
}

#[tokio::test]
async fn workers_that_give_no_token_are_tried_only_so_often() {
    let app = start_router(|args| args.retries = 2).await;
    let mut workers = Vec::new();
    for i in 0..5 {
        workers.push(Behaviour::new(&format!("w{i}")).ready(&app).await);
    }
    let mut answer = answer(&app, job()).await.unwrap();
    let mut tried = 0;
    let error = loop {
        let submitted = async {
            let submits = workers.iter_mut().map(|worker| Box::pin(worker.submitted()));
            let (submit, i, _) = futures_util::future::select_all(submits).await;
            (submit, i)
        };
        tokio::select! {
            biased;
            (submit, i) = submitted => {
                tried += 1;
                let (kind, message) = (FailureKind::Engine, "bad luck".to_owned());
                let failed = Failed { request: submit.request, kind, message };
                workers[i].send(Frame::Failed(failed));
            }
            delta = answer.next() => break delta,
        }
    };
    assert!(matches!(error, Some(Err(RouteError::WorkerFailed { .. }))), "{error:?}");
    assert_eq!(tried, 3, "once, and two retries");
}
#[tokio::test]
async fn an_answer_waits_for_a_worker_that_comes_back() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let mut answer = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "a");
    drop(worker);
    let mut again = while_waiting(&mut answer, async {
        until("it is gone", || app.fleet.workers()["workers"].as_array().unwrap().is_empty()).await;
        let mut back = Behaviour::new("w1");
        back.hello.epoch += 1;
        back.ready(&app).await
    })
    .await;
    let submit = while_waiting(&mut answer, again.submitted()).await;
    assert_eq!(resumed(&submit), letters("a"));
    again.gives(submit.request, &letters("b"), Some(Finish::Length));
    assert_eq!(whole(answer).await.0, [("b".into(), Some(FinishReason::Length))]);
}

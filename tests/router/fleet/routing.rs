//! Where requests go, and that nothing of them stays: prefixes, bursts, sessions, deaths, hang-ups, deadlines, full queues.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use headrace_router::app::App;
use headrace_router::config::RouterArgs;
use headrace_router::core::frame::*;
use headrace_router::error::RouteError;
use headrace_router::limits::shares::Holder;
use headrace_router::prompt::Prompt;
use headrace_router::request::{Answer, Job, RequestTrace, Slo};
use tokio::task::JoinHandle;

use super::caching::*;
use super::requests::{answer, job, next};
use crate::fake_worker::*;

/// Three workers with empty caches.
async fn three(app: &App) -> [Caching; 3] {
    [
        Caching::ready(app, "w0").await,
        Caching::ready(app, "w1").await,
        Caching::ready(app, "w2").await,
    ]
}

/// A worker that takes so many requests, and the router that has no other.
async fn one_with_places(places: u32, args: impl FnOnce(&mut RouterArgs)) -> (Arc<App>, Caching) {
    let app = start_router(args).await;
    let mut behaviour = Behaviour::new("w0");
    behaviour.hello.capacity =
        Capacity { sequences: places, waiting: 0, ..behaviour.hello.capacity };
    let worker = Caching::ready_as(&app, behaviour).await;
    (app, worker)
}

/// Prompts were computed all the time of late, on all workers: from here on computing one twice takes others' time. On an
/// idle fleet it takes nobody's, and is as fast as waiting for the one in flight.
async fn busy(app: &App, workers: &[Caching]) {
    for worker in workers {
        for n in 2..12 {
            let (prefill_tokens, ms) = (512, 1.0 + 0.2 * 512.0);
            worker.send(Frame::Step(Step { step: n, ms, prefill_tokens, ..step(vec![]) }));
        }
        let learnt = || of_worker(app, &worker.name)["steps_learnt"].as_u64() >= Some(10);
        until("its steps", learnt).await;
    }
}

/// The same job with a deadline for its first token.
fn wanted_within(app: &App, first_token: Duration, job: Job) -> Job {
    let metrics = Arc::clone(&app.metrics);
    let slo = Slo { first_token, tpot_ms: None, metrics };
    Job { request_trace: RequestTrace::new("test", Some(slo)), ..job }
}

/// Asks in a task of its own, and returns once it waits as the `n`th.
pub(super) async fn waits(
    app: &Arc<App>,
    n: usize,
    job: Job,
) -> JoinHandle<Result<Answer, RouteError>> {
    let waiting = tokio::spawn({
        let app = Arc::clone(app);
        async move { answer(&app, job).await }
    });
    until("it waits", || metric(app, "headrace_queue_requests", "") == n as f64).await;
    waiting
}

/// What a placement on this worker could have counted on.
fn cached_on(request_trace: &RequestTrace, worker: &str) -> u32 {
    let decisions = request_trace.decisions();
    let candidates = &decisions[0].candidates;
    candidates.iter().find(|candidate| *candidate.name == *worker).unwrap().cached_tokens
}

// ---- where requests go ----

/// The request of a tenant.
fn by(tenant: u64, job: Job) -> Job {
    Job { holder: Holder { tenant, ..Holder::default() }, ..job }
}

#[tokio::test]
async fn a_prompt_goes_where_its_blocks_are_and_with_another_salt_it_does_not() {
    let app = start_router(|_| {}).await;
    let [mut w0, mut w1, mut w2] = three(&app).await;
    let text = prompt(1, 40);
    let (keys, salted) = (w1.keys(&text, b""), w2.keys(&text, b"tenant-a"));
    w1.sequence += 1;
    w1.sends_snapshot(&keys);
    w2.stores(&salted[..30]);
    w1.indexed(&app, 40).await;
    w2.indexed(&app, 30).await;
    let fleet = &mut [&mut w0, &mut w1, &mut w2];
    for _ in 0..3 {
        assert_eq!(honestly(&app, fleet, &text).await, ("w1".into(), 40 * BLOCK));
        let salted = Job { salt: b"tenant-a".into(), ..ask(&text) };
        let promised = served(&app, fleet, salted, |promised| promised).await;
        assert_eq!(promised, ("w2".into(), 30 * BLOCK));
        let other = Job { salt: b"tenant-b".into(), ..ask(&text) };
        assert_eq!(served(&app, fleet, other, |promised| promised).await.1, 0);
    }
    // a prompt that goes on from there, and one that ends inside
    let longer = [&text[..], &prompt(2, 5)[..]].concat();
    assert_eq!(honestly(&app, fleet, &longer).await, ("w1".into(), 40 * BLOCK));
    let whole = &text[..(10 * BLOCK) as usize];
    assert_eq!(
        honestly(&app, fleet, whole).await,
        ("w1".into(), 9 * BLOCK),
        "never the last token"
    );
    all_is_given_back(&app).await;
}

#[tokio::test]
async fn a_burst_with_one_prefix_goes_to_one_worker_before_any_event() {
    let app = start_router(|_| {}).await;
    let mut workers = three(&app).await;
    busy(&app, &workers).await;
    let begin = prompt(1, 60);
    let mut jobs = Vec::new();
    let mut answers = Vec::new();
    for n in 0..6 {
        let job = ask(&[&begin[..], &prompt(100 + n, 1)[..]].concat());
        answers.push(answer(&app, job.clone()).await.unwrap());
        jobs.push(job);
    }
    let home = chosen(&jobs[0].request_trace);
    assert_eq!((home.held_tokens, home.cached_tokens), (0, 0));
    for job in &jobs[1..] {
        let chosen = chosen(&job.request_trace);
        assert_eq!((chosen.id, chosen.held_tokens, chosen.cached_tokens), (home.id, 0, 60 * BLOCK));
    }
    // another prefix goes elsewhere
    let other = ask(&prompt(2, 60));
    answers.push(answer(&app, other.clone()).await.unwrap());
    assert_ne!(chosen(&other.request_trace).id, home.id);
    let worker = workers.iter_mut().find(|worker| *worker.name == *home.name).unwrap();
    for _ in 0..6 {
        worker.submitted().await;
    }
    drop(answers);
    all_is_given_back(&app).await;
}

#[tokio::test]
async fn all_choices_of_a_request_go_to_one_worker() {
    let app = start_router(|_| {}).await;
    let workers = three(&app).await;
    busy(&app, &workers).await;
    for number in 0..4 {
        let job = Job { n: 4, ..ask(&prompt(number, 60)) };
        let _answer = answer(&app, job.clone()).await.unwrap();
        let winners: HashSet<_> = job.request_trace.decisions().iter().map(|d| d.winner).collect();
        assert_eq!((job.request_trace.decisions().len(), winners.len()), (4, 1));
    }
    all_is_given_back(&app).await;
}

#[tokio::test]
async fn among_equals_a_session_has_its_own_worker_and_a_cached_prefix_counts_for_more() {
    let app = start_router(|_| {}).await;
    let [mut w0, mut w1, mut w2] = three(&app).await;
    let mut homes = HashSet::new();
    for session in 0..12 {
        let mut home = HashSet::new();
        for _ in 0..3 {
            let session = Some(format!("session {session}"));
            let fleet = &mut [&mut w0, &mut w1, &mut w2];
            home.insert(served(&app, fleet, Job { session, ..job() }, |_| 0).await.0);
        }
        assert_eq!(home.len(), 1, "{home:?}");
        homes.extend(home);
    }
    assert_eq!(homes.len(), 3, "sessions spread");
    let text = prompt(1, 40);
    w2.stores(&w2.keys(&text, b""));
    w2.indexed(&app, 40).await;
    for session in 0..6 {
        let job = Job { session: Some(format!("session {session}")), ..ask(&text) };
        let fleet = &mut [&mut w0, &mut w1, &mut w2];
        assert_eq!(served(&app, fleet, job, |promised| promised).await.0, "w2");
    }
}

// ---- nothing stays ----

#[tokio::test]
async fn a_worker_that_dies_before_the_first_token_takes_its_bookings_with_it() {
    let app = start_router(|_| {}).await;
    let text = prompt(1, 60);
    let mut dying = Caching::holding(&app, "dying", &text).await;
    let mut other = Caching::ready(&app, "other").await;
    let mut jobs = Vec::new();
    let mut answers = Vec::new();
    for n in 0..3 {
        let job = ask(&[&text[..], &prompt(100 + n, 20)[..]].concat());
        answers.push(answer(&app, job.clone()).await.unwrap());
        assert_eq!(&*chosen(&job.request_trace).name, "dying");
        dying.submitted().await;
        jobs.push(job);
    }
    assert_eq!(metric(&app, "headrace_booked_legs", ""), 3.0);
    assert!(of_worker(&app, "dying")["backlog_tokens"].as_u64().unwrap() > 0);
    let name = dying.name.clone();
    drop(dying);
    until("it is gone", || state_of(&app, &name).is_empty()).await;
    assert_eq!(metric(&app, "headrace_booked_legs", ""), 0.0);
    assert_eq!(metric(&app, "headrace_worker_backlog_tokens", ""), 0.0);
    for (job, answer) in jobs.iter().zip(&mut answers) {
        let (delta, ()) = tokio::join!(next(answer), async {
            let request = other.submitted().await.request;
            other.begins(request, 0, Some(Finish::Length));
        });
        assert_eq!(delta.unwrap().unwrap().text, "a", "moved on");
        assert_eq!(&*chosen(&job.request_trace).name, "other");
    }
    assert_eq!(metric(&app, "headrace_retries_total", ""), 3.0);
    all_is_given_back(&app).await;
    // a newer life knows nothing of what was booked on the old one
    let _reborn = Caching::ready(&app, "dying").await;
    let job = ask(&text);
    let _answer = answer(&app, job.clone()).await.unwrap();
    assert_eq!(cached_on(&job.request_trace, "dying"), 0);
}

#[tokio::test]
async fn a_client_that_hangs_up_before_the_first_token_leaves_no_prediction() {
    let app = start_router(|_| {}).await;
    let mut worker = Caching::ready(&app, "w0").await;
    let text = prompt(1, 60);
    let seen = |job: &Job| cached_on(&job.request_trace, "w0");
    let (first, second, third) = (ask(&text), ask(&text), ask(&text));
    let answer_ = answer(&app, first.clone()).await.unwrap();
    worker.submitted().await;
    drop(answer_);
    worker.cancelled().await;
    all_is_given_back(&app).await;
    let answer_ = answer(&app, second.clone()).await.unwrap();
    assert_eq!((seen(&first), seen(&second)), (0, 0));
    worker.submitted().await;
    // while one of two with the same prompt is left, the prompt is on its way
    let other = answer(&app, third.clone()).await.unwrap();
    drop(answer_);
    worker.cancelled().await;
    until("one is left", || metric(&app, "headrace_booked_legs", "") == 1.0).await;
    let fourth = ask(&text);
    let _answer = answer(&app, fourth.clone()).await.unwrap();
    assert_eq!((seen(&third), seen(&fourth)), (60 * BLOCK, 60 * BLOCK));
    drop((other, _answer));
    all_is_given_back(&app).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_in_the_queue_leaves_it() {
    let (app, mut worker) = one_with_places(1, |_| {}).await;
    let running = answer(&app, ask(&prompt(1, 10))).await.unwrap();
    worker.submitted().await;
    let waiting = waits(&app, 1, ask(&prompt(2, 10))).await;
    waiting.abort();
    until("it left", || metric(&app, "headrace_queue_requests", "") == 0.0).await;
    assert_eq!(metric(&app, "headrace_booked_legs", ""), 1.0, "the one that runs");
    drop(running);
    all_is_given_back(&app).await;
    assert!(worker.so_far().iter().all(|event| !matches!(event, Event::Submit(_))));
}

#[tokio::test]
async fn a_client_that_hangs_up_once_it_has_a_place_and_does_not_know_it_gives_it_back() {
    let (app, mut worker) = one_with_places(1, |_| {}).await;
    let mut running = answer(&app, ask(&prompt(1, 10))).await.unwrap();
    let request = worker.submitted().await.request;
    let mut waiting = Box::pin(answer(&app, ask(&prompt(2, 10))));
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("there is no room"),
        () = until("it waits", || metric(&app, "headrace_queue_requests", "") == 1.0) => {}
    }
    let behind = waits(&app, 2, ask(&prompt(3, 10))).await;
    // from here on nobody looks at the one that waits
    worker.begins(request, 0, Some(Finish::Length));
    next(&mut running).await.unwrap().unwrap();
    until("it has a place", || metric(&app, "headrace_queue_requests", "") == 1.0).await;
    assert_eq!(metric(&app, "headrace_booked_legs", ""), 1.0);
    drop(waiting);
    let submit = worker.submitted().await;
    assert_eq!(submit.tokens[..4], prompt(3, 10)[0].to_le_bytes(), "the place went to the next");
    drop(in_time("the next one", behind).await.unwrap().unwrap());
    worker.cancelled().await;
    all_is_given_back(&app).await;
}

#[tokio::test]
async fn clients_that_hang_up_while_their_submits_wait_for_the_socket_leave_nothing() {
    let app = start_router(|args| {
        args.worker_queue_ms = 1 << 40;
        args.submit_timeout_ms = 60_000; // not what ends it
        args.heartbeat_ms = 30_000; // nor this
        args.heartbeat_timeout_ms = 100_000;
    })
    .await;
    let mut behaviour = Behaviour::new("frozen");
    behaviour.hello.capacity.sequences = 4000;
    behaviour.hello.context_tokens = 1 << 20;
    let frozen = Caching::ready_as(&app, behaviour).await;
    frozen.freeze();
    let long = Job { prompt: Prompt::Tokens(vec![3; 100_000]), ..job() };
    let mut answers = Vec::new();
    // until the socket, and then the queue in front of it, takes no more: a leg is booked and its answer does not come
    let stuck = loop {
        let mut next = Box::pin(answer(&app, long.clone()));
        let booked = || metric(&app, "headrace_booked_legs", "") > answers.len() as f64;
        let answer = tokio::select! {
            biased;
            answer = &mut next => Some(answer.unwrap()),
            () = until("it is booked", booked) => None,
        };
        match answer {
            Some(answer) => answers.push(answer),
            None => break next,
        }
    };
    assert_eq!(metric(&app, "headrace_booked_legs", ""), (answers.len() + 1) as f64);
    let cancelled = |stage| metric(&app, "headrace_cancels_total", &format!("\"{stage}\""));
    drop(stuck);
    assert_eq!(
        (cancelled("submit"), metric(&app, "headrace_booked_legs", "")),
        (1.0, answers.len() as f64)
    );
    let all = answers.len() as f64;
    drop(answers);
    assert!(cancelled("submit") > 2.0, "those in front of the socket are free at once");
    assert_eq!(metric(&app, "headrace_booked_legs", ""), all - (cancelled("submit") - 1.0));
    drop(frozen); // those that were sent are the worker's to free, or go with it
    until("it is gone", || state_of(&app, "frozen").is_empty()).await;
    all_is_given_back(&app).await;
}

// ---- who is turned away, and until when ----

#[tokio::test]
async fn a_deadline_that_cannot_be_met_is_refused_at_once_and_nothing_is_sent() {
    let app = start_router(|_| {}).await;
    let mut worker = Caching::ready(&app, "w0").await;
    let impossible = |job| wanted_within(&app, Duration::from_millis(500), job);
    let too_late = |result: Result<Answer, RouteError>| match result {
        Err(RouteError::TooLate { predicted, deadline, retry_after }) => {
            assert!(predicted > deadline && deadline <= Duration::from_millis(500));
            assert!(retry_after >= Duration::from_secs(1));
            retry_after
        }
        other => panic!("{other:?}"),
    };
    // idle: it would take too long anywhere
    too_late(answer(&app, impossible(ask(&prompt(1, 240)))).await);
    // short enough alone, but behind more and more others; few enough that the router holds none of them back. A prompt of a
    // step or less would overtake them
    let mut running = Vec::new();
    let mut retries = Vec::new();
    for n in 0..6 {
        running.push(answer(&app, ask(&prompt(10 + n, 240))).await.unwrap());
        worker.submitted().await;
        retries.push(too_late(answer(&app, impossible(ask(&prompt(2, 120)))).await));
    }
    assert!(retries.is_sorted() && retries[5] > retries[0] + Duration::from_secs(2), "{retries:?}");
    assert_eq!(metric(&app, "headrace_refused_total", "\"deadline\""), 7.0);
    assert_eq!(metric(&app, "headrace_booked_legs", ""), 6.0);
    // one that can be met is served
    let patient = wanted_within(&app, Duration::from_secs(3600), ask(&prompt(3, 2)));
    running.push(answer(&app, patient).await.unwrap());
    assert_eq!(worker.submitted().await.tokens[..4], prompt(3, 2)[0].to_le_bytes());
    assert!(worker.so_far().is_empty(), "nothing of the others was sent");
    drop(running);
    all_is_given_back(&app).await;
}

#[tokio::test]
async fn a_deadline_that_passes_in_the_queue_ends_the_wait() {
    let (app, mut worker) = one_with_places(1, |_| {}).await;
    let _running = answer(&app, ask(&prompt(1, 10))).await.unwrap();
    worker.submitted().await;
    tokio::time::pause();
    let late = wanted_within(&app, Duration::from_secs(10), ask(&prompt(2, 10)));
    let begin = tokio::time::Instant::now();
    let error = waits(&app, 1, late).await.await.unwrap().unwrap_err();
    assert!(matches!(error, RouteError::TooLate { .. }), "{error:?}");
    assert!((10.0..12.0).contains(&begin.elapsed().as_secs_f64()), "{:?}", begin.elapsed());
    assert_eq!(metric(&app, "headrace_queue_requests", ""), 0.0);
    assert_eq!(metric(&app, "headrace_booked_legs", ""), 1.0);
    assert!(worker.so_far().iter().all(|event| !matches!(event, Event::Submit(_))));
}

#[tokio::test]
async fn a_queue_is_full_by_requests_tokens_and_bytes_and_says_for_how_long() {
    type Change = fn(&mut RouterArgs);
    let cases: [(&str, Change); 3] = [
        ("queued requests", |args| args.queue_requests = 12),
        ("queued tokens", |args| args.queue_tokens = 12 * 4000),
        ("queued bytes", |args| args.queue_bytes = 12 * 19_000),
    ];
    for (bound, change) in cases {
        let (app, mut worker) = one_with_places(1, change).await;
        let running = answer(&app, ask(&prompt(1, 2))).await.unwrap();
        worker.submitted().await;
        let mut waiting = Vec::new();
        while waiting.len() < 12 {
            let n = waiting.len() + 1;
            waiting.push(waits(&app, n, by(n as u64, ask(&prompt(2, 249)))).await);
        }
        match answer(&app, by(99, ask(&prompt(2, 249)))).await {
            Err(RouteError::Overloaded { what, retry_after }) => {
                assert_eq!(what, bound);
                // what waits is computed at some 0.2 ms a token, as nothing else is known of the worker
                assert!(
                    (5.0..20.0).contains(&retry_after.as_secs_f64()),
                    "{bound}: {retry_after:?}"
                );
            }
            other => panic!("{bound}: {other:?}"),
        }
        assert_eq!(metric(&app, "headrace_refused_total", &format!("\"{bound}\"")), 1.0);
        waiting.iter().for_each(JoinHandle::abort);
        drop(running);
        all_is_given_back(&app).await;
    }
}

#[tokio::test]
async fn whoever_waited_too_long_is_told_how_long_the_queue_is() {
    let (app, mut worker) = one_with_places(1, |_| {}).await;
    let _running = answer(&app, ask(&prompt(1, 2))).await.unwrap();
    worker.submitted().await;
    tokio::time::pause();
    let mut waiting = Vec::new();
    while waiting.len() < 12 {
        let n = waiting.len() + 1;
        waiting.push(waits(&app, n, ask(&prompt(2, 249))).await);
    }
    let first = waiting.remove(0);
    match first.await.unwrap() {
        Err(RouteError::Overloaded { what, retry_after }) => {
            assert_eq!(what, "all workers are full");
            assert!(retry_after > Duration::from_secs(5), "{retry_after:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_tenant_that_had_little_goes_before_one_that_had_much() {
    let (app, mut worker) = one_with_places(1, |_| {}).await;
    let of = |tenant, number| by(tenant, ask(&prompt(number, 100)));
    let mut running = Vec::new();
    running.push(answer(&app, of(1, 1)).await.unwrap());
    let mut request = worker.submitted().await.request;
    let mut waiting = Vec::new();
    for (n, (tenant, number)) in [(1, 2), (1, 3), (1, 4), (2, 5)].into_iter().enumerate() {
        waiting.push(waits(&app, n + 1, of(tenant, number)).await);
    }
    let mut order = Vec::new();
    for _ in 0..4 {
        worker.begins(request, 0, Some(Finish::Length));
        let submit = worker.submitted().await;
        request = submit.request;
        order.extend(
            (2..6).filter(|n| submit.tokens[..400] == little_endian(&prompt(*n, 100))[..400]),
        );
    }
    assert_eq!(order[0], 5, "{order:?}");
    assert_eq!(order[1..], [2, 3, 4]);
    worker.begins(request, 0, Some(Finish::Length));
    for waiting in waiting {
        let mut answer = in_time("its turn", waiting).await.unwrap().unwrap();
        next(&mut answer).await.unwrap().unwrap();
    }
    all_is_given_back(&app).await;
}

fn little_endian(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

#[tokio::test]
async fn a_worker_that_says_that_its_steps_take_no_time_is_measured_and_named() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour { lives: false, ..Behaviour::new("liar") }.ready(&app).await;
    let mut stream = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("a"), None);
    next(&mut stream).await.unwrap().unwrap();
    assert_eq!(of_worker(&app, "liar")["speed_doubted"], serde_json::Value::Null);
    tokio::time::pause();
    let mut number = 2;
    let mut lies = async |ms: f64, until: &dyn Fn() -> bool| {
        for _ in 0..600 {
            if until() {
                return;
            }
            // each step takes 20 ms; a token in the first ones, as there are no more than 64
            let ids = if number < 50 { letters("b") } else { Vec::new() };
            let outputs = vec![output(request, ids, None)];
            let said = Step { step: number, decode_rows: 1, ms, ..step(outputs) };
            worker.send(Frame::Step(said));
            number += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("it is never so");
    };
    let doubted = |why: &str| of_worker(&app, "liar")["speed_doubted"] == *why;
    lies(0.001, &|| doubted("step_times")).await;
    assert_eq!(metric(&app, "headrace_worker_speed_doubted", "liar"), 1.0);
    assert_eq!(metric(&app, "headrace_speed_doubted_total", "step_times"), 1.0);
    assert_eq!(state_of(&app, "liar"), "ready", "it serves on");
    // its word counts again once it is true for long enough
    lies(20.0, &|| of_worker(&app, "liar")["speed_doubted"].is_null()).await;
    assert_eq!(metric(&app, "headrace_worker_speed_doubted", "liar"), 0.0);
}

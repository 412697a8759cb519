//! Requests through a router: what is answered, and what is refused.

use std::sync::Arc;

use headrace_router::app::App;
use headrace_router::core::frame::*;
use headrace_router::error::RouteError;
use headrace_router::limits::shares::Account;
use headrace_router::limits::shares::Holder;
use headrace_router::prompt::Prompt;
use headrace_router::prompt::StopStrings;
use headrace_router::request::{self, Answer, Delta, FinishReason, Job, RequestTrace};

use crate::fake_worker::*;

/// Asks for the model of these tests.
pub(super) async fn answer(app: &Arc<App>, job: Job) -> Result<Answer, RouteError> {
    request::answer(app, app.fleet.find(MODEL)?, job).await
}

pub(super) fn job() -> Job {
    Job {
        name: "test".into(),
        prompt: Prompt::Tokens(letters("Hello")),
        sampling: Sampling::default(),
        stop: StopStrings::default(),
        stop_ids: Vec::new(),
        max_tokens: Some(64),
        n: 1,
        skip_special_tokens: true,
        reading: request::Reading::default(),
        session: None,
        priority: 0,
        account: Account::default(),
        holder: Holder::default(),
        key: None,
        request_trace: RequestTrace::new("test", None),
        first_choice: 0,
        salt: Vec::new(),
        memory: None,
        truncation: None,
        pooling: None,
        returns_ids: false,
        scores_prompt: false,
    }
}

pub(super) async fn next(answer: &mut Answer) -> Option<Result<Delta, RouteError>> {
    in_time("a delta", answer.next()).await
}

/// All deltas of all choices, by choice: text and end.
pub(super) async fn whole(mut answer: Answer) -> (Vec<(String, Option<FinishReason>)>, Answer) {
    let mut choices = Vec::new();
    while let Some(delta) = next(&mut answer).await {
        let delta = delta.unwrap();
        let choice = delta.choice as usize;
        choices.resize(choices.len().max(choice + 1), (String::new(), None));
        choices[choice].0.push_str(&delta.text);
        choices[choice].1 = choices[choice].1.or(delta.finish);
    }
    (choices, answer)
}

/// What a worker is told that was generated before.
pub(super) fn resumed(submit: &Submit) -> Vec<u32> {
    let Some(resume) = &submit.resume else { return Vec::new() };
    let ids: Vec<u32> = resume
        .generated
        .chunks_exact(4)
        .map(|id| u32::from_le_bytes(id.try_into().unwrap()))
        .collect();
    assert_eq!(resume.rng_counter, ids.len() as u64);
    ids
}

/// Polls the answer while the test looks at a worker: a request moves on only when its client asks for more.
pub(super) async fn while_waiting<T>(answer: &mut Answer, look: impl Future<Output = T>) -> T {
    tokio::select! {
        biased;
        seen = look => seen,
        delta = answer.next() => panic!("too early: {delta:?}"),
    }
}

async fn one_worker(text: &str) -> (Arc<App>, FakeWorker) {
    let app = start_router(|_| {}).await;
    let worker = Behaviour::says("w1", text).ready(&app).await;
    (app, worker)
}

/// A router with one worker that answers only what the test makes it answer.
pub(super) async fn by_hand() -> (Arc<App>, FakeWorker) {
    let app = start_router(|_| {}).await;
    let worker = Behaviour::new("w1").ready(&app).await;
    (app, worker)
}

#[tokio::test]
async fn an_answer_comes_whole_with_its_usage() {
    let (app, mut worker) = one_worker("Good morning").await;
    let (choices, answer) = whole(answer(&app, job()).await.unwrap()).await;
    assert_eq!(choices, [("Good morning".to_owned(), Some(FinishReason::Stop))]);
    let usage = answer.usage();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (5, 13), "the stop token counts");
    let submit = worker.submitted().await;
    assert_eq!(submit.tokens[..4], letters("H")[0].to_le_bytes());
    assert_eq!((submit.stop_ids, submit.max_tokens), (vec![EOS], 64));
    assert!(submit.deadline_ms.unwrap() > 3_590_000);
    until("the booking is gone", || of_worker(&app, "w1")["booked_requests"] == 0).await;
    assert_eq!(of_worker(&app, "w1")["booked_tokens"], 0);
}

#[tokio::test]
async fn choices_run_apart_with_seeds_of_their_own() {
    let app = start_router(|_| {}).await;
    let says = |submit: &Submit| Some(Script::says(&format!("seed {}", submit.sampling.seed)));
    let _worker = Behaviour::new("w1").answers(says).ready(&app).await;
    let mut job = Job { n: 3, ..job() };
    job.sampling.seed = u64::MAX;
    let (choices, answer) = whole(answer(&app, job).await.unwrap()).await;
    let texts: Vec<_> = choices.into_iter().map(|(text, _)| text).collect();
    assert_eq!(texts, [format!("seed {}", u64::MAX), "seed 0".into(), "seed 1".into()]);
    assert_eq!(answer.usage().prompt_tokens, 5, "counted once");
    assert_eq!(metric(&app, "headrace_prompt_tokens_total", ""), 5.0);
    drop(answer);
    assert_eq!(metric(&app, "headrace_streams", ""), 0.0);
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_the_worker_is_told() {
    let (app, mut worker) = by_hand().await;
    let job = Job { stop: StopStrings::new(&["END".into()]), ..job() };
    let mut answer = answer(&app, job).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("so far E"), None);
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "so far ");
    worker.gives(request, &letters("NDmore"), None);
    let last = next(&mut answer).await.unwrap().unwrap();
    assert_eq!((last.text.as_str(), last.finish), ("", Some(FinishReason::Stop)));
    assert!(next(&mut answer).await.is_none());
    assert_eq!(answer.usage().completion_tokens, 10, "up to the stop string");
    assert_eq!(worker.cancelled().await, request);
    until("it is freed", || of_worker(&app, "w1")["booked_requests"] == 0).await;
    assert_eq!(metric(&app, "headrace_cancel_to_freed_seconds_count", ""), 1.0);
}

#[tokio::test]
async fn the_stop_token_is_not_text_and_length_is_length() {
    let (app, mut worker) = by_hand().await;
    let job = Job { skip_special_tokens: false, stop_ids: vec![9], ..job() };
    let mut one = answer(&app, job.clone()).await.unwrap();
    let submit = worker.submitted().await;
    assert_eq!(submit.stop_ids, [EOS, 9]);
    worker.gives(submit.request, &[letters("a")[0], 9], Some(Finish::Stop));
    let delta = next(&mut one).await.unwrap().unwrap();
    assert_eq!((delta.text.as_str(), delta.finish), ("a", Some(FinishReason::Stop)));
    let mut two = answer(&app, job).await.unwrap();
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("b)"), Some(Finish::Length));
    let delta = next(&mut two).await.unwrap().unwrap();
    assert_eq!((delta.text.as_str(), delta.finish), ("b)", Some(FinishReason::Length)));
}

#[tokio::test]
async fn ignore_eos_leaves_the_models_own_stop_tokens_out() {
    let (app, mut worker) = by_hand().await;
    let mut job = Job { stop_ids: vec![9], ..job() };
    job.sampling.ignore_eos = true;
    let _answer = answer(&app, job.clone()).await.unwrap();
    let submit = worker.submitted().await;
    assert_eq!(submit.stop_ids, [9]);
    assert!(!submit.sampling.ignore_eos, "the worker would ignore the client's own as well");
    job.stop_ids = Vec::new();
    let _without = answer(&app, job).await.unwrap();
    assert!(worker.submitted().await.sampling.ignore_eos);
}

#[tokio::test]
async fn log_probabilities_come_with_their_tokens() {
    let (app, mut worker) = by_hand().await;
    let mut job = job();
    job.sampling.logprobs = Some(2);
    job.sampling.prompt_logprobs = Some(0);
    let mut answer = answer(&app, job).await.unwrap();
    let request = worker.submitted().await.request;
    let (a, b) = (letters("a")[0], letters("b")[0]);
    let at = |logprob, top: &[(u32, f64)]| TokenLogprob {
        logprob,
        top: top.iter().map(|(id, logprob)| Ranked(*id, *logprob)).collect(),
    };
    worker.send(Frame::Step(step(vec![Output {
        logprobs: Some(vec![at(-0.5, &[(a, -0.5), (b, -1.0)]), at(-2.0, &[])]),
        prompt_logprobs: Some(vec![at(-1.0, &[]); 4]),
        cached_tokens: Some(3),
        ..output(request, vec![a, EOS], Some(Finish::Stop))
    }])));
    let delta = next(&mut answer).await.unwrap().unwrap();
    assert_eq!(delta.tokens.len(), 1, "the stop token is not part of the answer");
    let token = &delta.tokens[0];
    assert_eq!((token.id, token.logprob), (a, Some(-0.5)));
    assert_eq!(token.top, [Ranked(a, -0.5), Ranked(b, -1.0)]);
    let prompt = delta.prompt_tokens.unwrap();
    let ids: Vec<u32> = prompt.iter().map(|token| token.id).collect();
    assert_eq!((ids, prompt[0].logprob, prompt[4].logprob), (letters("Hello"), None, Some(-1.0)));
    assert_eq!(answer.usage().cached_tokens, 3);
}

#[tokio::test]
async fn a_prompt_without_answer_is_computed_only_for_its_log_probabilities() {
    let (app, mut worker) = by_hand().await;
    let nothing = Job { max_tokens: Some(0), ..job() };
    let (choices, answer_) = whole(answer(&app, nothing.clone()).await.unwrap()).await;
    assert_eq!(choices, [(String::new(), Some(FinishReason::Length))]);
    assert_eq!(answer_.usage().completion_tokens, 0);
    assert!(worker.so_far().iter().all(|event| !matches!(event, Event::Submit(_))));
    let mut scored = nothing;
    scored.sampling.prompt_logprobs = Some(0);
    let mut answer = answer(&app, scored).await.unwrap();
    let submit = worker.submitted().await;
    assert_eq!(submit.max_tokens, 0);
    worker.send(Frame::Step(step(vec![Output {
        prompt_logprobs: Some(vec![TokenLogprob { logprob: -1.0, top: vec![] }; 4]),
        ..output(submit.request, vec![], Some(Finish::Length))
    }])));
    let delta = next(&mut answer).await.unwrap().unwrap();
    assert_eq!(delta.prompt_tokens.unwrap().len(), 5);
    assert_eq!(delta.finish, Some(FinishReason::Length));
}

#[tokio::test]
async fn what_does_not_fit_or_does_not_exist_is_refused() {
    let app = start_router(|_| {}).await;
    assert!(matches!(answer(&app, job()).await, Err(RouteError::NoWorker { .. })));
    let worker = Behaviour::new("w1").ready(&app).await;
    match app.fleet.find("gpt-4") {
        Err(RouteError::UnknownModel { model, served }) => {
            assert_eq!((model.as_str(), served.as_str()), ("gpt-4", MODEL));
        }
        other => panic!("{other:?}"),
    }
    let long = Job { max_tokens: Some(CONTEXT_TOKENS), ..job() };
    assert!(matches!(answer(&app, long).await, Err(RouteError::ContextLength { .. })));
    let empty = Job { prompt: Prompt::Tokens(Vec::new()), ..job() };
    assert!(matches!(answer(&app, empty).await, Err(RouteError::BadRequest { .. })));
    drop(worker);
    until("w1 is gone", || state_of(&app, "w1").is_empty()).await;
    assert!(matches!(answer(&app, job()).await, Err(RouteError::NoWorker { .. })), "known, absent");
}

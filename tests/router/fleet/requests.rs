//! Requests through a router: answered, retried, cancelled, late.

use std::sync::Arc;
use std::time::Duration;

use headrace_router::app::App;
use headrace_router::core::frame::*;
use headrace_router::error::RouteError;
use headrace_router::request::{Answer, Delta, FinishReason, Job, Prompt, answer};

use crate::fake_worker::*;

fn job() -> Job {
    Job {
        name: "test".into(),
        model: MODEL.into(),
        prompt: Prompt::Tokens(letters("Hello")),
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_ids: Vec::new(),
        max_tokens: Some(64),
        n: 1,
        skip_special_tokens: true,
        session: None,
        priority: 0,
        salt: Vec::new(),
    }
}

async fn next(answer: &mut Answer) -> Option<Result<Delta, RouteError>> {
    in_time("a delta", answer.next()).await
}

/// All deltas of all choices, by choice: text and end.
async fn whole(mut answer: Answer) -> (Vec<(String, Option<FinishReason>)>, Answer) {
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

async fn one_worker(text: &str) -> (Arc<App>, FakeWorker) {
    let app = start_router(|_| {}).await;
    let worker = Behaviour::says("w1", text).ready(&app).await;
    (app, worker)
}

/// A router with one worker that answers only what the test makes it answer.
async fn by_hand() -> (Arc<App>, FakeWorker) {
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

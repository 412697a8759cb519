//! What a worker says of requests that are not its own: nothing of it reaches a client, moves a request or frees a place.

use headrace_router::core::frame::*;
use headrace_router::request::FinishReason;

use super::requests::{answer, job, next, whole};
use crate::fake_worker::*;

/// Everything that could be said of a request.
fn lies(request: RequestId) -> Vec<Frame> {
    let failed = Failed { request, kind: FailureKind::Engine, message: "it is lost".into() };
    vec![
        Frame::Step(step(vec![output(request, letters("lie"), None)])),
        Frame::Step(step(vec![output(request, vec![EOS], Some(Finish::Stop))])),
        Frame::Failed(failed),
        Frame::Freed(Freed { request, blocks: 1 << 20 }),
    ]
}

#[tokio::test]
async fn another_workers_request_is_none_of_its_business() {
    let app = start_router(|_| {}).await;
    let mut busy = Behaviour::new("busy").ready(&app).await;
    let running = answer(&app, job()).await.unwrap();
    let request = busy.submitted().await.request;
    busy.gives(request, &letters("tr"), None);
    let liar = Behaviour::new("liar").ready(&app).await;
    for number in [request, RequestId(request.0 + 1), RequestId(0), RequestId(u64::MAX)] {
        for lie in lies(number) {
            liar.send(lie);
        }
    }
    // all of it was read when this is answered: frames come in their order
    let (second, mut liar) = (answer(&app, job()).await.unwrap(), liar);
    let own = liar.submitted().await.request;
    liar.gives(own, &letters("own"), Some(Finish::Length));
    let (texts, _) = whole(second).await;
    assert_eq!(texts, [("own".into(), Some(FinishReason::Length))]);
    busy.gives(request, &letters("uth"), Some(Finish::Length));
    let (texts, answer) = whole(running).await;
    assert_eq!(texts, [("truth".into(), Some(FinishReason::Length))]);
    assert_eq!(answer.usage().completion_tokens, 5);
    assert_eq!(metric(&app, "headrace_resumes_total", ""), 0.0);
    assert_eq!(metric(&app, "headrace_completion_tokens_total", ""), 8.0);
    until("nothing is booked", || of_worker(&app, "busy")["booked_requests"] == 0).await;
    until("nor there", || of_worker(&app, "liar")["booked_requests"] == 0).await;
}

#[tokio::test]
async fn what_is_over_stays_over_whatever_is_still_said_of_it() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let first = answer(&app, job()).await.unwrap();
    let old = worker.submitted().await.request;
    worker.gives(old, &letters("one"), Some(Finish::Length));
    let (texts, first) = whole(first).await;
    assert_eq!(texts, [("one".into(), Some(FinishReason::Length))]);
    for lie in lies(old) {
        worker.send(lie);
    }
    let second = answer(&app, job()).await.unwrap();
    let request = worker.submitted().await.request;
    assert_ne!(request, old, "numbers are not used again");
    for lie in lies(old) {
        worker.send(lie);
    }
    worker.gives(request, &letters("two"), Some(Finish::Length));
    let (texts, _) = whole(second).await;
    assert_eq!(texts, [("two".into(), Some(FinishReason::Length))]);
    assert_eq!(first.usage().completion_tokens, 3);
    assert_eq!(state_of(&app, "w1"), "ready");
}

#[tokio::test]
async fn tokens_that_no_vocabulary_has_have_no_text_and_harm_nobody() {
    let app = start_router(|_| {}).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let mut scored = job();
    scored.sampling.logprobs = Some(2);
    for job in [job(), scored] {
        let running = answer(&app, job).await.unwrap();
        let request = worker.submitted().await.request;
        worker.gives(request, &[letters("a")[0], u32::MAX, 1 << 20, letters("b")[0]], None);
        worker.gives(request, &letters("c"), Some(Finish::Length));
        let mut running = running;
        let mut text = String::new();
        let end = loop {
            match next(&mut running).await {
                Some(Ok(delta)) => text.push_str(&delta.text),
                other => break other,
            }
        };
        assert!(text == "abc" || matches!(end, Some(Err(_))), "{text:?} {end:?}");
    }
    assert_eq!(state_of(&app, "w1"), "ready");
}

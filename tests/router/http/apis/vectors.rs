//! Prompts as vectors, with workers that do what they should, lie, are lost, or cannot.

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{
    Failed, FailureKind, Finish, Frame, Output, Pooling, RequestId,
};
use serde_json::{Value, json};

use super::super::client::{Connection, TestRouter, args};
use crate::fake_worker::{Behaviour, FakeWorker, MODEL, letters, output, step};

const PATH: &str = "POST /v1/embeddings HTTP/1.1\r\nContent-Type: application/json";

fn body(more: &Value) -> Vec<u8> {
    let mut body = json!({"model": MODEL, "input": "abc"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string().into_bytes()
}

fn floats(values: &[f32]) -> Option<Vec<u8>> {
    Some(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn gives(worker: &FakeWorker, request: RequestId, pooled: Option<Vec<u8>>) {
    let output = Output { pooled, ..output(request, Vec::new(), Some(Finish::Length)) };
    worker.send(Frame::Step(step(vec![output])));
}

async fn in_flight(more: &Value) -> (TestRouter, FakeWorker, Connection, RequestId) {
    let args = RouterArgs { queue_timeout_ms: 300, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut connection = router.connect().await;
    connection.request(PATH, &body(more)).await;
    let submit = worker.submitted().await;
    assert_eq!((submit.max_tokens, submit.pooling), (0, Some(Pooling::Last)));
    (router, worker, connection, submit.request)
}

#[tokio::test]
async fn a_vector_comes_back_with_the_length_1() {
    let (_router, worker, mut connection, request) = in_flight(&json!({})).await;
    gives(&worker, request, floats(&[3.0, 0.0, -4.0, 0.0]));
    let reply = connection.reply().await;
    let answer = reply.json();
    assert_eq!(answer["data"][0]["embedding"], json!([0.6, 0.0, -0.8, 0.0]));
    assert_eq!(answer["data"][0]["object"], "embedding");
    let tokens = letters("abc").len();
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    assert_eq!(answer["usage"]["total_tokens"], tokens);
}

#[tokio::test]
async fn a_worker_that_lies_about_a_vector_is_not_believed() {
    let lies = [
        floats(&[1.0, 2.0, 3.0, f32::NAN]),
        floats(&[1.0, f32::NEG_INFINITY, 3.0, 4.0]),
        floats(&[1.0, 2.0, 3.0]),
        floats(&[1.0; 5]),
        Some(vec![0; 15]),
        None,
    ];
    for lie in lies {
        let (_router, mut worker, mut connection, request) = in_flight(&json!({})).await;
        gives(&worker, request, lie.clone());
        assert_eq!(worker.cancelled().await, request);
        let reply = connection.reply().await;
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (503, &json!("worker_failed")),
            "{lie:?}"
        );
    }
}

#[tokio::test]
async fn a_prompt_whose_worker_is_lost_is_computed_by_another() {
    let (router, mut first, mut connection, request) = in_flight(&json!({})).await;
    let mut second = Behaviour::new("w2").ready(&router.app).await;
    gives(&first, request, floats(&[f32::NAN; 4])); // as good as lost
    assert_eq!(first.cancelled().await, request);
    let submit = second.submitted().await;
    assert_eq!((submit.pooling, submit.resume), (Some(Pooling::Last), None));
    let mut third = Behaviour::new("w3").ready(&router.app).await;
    drop(second);
    let submit = third.submitted().await;
    gives(&third, submit.request, floats(&[0.0, 2.0, 0.0, 0.0]));
    let reply = connection.reply().await;
    assert_eq!(reply.json()["data"][0]["embedding"], json!([0.0, 1.0, 0.0, 0.0]));
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_all_its_prompts() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    connection.request(PATH, &body(&json!({"input": ["a", "b"], "pooling": "mean"}))).await;
    let submits = [worker.submitted().await, worker.submitted().await];
    assert!(submits.iter().all(|submit| submit.pooling == Some(Pooling::Mean)));
    drop(connection);
    let mut cancelled = [worker.cancelled().await, worker.cancelled().await];
    cancelled.sort_unstable();
    assert_eq!(cancelled, [submits[0].request, submits[1].request]);
}

#[tokio::test]
async fn one_prompt_that_fails_fails_the_request_and_cancels_the_others() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = router.connect().await;
    connection.request(PATH, &body(&json!({"input": ["a", "b"]}))).await;
    let [first, second] = [worker.submitted().await.request, worker.submitted().await.request];
    let (kind, message) = (FailureKind::BadToken, "out of luck".into());
    worker.send(Frame::Failed(Failed { request: first, kind, message }));
    assert_eq!(worker.cancelled().await, second);
    assert_eq!(connection.reply().await.status, 500);
}

#[tokio::test]
async fn a_model_without_hidden_states_says_so() {
    let mut behaviour = Behaviour::new("w");
    behaviour.hello.pooled_width = 0;
    let (router, _worker) = TestRouter::with(behaviour, args()).await;
    for (path, more) in [
        ("/v1/embeddings", json!({"input": "a"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
        ("/score", json!({"text_1": "a", "text_2": "b"})),
    ] {
        let mut body = json!({ "model": MODEL });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = router.post(path, body.to_string()).await;
        let error = reply.error();
        assert_eq!((reply.status, &error["param"]), (400, &json!("model")), "{path}");
        assert!(error["message"].as_str().unwrap().contains("gives no vectors"), "{error}");
    }
}

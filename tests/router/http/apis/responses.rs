//! `/v1/responses` as OpenAI's clients see it: whole, streamed, stored, continued, cancelled.

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{Finish, Submit};
use serde_json::{Value, json};

use super::super::client::{Connection, Reply, TestRouter, args};
use crate::fake_worker::{Behaviour, EOS, FakeWorker, MODEL, Script, letters, metric};

const PATH: &str = "/v1/responses";
const HEAD: &str = "POST /v1/responses HTTP/1.1\r\nContent-Type: application/json";

fn body(more: &Value) -> String {
    let mut body = json!({"model": MODEL, "input": "hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

async fn made(router: &TestRouter, more: &Value) -> Value {
    let reply = router.post(PATH, body(more)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

fn id(response: &Value) -> &str {
    response["id"].as_str().unwrap()
}

async fn with(router: &TestRouter, method: &str, path: &str, key: &str) -> Reply {
    let head = format!("{method} {path} HTTP/1.1\r\nAuthorization: Bearer {key}");
    let typed = format!("{head}\r\nContent-Type: application/json");
    let sends = method == "POST";
    router.send(if sends { &typed } else { &head }, if sends { b"{}" } else { b"" }).await
}

/// The data of all events, after a check of their names and numbers.
fn events(text: &str) -> Vec<Value> {
    let events = text.split_terminator("\n\n").enumerate().map(|(i, event)| {
        let (name, data) = event.split_once("\ndata: ").unwrap_or_else(|| panic!("{event}"));
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], i);
        data
    });
    events.collect()
}

#[tokio::test]
async fn a_whole_response_is_that_of_openai_and_can_be_asked_for_again() {
    let (router, _worker) = TestRouter::saying("Hello!").await;
    let response =
        made(&router, &json!({"instructions": "Be brief.", "metadata": {"a": "b"}})).await;
    assert!(id(&response).starts_with("resp_"));
    let part = json!({"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []});
    for (field, want) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!(MODEL)),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("instructions", json!("Be brief.")),
        ("metadata", json!({"a": "b"})),
        ("background", json!(false)),
        ("temperature", json!(1.0)),
        ("store", json!(true)),
    ] {
        assert_eq!(response[field], want, "{field}");
        assert!(response.as_object().unwrap().contains_key(field), "{field}");
    }
    let [item] = response["output"].as_array().unwrap().as_slice() else { panic!("{response}") };
    assert_eq!((&item["content"], &item["type"]), (&json!([part]), &json!("message")));
    assert_eq!(response["usage"]["output_tokens"], 7);

    let path = format!("{PATH}/{}", id(&response));
    assert_eq!(router.get(&path).await.json(), response);
    let items = router.get(&format!("{path}/input_items")).await.json();
    let data = items["data"].as_array().unwrap();
    assert_eq!(data[0]["content"], json!([{"type": "input_text", "text": "hi"}]));
    assert_eq!((&items["object"], &items["has_more"]), (&json!("list"), &json!(false)));
    assert_eq!((&items["first_id"], data.len()), (&data[0]["id"], 1));

    let deleted = with(&router, "DELETE", &path, "any").await;
    let want = json!({"id": id(&response), "object": "response", "deleted": true});
    assert_eq!((deleted.status, deleted.json()), (200, want));
    for reply in [router.get(&path).await, with(&router, "DELETE", &path, "any").await] {
        assert_eq!((reply.status, &reply.error()["code"]), (404, &json!("response_not_found")));
    }
}

#[tokio::test]
async fn a_stream_says_what_is_stored() {
    let (router, _worker) = TestRouter::saying("Hi there").await;
    let reply = router.post(PATH, body(&json!({"stream": true}))).await;
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = events(reply.text());
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let begin = ["response.created", "response.in_progress", "response.output_item.added"];
    assert_eq!(kinds[..3], begin);
    let end = ["response.content_part.done", "response.output_item.done", "response.completed"];
    assert_eq!(kinds[kinds.len() - 3..], end);
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let text: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(text, "Hi there");
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], "Hi there");
    let again = router.get(&format!("{PATH}/{}", id(last))).await.json();
    assert_eq!(&again, last);
}

/// What the worker gets of a request, which it then answers so.
async fn turn(
    router: &TestRouter,
    worker: &mut FakeWorker,
    more: &Value,
    says: &str,
) -> (Submit, Value) {
    let mut connection = router.connect().await;
    connection.request(HEAD, body(more).as_bytes()).await;
    let submit = worker.submitted().await;
    let ids = [letters(says), vec![EOS]].concat();
    worker.gives(submit.request, &ids, Some(Finish::Stop));
    let reply = connection.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    (submit, reply.json())
}

#[tokio::test]
async fn a_response_that_continues_others_sees_them_but_for_their_instructions() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let worker = &mut worker;
    let (_, first) = turn(&router, worker, &json!({"input": "a", "instructions": "x"}), "b").await;
    let more = json!({"input": "c", "previous_response_id": id(&first)});
    let (_, second) = turn(&router, worker, &more, "d").await;
    assert_eq!(second["previous_response_id"], id(&first));
    let more = json!({"input": "e", "previous_response_id": id(&second), "seed": 1});
    let (chained, third) = turn(&router, worker, &more, "f").await;
    let item = second["output"][0]["id"].clone();
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let whole = json!({"seed": 1, "input": [
        message("user", "a"), message("assistant", "b"), message("user", "c"),
        {"type": "item_reference", "id": item}, message("user", "e")]});
    let (sent, _) = turn(&router, worker, &whole, "f").await;
    assert_eq!(chained.tokens, sent.tokens);

    let gone = format!("{PATH}/{}", id(&first));
    assert_eq!(with(&router, "DELETE", &gone, "any").await.status, 200);
    let more = json!({"previous_response_id": id(&third)});
    let reply = router.post(PATH, body(&more)).await;
    let error = reply.error();
    assert_eq!((reply.status, &error["code"]), (400, &json!("previous_response_not_found")));
    assert_eq!(error["param"], "previous_response_id");
    assert!(error["message"].as_str().unwrap().contains(id(&first)), "{error}");
}

#[tokio::test]
async fn a_response_is_its_tenants_alone() {
    let args = RouterArgs { api_key: vec!["alice a".into(), "bob b".into()], ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), args).await;
    let head = |key: &str| format!("{HEAD}\r\nAuthorization: Bearer {key}");
    let response = router.send(&head("a"), body(&json!({})).as_bytes()).await.json();
    let path = format!("{PATH}/{}", id(&response));
    for (method, path) in [
        ("GET", path.clone()),
        ("GET", format!("{path}/input_items")),
        ("POST", format!("{path}/cancel")),
        ("DELETE", path.clone()),
    ] {
        assert_eq!(with(&router, method, &path, "b").await.status, 404, "{method} {path}");
    }
    let continues = body(&json!({"previous_response_id": id(&response)}));
    assert_eq!(router.send(&head("b"), continues.as_bytes()).await.status, 400);
    let item = json!({"type": "item_reference", "id": response["output"][0]["id"]});
    let refers = body(&json!({"input": [item]}));
    assert_eq!(router.send(&head("b"), refers.as_bytes()).await.status, 400);
    assert_eq!(with(&router, "GET", &path, "a").await.status, 200);
    assert_eq!(router.get(&path).await.status, 401);
}

#[tokio::test]
async fn what_is_not_to_be_stored_is_not() {
    let (router, _worker) = TestRouter::saying("x").await;
    let response = made(&router, &json!({"store": false})).await;
    assert_eq!(response["store"], false);
    assert_eq!(router.get(&format!("{PATH}/{}", id(&response))).await.status, 404);
    assert!(metric(&router.app, "headrace_responses_stored", "") < 0.5);

    let args = RouterArgs { response_store_bytes: 0, ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), args).await;
    assert_eq!(made(&router, &json!({})).await["store"], false);
    let reply = router.post(PATH, body(&json!({"store": true}))).await;
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("store")));
}

#[tokio::test]
async fn a_tenant_has_a_number_of_responses_and_the_oldest_goes() {
    let args = RouterArgs { tenant_responses: 2, ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "x"), args).await;
    let mut paths = Vec::new();
    for _ in 0..3 {
        paths.push(format!("{PATH}/{}", id(&made(&router, &json!({})).await)));
    }
    let mut statuses = Vec::new();
    for path in &paths {
        statuses.push(router.get(path).await.status);
    }
    assert_eq!(statuses, [404, 200, 200]);
    let evicted = metric(&router.app, "headrace_responses_evicted_total", "");
    assert!((evicted - 1.0).abs() < 0.1, "{evicted}");
    assert!(metric(&router.app, "headrace_responses_stored_bytes", "") > 1_000.0);
}

async fn streaming(worker: Behaviour) -> (TestRouter, FakeWorker, Connection, Submit, Value) {
    let (router, mut worker) = TestRouter::with(worker, args()).await;
    let mut connection = router.connect().await;
    connection.request(HEAD, body(&json!({"stream": true})).as_bytes()).await;
    let submit = worker.submitted().await;
    worker.gives(submit.request, &letters("a"), None);
    assert_eq!(connection.head().await.status, 200);
    let first = events(&connection.piece().await).remove(0)["response"].clone();
    (router, worker, connection, submit, first)
}

#[tokio::test]
async fn a_response_that_runs_can_be_seen_and_cancelled() {
    let (router, mut worker, mut connection, submit, first) = streaming(Behaviour::new("w")).await;
    let path = format!("{PATH}/{}", id(&first));
    let seen = router.get(&path).await.json();
    assert_eq!((&seen["status"], &seen["id"]), (&json!("in_progress"), &first["id"]));
    let cancelled = with(&router, "POST", &format!("{path}/cancel"), "any").await;
    assert_eq!(cancelled.status, 200, "{}", cancelled.text());
    let response = cancelled.json();
    assert_eq!(response["status"], "cancelled");
    assert_eq!(response["output"][0]["content"][0]["text"], "a");
    assert_eq!(worker.cancelled().await, submit.request);
    let mut rest = String::new();
    while let Some(chunk) = connection.chunk().await {
        rest.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    let last = rest.split_terminator("\n\n").last().unwrap();
    assert!(last.starts_with("event: response.incomplete"), "{last}");
    assert_eq!(router.get(&path).await.json(), response);
    let again = with(&router, "POST", &format!("{path}/cancel"), "any").await;
    assert_eq!(again.status, 400);
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_and_nothing_is_stored() {
    let (router, mut worker, connection, submit, first) = streaming(Behaviour::new("w")).await;
    drop(connection);
    assert_eq!(worker.cancelled().await, submit.request);
    assert_eq!(router.get(&format!("{PATH}/{}", id(&first))).await.status, 404);
}

#[tokio::test]
async fn input_items_come_page_by_page() {
    let (router, _worker) = TestRouter::saying("x").await;
    let input: Vec<Value> = (0..5)
        .map(|i| json!({"role": "user", "content": format!("{i}"), "id": format!("msg_{i}")}))
        .collect();
    let response = made(&router, &json!({ "input": input })).await;
    let path = format!("{PATH}/{}/input_items", id(&response));
    for (query, want, has_more) in [
        ("", vec!["4", "3", "2", "1", "0"], false),
        ("?order=asc&limit=2", vec!["0", "1"], true),
        ("?order=asc&limit=2&after=msg_3", vec!["4"], false),
        ("?limit=2&after=msg_3", vec!["2", "1"], true),
    ] {
        let page = router.get(&format!("{path}{query}")).await.json();
        let texts: Vec<_> = page["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["content"][0]["text"].as_str().unwrap())
            .collect();
        assert_eq!((texts, &page["has_more"]), (want, &json!(has_more)), "{query}");
    }
    for wrong in ["?limit=0", "?limit=101", "?order=up", "?wish=1"] {
        assert_eq!(router.get(&format!("{path}{wrong}")).await.status, 400, "{wrong}");
    }
}

#[tokio::test]
async fn a_response_that_was_cut_is_incomplete() {
    let script = Script { steps: vec![letters("abc")], finish: Finish::Length };
    let worker = Behaviour::new("w").answers(move |_| Some(script.clone()));
    let (router, _worker) = TestRouter::with(worker, args()).await;
    let response = made(&router, &json!({"max_output_tokens": 3})).await;
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(response["max_output_tokens"], 3);
}

#[tokio::test]
async fn mistakes_are_refused_by_name() {
    let (router, _worker) = TestRouter::saying("x").await;
    for (more, status, param) in [
        (json!({"background": true}), 400, json!("background")),
        (json!({"tools": [{"type": "web_search"}]}), 400, json!("tools[0].type")),
        (json!({"temperature": 3}), 400, json!("temperature")),
        (json!({"model": "other"}), 404, json!("model")),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}),
            400,
            json!("text.format.schema"),
        ),
        (json!({"previous_response_id": "resp_x"}), 400, json!("previous_response_id")),
    ] {
        let reply = router.post(PATH, body(&more)).await;
        assert_eq!((reply.status, &reply.error()["param"]), (status, &param), "{more}");
    }
}

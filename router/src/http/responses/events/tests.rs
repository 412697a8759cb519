//! Whole streams, event by event.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::core::frame::Ranked;
use crate::http::reply::logprobs::TestPieces;
use crate::http::responses::ids::ResponseIds;
use crate::limits::memory::MemoryPool;
use crate::output::Part;
use crate::request::{FinishReason, ScoredToken};

fn writer() -> ResponseEvents {
    let keeper = Keeper {
        ids: ResponseIds::new(),
        head: Bytes::from_static(b"{\"id\":\"resp_1\",\"output\":"),
        input: Bytes::new(),
        previous: None,
        extras: ItemExtras { seals: true, vocabulary: None },
        store: None,
    };
    let kept = KeptBlocks::new(MemoryPool::private(1 << 20).share());
    ResponseEvents::new(keeper, kept, PartReader::plain(), None)
}

fn delta(text: &str, finish: Option<FinishReason>) -> Delta {
    Delta { text: text.into(), finish, ..Delta::default() }
}

/// The data of all events, after a check of their names and numbers.
fn events(out: &BytesMut) -> Vec<Value> {
    let text = std::str::from_utf8(out).unwrap();
    let events = text.split_terminator("\n\n").enumerate().map(|(i, event)| {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"));
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], i, "{text}");
        data
    });
    events.collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

#[test]
fn a_stream_of_text_has_all_events_of_openai_in_their_order() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    writer.delta(&delta("Hi", None), Usage::default(), &mut out).unwrap();
    writer.delta(&delta("!", Some(FinishReason::Stop)), Usage::default(), &mut out).unwrap();
    writer.end(
        Usage { prompt_tokens: 3, completion_tokens: 2, ..Usage::default() },
        None,
        &mut out,
    );
    let events = events(&out);
    let want = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(kinds(&events), want);
    let id = writer.items.keeper.ids.item("msg", 0);
    for event in &events[2..9] {
        assert_eq!((&event["item_id"], &event["output_index"]), (&json!(id), &json!(0)));
    }
    assert_eq!((&events[4]["delta"], &events[4]["content_index"]), (&json!("Hi"), &json!(0)));
    assert_eq!(events[4]["logprobs"], json!([]));
    assert_eq!(events[6]["text"], "Hi!");
    let part = json!({"type": "output_text", "text": "Hi!", "annotations": [], "logprobs": []});
    let item = json!({"id": id, "type": "message", "role": "assistant", "content": [part],
        "status": "completed"});
    assert_eq!((&events[7]["part"], &events[8]["item"]), (&part, &item));
    let last = &events[9]["response"];
    assert_eq!((&last["output"], &last["status"]), (&json!([item]), &json!("completed")));
    assert_eq!(last["usage"]["total_tokens"], 5);
    let first = &events[0]["response"];
    assert_eq!((&first["output"], &first["status"]), (&json!([]), &json!("in_progress")));
}

#[test]
fn reasoning_and_calls_are_items_of_their_own() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    let call = Part::CallBegins { index: 0, id: "call_1".into(), name: "f".into() };
    let arguments = Part::CallArguments { index: 0, text: "{}".into() };
    for part in [Part::Reasoning("hm".into()), call, arguments] {
        let items = &mut writer.items;
        let mut step = |step| items.step(step, ResponseStatus::Completed, &mut out);
        writer.order.take(part, &mut step).unwrap();
    }
    writer.delta(&delta("", Some(FinishReason::Stop)), Usage::default(), &mut out).unwrap();
    let text = String::from_utf8(out.to_vec()).unwrap();
    let at = text.find("event: response.created").unwrap();
    let end = text.find("event: response.function_call_arguments.done").unwrap();
    let out = [&text[..at], &text[end..]].concat();
    let events: Vec<Value> = out
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.split_once("\ndata: ").unwrap().1).unwrap())
        .collect();
    let want = [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ];
    assert_eq!(kinds(&events), want);
    let ids = &writer.items.keeper.ids;
    let thought = json!({"id": ids.item("rs", 0), "type": "reasoning", "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": "headrace:hm", "status": "completed"});
    let called = json!({"id": ids.item("fc", 1), "type": "function_call", "call_id": "call_1",
        "name": "f", "arguments": "{}", "status": "completed"});
    assert_eq!((&events[5]["item"], &events[9]["item"]), (&thought, &called));
    assert_eq!((&events[7]["delta"], &events[8]["arguments"]), (&json!("{}"), &json!("{}")));
    assert_eq!((&events[5]["output_index"], &events[9]["output_index"]), (&json!(0), &json!(1)));
}

#[test]
fn an_answer_that_was_cut_is_incomplete() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    writer.delta(&delta("Hi", Some(FinishReason::Length)), Usage::default(), &mut out).unwrap();
    writer.end(Usage::default(), None, &mut out);
    let events = events(&out);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    let response = &last["response"];
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(response["status"], "incomplete");
}

#[test]
fn a_stream_that_breaks_off_says_why_and_what_there_is() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    writer.delta(&delta("Hi", None), Usage::default(), &mut out).unwrap();
    let retry_after = Duration::from_secs(1);
    writer.failed(RouteError::NoWorker { retry_after }, &mut out);
    let events = events(&out);
    let [.., error, failed] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!("no_worker")));
    assert!(error["message"].as_str().unwrap().contains("worker"));
    let response = &failed["response"];
    assert_eq!(
        (&failed["type"], &response["status"]),
        (&json!("response.failed"), &json!("failed"))
    );
    assert_eq!(response["output"][0]["content"][0]["text"], "Hi");
    assert_eq!(response["error"]["code"], "server_error");
}

#[test]
fn a_response_that_was_cancelled_keeps_what_there_is() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    writer.delta(&delta("Hi", None), Usage::default(), &mut out).unwrap();
    writer.cancel(Usage::default(), &mut out);
    let events = events(&out);
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["status"]),
        (&json!("response.incomplete"), &json!("cancelled"))
    );
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
}

#[test]
fn an_answer_without_memory_for_its_end_fails() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    writer.items.kept = KeptBlocks::new(MemoryPool::private(3_000).share());
    let long = "x".repeat(1_000);
    writer.delta(&delta(&long, None), Usage::default(), &mut out).unwrap();
    let end = writer.delta(&delta("", Some(FinishReason::Stop)), Usage::default(), &mut out);
    assert!(matches!(end, Err(RouteError::AnswerTooLarge { .. })), "{end:?}");
}

#[test]
fn tokens_of_text_are_told_with_their_probabilities() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    writer.items.keeper.extras.vocabulary = Some(Arc::new(TestPieces(&[b"Hi", b"!", b"?"])));
    let scored = |id: u32, logprob: f64, top: Vec<Ranked>| {
        vec![ScoredToken { id, logprob: Some(logprob), top }]
    };
    let with = |delta: Delta, tokens| Delta { tokens, ..delta };
    let usage = Usage::default();
    let first = with(delta("Hi", None), scored(0, -0.5, vec![Ranked(2, -1.5)]));
    writer.delta(&first, usage, &mut out).unwrap();
    let last = with(delta("!", Some(FinishReason::Stop)), scored(1, -0.25, vec![]));
    writer.delta(&last, usage, &mut out).unwrap();
    writer.end(usage, None, &mut out);
    let events = events(&out);
    let of = |kind: &str| -> Vec<&Value> { events.iter().filter(|e| e["type"] == kind).collect() };
    let other = json!({"token": "?", "logprob": -1.5, "bytes": [63]});
    let hi = json!({"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [other]});
    let mark = json!({"token": "!", "logprob": -0.25, "bytes": [33], "top_logprobs": []});
    let deltas = of("response.output_text.delta");
    assert_eq!(deltas[0]["logprobs"], json!([hi]));
    assert_eq!(deltas[1]["logprobs"], json!([mark]));
    let all = json!([hi, mark]);
    assert_eq!(of("response.output_text.done")[0]["logprobs"], all);
    assert_eq!(of("response.content_part.added")[0]["part"]["logprobs"], json!([]));
    assert_eq!(of("response.content_part.done")[0]["part"]["logprobs"], all);
    let item = &of("response.completed")[0]["response"]["output"][0];
    assert_eq!(item["content"][0]["logprobs"], all);
    assert_eq!(of("response.output_item.done")[0]["item"], *item);
}

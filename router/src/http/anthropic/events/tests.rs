//! Whole streams, event by event.

use std::time::Duration;

use serde_json::Value;

use super::*;
use crate::http::reply::parts::AnswerEnd;
use crate::output::Part;
use crate::request::FinishReason;

fn writer() -> MessageEvents {
    let head = MessageHead { id: "msg_1".into(), model: "m".into() };
    MessageEvents::new(head, "req-1".into(), PartReader::plain())
}

/// Name and data of each event.
fn events(out: &BytesMut) -> Vec<Value> {
    let text = std::str::from_utf8(out).unwrap();
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    });
    events.collect()
}

fn delta(text: &str, finish: Option<FinishReason>) -> Delta {
    Delta { text: text.into(), finish, ..Delta::default() }
}

const USAGE: Usage = Usage {
    prompt_tokens: 10,
    completion_tokens: 3,
    cached_tokens: 4,
    accepted_drafts: 0,
    rejected_drafts: 0,
    reasoning_tokens: 0,
};

#[test]
fn a_stream_is_start_ping_block_end() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    writer.delta(&delta("Hi", None), USAGE, &mut out).unwrap();
    writer.delta(&delta("!", Some(FinishReason::Stop)), USAGE, &mut out).unwrap();
    writer.end(USAGE, None, &mut out);
    let usage = json!({"input_tokens": 6, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4, "output_tokens": 3, "service_tier": "standard"});
    let text = |text: &str| {
        json!({"type": "content_block_delta", "index": 0,
            "delta": {"type": "text_delta", "text": text}})
    };
    let want = [
        json!({"type": "message_start", "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage}}),
        json!({"type": "ping"}),
        json!({"type": "content_block_start", "index": 0,
            "content_block": {"type": "text", "text": ""}}),
        text("Hi"),
        text("!"),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "message_delta", "usage": usage,
            "delta": {"stop_reason": "end_turn", "stop_sequence": null}}),
        json!({"type": "message_stop"}),
    ];
    assert_eq!(events(&out), want);
}

#[test]
fn thoughts_and_calls_are_blocks_of_their_own() {
    let (mut order, mut blocks, mut out) =
        (BlockOrder::default(), BlockEvents::default(), BytesMut::new());
    let arguments = |text: &str| Part::CallArguments { index: 0, text: text.into() };
    for part in [
        Part::Reasoning("h".into()),
        Part::Reasoning("m".into()),
        Part::CallBegins { index: 0, id: "call_1".into(), name: "f".into() },
        arguments("{"),
        arguments("}"),
    ] {
        let mut step = |step| {
            blocks.step(step, &mut out);
            Ok::<_, RouteError>(())
        };
        order.take(part, &mut step).unwrap();
    }
    order
        .finish(&mut |step| {
            blocks.step(step, &mut out);
            Ok::<_, RouteError>(())
        })
        .unwrap();
    let mut signature = Signature::default();
    signature.update("hm");
    let delta = |index, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    let json_delta = |text: &str| json!({"type": "input_json_delta", "partial_json": text});
    let want = [
        json!({"type": "content_block_start", "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
        delta(0, json!({"type": "thinking_delta", "thinking": "h"})),
        delta(0, json!({"type": "thinking_delta", "thinking": "m"})),
        delta(0, json!({"type": "signature_delta", "signature": signature.sign()})),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "content_block_start", "index": 1,
            "content_block": {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}}),
        delta(1, json_delta("{")),
        delta(1, json_delta("}")),
        json!({"type": "content_block_stop", "index": 1}),
    ];
    assert_eq!(events(&out), want);
}

#[test]
fn why_it_ended_is_said_in_their_words() {
    let stopped = |finish, stop_string: Option<&str>, called| {
        let mut end = MessageEnd::default();
        let stop_string = stop_string.map(Into::into);
        let last = Delta { finish: Some(finish), stop_string, ..Delta::default() };
        end.note(&last, AnswerEnd { finish, called });
        let delta = end.delta(USAGE);
        let reason = delta["delta"]["stop_reason"].as_str().unwrap().to_owned();
        (reason, delta["delta"]["stop_sequence"].clone())
    };
    let (stop, length) = (FinishReason::Stop, FinishReason::Length);
    assert_eq!(stopped(stop, None, false), ("end_turn".into(), Value::Null));
    assert_eq!(stopped(stop, Some("END"), false), ("stop_sequence".into(), json!("END")));
    assert_eq!(stopped(stop, None, true), ("tool_use".into(), Value::Null));
    assert_eq!(stopped(length, None, true), ("max_tokens".into(), Value::Null));
}

#[test]
fn a_stream_that_breaks_off_ends_with_their_error() {
    let (mut writer, mut out) = (writer(), BytesMut::new());
    let retry_after = Duration::from_secs(1);
    writer.failed(RouteError::NoWorker { retry_after }, &mut out);
    let got = events(&out);
    assert_eq!(got.len(), 1);
    assert_eq!((&got[0]["type"], &got[0]["request_id"]), (&json!("error"), &json!("req-1")));
    assert_eq!(got[0]["error"]["type"], "overloaded_error");
}

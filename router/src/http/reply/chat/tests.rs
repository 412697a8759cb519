//! The shape of a chat answer, streamed and whole.

use super::*;
use crate::http::reply::FINGERPRINT;
use crate::request::FinishReason;

fn events(deltas: &[Delta], delivery: Delivery) -> String {
    let head = AnswerHead { id: "chatcmpl-1".into(), created: 7, model: "m\"x".into() };
    let mut reply = ChatReply::new(head, 2, None);
    let envelope = reply.envelope(delivery);
    let mut out = BytesMut::new();
    let usage = Usage {
        prompt_tokens: 3,
        completion_tokens: 1,
        cached_tokens: 2,
        accepted_drafts: 1,
        rejected_drafts: 4,
        ..Usage::default()
    };
    for delta in deltas {
        reply.delta(delta, usage, &envelope, &mut out).unwrap();
    }
    String::from_utf8(out.to_vec()).unwrap().replace(FINGERPRINT, "FP")
}

fn delta(choice: u32, text: &str, finish: Option<FinishReason>) -> Delta {
    Delta { choice, text: text.into(), finish, ..Delta::default() }
}

const PREFIX: &str = r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m\"x","service_tier":"default","system_fingerprint":"FP","choices":["#;

#[test]
fn a_choice_is_its_role_its_text_and_its_end() {
    let end = delta(0, "b\n", Some(FinishReason::Length));
    let got = events(&[delta(0, "a", None), delta(0, "", None), end], Delivery::default());
    let want = [
        r#"{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}"#,
        r#"{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}"#,
        r#"{"index":0,"delta":{"content":"b\n"},"logprobs":null,"finish_reason":null}"#,
        r#"{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}"#,
    ];
    let want = want.map(|choice| format!("{PREFIX}{choice}]}}\n\n"));
    assert_eq!(got, want.concat());
}

#[test]
fn every_choice_begins_with_its_role() {
    let got = events(&[delta(1, "a", None), delta(0, "b", None)], Delivery::default());
    assert_eq!(got.matches("\"role\":\"assistant\"").count(), 2);
    assert!(got.find("\"index\":1").unwrap() < got.find("\"index\":0").unwrap());
}

#[test]
fn usage_is_null_until_the_end_or_runs_along() {
    let with_usage =
        Delivery { stream: true, include_usage: true, running_usage: false, ..Delivery::default() };
    assert_eq!(events(&[delta(0, "a", None)], with_usage).matches("],\"usage\":null}").count(), 2);
    let running = Delivery { running_usage: true, ..with_usage };
    let want = r#"],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"accepted_prediction_tokens":1,"rejected_prediction_tokens":4,"reasoning_tokens":0}}}"#;
    assert_eq!(events(&[delta(0, "a", None)], running).matches(want).count(), 2);
}

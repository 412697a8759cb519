//! The golden frames, which Python reads and writes too (tests/wire/test_frames.py).

use std::path::PathBuf;

use headrace_router::core::frame::Frame;
use headrace_router::fleet::codec::{CodecError, decode, encode};
use serde_json::{Value, json};

fn golden(path: &str) -> Vec<Value> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

/// File and variant of each frame that workers send.
const FROM_WORKER: [(&str, &str); 15] = [
    ("hello", "Hello"),
    ("prove", "Prove"),
    ("snapshot", "Snapshot"),
    ("blocks", "Blocks"),
    ("step", "Step"),
    ("model", "Model"),
    ("kv_ready", "KvReady"),
    ("freed", "Freed"),
    ("failed", "Failed"),
    ("bye", "Bye"),
    ("transferred", "Transferred"),
    ("offer", "Offer"),
    ("group_totals", "GroupTotals"),
    ("grammar_totals", "GrammarTotals"),
    ("other_prompts", "OtherPrompts"),
];

/// The same for routers.
const FROM_ROUTER: [(&str, &str); 12] = [
    ("welcome", "Welcome"),
    ("other_version", "OtherVersion"),
    ("submit", "Submit"),
    ("describe", "Describe"),
    ("cancel", "Cancel"),
    ("drain", "Drain"),
    ("ping", "Ping"),
    ("resync", "Resync"),
    ("ticket", "Ticket"),
    ("continue", "Continue"),
    ("fetch", "Fetch"),
    ("refuse", "Refuse"),
];

#[test]
fn golden_frames_are_read_and_written_byte_for_byte() {
    let from_worker = FROM_WORKER.map(|frame| ("from_worker", frame));
    let from_router = FROM_ROUTER.map(|frame| ("from_router", frame));
    for (folder, (name, variant)) in from_worker.into_iter().chain(from_router) {
        let cases = golden(&format!("frames/{folder}/{name}.json"));
        assert!(!cases.is_empty());
        for case in cases {
            let what = format!("{name}: {}", case["name"]);
            let body = bytes(&case["hex"]);
            let frame: Frame =
                serde_json::from_value(json!({variant: case["fields"]})).expect(&what);
            assert_eq!(frame.name(), name);
            let mut out = Vec::new();
            encode(&frame, &mut out).unwrap();
            assert_eq!(out, body, "{what}");
            assert_eq!(decode(&body), Ok(frame), "{what}");
        }
    }
}

#[test]
fn invalid_frames_are_refused_for_their_reason() {
    let cases = golden("invalid.json");
    assert!(cases.len() > 30);
    for case in cases {
        let error = decode(&bytes(&case["hex"])).expect_err(&case["name"].to_string());
        let (kind, at) = match &error {
            CodecError::TooLong { .. } => ("too long", ""),
            CodecError::Truncated { .. } => ("truncated", ""),
            CodecError::UnknownType { .. } => ("unknown", ""),
            CodecError::OtherVersion { .. } => ("version", ""),
            CodecError::Malformed { at, .. } => ("malformed", at.as_str()),
            CodecError::TrailingBytes { .. } => ("trailing", ""),
        };
        assert_eq!(kind, case["error"], "{}: {error}", case["name"]);
        let expected = case["at"].as_str().unwrap(); // empty where Python cannot say it
        assert!(expected.is_empty() || at == expected, "{}: {error}", case["name"]);
    }
}

//! What the words of an explanation mean, said beside the figures.

use serde_json::{Map, Value};

const PREDICTED: [(&str, &str); 10] = [
    ("cached_tokens", "tokens of the prompt that the worker is believed to have in its cache"),
    ("queue_ms", "time before the worker begins with this prompt"),
    ("prefill_ms", "time to compute what is not cached of the prompt"),
    (
        "transfer_ms",
        "in a split, time from the first token until the prompt's KV is on the worker that decodes",
    ),
    ("decode_ms", "time for all tokens after the first"),
    (
        "interference_ms",
        "delay that this request adds to the requests already running there and to those still to come",
    ),
    (
        "saturation_ms",
        "delay that the KV blocks which this request keeps add to the requests still to come",
    ),
    ("total_ms", "the sum of these; the policy `kv` takes the smallest"),
    (
        "left_out",
        "how many candidates are not shown, how many of these could not be chosen, and the least total_ms of the rest; \
         with X-Headrace-Explain, --decision-log or --shadow all are shown",
    ),
    ("regret_ms", "what following the shadow policy would have added to total_ms, as predicted"),
];

const ACTUAL: [(&str, &str); 9] = [
    ("outcome", "running, finished, failed (another worker may have gone on) or cancelled"),
    ("finish_reason", "of a finished answer, stop or length"),
    ("error", "why a placement failed"),
    ("waited_ms", "time in the router's queue before this placement, which no prediction contains"),
    ("first_token_ms", "placement to first token; predicted as queue_ms + prefill_ms"),
    ("decode_ms", "first to last token so far; predicted as transfer_ms + decode_ms"),
    ("total_ms", "placement to the end of the answer"),
    ("cached_tokens", "tokens of the prompt that the worker found in its cache"),
    ("output_tokens", "tokens that came from this placement"),
];

/// Each word with its meaning: those of predictions, and those of `actual`.
pub(super) fn all() -> Value {
    let meanings = |words: &[(&str, &str)]| -> Value {
        let pairs = words.iter().map(|(word, meaning)| ((*word).to_owned(), (*meaning).into()));
        pairs.collect::<Map<_, _>>().into()
    };
    serde_json::json!({ "predicted": meanings(&PREDICTED), "actual": meanings(&ACTUAL) })
}

//! Lines as they are written: which, how many, and what strangers cannot do to them.

use super::*;
use crate::log::kept::KeptLog;

fn config(requests_per_s: u32, prompts: bool) -> LogConfig {
    LogConfig { filter: "info".into(), json: false, requests_per_s, prompts }
}

/// What a log of this form writes while `work` is done.
fn written(json: bool, work: impl FnOnce()) -> String {
    let kept = KeptLog::default();
    let format = tracing_subscriber::fmt().with_writer(kept.clone()).with_ansi(false);
    if json {
        tracing::subscriber::with_default(format.json().finish(), work);
    } else {
        tracing::subscriber::with_default(format.finish(), work);
    }
    kept.text()
}

fn answered() -> RequestEnd<'static> {
    RequestEnd {
        id: "req-1",
        model: Some("m"),
        status: 200,
        prompt_tokens: Some(20),
        cached_tokens: Some(16),
        output_tokens: Some(5),
        queue_ms: Some(0.04),
        ttft_ms: Some(12.34),
        tpot_ms: Some(3.0),
        worker: Some("w-0"),
        leg: Some(8),
        prompt: Some("a secret of a client"),
        ..RequestEnd::default()
    }
}

#[test]
fn a_line_says_what_happened_and_leaves_out_what_did_not() {
    let text = written(false, || RequestLog::new(&config(10, false)).ended(&answered()));
    for part in [
        " INFO headrace_router::log::requests: request finished ",
        " request=\"req-1\" ",
        " model=\"m\" ",
        " status=200 ",
        " prompt_tokens=20 cached_tokens=16 output_tokens=5 ",
        " queue_ms=0.0 ttft_ms=12.3 tpot_ms=3.0 ",
        " worker=\"w-0\" leg=8",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    for part in ["error", "why", "prefill_worker", "total_ms", "secret", "None"] {
        assert!(!text.contains(part), "{part} in {text}");
    }
}

#[test]
fn as_json_it_has_the_same_fields_and_their_types() {
    let text = written(true, || RequestLog::new(&config(10, false)).ended(&answered()));
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    let fields = &line["fields"];
    assert_eq!(
        (&fields["message"], &fields["request"]),
        (&"request finished".into(), &"req-1".into())
    );
    assert_eq!((&fields["ttft_ms"], &fields["leg"]), (&12.3.into(), &8.into()));
    assert_eq!(line["level"], "INFO");
    assert!(line["timestamp"].is_string() && fields.get("prompt").is_none());
}

#[test]
fn a_prompt_is_told_where_it_was_asked_for_and_not_all_of_a_long_one() {
    let long = "q".repeat(5) + &"p".repeat(PROMPT);
    let end = RequestEnd { prompt: Some(&long), ..answered() };
    let text = written(false, || RequestLog::new(&config(10, true)).ended(&end));
    assert!(text.contains(&format!(" prompt=\"...{}\"", "p".repeat(PROMPT))), "{text}");
}

#[test]
fn strangers_make_neither_lines_nor_colours_nor_long_ones() {
    let evil =
        "x\n2026-01-01T00:00:00Z  INFO fake\u{1b}[2J\u{202e}\"".to_owned() + &"y".repeat(5_000);
    let end = RequestEnd {
        model: Some(&evil),
        error: Some("unknown_model"),
        why: Some(&evil),
        ..answered()
    };
    let text = written(false, || RequestLog::new(&config(10, false)).ended(&end));
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("request failed") && text.len() < 1_200, "{text}");
    let raw = |c: char| c == '\u{1b}' || c == '\u{202e}';
    assert!(!text.contains(raw) && text.contains("\\n2026"), "{text}");
}

#[test]
fn what_a_second_has_no_room_for_is_counted_and_failures_have_room_of_their_own() {
    let log = RequestLog::new(&config(2, false));
    let failed = RequestEnd { status: 503, error: Some("no_worker"), ..RequestEnd::default() };
    let text = written(false, || {
        // the clock may pass a second meanwhile: then there is room once more
        (0..100).for_each(|_| log.ended(&failed));
        (0..100).for_each(|_| log.ended(&answered()));
    });
    let counts = log.counts();
    assert_eq!((counts.finished, counts.failed), (100, 100));
    let lines = text.lines().count() as u64;
    assert_eq!(lines + counts.left_out, 200);
    assert!((4..=60).contains(&lines), "{lines}");
    let finished = text.lines().filter(|line| line.contains("request finished")).count();
    assert!(finished >= 2, "{text}");
}

#[test]
fn without_lines_it_still_counts() {
    let log = RequestLog::new(&config(0, false));
    assert_eq!(written(false, || log.ended(&answered())), "");
    assert_eq!(log.counts(), RequestCounts { finished: 1, failed: 0, left_out: 1 });
}

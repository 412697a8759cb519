//! Events, and what of an answer they carry.

use super::split::fits;
use super::*;
use crate::request::{FinishReason, ScoredToken};

#[test]
fn many_tokens_are_several_deltas_that_say_the_same() {
    let tokens = |ids: std::ops::Range<u32>| -> Vec<_> {
        ids.map(|id| ScoredToken { id, logprob: None, top: Vec::new() }).collect()
    };
    let delta = Delta {
        choice: 3,
        text: "text".into(),
        token_ends: Vec::new(),
        tokens: tokens(600..1000),
        prompt_tokens: Some(tokens(0..600)),
        ids: Some((600..1000).collect()),
        finish: Some(FinishReason::Stop),
        stop_string: Some("end".into()),
        ..Delta::default()
    };
    let deltas = split(delta.clone());
    assert!(deltas.len() == 5 && deltas.iter().all(|delta| delta.choice == 3 && fits(delta)));
    let texts: String = deltas.iter().map(|delta| delta.text.as_str()).collect();
    assert_eq!((texts.as_str(), deltas[0].text.as_str()), ("text", "text"));
    let ends: Vec<_> = deltas.iter().map(|delta| delta.finish).collect();
    assert_eq!(ends, [None, None, None, None, Some(FinishReason::Stop)]);
    let stops: Vec<_> = deltas.iter().map(|delta| delta.stop_string.as_deref()).collect();
    assert_eq!(stops, [None, None, None, None, Some("end")]);
    let all = deltas.iter().flat_map(|delta| {
        delta.prompt_tokens.iter().flatten().chain(&delta.tokens).map(|token| token.id)
    });
    assert!(all.eq(0..1000));
    let small = Delta { tokens: tokens(0..2), prompt_tokens: None, ..delta };
    assert_eq!(split(small.clone()), [small]);
}

//! Deltas whose events are of bounded size.

use std::collections::VecDeque;

use crate::request::Delta;

/// Tokens with log-probabilities in one event: twenty alternatives each make half a megabyte of that.
const EVENT_TOKENS: usize = 256;

pub(super) fn fits(delta: &Delta) -> bool {
    delta.tokens.len() + delta.prompt_tokens.as_ref().map_or(0, Vec::len) <= EVENT_TOKENS
}

/// A delta as one or several whose events are of bounded size: where log-probabilities of a prompt are sent, or a slow
/// client lets them pile up.
pub(super) fn split(mut delta: Delta) -> VecDeque<Delta> {
    let mut deltas = VecDeque::new();
    if fits(&delta) {
        deltas.push_back(delta);
        return deltas;
    }
    // the text comes with the first one, the end with the last one
    let (choice, finish) = (delta.choice, delta.finish.take());
    let stop_string = delta.stop_string.take();
    let mut text = Some((std::mem::take(&mut delta.text), std::mem::take(&mut delta.token_ends)));
    let (mut ids, mut prompt_ids) = (delta.ids.take(), delta.prompt_ids.take());
    let mut next = |tokens, prompt_tokens| {
        let (text, token_ends) = text.take().unwrap_or_default();
        let (ids, prompt_ids) = (ids.take(), prompt_ids.take());
        Delta {
            choice,
            text,
            token_ends,
            tokens,
            prompt_tokens,
            ids,
            prompt_ids,
            ..Delta::default()
        }
    };
    let mut prompt = delta.prompt_tokens.unwrap_or_default().into_iter();
    while prompt.len() > 0 {
        let part = prompt.by_ref().take(EVENT_TOKENS).collect();
        deltas.push_back(next(Vec::new(), Some(part)));
    }
    let mut tokens = delta.tokens.into_iter();
    while tokens.len() > 0 {
        let part = tokens.by_ref().take(EVENT_TOKENS).collect();
        deltas.push_back(next(part, None));
    }
    if let Some(last) = deltas.back_mut() {
        last.finish = finish;
        last.stop_string = stop_string;
    }
    deltas
}

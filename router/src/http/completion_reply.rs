//! The answer of `/v1/completions`: `text_completion`, whole and in a stream.

use bytes::BytesMut;
use serde::Serialize;

use crate::http::events::{Envelope, Events, json, number};
use crate::http::logprobs::{LegacyLogprobs, Offset};
use crate::http::params::Delivery;
use crate::http::reply::{Choice, FINGERPRINT, Head, UsageBody, Whole, finish_reason};
use crate::request::{Delta, TokenText, Usage};

const OBJECT: &str = "text_completion";

/// How one plain answer looks.
#[derive(Debug)]
pub(super) struct CompletionReply {
    head: Head,
    logprobs: bool,
    /// With `echo`: the text of each prompt, which its choices begin with.
    echo: Option<Vec<String>>,
    choices: Vec<Progress>,
    /// Choices per prompt.
    n: usize,
}

/// How far the stream of one choice has come.
#[derive(Debug, Clone, Default)]
struct Progress {
    begun: bool,
    offset: Offset,
}

impl CompletionReply {
    pub(super) fn new(
        head: Head,
        prompts: usize,
        n: u32,
        logprobs: bool,
        echo: Option<Vec<String>>,
    ) -> Self {
        let n = n as usize;
        Self { head, logprobs, echo, choices: vec![Progress::default(); prompts * n], n }
    }

    fn echoed(&self, choice: usize) -> &str {
        self.echo.as_ref().and_then(|texts| texts.get(choice / self.n)).map_or("", String::as_str)
    }

    fn logprobs_of(
        &self,
        prompt: Option<&[TokenText]>,
        answer: &[TokenText],
        offset: &mut Offset,
    ) -> Option<LegacyLogprobs> {
        self.logprobs.then(|| {
            let mut logprobs = LegacyLogprobs::default();
            for token in prompt.unwrap_or_default().iter().chain(answer) {
                logprobs.push(token, offset);
            }
            logprobs
        })
    }
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceBody>,
    usage: UsageBody,
    service_tier: &'static str,
    system_fingerprint: &'static str,
}

#[derive(Serialize)]
struct ChoiceBody {
    index: usize,
    text: String,
    logprobs: Option<LegacyLogprobs>,
    finish_reason: Option<&'static str>,
}

impl Whole for CompletionReply {
    fn whole(self, choices: Vec<Choice>, usage: Usage) -> serde_json::Result<Vec<u8>> {
        let choices = choices.into_iter().enumerate().map(|(index, choice)| ChoiceBody {
            index,
            logprobs: self.logprobs_of(
                choice.prompt_tokens.as_deref(),
                &choice.tokens,
                &mut Offset::default(),
            ),
            text: self.echoed(index).to_owned() + &choice.text,
            finish_reason: choice.finish.map(finish_reason),
        });
        serde_json::to_vec(&Body {
            id: &self.head.id,
            object: OBJECT,
            created: self.head.created,
            model: &self.head.model,
            choices: choices.collect(),
            usage: usage.into(),
            service_tier: "default",
            system_fingerprint: FINGERPRINT,
        })
    }
}

impl Events for CompletionReply {
    fn envelope(&self, delivery: Delivery) -> Envelope {
        Envelope::new(&self.head, OBJECT, delivery)
    }

    fn delta(&mut self, delta: &Delta, usage: Usage, envelope: &Envelope, out: &mut BytesMut) {
        let index = delta.choice as usize;
        let mut progress = self.choices.get_mut(index).map(std::mem::take).unwrap_or_default();
        let first = !std::mem::replace(&mut progress.begun, true);
        let echo = if first { self.echoed(index) } else { "" };
        let prompt = delta.prompt_tokens.as_deref();
        let says_something = !delta.text.is_empty()
            || !delta.tokens.is_empty()
            || prompt.is_some_and(|tokens| !tokens.is_empty())
            || !echo.is_empty()
            || delta.finish.is_some();
        if says_something {
            envelope.open(out);
            out.extend_from_slice(b"{\"index\":");
            number(out, delta.choice);
            out.extend_from_slice(b",\"text\":");
            if echo.is_empty() {
                json(out, &delta.text);
            } else {
                json(out, &(echo.to_owned() + &delta.text));
            }
            out.extend_from_slice(b",\"logprobs\":");
            json(out, &self.logprobs_of(prompt, &delta.tokens, &mut progress.offset));
            out.extend_from_slice(b",\"finish_reason\":");
            json(out, &delta.finish.map(finish_reason));
            out.extend_from_slice(b"}");
            envelope.close(usage, out);
        }
        if let Some(slot) = self.choices.get_mut(index) {
            *slot = progress;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::FinishReason;

    fn token(text: &str, logprob: Option<f64>) -> TokenText {
        TokenText { id: 0, text: text.into(), bytes: text.into(), logprob, top: Vec::new() }
    }

    fn reply(logprobs: bool, echo: Option<Vec<String>>) -> CompletionReply {
        let head = Head { id: "cmpl-1".into(), created: 7, model: "m".into() };
        CompletionReply::new(head, 2, 1, logprobs, echo)
    }

    fn deltas() -> Vec<Delta> {
        let prompt = Some(vec![token("p", None), token("q", Some(-1.0))]);
        let first = vec![token("a", Some(-2.0))];
        vec![
            Delta {
                choice: 1,
                text: "a".into(),
                tokens: first,
                prompt_tokens: prompt,
                finish: None,
            },
            Delta { choice: 1, tokens: vec![token("b", Some(-3.0))], ..Delta::default() },
            Delta {
                choice: 1,
                text: "b".into(),
                finish: Some(FinishReason::Stop),
                ..Delta::default()
            },
        ]
    }

    fn streamed(mut reply: CompletionReply) -> Vec<Value> {
        let envelope = reply.envelope(Delivery::default());
        let mut out = BytesMut::new();
        for delta in deltas() {
            reply.delta(&delta, Usage::default(), &envelope, &mut out);
        }
        let text = String::from_utf8(out.to_vec()).unwrap();
        let events =
            text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
        events
            .map(|event| serde_json::from_str::<Value>(event).unwrap()["choices"][0].clone())
            .collect()
    }

    #[test]
    fn text_and_end_may_share_an_event() {
        let got = streamed(reply(false, None));
        assert_eq!(
            got[0],
            json!({"index": 1, "text": "a", "logprobs": null, "finish_reason": null})
        );
        assert_eq!(
            got[2],
            json!({"index": 1, "text": "b", "logprobs": null, "finish_reason": "stop"})
        );
    }

    #[test]
    fn echo_comes_once_and_offsets_run_through_the_stream() {
        let echo = Some(vec!["no".into(), "pq".into()]);
        let got = streamed(reply(true, echo.clone()));
        let texts: String = got.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(texts, "pqab");
        let offsets: Vec<&Value> =
            got.iter().map(|choice| &choice["logprobs"]["text_offset"]).collect();
        assert_eq!(offsets, [&json!([0, 1, 2]), &json!([3]), &json!([])]);

        let mut choices: Vec<Choice> = vec![Choice::default(), Choice::default()];
        for delta in deltas() {
            let choice = &mut choices[1];
            choice.text.push_str(&delta.text);
            choice.tokens.extend(delta.tokens);
            choice.prompt_tokens = choice.prompt_tokens.take().or(delta.prompt_tokens);
        }
        let whole = reply(true, echo).whole(choices, Usage::default()).unwrap();
        let whole: Value = serde_json::from_slice(&whole).unwrap();
        let choice = &whole["choices"][1];
        assert_eq!(choice["text"], "pqab");
        assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2, 3]));
        assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.0, -2.0, -3.0]));
    }
}

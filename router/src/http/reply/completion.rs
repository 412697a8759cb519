//! The answer of `/v1/completions`: `text_completion`, whole and in a stream.

use std::sync::Arc;

use bytes::BytesMut;

use crate::error::RouteError;
use crate::http::parse::params::Delivery;
use crate::http::reply::events::{Envelope, Events, json, number};
use crate::http::reply::logprobs::{self, Column, Offset, Vocabulary};
use crate::http::reply::whole::Shape;
use crate::http::reply::{AnswerHead, ReplyChoice, token_ids};
use crate::limits::memory::MemoryShare;
use crate::request::{Delta, FinishReason, ScoredToken, Usage};

/// How one plain answer looks.
#[derive(Debug)]
pub(in crate::http) struct CompletionReply {
    head: AnswerHead,
    /// What its tokens stand for, if they are sent with their log-probabilities.
    logprobs: Option<Arc<dyn Vocabulary>>,
    /// The same of the prompt, where its log-probabilities stand apart.
    scored_prompt: Option<Arc<dyn Vocabulary>>,
    echo: Option<Echo>,
    choices: Vec<Progress>,
    /// Choices per prompt.
    n: usize,
    /// In an answer as a whole, of the choice that is written.
    offset: Offset,
}

/// What choices begin with where the client asks for it.
#[derive(Debug)]
pub(in crate::http) struct Echo {
    /// The text of each prompt.
    texts: Vec<String>,
    /// What they were charged to, until the answer is sent.
    _memory: Arc<MemoryShare>,
}

impl Echo {
    pub(in crate::http) fn new(texts: Vec<String>, memory: Arc<MemoryShare>) -> Self {
        Self { texts, _memory: memory }
    }
}

/// How far the stream of one choice has come.
#[derive(Debug, Clone, Default)]
struct Progress {
    begun: bool,
    offset: Offset,
}

impl CompletionReply {
    pub(in crate::http) fn new(
        head: AnswerHead,
        prompts: usize,
        n: u32,
        logprobs: Option<Arc<dyn Vocabulary>>,
        echo: Option<Echo>,
    ) -> Self {
        let n = n as usize;
        let choices = vec![Progress::default(); prompts * n];
        let offset = Offset::default();
        Self { head, logprobs, scored_prompt: None, echo, choices, n, offset }
    }

    /// The log-probabilities of the prompt stand apart, and its tokens stand for this.
    pub(in crate::http) fn scoring_prompt(mut self, pieces: Option<Arc<dyn Vocabulary>>) -> Self {
        self.scored_prompt = pieces;
        self
    }

    fn echoed(&self, choice: usize) -> &str {
        let echo = self.echo.as_ref().and_then(|echo| echo.texts.get(choice / self.n));
        echo.map_or("", String::as_str)
    }
}

/// Appends the echoed text and the answer's as one string.
fn text(echo: &str, text: &str, out: &mut BytesMut) {
    if echo.is_empty() { json(out, text) } else { json(out, &(echo.to_owned() + text)) }
}

impl Shape for CompletionReply {
    const OBJECT: &'static str = "text_completion";

    fn head(&self) -> &AnswerHead {
        &self.head
    }

    fn text(&mut self, index: usize, choice: &ReplyChoice, out: &mut BytesMut) {
        self.offset = Offset::default();
        out.extend_from_slice(b"\"text\":");
        text(self.echoed(index), &choice.text, out);
        out.extend_from_slice(b",");
    }

    fn columns(&self) -> usize {
        if self.logprobs.is_some() { Column::ALL.len() } else { 0 }
    }

    fn open(&self, column: usize, out: &mut BytesMut) {
        let open = Column::ALL.get(column).map_or(logprobs::COLUMNS_CLOSE, |column| column.open());
        out.extend_from_slice(open);
    }

    fn token(&mut self, column: usize, token: &ScoredToken, out: &mut BytesMut) {
        if let (Some(vocabulary), Some(column)) = (&self.logprobs, Column::ALL.get(column)) {
            column.token(vocabulary.as_ref(), token, &mut self.offset, out);
        }
    }

    fn prompt_token(&self, token: &ScoredToken, out: &mut BytesMut) {
        if let Some(vocabulary) = &self.scored_prompt {
            logprobs::prompt_token(vocabulary.as_ref(), token, out);
        }
    }

    fn end(&mut self, choice: &ReplyChoice, out: &mut BytesMut) {
        token_ids::field(token_ids::OF_PROMPT, choice.prompt_ids.as_ref().map(|ids| &ids[..]), out);
        token_ids::field(token_ids::OF_CHOICE, choice.ids.as_deref(), out);
    }
}

impl Events for CompletionReply {
    fn envelope(&self, delivery: Delivery) -> Envelope {
        Envelope::new(&self.head, Self::OBJECT, delivery)
    }

    fn delta(
        &mut self,
        delta: &Delta,
        usage: Usage,
        envelope: &Envelope,
        out: &mut BytesMut,
    ) -> Result<(), RouteError> {
        let index = delta.choice as usize;
        let mut progress = self.choices.get_mut(index).map(std::mem::take).unwrap_or_default();
        let first = !std::mem::replace(&mut progress.begun, true);
        let echo = if first { self.echoed(index) } else { "" };
        let prompt = delta.prompt_tokens.as_deref();
        let says_something = !delta.text.is_empty()
            || !delta.tokens.is_empty()
            || prompt.is_some_and(|tokens| !tokens.is_empty())
            || !echo.is_empty()
            || delta.ids.as_ref().is_some_and(|ids| !ids.is_empty())
            || delta.finish.is_some();
        if says_something {
            envelope.open(out);
            out.extend_from_slice(b"{\"index\":");
            number(out, delta.choice);
            out.extend_from_slice(b",\"text\":");
            text(echo, &delta.text, out);
            out.extend_from_slice(b",\"logprobs\":");
            match &self.logprobs {
                Some(vocabulary) => {
                    let tokens = prompt.unwrap_or_default().iter().chain(&delta.tokens);
                    logprobs::columns(vocabulary.as_ref(), &tokens, &mut progress.offset, out);
                }
                None => out.extend_from_slice(b"null"),
            }
            out.extend_from_slice(b",\"finish_reason\":");
            json(out, &delta.finish.map(FinishReason::as_str));
            token_ids::field(
                token_ids::OF_PROMPT,
                delta.prompt_ids.as_ref().map(|ids| &ids[..]),
                out,
            );
            token_ids::field(token_ids::OF_CHOICE, delta.ids.as_deref(), out);
            out.extend_from_slice(b"}");
            envelope.close(usage, out);
        }
        if let Some(slot) = self.choices.get_mut(index) {
            *slot = progress;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::http::reply::gather;
    use crate::http::reply::logprobs::TestPieces;
    use crate::http::reply::pieces::Parts as _;
    use crate::http::reply::whole::WholeAnswer;
    use crate::limits::memory::MemoryPool;

    const WORDS: TestPieces = TestPieces(&[b"p", b"q", b"a", b"b"]);

    fn token(text: &str, logprob: Option<f64>) -> ScoredToken {
        let id = WORDS.0.iter().position(|word| *word == text.as_bytes()).unwrap();
        ScoredToken { id: u32::try_from(id).unwrap(), logprob, top: Vec::new() }
    }

    fn reply(logprobs: bool, echo: Option<Vec<String>>) -> CompletionReply {
        let memory = Arc::new(MemoryPool::private(0).share());
        let echo = echo.map(|texts| Echo::new(texts, memory));
        let head = AnswerHead { id: "cmpl-1".into(), created: 7, model: "m".into() };
        let words: Arc<dyn Vocabulary> = Arc::new(WORDS);
        CompletionReply::new(head, 2, 1, logprobs.then_some(words), echo)
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
                ..Delta::default()
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
            reply.delta(&delta, Usage::default(), &envelope, &mut out).unwrap();
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

        let mut choices: Vec<ReplyChoice> = vec![ReplyChoice::default(), ReplyChoice::default()];
        let mut memory = MemoryPool::private(1 << 20).share();
        for delta in deltas() {
            gather(&mut choices, delta, None, &mut memory).unwrap();
        }
        let mut out = BytesMut::new();
        let mut whole = WholeAnswer::new(reply(true, echo), choices, Usage::default(), memory);
        while whole.write(&mut out) {}
        let whole: Value = serde_json::from_slice(&out).unwrap();
        let choice = &whole["choices"][1];
        assert_eq!(choice["text"], "pqab");
        assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2, 3]));
        assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.0, -2.0, -3.0]));
    }
}

//! Server-sent events: a delta in, one write out.
//!
//! The bytes of an event that stay the same through a stream (id, model, time) are made once; each event then is that
//! prefix, the text as a JSON string, and a suffix, appended to a buffer that the stream keeps. Nothing is made before
//! the socket asks for it: hyper polls the body only when it has room, so a slow client slows its own stream, and what
//! it does not take waits in the bounded store of the request. Dropping the body drops the answers and so cancels them.
//!
//! No comments are sent to keep idle connections alive: before the first token there is no status yet to send them
//! under, and after it the deadline for the next token is no longer than what proxies wait.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream;
use serde::Serialize;

use crate::error::{Causes, RouteError};
use crate::http::call::Ending;
use crate::http::parse::params::Delivery;
use crate::http::reply::answers::Answers;
use crate::http::reply::reject::Reject;
use crate::http::reply::{AnswerHead, FINGERPRINT, UsageBody, token_ids};
use crate::request::{Delta, Usage};

/// How the events of one stream look, from its first delta to its end.
pub(in crate::http) trait EventWriter: Send + 'static {
    /// Appends the events of one delta; none where all of it is held back.
    ///
    /// # Errors
    /// The answer fails with it.
    fn delta(&mut self, delta: &Delta, usage: Usage, out: &mut BytesMut) -> Result<(), RouteError>;

    /// The usage with the tokens of reasoning, where they are known.
    fn with_reasoning(&self, usage: Usage) -> Usage {
        usage
    }

    /// The last delta said all of its choice, whose worker goes on.
    fn ends_early(&mut self) -> bool {
        false
    }

    /// Appends what follows the last delta. `comment` stands before the last event.
    fn end(&mut self, usage: Usage, comment: Option<String>, out: &mut BytesMut);

    /// Appends what says that the answer broke off.
    fn failed(&mut self, error: RouteError, out: &mut BytesMut);

    /// Comes when somebody but its reader ends the answer.
    fn cancelled(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    /// Appends what says that somebody ended the answer.
    fn cancel(&mut self, _usage: Usage, _out: &mut BytesMut) {}
}

/// How a delta of a choice looks as OpenAI's chunks.
pub(in crate::http) trait Events: Send + 'static {
    /// Appends the events of one delta, each between `envelope.open` and `envelope.close`.
    fn delta(&mut self, delta: &Delta, usage: Usage, envelope: &Envelope, out: &mut BytesMut);
    /// The usage with the tokens of reasoning, where they are known.
    fn with_reasoning(&self, usage: Usage) -> Usage {
        usage
    }

    /// Whether the choice of the last delta is over before its worker is.
    fn ends_early(&mut self) -> bool {
        false
    }

    /// The constant part.
    fn envelope(&self, delivery: Delivery) -> Envelope;
}

/// The part that all events of a stream share.
#[derive(Debug)]
pub(in crate::http) struct Envelope {
    prefix: Vec<u8>,
    delivery: Delivery,
}

impl Envelope {
    pub(in crate::http) fn new(head: &AnswerHead, object: &str, delivery: Delivery) -> Self {
        #[derive(Serialize)]
        struct Fields<'a> {
            id: &'a str,
            object: &'a str,
            created: u64,
            model: &'a str,
            service_tier: &'a str,
            system_fingerprint: &'a str,
        }
        let mut prefix = BytesMut::from(&b"data: "[..]);
        let fields = Fields {
            id: &head.id,
            object,
            created: head.created,
            model: &head.model,
            service_tier: "default",
            system_fingerprint: FINGERPRINT,
        };
        json(&mut prefix, &fields);
        prefix.truncate(prefix.len() - 1); // its closing brace
        prefix.extend_from_slice(b",\"choices\":[");
        Self { prefix: prefix.to_vec(), delivery }
    }

    /// Up to the choice.
    pub(in crate::http) fn open(&self, out: &mut BytesMut) {
        out.extend_from_slice(&self.prefix);
    }

    /// From the choice on.
    pub(in crate::http) fn close(&self, usage: Usage, out: &mut BytesMut) {
        self.close_with(None, usage, out);
    }

    /// The same, with the ids of the prompt.
    pub(in crate::http) fn close_with(
        &self,
        prompt_ids: Option<&[u32]>,
        usage: Usage,
        out: &mut BytesMut,
    ) {
        out.extend_from_slice(b"]");
        token_ids::field(token_ids::OF_PROMPT, prompt_ids, out);
        if self.delivery.running_usage {
            out.extend_from_slice(b",\"usage\":");
            json(out, &UsageBody::from(usage));
        } else if self.delivery.include_usage {
            out.extend_from_slice(b",\"usage\":null");
        }
        out.extend_from_slice(b"}\n\n");
    }

    /// The event with the final usage, without choices.
    fn usage(&self, usage: Usage, out: &mut BytesMut) {
        self.open(out);
        out.extend_from_slice(b"],\"usage\":");
        json(out, &UsageBody::from(usage));
        out.extend_from_slice(b"}\n\n");
    }
}

/// Chunks with choices, which end with `[DONE]`: those of chats and of plain completions.
#[derive(Debug)]
pub(in crate::http) struct ChoiceChunks<S> {
    shape: S,
    envelope: Envelope,
}

impl<S: Events> ChoiceChunks<S> {
    pub(in crate::http) fn new(shape: S, delivery: Delivery) -> Self {
        Self { envelope: shape.envelope(delivery), shape }
    }
}

impl<S: Events> EventWriter for ChoiceChunks<S> {
    fn delta(&mut self, delta: &Delta, usage: Usage, out: &mut BytesMut) -> Result<(), RouteError> {
        self.shape.delta(delta, usage, &self.envelope, out);
        Ok(())
    }

    fn with_reasoning(&self, usage: Usage) -> Usage {
        self.shape.with_reasoning(usage)
    }

    fn ends_early(&mut self) -> bool {
        self.shape.ends_early()
    }

    fn end(&mut self, usage: Usage, remark: Option<String>, out: &mut BytesMut) {
        if self.envelope.delivery.include_usage {
            self.envelope.usage(usage, out);
        }
        comment(remark, out);
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn failed(&mut self, error: RouteError, out: &mut BytesMut) {
        // and no [DONE]: the answer is not whole
        event(out, "error", &Reject::from(error).body());
    }
}

/// Appends a comment of a stream, which is one line.
pub(in crate::http) fn comment(comment: Option<String>, out: &mut BytesMut) {
    if let Some(comment) = comment {
        write!(out, ": {comment}\n\n").expect("writing to memory cannot fail");
    }
}

/// Appends an event with a name.
pub(in crate::http) fn event(out: &mut BytesMut, name: &str, data: &impl Serialize) {
    write!(out, "event: {name}\ndata: ").expect("writing to memory cannot fail");
    json(out, data);
    out.extend_from_slice(b"\n\n");
}

/// Appends `value` as JSON.
pub(in crate::http) fn json(out: &mut BytesMut, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(out.writer(), value)
        .expect("plain data, and writing to memory cannot fail");
}

/// Appends a number.
pub(in crate::http) fn number(out: &mut BytesMut, value: u32) {
    write!(out, "{value}").expect("writing to memory cannot fail");
}

/// Tokens with log-probabilities in one event: twenty alternatives each make half a megabyte of that.
const EVENT_TOKENS: usize = 256;

fn fits(delta: &Delta) -> bool {
    delta.tokens.len() + delta.prompt_tokens.as_ref().map_or(0, Vec::len) <= EVENT_TOKENS
}

/// A delta as one or several whose events are of bounded size: where log-probabilities of a prompt are sent, or a slow
/// client lets them pile up.
fn split(mut delta: Delta) -> VecDeque<Delta> {
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

struct Stream<W> {
    /// Written before anything else is asked for.
    ready: VecDeque<Delta>,
    /// `None` once all is said.
    answers: Option<Answers>,
    writer: W,
    ending: Ending,
    buffer: BytesMut,
    /// The client was cut off for taking nothing. Should it read on, it finds its connection closed.
    cut_off: bool,
}

impl<W: EventWriter> Stream<W> {
    /// The next piece of the body.
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if std::mem::take(&mut self.cut_off) {
            return Some(Err(io::Error::other("the client took nothing")));
        }
        let answers = self.answers.as_mut()?;
        loop {
            let delta = match self.ready.pop_front() {
                Some(ready) => {
                    if self.ready.is_empty() {
                        self.ready = VecDeque::new(); // most streams never need it again
                    }
                    Some(Ok(ready))
                }
                None => {
                    let next = tokio::select! {
                        biased;
                        () = self.writer.cancelled() => None,
                        next = answers.next() => Some(next),
                    };
                    match next {
                        Some(Some(Ok(delta))) if !fits(&delta) => {
                            self.ready = split(delta);
                            continue;
                        }
                        Some(next) => next,
                        None => {
                            self.ending.failed(&RouteError::ClientGone);
                            self.writer.cancel(answers.usage(), &mut self.buffer);
                            self.answers = None;
                            break;
                        }
                    }
                }
            };
            let usage = answers.usage();
            let written = match delta {
                Some(Ok(delta)) => {
                    let written = self.writer.delta(&delta, usage, &mut self.buffer);
                    if self.writer.ends_early() {
                        answers.end(delta.choice);
                    }
                    written
                }
                Some(Err(error)) => Err(error),
                None => {
                    let usage = self.writer.with_reasoning(usage);
                    self.ending.answered(usage);
                    self.writer.end(usage, self.ending.comment(), &mut self.buffer);
                    self.answers = None;
                    break;
                }
            };
            if let Err(error) = written {
                tracing::warn!(error = %Causes(&error), "an answer failed after its first byte");
                self.ending.failed(&error);
                self.cut_off = matches!(error, RouteError::ClientGone);
                self.writer.failed(error, &mut self.buffer);
                self.answers = None;
                break;
            }
            if !self.buffer.is_empty() {
                break;
            } // else all of it is held back until the next token decides
        }
        Some(Ok(self.buffer.split().freeze()))
    }
}

/// The whole response; `first` was waited for, so its status is 200.
pub(in crate::http) fn response(
    first: Delta,
    answers: Answers,
    writer: impl EventWriter,
    ending: Ending,
) -> Response {
    let buffer = BytesMut::with_capacity(4096);
    let (ready, answers) = (split(first), Some(answers));
    let stream = Box::new(Stream { ready, answers, writer, ending, buffer, cut_off: false });
    let body = stream::unfold(stream, |mut stream| async move {
        let piece = stream.next().await?;
        Some((piece, stream))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // nginx would otherwise collect the events before it passes them on.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(body)).into_response()
}

#[cfg(test)]
mod tests;

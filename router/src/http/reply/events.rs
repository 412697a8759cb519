//! Server-sent events: a delta in, one write out.
//!
//! Nothing is made before the socket asks for it: hyper polls the body only when it has room, so a slow client slows its
//! own stream, and what it does not take waits in the bounded store of the request. Dropping the body drops the answers
//! and so cancels them.
//!
//! No comments are sent to keep idle connections alive: before the first token there is no status yet to send them
//! under, and after it the deadline for the next token is no longer than what proxies wait.

mod chunks;
mod split;

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
use crate::http::reply::answers::Answers;
use crate::request::{Delta, Usage};
use split::{fits, split};

pub(in crate::http) use chunks::{ChoiceChunks, Envelope, Events};

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

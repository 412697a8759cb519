//! Server-sent events: a delta in, one write out.
//!
//! Nothing is made before there is room for it: a slow client slows its own stream, and what it does not take waits in the
//! bounded store of the request. Dropping the stream drops the answers and so cancels them.
//!
//! No comments are sent to keep idle connections alive: before the first token there is no status yet to send them
//! under, and after it the deadline for the next token is no longer than what proxies wait.
//!
//! `stream` is how far an answer has come, `direct` who asks it for events, `chunks` how OpenAI's look, `annotations` what
//! Dynamo's clients are told beside it.

mod annotations;
mod chunks;
mod direct;
mod split;
mod stream;

use std::fmt::Write as _;
use std::pin::Pin;

use axum::Extension;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut as _, BytesMut};
use serde::Serialize;

use crate::error::RouteError;
use crate::http::call::Ending;
use crate::http::reply::answers::Answers;
use crate::request::{Delta, Usage};
use split::split;
use stream::Stream;

pub(in crate::http) use annotations::{AnnotatedRequest, Opening};
pub(in crate::http) use chunks::{ChoiceChunks, Envelope, Events};
pub(crate) use direct::{EventStream, Outlet, PIECE_HEAD};

/// Comes when somebody but its reader ends an answer.
pub(in crate::http) type Cancelled = Pin<Box<dyn Future<Output = ()> + Send>>;

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

    /// Comes when somebody but its reader ends the answer, where somebody can.
    fn cancelled(&self) -> Option<Cancelled> {
        None
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
    match u8::try_from(value) {
        Ok(digit @ 0..10) => out.put_u8(b'0' + digit), // choices and blocks, once a token
        Ok(_) | Err(_) => write!(out, "{value}").expect("writing to memory cannot fail"),
    }
}

/// The whole response; `first` was waited for, so its status is 200.
pub(in crate::http) fn response(
    first: Delta,
    answers: Answers,
    writer: impl EventWriter,
    ending: Ending,
) -> Response {
    let stream = Stream::new(split(first), answers, writer, ending);
    let (body, events) = direct::shared(stream);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // nginx would otherwise collect the events before it passes them on.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Extension(events), Body::new(body)).into_response()
}

#[cfg(test)]
mod tests;

//! What a stream tells beside its answer, as NVIDIA Dynamo sends it: events with a name and without data, whose comment is
//! JSON. Whoever reads server-sent events by their standard takes no notice of them.

use std::fmt::Write as _;

use bytes::BytesMut;
use serde::Serialize;

use super::json;
use crate::error::RouteError;
use crate::http::parse::nvext::Annotations;
use crate::limits::memory::{MemoryShare, Refused};
use crate::request::Usage;

/// What stands before the first event of the answer, and what it is charged to until it is written.
#[derive(Debug)]
pub(in crate::http) struct Opening {
    pub(super) events: BytesMut,
    _memory: MemoryShare,
}

/// What is known of a request before its answer.
pub(in crate::http) struct AnnotatedRequest<'a> {
    pub(in crate::http) prompt: &'a [u32],
    pub(in crate::http) request_id: &'a str,
}

impl Opening {
    /// `None` where nothing is to be told. `decode` gives the text of the prompt.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(in crate::http) fn of(
        annotations: Annotations,
        request: &AnnotatedRequest<'_>,
        decode: impl FnOnce(&[u32]) -> String,
        mut memory: MemoryShare,
    ) -> Result<Option<Box<Self>>, RouteError> {
        let mut events = BytesMut::new();
        if annotations.formatted_prompt {
            annotation(&mut events, "formatted_prompt", &decode(request.prompt));
        }
        if annotations.token_ids {
            let ids = serde_json::to_string(request.prompt)
                .map_err(|error| RouteError::internal("token ids as JSON", error))?;
            annotation(&mut events, "token_ids", &ids); // a text with JSON in it, as there
        }
        if annotations.request_id {
            annotation(&mut events, "request_id", request.request_id);
        }
        if events.is_empty() {
            return Ok(None);
        }
        memory.charge(events.capacity()).map_err(Refused::answer)?;
        Ok(Some(Box::new(Self { events, _memory: memory })))
    }
}

/// Appends the tokens of a stream that has ended, once: `chunk_tokens` are those since the last such event.
pub(super) fn metrics(usage: Usage, out: &mut BytesMut) {
    #[derive(Serialize)]
    struct Metrics {
        input_tokens: u32,
        output_tokens: u32,
        chunk_tokens: u32,
        cached_tokens: u32,
    }
    let metrics = Metrics {
        input_tokens: usage.prompt_tokens,
        output_tokens: usage.completion_tokens,
        chunk_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens,
    };
    annotation(out, "llm_metrics", &metrics);
}

fn annotation(out: &mut BytesMut, name: &str, said: &(impl Serialize + ?Sized)) {
    write!(out, "event: {name}\n: ").expect("writing to memory cannot fail");
    json(out, said); // one line: JSON escapes line breaks
    out.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::memory::MemoryPool;

    const REQUEST: AnnotatedRequest<'_> = AnnotatedRequest { prompt: &[5, 7], request_id: "r-1" };

    fn opening(annotations: Annotations, bytes: usize) -> Result<Option<String>, RouteError> {
        let memory = MemoryPool::private(bytes).share();
        let opening =
            Opening::of(annotations, &REQUEST, |ids| format!("a\r\n\"{}", ids.len()), memory)?;
        Ok(opening.map(|opening| String::from_utf8(opening.events.to_vec()).unwrap()))
    }

    #[test]
    fn each_is_an_event_without_data_whose_comment_is_one_line() {
        let none = Annotations::default();
        let prompt = Annotations { formatted_prompt: true, ..none };
        let want = "event: formatted_prompt\n: \"a\\r\\n\\\"2\"\n\n";
        assert_eq!(opening(prompt, 1 << 20).unwrap().unwrap(), want);
        let ids = Annotations { token_ids: true, request_id: true, ..none };
        let want = "event: token_ids\n: \"[5,7]\"\n\nevent: request_id\n: \"r-1\"\n\n";
        assert_eq!(opening(ids, 1 << 20).unwrap().unwrap(), want);
        let end = Annotations { llm_metrics: true, ..none };
        assert_eq!(opening(end, 1 << 20).unwrap(), None);
        assert_eq!(opening(none, 0).unwrap(), None);
    }

    #[test]
    fn what_it_takes_is_charged() {
        let ids = Annotations { token_ids: true, ..Annotations::default() };
        let error = opening(ids, 8).unwrap_err();
        assert!(matches!(error, RouteError::AnswerTooLarge { .. }), "{error:?}");
    }

    #[test]
    fn the_metrics_are_those_of_the_whole_answer() {
        let usage =
            Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: 8, ..Usage::default() };
        let mut out = BytesMut::new();
        metrics(usage, &mut out);
        let want = "event: llm_metrics\n: {\"input_tokens\":9,\"output_tokens\":4,\"chunk_tokens\":4,\"cached_tokens\":8}\n\n";
        assert_eq!(out, want);
    }
}

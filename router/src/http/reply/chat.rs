//! The answer of `/v1/chat/completions`: `chat.completion`, and `chat.completion.chunk` in a stream.

mod chunk;
mod whole;

use std::sync::Arc;

use bytes::BytesMut;

use crate::error::RouteError;
use crate::http::parse::params::Delivery;
use crate::http::reply::events::{Envelope, Events, json};
use crate::http::reply::logprobs::{self, Vocabulary};
use crate::http::reply::readers::ChoiceReaders;
use crate::http::reply::{AnswerHead, token_ids};
use crate::limits::memory::MemoryShare;
use crate::output::{Format, Part};
use crate::request::{Delta, ScoredToken, Usage};
use chunk::{ChatChunk, ROLE, ROLE_OF_CALLS, write_part};

/// How one chat answer looks.
#[derive(Debug)]
pub(in crate::http) struct ChatReply {
    head: AnswerHead,
    /// What its tokens stand for, if they are sent with their log-probabilities.
    logprobs: Option<Arc<dyn Vocabulary>>,
    /// Choices whose first chunk, the one with the role, was sent.
    begun: Vec<bool>,
    /// What tells the text apart, where it has parts; apart from all that most streams hold.
    readers: Option<Box<ChoiceReaders>>,
    shows_reasoning: bool,
    /// Reused between deltas.
    parts: Vec<Part>,
    /// Those of the prompt, until they are written.
    prompt_ids: Option<Arc<Vec<u32>>>,
    /// The choice of the last delta is over before its worker is.
    ends_early: bool,
    /// What tokens of the prompt stand for, if those are sent with their log-probabilities.
    scored_prompt: Option<Arc<dyn Vocabulary>>,
}

impl ChatReply {
    pub(in crate::http) fn new(
        head: AnswerHead,
        n: u32,
        logprobs: Option<Arc<dyn Vocabulary>>,
    ) -> Self {
        let begun = vec![false; n as usize];
        let parts = Vec::new();
        Self {
            head,
            logprobs,
            begun,
            readers: None,
            shows_reasoning: true,
            parts,
            prompt_ids: None,
            ends_early: false,
            scored_prompt: None,
        }
    }

    /// The log-probabilities of the prompt stand apart, and its tokens stand for this.
    pub(in crate::http) fn scoring_prompt(mut self, pieces: Option<Arc<dyn Vocabulary>>) -> Self {
        self.scored_prompt = pieces;
        self
    }

    /// Its text is told apart as `format` says; `memory` is for what is held back.
    pub(in crate::http) fn reading(
        mut self,
        format: Option<Format>,
        shows_reasoning: bool,
        memory: MemoryShare,
    ) -> Self {
        self.readers =
            format.map(|format| Box::new(ChoiceReaders::new(format, self.begun.len(), memory)));
        self.shows_reasoning = shows_reasoning;
        self
    }

    /// True for the first time.
    fn begins(&mut self, choice: u32) -> bool {
        self.begun.get_mut(choice as usize).is_some_and(|begun| !std::mem::replace(begun, true))
    }

    /// What opens a message. The first one has the ids of the prompt, where they were asked for.
    fn role(&mut self, event: &ChatChunk<'_>, role: &[u8], out: &mut BytesMut) {
        let prompt_ids = self.prompt_ids.take();
        let prompt_ids = prompt_ids.as_ref().map(|ids| &ids[..]);
        event.write_with(prompt_ids, out, |out| out.extend_from_slice(role));
    }

    /// The log-probabilities of these tokens, or null, and the ids of tokens where they were asked for.
    fn write_logprobs(&self, tokens: &[ScoredToken], ids: Option<&[u32]>, out: &mut BytesMut) {
        out.extend_from_slice(b",\"logprobs\":");
        match &self.logprobs {
            Some(vocabulary) => logprobs::chat(vocabulary.as_ref(), tokens, out),
            None => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(b",\"finish_reason\":null");
        token_ids::field(token_ids::OF_CHOICE, ids, out);
    }

    /// The events of a delta whose text has parts. The role comes with the first of them: it says whether the message has
    /// a content.
    fn parts(
        &mut self,
        delta: &Delta,
        usage: Usage,
        envelope: &Envelope,
        out: &mut BytesMut,
    ) -> Result<(), RouteError> {
        let Some(readers) = &mut self.readers else { return Ok(()) };
        let mut parts = std::mem::take(&mut self.parts);
        let finish = readers.read(delta, &mut parts)?;
        self.ends_early = finish.is_some() && delta.finish.is_none();
        if !self.shows_reasoning {
            parts.retain(|part| !matches!(part, Part::Reasoning(_)));
        }
        let usage = self.with_reasoning(usage);
        let event = ChatChunk { choice: delta.choice, usage, envelope };
        // the tokens of a delta stand with its first part
        let mut ids = delta.ids.as_deref().filter(|ids| !ids.is_empty());
        let says_something =
            !parts.is_empty() || !delta.tokens.is_empty() || ids.is_some() || finish.is_some();
        if says_something && self.begins(delta.choice) {
            let calls = matches!(parts.first(), Some(Part::CallBegins { .. }));
            self.role(&event, if calls { ROLE_OF_CALLS } else { ROLE }, out);
        }
        let mut tokens = delta.tokens.as_slice();
        for part in parts.drain(..) {
            let (tokens, ids) = (std::mem::take(&mut tokens), ids.take());
            event.write(out, |out| {
                write_part(&part, out);
                self.write_logprobs(tokens, ids, out);
            });
        }
        if !tokens.is_empty() || ids.is_some() {
            event.write(out, |out| {
                out.extend_from_slice(b"{}");
                self.write_logprobs(tokens, ids, out);
            });
        }
        self.parts = parts;
        if let Some(finish) = finish {
            event.end(finish, out);
        }
        Ok(())
    }
}

impl Events for ChatReply {
    fn envelope(&self, delivery: Delivery) -> Envelope {
        Envelope::new(&self.head, "chat.completion.chunk", delivery)
    }

    fn with_reasoning(&self, usage: Usage) -> Usage {
        let reasoning_tokens =
            self.readers.as_ref().map_or(0, |readers| readers.reasoning_tokens());
        Usage { reasoning_tokens, ..usage }
    }

    fn ends_early(&mut self) -> bool {
        self.ends_early
    }

    fn delta(
        &mut self,
        delta: &Delta,
        usage: Usage,
        envelope: &Envelope,
        out: &mut BytesMut,
    ) -> Result<(), RouteError> {
        if !self.begun.contains(&true) {
            // one event says them for all choices
            self.prompt_ids = delta.prompt_ids.clone().or(self.prompt_ids.take());
        }
        if self.readers.is_some() {
            return self.parts(delta, usage, envelope, out);
        }
        let event = ChatChunk { choice: delta.choice, usage, envelope };
        if self.begins(delta.choice) {
            self.role(&event, ROLE, out);
        }
        let ids = delta.ids.as_deref().filter(|ids| !ids.is_empty());
        if !delta.text.is_empty() || !delta.tokens.is_empty() || ids.is_some() {
            event.write(out, |out| {
                out.extend_from_slice(b"{\"content\":");
                json(out, &delta.text);
                out.extend_from_slice(b"}");
                self.write_logprobs(&delta.tokens, ids, out);
            });
        }
        if let Some(finish) = delta.finish {
            event.end(finish.as_str(), out);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! The answer of a chat as one object.

use bytes::BytesMut;

use super::ChatReply;
use crate::http::reply::events::json;
use crate::http::reply::readers::ChoiceReaders;
use crate::http::reply::whole::Shape;
use crate::http::reply::{AnswerHead, ReplyChoice, logprobs, token_ids};
use crate::request::ScoredToken;

impl Shape for ChatReply {
    const OBJECT: &'static str = "chat.completion";

    fn head(&self) -> &AnswerHead {
        &self.head
    }

    fn readers(&mut self) -> Option<&mut ChoiceReaders> {
        self.readers.as_deref_mut()
    }

    fn text(&mut self, _index: usize, choice: &ReplyChoice, out: &mut BytesMut) {
        out.extend_from_slice(b"\"message\":");
        if self.readers.is_some() {
            choice.message.write(self.shows_reasoning, out);
        } else {
            out.extend_from_slice(b"{\"role\":\"assistant\",\"content\":");
            json(out, &choice.text);
            out.extend_from_slice(b",\"refusal\":null}");
        }
        out.extend_from_slice(b",");
    }

    fn columns(&self) -> usize {
        usize::from(self.logprobs.is_some())
    }

    fn open(&self, column: usize, out: &mut BytesMut) {
        out.extend_from_slice(if column == 0 { logprobs::CHAT_OPEN } else { logprobs::CHAT_CLOSE });
    }

    fn token(&mut self, _column: usize, token: &ScoredToken, out: &mut BytesMut) {
        if let Some(vocabulary) = &self.logprobs {
            logprobs::chat_token(vocabulary.as_ref(), token, out);
        }
    }

    const PROMPT_AFTER_ALL: bool = true;

    fn prompt_token(&self, token: &ScoredToken, out: &mut BytesMut) {
        if let Some(vocabulary) = &self.scored_prompt {
            logprobs::prompt_token(vocabulary.as_ref(), token, out);
        }
    }

    fn end(&mut self, choice: &ReplyChoice, out: &mut BytesMut) {
        token_ids::field(token_ids::OF_CHOICE, choice.ids.as_deref(), out);
        self.prompt_ids = self.prompt_ids.take().or_else(|| choice.prompt_ids.clone());
    }

    fn tail(&self, out: &mut BytesMut) {
        token_ids::field(token_ids::OF_PROMPT, self.prompt_ids.as_ref().map(|ids| &ids[..]), out);
    }
}

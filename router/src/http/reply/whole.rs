//! An answer as one JSON object. All of it is there before its first byte is sent, as numbers; text it becomes as the
//! client takes it.

use bytes::BytesMut;

use crate::http::reply::events::json;
use crate::http::reply::pieces::Parts;
use crate::http::reply::readers::ChoiceReaders;
use crate::http::reply::token_log::{Cursor, TokenLog};
use crate::http::reply::{AnswerHead, FINGERPRINT, ReplyChoice, UsageBody};
use crate::limits::memory::MemoryShare;
use crate::request::{ScoredToken, Usage};

/// How the choices of an answer look.
pub(in crate::http) trait Shape: Send + 'static {
    /// The answer's type, in OpenAI's words.
    const OBJECT: &'static str;

    fn head(&self) -> &AnswerHead;

    /// What reads the choices, where they have parts.
    fn readers(&mut self) -> Option<&mut ChoiceReaders> {
        None
    }

    /// The usage with the tokens of reasoning.
    fn count_reasoning(&mut self, usage: Usage) -> Usage {
        let reasoning_tokens = self.readers().map_or(0, |readers| readers.reasoning_tokens());
        Usage { reasoning_tokens, ..usage }
    }

    /// Appends a choice's text, as fields that end with a comma.
    fn text(&mut self, index: usize, choice: &ReplyChoice, out: &mut BytesMut);

    /// How often the tokens with log-probabilities are gone through; 0 if there are none.
    fn columns(&self) -> usize;

    /// Appends what stands before the tokens of this column, or after the last one.
    fn open(&self, column: usize, out: &mut BytesMut);

    /// Appends what this column has of a token.
    fn token(&mut self, column: usize, token: &ScoredToken, out: &mut BytesMut);

    /// Where log-probabilities of the prompt that stand apart are written: after all choices, rather than in each.
    const PROMPT_AFTER_ALL: bool = false;

    /// Appends one token of the prompt, where these stand apart.
    fn prompt_token(&self, _token: &ScoredToken, _out: &mut BytesMut) {}

    /// Appends what the end of a choice has beside its reason, each field after a comma.
    fn end(&mut self, _choice: &ReplyChoice, _out: &mut BytesMut) {}

    /// The same of the whole answer.
    fn tail(&self, _out: &mut BytesMut) {}
}

/// The body of an answer: written piece by piece, as the client takes it.
pub(in crate::http) struct WholeAnswer<S> {
    shape: S,
    choices: Vec<ReplyChoice>,
    usage: Usage,
    at: Part,
    /// The prompt that is to be written.
    prompt: Option<TokenLog>,
    _memory: MemoryShare,
}

/// What is to be written next.
enum Part {
    Head,
    /// The text of this choice.
    Text(usize),
    /// Tokens of a choice; `cursor` is `None` before the first one.
    Tokens {
        choice: usize,
        column: usize,
        cursor: Option<Cursor>,
    },
    /// Tokens of the prompt, of a choice or of all (`None`); `cursor` is `None` before the first one.
    Prompt {
        of: Option<usize>,
        cursor: Option<Cursor>,
    },
    Tail,
}

impl<S: Shape> WholeAnswer<S> {
    pub(in crate::http) fn new(
        shape: S,
        choices: Vec<ReplyChoice>,
        usage: Usage,
        memory: MemoryShare,
    ) -> Self {
        Self { shape, choices, usage, at: Part::Head, prompt: None, _memory: memory }
    }

    fn head(&self, out: &mut BytesMut) {
        let head = self.shape.head();
        out.extend_from_slice(b"{\"id\":");
        json(out, &head.id);
        out.extend_from_slice(b",\"object\":");
        json(out, S::OBJECT);
        out.extend_from_slice(b",\"created\":");
        json(out, &head.created);
        out.extend_from_slice(b",\"model\":");
        json(out, &head.model);
        out.extend_from_slice(b",\"choices\":[");
    }

    fn tail(&self, out: &mut BytesMut) {
        out.extend_from_slice(b",\"usage\":");
        json(out, &UsageBody::from(self.usage));
        out.extend_from_slice(b",\"service_tier\":\"default\",\"system_fingerprint\":");
        json(out, FINGERPRINT);
        self.shape.tail(out);
        out.extend_from_slice(b"}");
    }

    /// The beginning of a choice; gives what follows.
    fn text(&mut self, index: usize, out: &mut BytesMut) -> Part {
        let Some(choice) = self.choices.get(index) else {
            out.extend_from_slice(b"]");
            return Part::Prompt { of: None, cursor: None };
        };
        if index > 0 {
            out.extend_from_slice(b",");
        }
        out.extend_from_slice(b"{\"index\":");
        json(out, &index);
        out.extend_from_slice(b",");
        self.shape.text(index, choice, out);
        out.extend_from_slice(b"\"logprobs\":");
        if self.shape.columns() > 0 {
            return Part::Tokens { choice: index, column: 0, cursor: None };
        }
        out.extend_from_slice(b"null");
        self.end(index, out)
    }

    /// The end of a choice; gives what follows.
    fn end(&mut self, index: usize, out: &mut BytesMut) -> Part {
        // what was written needs no memory any more
        let mut choice = std::mem::take(&mut self.choices[index]);
        let prompt = choice.prompt.take();
        out.extend_from_slice(b",\"finish_reason\":");
        json(out, &choice.finish);
        self.shape.end(&choice, out);
        if let Some(log) = prompt {
            if !S::PROMPT_AFTER_ALL {
                self.prompt = Some(log);
                return Part::Prompt { of: Some(index), cursor: None };
            }
            // all choices have the same
            self.prompt.get_or_insert(log);
        }
        out.extend_from_slice(b"}");
        Part::Text(index + 1)
    }

    /// The next token of the prompt, where those stand apart.
    fn prompt(&mut self, of: Option<usize>, cursor: Option<Cursor>, out: &mut BytesMut) -> Part {
        if let Some(log) = &self.prompt {
            out.extend_from_slice(if cursor.is_none() { b",\"prompt_logprobs\":[" } else { b"" });
            let mut at = cursor.unwrap_or_default();
            if let Some(token) = log.read(&mut at) {
                if cursor.is_some() {
                    out.extend_from_slice(b",");
                }
                self.shape.prompt_token(&token, out);
                return Part::Prompt { of, cursor: Some(at) };
            }
            out.extend_from_slice(b"]");
            self.prompt = None;
        }
        match of {
            None => Part::Tail,
            Some(index) => {
                out.extend_from_slice(b"}");
                Part::Text(index + 1)
            }
        }
    }

    fn tokens(
        &mut self,
        choice: usize,
        column: usize,
        cursor: Option<Cursor>,
        out: &mut BytesMut,
    ) -> Part {
        if cursor.is_none() {
            self.shape.open(column, out);
            if column == self.shape.columns() {
                return self.end(choice, out);
            }
        }
        let mut at = cursor.unwrap_or_default();
        match self.choices[choice].tokens.read(&mut at) {
            None => Part::Tokens { choice, column: column + 1, cursor: None },
            Some(token) => {
                if cursor.is_some() {
                    out.extend_from_slice(b",");
                }
                self.shape.token(column, &token, out);
                Part::Tokens { choice, column, cursor: Some(at) }
            }
        }
    }
}

impl<S: Shape> Parts for WholeAnswer<S> {
    fn write(&mut self, out: &mut BytesMut) -> bool {
        self.at = match self.at {
            Part::Head => {
                self.head(out);
                Part::Text(0)
            }
            Part::Text(index) => self.text(index, out),
            Part::Tokens { choice, column, cursor } => self.tokens(choice, column, cursor, out),
            Part::Prompt { of, cursor } => self.prompt(of, cursor, out),
            Part::Tail => {
                self.tail(out);
                return false;
            }
        };
        true
    }
}

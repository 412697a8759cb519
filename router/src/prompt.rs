//! Text to tokens and tokens to text: chat template, tokeniser with its cache, incremental detokeniser, stop strings.
//!
//! Special tokens written inside a chat message are parsed as special tokens, as `transformers` and its peers do:
//! whoever must not have that rejects or rewrites such content before it gets here.

mod cache;
mod clock;
mod cuts;
mod detokenize;
mod doc;
mod encoding;
mod fast;
mod jinja;
mod length;
mod pieces;
mod pipeline;
mod pool;
mod seams;
mod stop;
mod template;
mod tokenize;

use std::sync::Arc;

pub use cache::{CacheStats, PrefixCache};
pub use detokenize::{Decoded, Decoder};
pub use doc::{GenerationDefaults, ModelDoc};
pub use encoding::Prompt;
pub use pool::TokenizePool;
pub use template::{ChatPrompt, Conventions, MistralCalls};

pub use crate::config::{ReasoningParser, ToolParser};

use crate::config::STRETCH_BYTES;
use crate::error::RouteError;
use crate::limits::memory::{MemoryShare, Refused};
use crate::process::background;
use encoding::{Encoding, HERE_BYTES, Input, Rendering};
pub(crate) use pieces::Pieces;
use pool::{Lane, Turn};
use stop::{StopMatcher, StopSet};
use template::ChatTemplate;
use tokenize::TextTokenizer;

/// Why a model's tokenizer or template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The model document is malformed.
    #[error("the worker's model document is malformed: {0}")]
    Doc(String),
    /// `tokenizers` does not read the tokenizer.
    #[error("the model's tokenizer.json cannot be read: {0}")]
    Tokenizer(#[source] tokenizers::Error),
    /// The decoder cannot be run token by token.
    #[error("the model's tokenizer has a decoder that is not supported: {0}")]
    Decoder(String),
    /// The chat template does not compile.
    #[error("the model's chat template does not compile: {0}")]
    Template(String),
    /// `tokenizers` failed on a text.
    #[error("the tokenizer failed: {0}")]
    Encode(#[source] tokenizers::Error),
}

/// Memory for tokens of recent texts where nobody says how much (a guess, not tuned).
const CACHE_BYTES: usize = 64 << 20;

/// Tokens that a prompt and its answer may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Tokens of prompt and answer together, at most.
    pub context: usize,
    /// Of them, for the answer.
    pub answer: usize,
}

/// Prompts to tokens and answers to text, for one model.
#[derive(Debug)]
pub struct PromptEngine {
    model: Arc<Model>,
    pool: Arc<TokenizePool>,
}

/// What a job on the pool needs. It must not hold the pool: the last handle to a pool joins its threads.
#[derive(Debug)]
struct Model {
    doc: ModelDoc,
    text: TextTokenizer,
    template: Option<ChatTemplate>,
    pieces: Arc<Pieces>,
    /// Longest stretch of a text that cannot be cut.
    stretch_bytes: usize,
}

impl Drop for PromptEngine {
    /// A vocabulary is millions of small pieces of memory, and whoever drops the last handle may hold a lock.
    fn drop(&mut self) {
        background::free(Arc::clone(&self.model));
    }
}

impl PromptEngine {
    /// Reads the tokenizer and compiles the template. Takes a good part of a second for a large vocabulary, so call it
    /// where blocking is allowed.
    ///
    /// # Errors
    /// Says which part of the document cannot be used, and why.
    pub fn new(doc: ModelDoc, pool: Arc<TokenizePool>) -> Result<Self, PromptError> {
        Self::with_cache(doc, pool, PrefixCache::new(CACHE_BYTES), STRETCH_BYTES)
    }

    /// Like [`Self::new`] with a cache that it may share with other models, and with this bound on stretches of texts that
    /// cannot be cut.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_cache(
        mut doc: ModelDoc,
        pool: Arc<TokenizePool>,
        cache: Arc<PrefixCache>,
        stretch_bytes: usize,
    ) -> Result<Self, PromptError> {
        let text = TextTokenizer::new(&std::mem::take(&mut doc.tokenizer), cache)?;
        if let Some(reason) = text.slow() {
            tracing::info!(
                reason,
                "`tokenizers` makes the tokens of a model, many times as slowly"
            );
        }
        if let Some(reason) = text.uncut() {
            tracing::warn!(reason, stretch_bytes, "texts of a model cannot be cut between words");
        }
        let pieces = Arc::new(Pieces::new(text.tokenizer())?);
        let template = match &doc.chat_template {
            Some(source) => Some(ChatTemplate::new(source, &doc)?),
            None => None,
        };
        let model = Arc::new(Model { doc, text, template, pieces, stretch_bytes });
        Ok(Self { model, pool })
    }

    /// The tokens of a prompt.
    ///
    /// A chat is rendered by the template and encoded as it is; plain text gets what the tokenizer puts around a text,
    /// such as a begin-of-text token.
    ///
    /// # Errors
    /// `BadRequest` for what the template rejects, for ids outside the vocabulary and for an empty prompt;
    /// `ContextLengthAtLeast` for a text that cannot fit the model's context, `TextWithoutBreaks` for one that cannot be
    /// tokenised in pieces; `Overloaded` if too many prompts wait; `ShuttingDown`; `Internal` if the tokenizer fails.
    ///
    /// # Cancel safety
    /// A dropped call takes the prompt out of the queue, or ends the work on it after the piece that is being cut.
    pub async fn encode(&self, prompt: Prompt) -> Result<Vec<u32>, RouteError> {
        self.encode_within(prompt, self.whole_context()).await
    }

    /// The same for a prompt that must leave room for an answer. A text is refused, by its length or as soon as it has too
    /// many tokens; token ids are not counted.
    ///
    /// # Errors
    /// As [`Self::encode`].
    ///
    /// # Cancel safety
    /// As [`Self::encode`].
    pub async fn encode_within(&self, prompt: Prompt, room: Room) -> Result<Vec<u32>, RouteError> {
        self.encode_charged(prompt, room, Vec::new(), None).await
    }

    /// The same, where what is cached of the prompt is shared with prompts of the same `salt` alone. What the prompt was
    /// charged is given back when the prompt is gone, which may be after a dropped call.
    ///
    /// # Errors
    /// As [`Self::encode`].
    ///
    /// # Cancel safety
    /// As [`Self::encode`].
    pub async fn encode_charged(
        &self,
        prompt: Prompt,
        room: Room,
        salt: Vec<u8>,
        charge: Option<Arc<MemoryShare>>,
    ) -> Result<Vec<u32>, RouteError> {
        match prompt {
            Prompt::Tokens(ids) => {
                self.model.check_ids(&ids, "prompt")?;
                Ok(ids)
            }
            Prompt::Text(text) => {
                let input = Input::Text { text, special: true };
                self.tokenise(input, room, "prompt", salt, charge).await
            }
            Prompt::Bare(text) => {
                let input = Input::Text { text, special: false };
                self.tokenise(input, room, "prompt", salt, charge).await
            }
            Prompt::Chat(chat) => {
                self.tokenise(Input::Chat(chat), room, "messages", salt, charge).await
            }
        }
    }

    /// The tokens of a text, with or without what the tokenizer puts around one.
    ///
    /// # Errors
    /// As [`Self::encode`].
    ///
    /// # Cancel safety
    /// As [`Self::encode`].
    pub async fn encode_text(&self, text: String, special: bool) -> Result<Vec<u32>, RouteError> {
        self.encode_text_charged(text, special, Vec::new(), None).await
    }

    /// Like [`Self::encode_text`], with a salt and a charge as in [`Self::encode_charged`].
    ///
    /// # Errors
    /// As [`Self::encode`].
    ///
    /// # Cancel safety
    /// As [`Self::encode`].
    pub async fn encode_text_charged(
        &self,
        text: String,
        special: bool,
        salt: Vec<u8>,
        charge: Option<Arc<MemoryShare>>,
    ) -> Result<Vec<u32>, RouteError> {
        let input = Input::Text { text, special };
        self.tokenise(input, self.whole_context(), "prompt", salt, charge).await
    }

    /// Tokens of words as an answer may have them: of each word as it stands, and as it follows a space where those are
    /// other tokens, as many. White space before a word does not count.
    ///
    /// # Errors
    /// `Overloaded`, `ShuttingDown`; `Internal` if the tokenizer fails.
    ///
    /// # Cancel safety
    /// A dropped call takes the work out of the queue.
    pub async fn banned_words(&self, words: Vec<String>) -> Result<Vec<Vec<u32>>, RouteError> {
        let model = Arc::clone(&self.model);
        self.pool
            .run(move || model.text.banned(&words))
            .await?
            .map_err(|error| RouteError::internal("bad words have no tokens", error))
    }

    /// Bytes of the longest text that can fit the model's context: its tokens times the most bytes that one of them can
    /// stand for, which is the longest one of the vocabulary (four times that where the tokenizer composes characters),
    /// and at least 256 where the tokenizer may drop text. Longer ones are refused unseen.
    #[must_use]
    pub fn longest_text(&self) -> usize {
        self.model.longest_text()
    }

    /// A chat as the text that the model gets to see.
    ///
    /// # Errors
    /// As [`Self::encode`].
    ///
    /// # Cancel safety
    /// As [`Self::encode`].
    pub async fn render(&self, chat: ChatPrompt) -> Result<String, RouteError> {
        let bytes = encoding::chat_bytes(&chat);
        let lane = Input::lane_of(&chat, bytes);
        let rendering = Rendering::new(Arc::clone(&self.model), chat);
        self.pool.run_turns(rendering, bytes, lane).await?
    }

    async fn tokenise(
        &self,
        input: Input,
        room: Room,
        param: &'static str,
        salt: Vec<u8>,
        charge: Option<Arc<MemoryShare>>,
    ) -> Result<Vec<u32>, RouteError> {
        let (bytes, lane) = match &input {
            Input::Text { text, .. } => {
                self.model.check_length(text, room)?;
                (text.len(), Lane::Quick)
            }
            Input::Chat(chat) => {
                let bytes = encoding::chat_bytes(chat);
                (bytes, Input::lane_of(chat, bytes))
            }
        };
        let mut encoding = Encoding::new(Arc::clone(&self.model), input, room, param, salt, charge);
        let (mut left, mut lane) = (bytes, lane);
        if bytes <= HERE_BYTES && lane == Lane::Quick && self.model.text.slow().is_none() {
            match self.pool.turn_here(&mut encoding)? {
                Turn::Done(tokens) => return tokens,
                Turn::More { left: bytes, lane: next } => (left, lane) = (bytes, next),
            }
        }
        self.pool.run_turns(encoding, left, lane).await?
    }

    /// Room for a prompt without an answer.
    #[must_use]
    pub fn whole_context(&self) -> Room {
        Room { context: self.model.doc.context_tokens as usize, answer: 0 }
    }

    /// What the worker said about the model, without the tokenizer.
    #[must_use]
    pub fn doc(&self) -> &ModelDoc {
        &self.model.doc
    }

    /// True if the model can chat.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.model.template.is_some()
    }

    /// What the chat template shows of how the model answers.
    #[must_use]
    pub fn conventions(&self) -> Conventions {
        self.model.template.as_ref().map(ChatTemplate::conventions).unwrap_or_default()
    }

    /// Turns the tokens of one choice into text as they come. Choices of one request may share a [`StopStrings`].
    #[must_use]
    pub fn decoder(&self, stop: &[String], skip_special: bool) -> Decoder {
        self.decoder_with(&StopStrings::new(stop), skip_special)
    }

    /// Like [`Self::decoder`], without preparing the stop strings again for every choice.
    #[must_use]
    pub fn decoder_with(&self, stop: &StopStrings, skip_special: bool) -> Decoder {
        Decoder::new(Arc::clone(&self.model.pieces), stop.matcher(), skip_special)
    }

    /// Text of a whole sequence of tokens, as `tokenizers` decodes it. Unknown ids are left out.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut decoder = self.decoder(&[], skip_special);
        decoder.push(ids).text + &decoder.finish()
    }

    /// Text and bytes of one token on its own. The bytes are exact where the tokenizer works on bytes; bytes that are no
    /// UTF-8 are U+FFFD in the text; both are empty for an unknown id.
    #[must_use]
    pub fn token_text(&self, id: u32) -> (String, Vec<u8>) {
        detokenize::token_text(&self.model.pieces, id)
    }

    /// Bytes of one token on its own, as in [`Self::token_text`].
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.model.pieces.piece(id)
    }

    /// The id of a token by its exact name, such as `<|im_end|>`.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.model.text.tokenizer().token_to_id(token)
    }

    /// The id of a special token by its exact name.
    #[must_use]
    pub fn special_token(&self, token: &str) -> Option<u32> {
        self.token_id(token).filter(|id| self.model.pieces.is_special(*id))
    }

    /// What the tokeniser and its cache did so far.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.model.text.stats()
    }
}

/// Stop strings, prepared once for all choices of a request. The default is none.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    set: Option<Arc<StopSet>>,
    included: bool,
}

impl StopStrings {
    /// Empty strings are skipped.
    #[must_use]
    pub fn new(stop: &[String]) -> Self {
        Self { set: StopSet::new(stop), included: false }
    }

    /// As [`Self::new`], charged to `memory` until the last copy drops.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn charged(stop: &[String], memory: MemoryShare) -> Result<Self, Refused> {
        StopSet::charged(stop, memory).map(|set| Self { set, included: false })
    }

    /// What ends a text is part of it, if `included`: a stop string, or the text of a stop token.
    #[must_use]
    pub fn including(self, included: bool) -> Self {
        Self { included, ..self }
    }

    /// What ends a text is part of it.
    #[must_use]
    pub fn included(&self) -> bool {
        self.included
    }

    fn matcher(&self) -> StopMatcher {
        StopMatcher::new(self.set.clone()).including(self.included)
    }
}

impl Room {
    /// Tokens that the prompt may take.
    fn prompt(self) -> usize {
        self.context.saturating_sub(self.answer)
    }

    /// A prompt has so many tokens, or more.
    fn exceeded(self, prompt: usize) -> RouteError {
        RouteError::ContextLengthAtLeast { prompt, answer: self.answer, limit: self.context }
    }
}

impl Model {
    fn template(&self) -> Result<&ChatTemplate, RouteError> {
        self.template.as_ref().ok_or_else(|| {
            let message = "this model has no chat template; use /v1/completions".to_owned();
            bad_request("messages", message)
        })
    }

    fn render(&self, mut chat: ChatPrompt) -> Result<String, RouteError> {
        let own = self.template_of(&mut chat)?;
        let template = own.as_deref().map_or_else(|| self.template(), Ok)?;
        template.render(&template.prepare(chat)?, Some(self.longest_text()))
    }

    /// The template that a request brought along, read.
    fn template_of(&self, chat: &mut ChatPrompt) -> Result<Option<Box<ChatTemplate>>, RouteError> {
        let Some(source) = chat.template.take() else { return Ok(None) };
        let template = ChatTemplate::new(&source, &self.doc);
        let template = template.map_err(|error| {
            let why = match error {
                PromptError::Template(why) => why,
                other @ (PromptError::Doc(_)
                | PromptError::Tokenizer(_)
                | PromptError::Decoder(_)
                | PromptError::Encode(_)) => other.to_string(),
            };
            bad_request("chat_template", format!("`chat_template` cannot be used: {why}"))
        })?;
        Ok(Some(Box::new(template)))
    }

    fn longest_text(&self) -> usize {
        let context = self.doc.context_tokens as usize;
        context.saturating_mul(self.text.least().token_bytes())
    }

    /// Refuses a text that cannot fit before any work is spent on it.
    fn check_length(&self, text: &str, room: Room) -> Result<(), RouteError> {
        // a token for each byte is the most that there can be but for what is put around
        if text.len() <= room.prompt() {
            return Ok(());
        }
        self.text.least().beyond(text, room.prompt()).map_or(Ok(()), |n| Err(room.exceeded(n)))
    }

    fn check_ids(&self, ids: &[u32], param: &str) -> Result<(), RouteError> {
        if ids.is_empty() {
            return Err(bad_request(param, "the prompt is empty".to_owned()));
        }
        let size = self.doc.vocab_size;
        match ids.iter().position(|id| *id >= size) {
            None => Ok(()),
            Some(at) => {
                let id = ids[at];
                let message = format!("token {at} is {id}, but the model's ids are below {size}");
                Err(bad_request(param, message))
            }
        }
    }
}

fn bad_request(param: &str, message: String) -> RouteError {
    RouteError::BadRequest { param: Some(param.to_owned()), message }
}

//! Text to tokens and tokens to text: chat template, tokeniser with its cache, incremental detokeniser, stop strings.
//!
//! Special tokens written inside a chat message are parsed as special tokens, as `transformers` and its peers do:
//! whoever must not have that rejects or rewrites such content before it gets here.

mod cache;
mod clock;
mod detokenize;
mod doc;
mod jinja;
mod pieces;
mod pool;
mod stop;
mod template;
mod tokenize;

use std::sync::Arc;

pub use cache::CacheStats;
pub use detokenize::{Decoded, Decoder};
pub use doc::{GenerationDefaults, ModelDoc};
pub use pool::TokenizePool;

use crate::error::RouteError;
use crate::request::{ChatPrompt, Prompt};
use pieces::Pieces;
use stop::StopSet;
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
    Tokenizer(String),
    /// The decoder cannot be run token by token.
    #[error("the model's tokenizer has a decoder that is not supported: {0}")]
    Decoder(String),
    /// The chat template does not compile.
    #[error("the model's chat template does not compile: {0}")]
    Template(String),
    /// `tokenizers` failed on a text.
    #[error("the tokenizer failed: {0}")]
    Encode(String),
}

/// Memory for tokens of recent texts, per model (a guess, not tuned).
const CACHE_BYTES: usize = 64 << 20;

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
    /// No token stands for more bytes of text than this; `None` where the tokenizer sets no such limit.
    max_token_bytes: Option<usize>,
}

impl PromptEngine {
    /// Reads the tokenizer and compiles the template. Takes a good part of a second for a large vocabulary, so call it
    /// where blocking is allowed.
    ///
    /// # Errors
    /// Says which part of the document cannot be used, and why.
    pub fn new(doc: ModelDoc, pool: Arc<TokenizePool>) -> Result<Self, PromptError> {
        Self::with_cache(doc, pool, CACHE_BYTES)
    }

    /// Like [`Self::new`] with so much memory for the cache; 0 switches it off.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_cache(
        mut doc: ModelDoc,
        pool: Arc<TokenizePool>,
        cache_bytes: usize,
    ) -> Result<Self, PromptError> {
        let text = TextTokenizer::new(&std::mem::take(&mut doc.tokenizer), cache_bytes)?;
        let pieces = Arc::new(Pieces::new(text.tokenizer())?);
        let template = match &doc.chat_template {
            Some(source) => Some(ChatTemplate::new(source, &doc)?),
            None => None,
        };
        let max_token_bytes = text.max_token_bytes(&pieces);
        let model = Arc::new(Model { doc, text, template, pieces, max_token_bytes });
        Ok(Self { model, pool })
    }

    /// The tokens of a prompt.
    ///
    /// A chat is rendered by the template and encoded as it is; plain text gets what the tokenizer puts around a text,
    /// such as a begin-of-text token.
    ///
    /// # Errors
    /// `BadRequest` for what the template rejects, for ids outside the vocabulary and for an empty prompt;
    /// `ContextLength` for a text that cannot fit, whose token count is then the least possible one;
    /// `Overloaded` if too many prompts wait; `ShuttingDown`; `Internal` if the tokenizer fails.
    ///
    /// # Cancel safety
    /// A dropped call changes nothing; work that has begun on the pool is thrown away.
    pub async fn encode(&self, prompt: Prompt) -> Result<Vec<u32>, RouteError> {
        let model = Arc::clone(&self.model);
        match prompt {
            Prompt::Tokens(ids) => {
                model.check_ids(&ids, "prompt")?;
                Ok(ids)
            }
            Prompt::Text(text) => {
                self.pool.run(move || model.encode(&text, true, "prompt")).await?
            }
            Prompt::Chat(chat) => {
                self.pool.run(move || model.encode(&model.render(chat)?, false, "messages")).await?
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
        let model = Arc::clone(&self.model);
        self.pool.run(move || model.encode(&text, special, "prompt")).await?
    }

    /// A chat as the text that the model gets to see.
    ///
    /// # Errors
    /// As [`Self::encode`].
    ///
    /// # Cancel safety
    /// As [`Self::encode`].
    pub async fn render(&self, chat: ChatPrompt) -> Result<String, RouteError> {
        let model = Arc::clone(&self.model);
        self.pool.run(move || model.render(chat)).await?
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

    /// Turns the tokens of one choice into text as they come. Choices of one request may share a [`StopStrings`].
    #[must_use]
    pub fn decoder(&self, stop: &[String], skip_special: bool) -> Decoder {
        self.decoder_with(&StopStrings::new(stop), skip_special)
    }

    /// Like [`Self::decoder`], without preparing the stop strings again for every choice.
    #[must_use]
    pub fn decoder_with(&self, stop: &StopStrings, skip_special: bool) -> Decoder {
        Decoder::new(Arc::clone(&self.model.pieces), stop.0.clone(), skip_special)
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

    /// The id of a token by its exact name, such as `<|im_end|>`.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.model.text.tokenizer().token_to_id(token)
    }

    /// What the tokeniser's cache did so far.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.model.text.stats()
    }
}

/// Stop strings, prepared once for all choices of a request.
#[derive(Debug, Clone)]
pub struct StopStrings(Option<Arc<StopSet>>);

impl StopStrings {
    /// Empty strings are skipped.
    #[must_use]
    pub fn new(stop: &[String]) -> Self {
        Self(StopSet::new(stop))
    }
}

impl Model {
    fn render(&self, chat: ChatPrompt) -> Result<String, RouteError> {
        let Some(template) = &self.template else {
            let message = "this model has no chat template; use /v1/completions".to_owned();
            return Err(bad_request("messages", message));
        };
        template.render(chat, None)
    }

    fn encode(&self, text: &str, special: bool, param: &str) -> Result<Vec<u32>, RouteError> {
        self.check_length(text)?;
        let ids = self.text.encode(text, special);
        let ids = ids.map_err(|e| RouteError::Internal(e.to_string()))?;
        self.check_ids(&ids, param)?;
        Ok(ids)
    }

    /// Refuses a text that cannot fit before any work is spent on it.
    fn check_length(&self, text: &str) -> Result<(), RouteError> {
        let limit = self.doc.context_tokens as usize;
        let Some(longest) = self.max_token_bytes else { return Ok(()) };
        let least = text.len() / longest.max(1);
        if least > limit {
            return Err(RouteError::ContextLength { got: least, prompt: least, answer: 0, limit });
        }
        Ok(())
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

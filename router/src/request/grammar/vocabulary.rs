//! The tokens of a model as the bytes that they add to a text.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::ParserFactory;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use tokenizers::Tokenizer;

use super::compile::{self, Compiled, GrammarError};
use super::memory::GrammarMemory;
use crate::core::frame::Grammar;
use crate::prompt::{ModelDoc, Pieces};

/// A bound of the trie, whose nodes count their parents in a byte.
const LONGEST_TOKEN: usize = 250;

/// What a worker needs of its tokenizer to say which tokens may come next.
pub struct GrammarTokens {
    factory: ParserFactory,
    tokens: usize,
    /// They end answers.
    ends: Arc<[u32]>,
    memory: Arc<GrammarMemory>,
    /// By byte: the tokens that write it before their end.
    holding: Mutex<HashMap<u8, Arc<[u32]>>>,
}

impl std::fmt::Debug for GrammarTokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarTokens").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl GrammarTokens {
    /// Of the document that a worker sends about its model ([`ModelDoc`]).
    ///
    /// # Errors
    /// Which part of the document cannot be used.
    pub fn of_document(json: &[u8]) -> Result<Self, GrammarError> {
        let doc = ModelDoc::parse(json).map_err(GrammarError::new)?;
        let tokenizer = Tokenizer::from_bytes(&doc.tokenizer).map_err(GrammarError::new)?;
        let pieces = Pieces::new(&tokenizer).map_err(GrammarError::new)?;
        let words = (0..doc.vocab_size).map(|id| {
            let special = doc.eos_token_ids.contains(&id) || pieces.is_special(id);
            match tokenizer.id_to_token(id).filter(|_| special) {
                // never part of a text, whatever its name
                Some(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER][..], name.as_bytes()].concat(),
                None => pieces.piece(id).to_vec(),
            }
        });
        Self::new(&words.collect::<Vec<_>>(), &doc.eos_token_ids)
    }

    /// Of tokens that add these bytes to a text, those at `ends` nothing: they end the answer. No token may be longer than 250
    /// bytes; a longer one is never allowed.
    ///
    /// # Errors
    /// What is wrong with the tokens.
    pub fn new(words: &[Vec<u8>], ends: &[u32]) -> Result<Self, GrammarError> {
        let tokens = words.len();
        let size = u32::try_from(tokens).map_err(GrammarError::new)?;
        if let Some(end) = ends.iter().find(|end| **end >= size) {
            return Err(GrammarError(format!("token {end} ends answers, and there are {tokens}")));
        }
        let mut info = TokRxInfo::new(size, ends.first().copied().unwrap_or(INVALID_TOKEN));
        info.vocab_size = size;
        let words: Vec<Vec<u8>> = words
            .iter()
            .map(|word| if word.len() > LONGEST_TOKEN { Vec::new() } else { word.clone() })
            .collect();
        let mut trie = TokTrie::from(&info, &words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(ends);
        }
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let capabilities = InferenceCapabilities::default();
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, capabilities, &slices).map_err(GrammarError::new)?;
        *factory.limits_mut() = compile::limits();
        factory.quiet();
        Ok(Self {
            factory,
            tokens,
            ends: ends.into(),
            memory: Arc::default(),
            holding: Mutex::default(),
        })
    }

    /// All single bytes: enough to say whether a grammar is one.
    pub(super) fn of_bytes() -> &'static Self {
        static BYTES: OnceLock<GrammarTokens> = OnceLock::new();
        BYTES.get_or_init(|| {
            let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
            words.push(vec![TokTrie::SPECIAL_TOKEN_MARKER, b'e']);
            Self::new(&words, &[256]).expect("the bytes are a vocabulary")
        })
    }

    /// How many tokens there are.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Words of 32 bits in a mask.
    #[must_use]
    pub fn mask_words(&self) -> usize {
        self.tokens.div_ceil(32)
    }

    /// # Errors
    /// What is wrong with the grammar, or which bound it passes.
    pub fn compile(&self, grammar: &Grammar) -> Result<Compiled, GrammarError> {
        compile::compile(self, grammar)
    }

    /// What grammars compiled for these tokens hold, and the answers that follow them.
    #[must_use]
    pub fn memory(&self) -> &Arc<GrammarMemory> {
        &self.memory
    }

    /// What a token writes; `None` of special ones, which write nothing.
    pub(super) fn text(&self, token: u32) -> Option<&[u8]> {
        let trie = self.factory.tok_env().tok_trie();
        let known = (token as usize) < self.tokens && !trie.is_special_token(token);
        known.then(|| trie.token(token)).filter(|bytes| !bytes.is_empty())
    }

    /// Tokens that write the beginning of `text`, or all of it, shortest first.
    pub(super) fn beginning(&self, text: &[u8]) -> Vec<u32> {
        let trie = self.factory.tok_env().tok_trie();
        trie.all_prefixes(text)
    }

    /// Tokens that write this byte before their end.
    pub(super) fn holding(&self, byte: u8) -> Arc<[u32]> {
        let mut known = self.holding.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.entry(byte).or_insert_with(|| {
            let size = u32::try_from(self.tokens).unwrap_or(u32::MAX);
            let tokens = (0..size).filter(|token| {
                self.text(*token).is_some_and(|text| text[..text.len() - 1].contains(&byte))
            });
            tokens.collect()
        });
        Arc::clone(found)
    }

    pub(super) fn factory(&self) -> &ParserFactory {
        &self.factory
    }

    pub(super) fn ends(&self) -> Arc<[u32]> {
        Arc::clone(&self.ends)
    }
}

//! Grammars that answers follow: masks of the tokens that may come next, made beside the model on a thread of their own.

#![expect(
    clippy::needless_pass_by_value,
    reason = "arguments are those of Python: owned, and named there"
)]

mod apply;
mod rows;
mod vocabulary;

pub(crate) use apply::{FewTokens, argmax_of_few, mask_logits};
pub(crate) use rows::GrammarRows;
pub(crate) use vocabulary::{AnswerRules, CompiledGrammar, GrammarVocabulary};

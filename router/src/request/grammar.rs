//! Grammars that answers follow: what may be asked for, and which tokens may come next.
//!
//! `llguidance` does the parsing; here are its bounds, the places of what is wrong in a schema, the vocabulary of a model, and
//! the state of one answer, which follows from the tokens of the answer alone. The router compiles a grammar to check it, a
//! worker to use it; both through this module, so that the two cannot disagree.

mod compile;
mod endless;
mod follower;
mod formats;
mod gbnf;
mod known;
mod place;
mod reasoning;
#[cfg(test)]
mod tests;
mod vocabulary;

pub use compile::{Compiled, GrammarError, check_grammar};
pub use endless::endless;
pub use follower::Follower;
pub use formats::spell_out;
pub use gbnf::lark_of_gbnf;
pub use known::{KnownGrammar, KnownGrammars};
pub use place::{SchemaError, check_schema};
pub use vocabulary::GrammarTokens;

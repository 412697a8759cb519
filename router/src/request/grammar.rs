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
mod marker;
mod memory;
mod place;
mod reasoning;
#[cfg(test)]
mod tests;
mod turns;
mod vocabulary;

pub use compile::{Compiled, GrammarError, check_grammar};
pub use endless::endless;
pub use follower::{Follower, MASK_WORK, Masked};
pub use formats::spell_out;
pub use gbnf::lark_of_gbnf;
pub use known::{KnownGrammar, KnownGrammars};
pub use memory::GrammarMemory;
pub use place::{SchemaError, check_schema};
pub use reasoning::ReasoningRules;
pub use turns::{MaskBudget, MaskSpending, MaskTurn, mask_order};
pub use vocabulary::GrammarTokens;

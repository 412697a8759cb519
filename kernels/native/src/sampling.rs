//! From logits to tokens: what requests change about logits ([`edits`]), the best of a row ([`highest`]), and a draw
//! ([`race`]). A row's result depends on that row alone.

pub mod edits;
pub mod highest;
pub mod race;

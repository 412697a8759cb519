//! Logits to tokens for Python: all rows of a step in one call, with the GIL released.

mod draw;
mod logits;

pub(crate) use draw::race;
pub(crate) use logits::{edit_logits, highest_logits};

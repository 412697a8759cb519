//! Workers without a model: a whole engine but for the arithmetic, whose place a step-time model takes.

pub(crate) mod engine;
mod pool;

//! The Headrace router: OpenAI-compatible HTTP on one side, model workers on the other.

pub mod core;
pub mod error;

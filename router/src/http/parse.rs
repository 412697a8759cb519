//! From bytes to a checked request. Everything here is pure, but for reading the body and for what it charges.
//!
//! `body`, `json` and `token_ids` read the body, `headers` its headers; `fields`, `params`, `missing` and `messages` check
//! what both endpoints have in common; `nvext` and `template_fields` are groups of such parameters; `ignored` keeps what changed nothing.

pub(super) mod body;
pub(super) mod fields;
#[cfg(test)]
mod fuzz;
pub(super) mod grammar;
pub(super) mod headers;
pub(super) mod ids;
pub(super) mod ignored;
pub(super) mod json;
pub(super) mod messages;
pub(super) mod missing;
pub(super) mod nvext;
pub(super) mod params;
pub(super) mod prompts;
pub(super) mod renamed;
pub(super) mod template_fields;
pub(super) mod token_ids;

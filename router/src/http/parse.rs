//! From bytes to a checked request. Everything here is pure, but for reading the body and for what it charges.
//!
//! `body`, `json` and `token_ids` read the body, `headers` its headers; `fields`, `params`, `missing` and `messages` check
//! what both endpoints have in common.

pub(super) mod body;
pub(super) mod fields;
#[cfg(test)]
mod fuzz;
pub(super) mod grammar;
pub(super) mod headers;
pub(super) mod ids;
pub(super) mod json;
pub(super) mod messages;
pub(super) mod missing;
pub(super) mod params;
pub(super) mod token_ids;

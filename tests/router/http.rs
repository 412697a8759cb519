//! The OpenAI surface: over real sockets, so that tests see what clients see.

mod access;
mod answers;
mod apis;
mod bad_requests;
mod client;
mod connection;
mod drain;
mod explain;
mod failures;
mod logprobs;
mod long_texts;
mod ops;
mod params;
mod shares;
mod tenants;
mod tools;

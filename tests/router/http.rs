//! The OpenAI surface: over real sockets, so that tests see what clients see.

mod access;
mod answers;
mod bad_requests;
mod client;
mod drain;
mod explain;
mod failures;
mod framing;
mod logprobs;
mod ops;
mod sockets;
mod tenants;

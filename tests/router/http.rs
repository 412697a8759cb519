//! The OpenAI surface: over real sockets, so that tests see what clients see.

mod access;
mod answers;
mod bad_requests;
mod client;
mod descriptors;
mod drain;
mod explain;
mod failures;
mod framing;
mod half_closed;
mod http2;
mod logprobs;
mod long_texts;
mod ops;
mod shares;
mod sockets;
mod tenants;

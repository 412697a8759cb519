//! The OpenAI surface: over real sockets where bytes and time matter, by `oneshot` elsewhere.

mod client;
mod ops;
mod sockets;

//! The Headrace router: OpenAI-compatible HTTP on one side, model workers on the other.
//!
//! Read in this order: [`http`] takes a request in and checks it, [`request`] is its life as straight-line code,
//! [`prompt`] turns text into tokens and back, [`core`] decides where it goes, [`fleet`] talks to the workers.

mod admin;
pub mod app;
mod background;
pub mod cli;
pub mod config;
mod connection;
pub mod core;
mod decision_log;
mod decisions;
mod descriptors;
pub mod error;
pub mod exit;
pub mod fleet;
pub mod http;
mod lock;
pub mod log;
pub mod memory;
pub mod metrics;
mod net;
pub mod prompt;
pub mod request;
pub mod runtime;
pub mod shares;
pub mod shutdown;
pub mod signals;
pub mod stream;

//! The Headrace router: OpenAI-compatible HTTP on one side, model workers on the other.
//!
//! Read in this order: [`http`] takes a request in and checks it, [`request`] is its life as straight-line code,
//! [`prompt`] turns text into tokens and back, [`core`] decides where it goes, [`fleet`] talks to the workers.

pub mod app;
pub mod cli;
pub mod config;
mod connection;
pub mod core;
mod decisions;
pub mod error;
pub mod fleet;
pub mod http;
pub mod limits;
pub mod log;
pub mod metrics;
mod net;
pub mod output;
pub mod process;
pub mod prompt;
pub mod request;
mod response_store;
pub mod server;

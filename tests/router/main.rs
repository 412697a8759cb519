//! Integration tests of the router: real sockets, workers that speak the real protocol.

#![allow(clippy::unwrap_used, reason = "unwrap is for tests, and for their helpers")]

mod blocks;
mod codec;
mod config_file;
mod fake_worker;
mod fleet;
mod golden;
mod http;
mod process;
mod prompt;

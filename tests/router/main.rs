//! Integration tests of the router: real sockets, workers that speak the real protocol.

mod blocks;
mod codec;
mod fake_worker;
mod fleet;
mod golden;
mod http;
mod prompt;

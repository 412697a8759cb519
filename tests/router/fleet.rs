//! Workers that join, work, misbehave and die; and the requests on them.

#![allow(clippy::wildcard_enum_match_arm, reason = "a test names what it waits for, not all else")]

mod block_events;
mod caching;
mod discovery;
mod drain;
mod fake_etcd;
mod handshake;
mod large_events;
mod links;
mod log;
mod many_workers;
mod mishaps;
mod requests;
mod resume;
mod routing;
mod shutdown;
mod split;

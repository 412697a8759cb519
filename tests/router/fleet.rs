//! Workers that join, work, misbehave and die; and the requests on them.

#![allow(clippy::wildcard_enum_match_arm, reason = "a test names what it waits for, not all else")]

mod block_events;
mod caching;
mod drain;
mod foreign;
mod gathering;
mod groups;
mod joining;
mod large_events;
mod links;
mod mishaps;
mod requests;
mod resume;
mod routing;
mod shutdown;
mod split;

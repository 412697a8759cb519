//! The pure part of the router: no I/O, no clock, no runtime. Used unchanged by the router, the Python bindings, the
//! simulator and the benchmarks.

pub mod admission;
pub mod blocks;
pub mod candidate;
pub mod circuit;
pub mod cost;
pub mod decision;
pub mod dispatch;
pub mod estimate;
pub mod events;
pub mod frame;
pub mod index;
pub mod migration;
pub mod policy;
pub mod scheduler;
pub mod secret;
pub mod transfer;

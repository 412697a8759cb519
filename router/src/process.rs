//! The process around the router: its runtime, its signals, threads for long work, and its end.

pub(crate) mod background;
pub(crate) mod cores;
pub mod exit;
pub(crate) mod feed;
pub(crate) mod lock;
pub mod notify;
pub mod runtime;
pub mod signals;
pub mod stopper;

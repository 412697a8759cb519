//! Bounds on what one request, one key, one tenant, one connection and the whole process may hold.

pub mod bucket;
pub(crate) mod descriptors;
pub mod key_ring;
pub mod memory;
pub mod shares;
pub(crate) mod turns;

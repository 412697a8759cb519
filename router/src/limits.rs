//! Bounds on what one request, one tenant, one connection and the whole process may hold.

pub(crate) mod descriptors;
pub mod memory;
pub mod shares;

//! What a router is measured beside: a bare loop of writes, and other routers (`bench/peers/`), which need a worker that they can
//! proxy, and clients that read nothing.

pub(crate) mod http_worker;
pub(crate) mod stalled;
pub(crate) mod writes;

//! What measures Headrace beside other routers (`bench/peers/`): a worker that those can proxy, and clients that read nothing.

pub(crate) mod http_worker;
pub(crate) mod stalled;

//! Connections: how requests are framed, how long they may take, how many there may be, and how they end.

mod descriptors;
mod floods;
mod framing;
mod half_closed;
mod http2;
mod pipelining;
mod sockets;
mod streams;
mod waited;

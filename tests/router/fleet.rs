//! Workers that join, work, misbehave and die; and the requests on them.

mod handshake;
mod links;
mod requests;

//! How workers and routers find each other, who may join, and what the log says of it.

mod certificates;
mod discovery;
mod fake_etcd;
mod handshake;
mod log;
mod many_workers;

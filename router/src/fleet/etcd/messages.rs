//! The messages of etcd's interface (`etcdserverpb` 3.x) that a router and a worker need, with the fields that they read
//! or write; a decoder passes over the others.

use prost::Message;

/// Type of an [`Event`] whose key went; a key that was set is 0.
pub const DELETE: i32 = 1;

/// What is common to all answers.
#[derive(Clone, PartialEq, Message)]
pub struct Header {
    /// Of the whole store.
    #[prost(int64, tag = "3")]
    pub revision: i64,
}

/// A key and its value.
#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    /// Key, with its prefix.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Value, which etcd does not look into.
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
}

/// `KV/Range`: the keys from `key` up to `range_end`.
#[derive(Clone, PartialEq, Message)]
pub struct Range {
    /// First key of the range.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// First key that is not meant any more.
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    /// Most keys that are given; 0 for all.
    #[prost(int64, tag = "3")]
    pub limit: i64,
}

/// The answer to [`Range`].
#[derive(Clone, PartialEq, Message)]
pub struct Ranged {
    /// With the revision that this is of.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// The keys of the range, with their values.
    #[prost(message, repeated, tag = "2")]
    pub kvs: Vec<KeyValue>,
}

/// `KV/Put`: sets a key.
#[derive(Clone, PartialEq, Message)]
pub struct Put {
    /// Key that is set.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Value that the key gets.
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
    /// The lease that the key goes with.
    #[prost(int64, tag = "3")]
    pub lease: i64,
}

/// An answer of which nothing is read.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct UnreadAnswer {}

/// `Lease/LeaseGrant`: begins a lease.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LeaseGrant {
    /// Seconds that the lease lasts unless it is kept alive.
    #[prost(int64, tag = "1")]
    pub ttl_s: i64,
}

/// The answer to [`LeaseGrant`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LeaseGranted {
    /// Number of the lease.
    #[prost(int64, tag = "2")]
    pub id: i64,
}

/// `Lease/LeaseRevoke`: ends a lease.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LeaseRevoke {
    /// Number of the lease.
    #[prost(int64, tag = "1")]
    pub id: i64,
}

/// `Lease/LeaseKeepAlive`: begins a lease's time anew.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct KeepAlive {
    /// Number of the lease.
    #[prost(int64, tag = "1")]
    pub id: i64,
}

/// The answer to [`KeepAlive`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct KeptAlive {
    /// Seconds; none for a lease that is over.
    #[prost(int64, tag = "3")]
    pub ttl_s: i64,
}

/// `Watch/Watch`: what is asked of a stream of changes.
#[derive(Clone, PartialEq, Message)]
pub struct WatchQuestion {
    /// Begins a watch.
    #[prost(message, optional, tag = "1")]
    pub create: Option<WatchCreate>,
}

/// Which keys are watched, and from when on.
#[derive(Clone, PartialEq, Message)]
pub struct WatchCreate {
    /// First key that is watched.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// First key that is not meant any more.
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    /// First revision that is told.
    #[prost(int64, tag = "3")]
    pub start_revision: i64,
}

/// News of a watch.
#[derive(Clone, PartialEq, Message)]
pub struct WatchAnswer {
    /// The watch is over.
    #[prost(bool, tag = "4")]
    pub canceled: bool,
    /// Where the history begins that is still there; 0 unless that is why the watch is over.
    #[prost(int64, tag = "5")]
    pub compact_revision: i64,
    /// Why it is over.
    #[prost(string, tag = "6")]
    pub cancel_reason: String,
    /// What changed, in order.
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<Event>,
}

/// One key that was set or went.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// 0, or [`DELETE`].
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// The key, and the value that it has now.
    #[prost(message, optional, tag = "2")]
    pub kv: Option<KeyValue>,
}

/// `Auth/Authenticate`: a login.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct Login {
    /// User as etcd knows this process.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Password, which no log may show.
    #[prost(string, tag = "2")]
    pub password: String,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The answer to [`Login`].
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct LoggedIn {
    /// What further calls show, and no log.
    #[prost(string, tag = "2")]
    pub token: String,
}

impl std::fmt::Debug for LoggedIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LoggedIn(..)")
    }
}

//! Frames by which one worker's KV reaches another: for a request that is split, and for the hot blocks of a worker
//! that leaves.
//!
//! The bytes go from worker to worker over a connection of their own. Here are only the permission, the start and the
//! result.

use serde::{Deserialize, Serialize};

use super::RequestId;
use super::words::words;
use crate::core::secret::PullKey;

/// Longest ticket in bytes.
pub const MAX_TICKET_BYTES: usize = 256;

/// Bytes of a block's full name, of which its key is the first half.
pub const NAME_BYTES: usize = 16;

/// Makes a leg one that computes the prompt and the first token, and keeps the KV for another worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTransfer {
    /// From the first token on, the blocks stay pinned at most this long.
    pub lease_ms: u32,
    /// The ticket is of use only with this key, which the decode leg gets in [`KvFrom`].
    pub pull_key: PullKey,
}

/// Where the KV of a prompt comes from, when not from this worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvFrom {
    /// The worker that has it.
    pub worker: String,
    /// Its transfer endpoints, best first.
    pub transfer: Vec<String>,
    /// The KV is given up this long after `Continue` (or `Fetch`), and computed here.
    pub timeout_ms: u32,
    /// What the source got in [`KvTransfer`] (or [`MigrationOrder`]).
    pub pull_key: PullKey,
}

/// Has a worker that leaves offer its hottest cached blocks ([`Offer`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationOrder {
    /// Blocks to offer at most.
    pub blocks: u32,
    /// The offer's ticket is of use only with this key, which each receiver gets in its [`Fetch`].
    pub pull_key: PullKey,
}

/// Permission to pull a request's KV. It comes when the request has its blocks, before they are computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvReady {
    /// Number of the request on this link.
    pub request: RequestId,
    /// Made by the transfer back-end of the prefill worker and read by that of the decode worker: at most
    /// [`MAX_TICKET_BYTES`].
    #[serde(with = "serde_bytes")]
    pub ticket: Vec<u8>,
    /// The blocks stay pinned this long after the first token.
    pub lease_ms: u32,
}

words! {
    /// What moves the bytes of a pull.
    TransferBackend {
        /// Shared memory of one host.
        Shm = "shm",
        /// The connection between the workers.
        Tcp = "tcp",
        /// RDMA, or what stands in for it.
        Nixl = "nixl",
        /// GPU memory of one host.
        CudaIpc = "cuda-ipc",
        /// Nothing: workers without a model.
        Mock = "mock",
    }

    /// Why a pull did not bring its blocks.
    TransferFailure {
        /// The source is gone, silent, or cannot be reached.
        Lost = "lost",
        /// The source took its blocks back.
        Revoked = "revoked",
        /// The lease was over.
        Expired = "expired",
        /// The bytes are not those that were sent.
        Checksum = "checksum",
        /// The pull as a whole was too late.
        Timeout = "timeout",
        /// The source does not know the ticket, or not with this pull key, or speaks another version.
        Refused = "refused",
        /// The pools differ.
        Layout = "layout",
        /// One end has as much under way as it takes.
        NoRoom = "no_room",
        /// The puller gave it up.
        Cancelled = "cancelled",
    }
}

impl TransferFailure {
    /// True if the way or the source is to blame, and the next pull from there may fail as well.
    #[must_use]
    pub fn blames_source(self) -> bool {
        match self {
            Self::Lost
            | Self::Revoked
            | Self::Expired
            | Self::Checksum
            | Self::Timeout
            | Self::Refused
            | Self::Layout => true,
            Self::NoRoom | Self::Cancelled => false,
        }
    }
}

/// A pull of KV ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transferred {
    /// The leg that waited for it, or the request of a `Fetch`.
    pub request: RequestId,
    /// The worker that it came from.
    pub worker: String,
    /// What moved the bytes; `None` where it did not come to that.
    pub backend: Option<TransferBackend>,
    /// Blocks that came whole.
    pub blocks: u32,
    /// Bytes that came.
    pub bytes: u64,
    /// Spent on moving the bytes, without the time in which the source had yet to compute them. Of a pull that failed,
    /// from its begin to its end.
    pub ms: f64,
    /// `None` if all came, otherwise why not.
    pub error: Option<TransferFailure>,
}

/// The hottest blocks of the prefix cache, pinned for others to pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// As in [`KvReady`].
    #[serde(with = "serde_bytes")]
    pub ticket: Vec<u8>,
    /// Full names of the blocks, [`NAME_BYTES`] each, parents before children.
    #[serde(with = "serde_bytes")]
    pub names: Vec<u8>,
    /// For each block the place of the one before it in `names`, -1 at the root.
    pub parents: Vec<i32>,
    /// For each block how many requests used it lately.
    pub hits: Vec<u32>,
    /// The blocks stay pinned this long.
    pub lease_ms: u32,
}

/// Passes a [`KvReady`] on to the leg that waits for it. One for a leg that has ended is ignored: it crossed the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The leg with `Submit.kv_from`.
    pub request: RequestId,
    /// As it came in `KvReady`.
    #[serde(with = "serde_bytes")]
    pub ticket: Vec<u8>,
}

/// Lets a leg with `Submit.kv_from` generate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Continue {
    /// Number of the leg on this link.
    pub request: RequestId,
    /// What the prefill worker generated, u32 little-endian, without `Submit.resume`. Empty: nothing comes from there,
    /// the leg computes all by itself.
    #[serde(with = "serde_bytes")]
    pub generated: Vec<u8>,
}

/// Asks for blocks of an [`Offer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// Name for `Transferred` and `Cancel`.
    pub request: RequestId,
    /// The worker that leaves.
    pub kv_from: KvFrom,
    /// As it came in the worker's `Offer`.
    #[serde(with = "serde_bytes")]
    pub ticket: Vec<u8>,
    /// Full names, [`NAME_BYTES`] each, parents before children.
    #[serde(with = "serde_bytes")]
    pub names: Vec<u8>,
    /// For each block the place of the one before it in these `names`, -1 at the root.
    pub parents: Vec<i32>,
    /// For each block its place in the offer.
    pub offset: Vec<u32>,
}

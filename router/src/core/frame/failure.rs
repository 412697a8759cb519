//! The frame by which a worker says that it does not serve a request, and why.

use serde::{Deserialize, Serialize};

use super::RequestId;
use super::words::words;

words! {
    /// Why a worker does not serve a request. The kind alone says whether another worker may succeed.
    FailureKind {
        /// As many requests wait as may.
        QueueFull = "queue_full",
        /// A request of this number is here.
        DuplicateRequest = "duplicate_request",
        /// The prompt has no token.
        EmptyPrompt = "empty_prompt",
        /// Prompt and answer do not fit the context.
        TooLong = "too_long",
        /// The sequence does not fit this worker's KV pool.
        TooBigForPool = "too_big_for_pool",
        /// A token is not in the vocabulary.
        BadToken = "bad_token",
        /// A sampling parameter is out of range.
        BadSampling = "bad_sampling",
        /// The state to go on from cannot be that of this request.
        BadResume = "bad_resume",
        /// No token may go on: the grammar of the answer met a bound, or the vocabulary lacks the bytes that it asks for.
        Grammar = "grammar",
        /// This worker cannot do it as it was started: it moves no KV, for instance.
        Unsupported = "unsupported",
        /// The worker leaves.
        Draining = "draining",
        /// The engine failed.
        Engine = "engine",
    }
}

impl FailureKind {
    /// True if another worker of the same model may succeed.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        match self {
            Self::QueueFull
            | Self::TooBigForPool
            | Self::Unsupported
            | Self::Draining
            | Self::Engine => true,
            Self::DuplicateRequest
            | Self::EmptyPrompt
            | Self::TooLong
            | Self::BadToken
            | Self::BadSampling
            | Self::BadResume
            | Self::Grammar => false,
        }
    }
}

/// A request that this worker does not serve. The worker goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// Number of the request on this link.
    pub request: RequestId,
    /// Why the worker does not serve it.
    pub kind: FailureKind,
    /// The reason for people; programs read `kind`.
    pub message: String,
}

//! Frames by which a router turns a worker away.

use serde::{Deserialize, Serialize};

use super::PROTOCOL;
use super::words::words;

words! {
    /// Why a worker may not join.
    RefuseReason {
        /// A field of the Hello cannot be.
        BadHello = "bad_hello",
        /// The worker does not know the secret of the deployment.
        Secret = "secret",
        /// A field of the Hello differs from that of the other workers of the model.
        Mismatch = "mismatch",
        /// The router knows as many models as it may.
        TooManyModels = "too_many_models",
        /// A worker of this name started later.
        Superseded = "superseded",
        /// The worker came and went too often. It may dial again after `retry_after_ms`.
        Circuit = "circuit",
        /// A worker of this name lives. This one may dial again after `retry_after_ms`.
        NameTaken = "name_taken",
        /// The router has a link to this start of the worker, by another address.
        AlreadyJoined = "already_joined",
    }
}

impl RefuseReason {
    /// True if the worker may dial again, after `retry_after_ms`: nothing about it is wrong, it is not its time.
    #[must_use]
    pub fn says_when(self) -> bool {
        match self {
            Self::Circuit | Self::NameTaken => true,
            Self::BadHello
            | Self::Secret
            | Self::Mismatch
            | Self::TooManyModels
            | Self::Superseded
            | Self::AlreadyJoined => false,
        }
    }
}

/// Why a worker may not join. Programs read `reason`, `router` and `retry_after_ms`; the other texts are for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refuse {
    /// What kind of refusal this is.
    pub reason: RefuseReason,
    /// Name of the router, as in `Welcome`.
    pub router: String,
    /// When the worker may dial again; set exactly where [`RefuseReason::says_when`].
    pub retry_after_ms: Option<u32>,
    /// The field of the Hello that is wrong, such as `fingerprints.tokenizer`; empty where none is.
    pub field: String,
    /// The fleet's value of it.
    pub expected: String,
    /// The worker's value of it.
    pub got: String,
    /// What to do.
    pub message: String,
}

impl Refuse {
    /// True if the worker may dial again: nothing about it is wrong, it is not its time.
    #[must_use]
    pub fn is_for_now(&self) -> bool {
        self.reason.says_when() || self.reason == RefuseReason::AlreadyJoined
    }

    /// The refusal as a sentence for people.
    #[must_use]
    pub fn in_words(&self) -> String {
        let Self { field, expected, got, message, .. } = self;
        if field.is_empty() {
            return message.clone();
        }
        format!("{field} is {got:?}, expected {expected:?}: {message}")
    }
}

/// The worker speaks another version of the protocol. This frame is the same in every version, for workers of all
/// versions have to read it: number 33, four texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherVersion {
    /// The word `protocol`.
    pub field: String,
    /// The router's version.
    pub expected: String,
    /// The worker's version.
    pub got: String,
    /// Which side to update.
    pub message: String,
}

impl OtherVersion {
    /// The answer to a Hello of this version.
    #[must_use]
    pub fn to(got: u16) -> Self {
        let older = if got < PROTOCOL { "worker" } else { "router" };
        Self {
            field: "protocol".into(),
            expected: PROTOCOL.to_string(),
            got: got.to_string(),
            message: format!(
                "this router speaks version {PROTOCOL} of the protocol and this worker version {got}: update the {older}"
            ),
        }
    }
}

//! Why a link ended, as words for people and for metrics.

use std::time::Duration;

use tokio::task::JoinError;

use crate::core::events::OddKeys;
use crate::fleet::codec::{CodecError, ReadError};
use crate::prompt::PromptError;

/// Why a link ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// The worker hung up.
    #[error("the worker closed its link")]
    Closed,
    /// The socket failed.
    #[error("reading failed: {0}")]
    Read(#[source] std::io::Error),
    /// The socket failed.
    #[error("writing failed: {0}")]
    Write(#[source] std::io::Error),
    /// The socket took nothing for `--submit-timeout-ms`.
    #[error("the worker's socket took nothing for {0:?}")]
    WriteStalled(Duration),
    /// What came is no frame.
    #[error(transparent)]
    Frame(#[from] CodecError),
    /// A frame that has no place here.
    #[error("a {0} frame is not expected here")]
    Unexpected(&'static str),
    /// Block events that are none.
    #[error(transparent)]
    Blocks(#[from] OddKeys),
    /// It did not say which blocks it holds.
    #[error("the snapshot of its blocks was not complete within {0:?}")]
    NoSnapshot(Duration),
    /// The model's description is not what was asked for, too long or late.
    #[error("the description of the model {0}")]
    Model(String),
    /// No prompt engine can be made of the model's description.
    #[error("the description of the model is of no use: {0}")]
    ModelOfNoUse(#[source] PromptError),
    /// Whatever read the model's description did not end well.
    #[error("the description of the model cannot be read: {0}")]
    ModelUnread(#[source] JoinError),
    /// Neither a frame nor a heartbeat came in time.
    #[error("no sign of life for {0:?}")]
    Silent(Duration),
    /// Another rank of its group is gone, and it cannot step without it.
    #[error("rank {rank} of its group {group}, worker {worker}, is lost")]
    RankLost {
        /// Name of the group.
        group: String,
        /// The rank that is lost.
        rank: u32,
        /// Its worker.
        worker: String,
    },
    /// It was to leave, and did not.
    #[error("the worker was to leave within {0:?} and did not")]
    DrainLate(Duration),
    /// A newer link of the same worker.
    #[error("the worker dialled again")]
    Replaced,
    /// This router ends.
    #[error("the router is shutting down")]
    Shutdown,
}

/// Why a link took no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotTaken {
    /// It had ended.
    #[error("its link closed")]
    Closed,
    /// There was no room on the way to the worker for `--submit-timeout-ms`.
    #[error("its link is full")]
    Full,
}

impl LinkError {
    /// As a word, for metrics.
    #[must_use]
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Read(_) => "read",
            Self::Write(_) => "write",
            Self::WriteStalled(_) => "write_stalled",
            Self::Frame(CodecError::TooLong { .. }) => "frame_too_long",
            Self::Frame(CodecError::UnknownType { .. }) => "frame_unknown",
            Self::Frame(CodecError::OtherVersion { .. }) => "frame_unexpected",
            Self::Frame(
                CodecError::Truncated { .. }
                | CodecError::Malformed { .. }
                | CodecError::TrailingBytes { .. },
            ) => "frame_malformed",
            Self::Unexpected(_) => "frame_unexpected",
            Self::Blocks(_) => "block_keys",
            Self::NoSnapshot(_) => "no_snapshot",
            Self::Model(_) | Self::ModelOfNoUse(_) | Self::ModelUnread(_) => "model",
            Self::Silent(_) => "silent",
            Self::RankLost { .. } => "rank_lost",
            Self::DrainLate(_) => "drain_late",
            Self::Replaced => "replaced",
            Self::Shutdown => "shutdown",
        }
    }
}

impl From<ReadError> for LinkError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io(error) => Self::Read(error),
            ReadError::Ended { .. } => Self::Closed,
            ReadError::Codec(error) => Self::Frame(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::io;
    use std::sync::Arc;

    use super::*;
    use crate::error::RouteError;

    fn chain(error: &RouteError) -> Vec<String> {
        let first: &dyn Error = error;
        let mut next = Some(first);
        let mut said = Vec::new();
        while let Some(error) = next {
            said.push(error.to_string());
            next = error.source();
        }
        said
    }

    fn lost(error: LinkError) -> RouteError {
        RouteError::WorkerLost { worker: "w1".into(), source: Arc::new(error) }
    }

    #[test]
    fn a_lost_worker_names_every_cause_down_to_the_socket() {
        let reset = || io::Error::new(io::ErrorKind::ConnectionReset, "reset by peer");
        for (error, what) in
            [(LinkError::Read(reset()), "reading"), (LinkError::Write(reset()), "writing")]
        {
            let error = lost(error);
            let broken = format!("{what} failed: reset by peer");
            let whole = format!("worker `w1` was lost: {broken}");
            assert_eq!(chain(&error), [whole, broken, "reset by peer".into()]);
            let cause = error.source().unwrap().source().unwrap();
            let cause = cause.downcast_ref::<io::Error>().unwrap();
            assert_eq!(cause.kind(), io::ErrorKind::ConnectionReset);
        }
        assert_eq!(chain(&lost(LinkError::Closed)).len(), 2);
    }

    #[test]
    fn a_worker_that_was_lost_for_its_model_names_what_is_wrong_with_that() {
        let error = lost(LinkError::ModelOfNoUse(PromptError::Doc("no tokenizer".into())));
        let cause = "the worker's model document is malformed: no tokenizer";
        let said = chain(&error);
        assert_eq!(said[1], format!("the description of the model is of no use: {cause}"));
        assert_eq!(said[2], cause);
    }
}

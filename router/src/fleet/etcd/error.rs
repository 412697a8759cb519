//! Why etcd did not do what it was asked for.

use std::error::Error;
use std::io;

use tonic::{Code, Status};

/// Why etcd did not do what it was asked for. No text holds a password or a token.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member answered; this is what the last one of them met with.
    #[error("{endpoint}: {reason}")]
    Unreachable {
        /// Which member.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No encrypted connection was agreed on with the last member.
    #[error(
        "{endpoint}: TLS: {reason}; look at HEADRACE_ETCD_CA, HEADRACE_ETCD_CERT and HEADRACE_ETCD_KEY"
    )]
    Tls {
        /// Which member.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// User, password or the rights of the user are not good enough.
    #[error(
        "{endpoint}: {reason}; look at HEADRACE_ETCD_USER, HEADRACE_ETCD_PASSWORD and the role of the user"
    )]
    Denied {
        /// Which member.
        endpoint: String,
        /// In etcd's words.
        reason: String,
    },
    /// It is no etcd, or one that cannot do this now.
    #[error("an answer of no use: {0}")]
    Answer(String),
    /// The lease is over.
    #[error("the lease is over")]
    LeaseLost,
    /// The history that a watch should begin with is gone: read again.
    #[error("the history of this prefix was compacted")]
    Compacted,
}

impl EtcdError {
    /// As a word, for metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "etcd_unreachable",
            Self::Tls { .. } => "etcd_tls",
            Self::Denied { .. } => "etcd_denied",
            Self::Answer(_) | Self::Compacted => "etcd_answer",
            Self::LeaseLost => "lease_lost",
        }
    }
}

/// How one member failed, before it is known whether others do better.
#[derive(Debug)]
pub(super) struct MemberRefused {
    kind: Kind,
    reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unreachable,
    Tls,
    Denied,
    /// The token of the login is not known any more.
    Token,
    /// This etcd knows no users.
    NoLogins,
    Answer,
    Lease,
}

impl MemberRefused {
    pub(super) fn unreachable(reason: String) -> Self {
        Self { kind: Kind::Unreachable, reason }
    }

    pub(super) fn tls(reason: String) -> Self {
        Self { kind: Kind::Tls, reason }
    }

    pub(super) fn answer(reason: impl Into<String>) -> Self {
        Self { kind: Kind::Answer, reason: reason.into() }
    }

    /// Of a watch, in words: it has no status.
    pub(super) fn cancelled(reason: &str) -> Self {
        let kind = if reason.contains("permission denied") || reason.contains("auth") {
            Kind::Denied
        } else {
            Kind::Answer
        };
        Self { kind, reason: format!("the watch was cancelled: {}", clip(reason)) }
    }

    /// A connection that did not come about.
    pub(super) fn connecting(error: &(dyn Error + 'static)) -> Self {
        let kind = if is_tls(error) { Kind::Tls } else { Kind::Unreachable };
        Self { kind, reason: chain(error) }
    }

    /// A new login may help.
    pub(super) fn is_token(&self) -> bool {
        self.kind == Kind::Token
    }

    /// There is no need for a login.
    pub(super) fn is_without_logins(&self) -> bool {
        self.kind == Kind::NoLogins
    }

    /// As an error, and whether another member is worth asking: all of them know the same leases and users.
    pub(super) fn at(self, endpoint: &str) -> (EtcdError, bool) {
        let (endpoint, reason) = (endpoint.to_owned(), self.reason);
        match self.kind {
            Kind::Unreachable => (EtcdError::Unreachable { endpoint, reason }, true),
            Kind::Tls => (EtcdError::Tls { endpoint, reason }, true),
            Kind::Denied | Kind::Token => (EtcdError::Denied { endpoint, reason }, false),
            Kind::Answer | Kind::NoLogins => {
                (EtcdError::Answer(format!("{endpoint}: {reason}")), true)
            }
            Kind::Lease => (EtcdError::LeaseLost, false),
        }
    }
}

impl From<Status> for MemberRefused {
    fn from(status: Status) -> Self {
        let text = status.message();
        let kind = match status.code() {
            _ if status.source().is_some_and(is_tls) => Kind::Tls,
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => Kind::Unreachable,
            // what broke under a call has a source, what etcd says has none
            Code::Unknown | Code::Internal if status.source().is_some() => Kind::Unreachable,
            Code::Unauthenticated => Kind::Token,
            Code::PermissionDenied => Kind::Denied,
            // etcd has no code of its own for these
            Code::InvalidArgument if text.contains("auth store is old") => Kind::Token,
            Code::InvalidArgument if text.contains("auth") || text.contains("user") => Kind::Denied,
            Code::FailedPrecondition if text.contains("authentication is not enabled") => {
                Kind::NoLogins
            }
            Code::NotFound if text.contains("lease") => Kind::Lease,
            Code::Ok
            | Code::Unknown
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Internal
            | Code::DataLoss => Kind::Answer,
        };
        let reason = match status.source() {
            Some(source) => chain(source),
            None => clip(text),
        };
        Self { kind, reason }
    }
}

/// A reason for TLS not to come about is somewhere below.
fn is_tls(error: &(dyn Error + 'static)) -> bool {
    sources(error).any(|error| {
        // an io::Error passes over what it is made of when it is asked for its source
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        error.is::<rustls::Error>()
            || inner.is_some_and(|inner| inner.downcast_ref::<rustls::Error>().is_some())
    })
}

fn sources<'e>(
    error: &'e (dyn Error + 'static),
) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error: &&'e (dyn Error + 'static)| error.source())
}

/// What happened, from the outermost words to the innermost; words that say the same again are left out.
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut said = String::new();
    for words in sources(error).map(ToString::to_string) {
        if !said.contains(&words) {
            said += if said.is_empty() { "" } else { ": " };
            said += &words;
        }
    }
    clip(&said)
}

fn clip(text: &str) -> String {
    text.chars().take(300).collect()
}

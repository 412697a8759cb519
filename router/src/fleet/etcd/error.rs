//! Why etcd did not do what it was asked for.

use std::error::Error;
use std::io;

use tonic::{Code, Status};

use crate::error::Causes;

/// What an error came of.
type BoxedCause = Box<dyn Error + Send + Sync>;

/// Why etcd did not do what it was asked for. No text holds a password or a token.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member answered; this is what the last one of them met with.
    #[error("{endpoint}: {reason}")]
    Unreachable {
        /// The member that was asked last, as `HOST:PORT`.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
        /// What it was met with.
        source: Option<BoxedCause>,
    },
    /// No encrypted connection was agreed on with the last member.
    #[error(
        "{endpoint}: TLS: {reason}; look at HEADRACE_ETCD_CA, HEADRACE_ETCD_CERT and HEADRACE_ETCD_KEY"
    )]
    Tls {
        /// The member that was asked last, as `HOST:PORT`.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
        /// What it was met with.
        source: Option<BoxedCause>,
    },
    /// User, password or the rights of the user are not good enough.
    #[error(
        "{endpoint}: {reason}; look at HEADRACE_ETCD_USER, HEADRACE_ETCD_PASSWORD and the role of the user"
    )]
    Denied {
        /// The member that refused, as `HOST:PORT`.
        endpoint: String,
        /// In etcd's words.
        reason: String,
        /// The status of the call, where it had one.
        source: Option<BoxedCause>,
    },
    /// It is no etcd, or one that cannot do this now.
    #[error("an answer of no use: {reason}")]
    Answer {
        /// What is wrong with it.
        reason: String,
        /// The status of the call, where it had one.
        source: Option<BoxedCause>,
    },
    /// The lease is over.
    #[error("the lease is over")]
    LeaseLost,
    /// The history that a watch should begin with is gone: read again.
    #[error("the history of this prefix was compacted")]
    Compacted,
}

impl EtcdError {
    /// An answer that lacks what it should have.
    pub(super) fn answer(reason: impl Into<String>) -> Self {
        Self::Answer { reason: reason.into(), source: None }
    }

    /// As a word, for metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "etcd_unreachable",
            Self::Tls { .. } => "etcd_tls",
            Self::Denied { .. } => "etcd_denied",
            Self::Answer { .. } | Self::Compacted => "etcd_answer",
            Self::LeaseLost => "lease_lost",
        }
    }
}

/// How one member failed, before it is known whether others do better.
#[derive(Debug)]
pub(super) struct MemberRefused {
    kind: Kind,
    reason: String,
    cause: Option<BoxedCause>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unreachable,
    /// A connection that stood broke under a call.
    Broken,
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
    pub(super) fn unreachable(reason: String, cause: impl Error + Send + Sync + 'static) -> Self {
        Self { kind: Kind::Unreachable, reason, cause: Some(Box::new(cause)) }
    }

    /// TLS cannot be tried: its files or what is in them are of no use.
    pub(super) fn tls(reason: String, cause: impl Error + Send + Sync + 'static) -> Self {
        Self { kind: Kind::Tls, reason, cause: Some(Box::new(cause)) }
    }

    pub(super) fn answer(reason: impl Into<String>) -> Self {
        Self { kind: Kind::Answer, reason: reason.into(), cause: None }
    }

    /// Of a watch, in words: it has no status.
    pub(super) fn cancelled(reason: &str) -> Self {
        let kind = if reason.contains("permission denied") || reason.contains("auth") {
            Kind::Denied
        } else {
            Kind::Answer
        };
        let reason = format!("the watch was cancelled: {}", clip(reason));
        Self { kind, reason, cause: None }
    }

    /// A connection that did not come about.
    pub(super) fn connecting(error: impl Error + Send + Sync + 'static) -> Self {
        let kind = if is_tls(&error) { Kind::Tls } else { Kind::Unreachable };
        Self { kind, reason: chain(&error), cause: Some(Box::new(error)) }
    }

    /// A connection that stood, and broke before a call had its answer.
    pub(super) fn broken(error: impl Error + Send + Sync + 'static) -> Self {
        let kind = if is_tls(&error) { Kind::Tls } else { Kind::Broken };
        Self { kind, reason: chain(&error), cause: Some(Box::new(error)) }
    }

    /// What may be wrong where an encrypted connection broke before it gave any answer, and no certificate was shown: etcd
    /// looks for one only after the handshake, from the client's point of view, and then hangs up.
    pub(super) fn without_certificate(mut self) -> Self {
        if matches!(self.kind, Kind::Broken | Kind::Tls) {
            self.reason += "; an etcd with --client-cert-auth wants a certificate of its clients: set HEADRACE_ETCD_CERT \
                 and HEADRACE_ETCD_KEY";
        }
        self
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
        let Self { kind, reason, cause: source } = self;
        let endpoint = endpoint.to_owned();
        match kind {
            Kind::Unreachable | Kind::Broken => {
                (EtcdError::Unreachable { endpoint, reason, source }, true)
            }
            Kind::Tls => (EtcdError::Tls { endpoint, reason, source }, true),
            Kind::Denied | Kind::Token => (EtcdError::Denied { endpoint, reason, source }, false),
            Kind::Answer | Kind::NoLogins => {
                (EtcdError::Answer { reason: format!("{endpoint}: {reason}"), source }, true)
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
            // what broke under a call has a source, what etcd says has none
            Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal
                if status.source().is_some() =>
            {
                Kind::Broken
            }
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => Kind::Unreachable,
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
        Self { kind, reason, cause: Some(Box::new(status)) }
    }
}

/// A reason for TLS not to come about is somewhere below.
fn is_tls(error: &(dyn Error + 'static)) -> bool {
    Causes(error).iter().any(|error| {
        // an io::Error passes over what it is made of when it is asked for its source
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        error.is::<rustls::Error>()
            || inner.is_some_and(|inner| inner.downcast_ref::<rustls::Error>().is_some())
    })
}

/// What happened, with its causes.
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    clip(&Causes(error).to_string())
}

fn clip(text: &str) -> String {
    text.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_connection_that_broke_may_lack_a_certificate_and_one_that_never_stood_does_not() {
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        let hint = "set HEADRACE_ETCD_CERT and HEADRACE_ETCD_KEY";
        let told = |refused: MemberRefused| refused.without_certificate().at("etcd:2379").0;
        let broken = told(MemberRefused::broken(gone()));
        assert_eq!(broken.reason(), "etcd_unreachable");
        assert!(broken.to_string().ends_with(hint), "{broken}");
        let alert = rustls::Error::AlertReceived(rustls::AlertDescription::CertificateRequired);
        let alert = told(MemberRefused::broken(alert));
        assert_eq!(alert.reason(), "etcd_tls");
        assert!(alert.to_string().contains(hint), "{alert}");
        for other in [MemberRefused::connecting(gone()), Status::unavailable("no leader").into()] {
            let other = told(other).to_string();
            assert!(!other.contains("HEADRACE"), "{other}");
        }
    }

    #[test]
    fn what_broke_under_a_call_is_told_from_what_etcd_says() {
        let mut broke = Status::unknown("transport error");
        broke.set_source(Arc::new(io::Error::from(io::ErrorKind::ConnectionReset)));
        assert_eq!(MemberRefused::from(broke).kind, Kind::Broken);
        assert_eq!(MemberRefused::from(Status::unknown("etcdserver: x")).kind, Kind::Answer);
        assert_eq!(MemberRefused::from(Status::unavailable("no leader")).kind, Kind::Unreachable);
    }

    #[test]
    fn an_error_keeps_what_caused_it() {
        let reset = || io::Error::from(io::ErrorKind::ConnectionReset);
        let mut status = Status::unknown("transport error");
        status.set_source(Arc::new(reset()));
        let refused = [
            MemberRefused::connecting(reset()),
            MemberRefused::broken(reset()),
            MemberRefused::tls("cannot read ca.pem".into(), reset()),
            status.into(),
        ];
        for refused in refused {
            let error = refused.at("etcd:2379").0;
            let causes = Causes(&error);
            let socket = causes.iter().find_map(|cause| cause.downcast_ref::<io::Error>());
            assert_eq!(
                socket.map(io::Error::kind),
                Some(io::ErrorKind::ConnectionReset),
                "{error}"
            );
        }
        let denied = MemberRefused::from(Status::permission_denied("etcdserver: no")).at("e:1").0;
        let status = denied.source().and_then(<dyn Error>::downcast_ref::<Status>);
        assert_eq!(status.map(Status::code), Some(Code::PermissionDenied));
        assert!(MemberRefused::answer("no message").at("e:1").0.source().is_none());
    }
}

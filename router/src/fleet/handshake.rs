//! From the dial of a worker to its welcome or its refusal.

mod hello;

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use self::hello::{NAME_BYTES, check};
use super::Setup;
use super::codec::{CodecError, FrameReader, FrameWriter, ReadError};
use super::registry::Registry;
use crate::core::frame::{
    Frame, Hello, OtherVersion, PROTOCOL, Refuse, RefuseReason, Welcome, Word as _,
};
use crate::core::secret::Side;
use crate::net::lobby::Origin;

/// Longest frame before the handshake is over. A Hello has a few hundred bytes.
pub(super) const HELLO_BYTES: usize = 64 << 10;
/// Bytes of a challenge.
const NONCE_BYTES: usize = 16;

/// Why a worker did not join.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The worker of this name was told why.
    #[error("refused: {}", .1.in_words())]
    Refused(String, Box<Refuse>),
    /// It speaks another version of the protocol, and was told so.
    #[error("refused: {}", OtherVersion::to(*.0).message)]
    OtherVersion(u16),
    /// It sent something else.
    #[error("a {0} frame came instead of {1}")]
    Unexpected(&'static str, &'static str),
    /// It hung up.
    #[error("it hung up")]
    Closed,
    /// It sent no frame.
    #[error(transparent)]
    Read(ReadError),
    /// It takes nothing.
    #[error("writing failed: {0}")]
    Write(#[from] std::io::Error),
    /// It was too slow.
    #[error("no handshake within {0:?}")]
    Late(Duration),
    /// It sent nothing.
    #[error("not a byte within {0:?}")]
    Silent(Duration),
    /// It had said nothing, or not enough, when others came.
    #[error("turned out to make room for others")]
    TurnedOut,
    /// The worker does not speak TLS, or not with this certificate.
    #[error("TLS failed: {0}")]
    Tls(#[source] std::io::Error),
}

impl HandshakeError {
    /// Whom it is about, if it said so.
    pub(super) fn worker(&self) -> Option<&str> {
        match self {
            Self::Refused(worker, _) => Some(worker),
            Self::OtherVersion(_)
            | Self::Unexpected(..)
            | Self::Closed
            | Self::Read(_)
            | Self::Write(_)
            | Self::Late(_)
            | Self::Silent(_)
            | Self::TurnedOut
            | Self::Tls(_) => None,
        }
    }

    /// A refusal of the worker with this Hello, whose name may still have any length.
    fn refused(hello: &Hello, refuse: Box<Refuse>) -> Self {
        Self::Refused(hello.worker.chars().take(NAME_BYTES).collect(), refuse)
    }

    /// As words, for metrics.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Refused(_, refuse) => format!("refused_{}", refuse.reason.as_str()),
            Self::OtherVersion(_) => "refused_protocol".into(),
            Self::Unexpected(..) => "handshake_unexpected".into(),
            Self::Closed => "handshake_closed".into(),
            Self::Read(_) => "handshake_frame".into(),
            Self::Write(_) => "handshake_write".into(),
            Self::Late(_) => "handshake_late".into(),
            Self::Silent(_) => "handshake_silent".into(),
            Self::TurnedOut => "handshake_turned_out".into(),
            Self::Tls(_) => "handshake_tls".into(),
        }
    }

    /// What the worker is told; `None` where there is nobody who could read it.
    pub(super) fn answer(&self) -> Option<Frame> {
        match self {
            Self::Refused(_, refuse) => Some(Frame::Refuse(Refuse::clone(refuse))),
            Self::OtherVersion(got) => Some(Frame::OtherVersion(OtherVersion::to(*got))),
            Self::Unexpected(..)
            | Self::Closed
            | Self::Read(_)
            | Self::Write(_)
            | Self::Late(_)
            | Self::Silent(_)
            | Self::TurnedOut
            | Self::Tls(_) => None,
        }
    }
}

impl From<ReadError> for HandshakeError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Codec(CodecError::OtherVersion { got }) => Self::OtherVersion(got),
            error @ (ReadError::Codec(_) | ReadError::Io(_) | ReadError::Ended { .. }) => {
                Self::Read(error)
            }
        }
    }
}

/// A field of a Hello that is wrong, and what would be right.
#[derive(Debug)]
pub(super) struct Misfit {
    pub(super) field: String,
    pub(super) expected: String,
    pub(super) got: String,
    /// What to do.
    pub(super) message: &'static str,
}

impl Misfit {
    /// The refusal for it, by the router of this name.
    pub(super) fn refuse(self, reason: RefuseReason, router: &str) -> Box<Refuse> {
        let Self { field, expected, got, message } = self;
        let (router, message) = (router.to_owned(), message.to_owned());
        Box::new(Refuse { reason, router, retry_after_ms: None, field, expected, got, message })
    }
}

/// Reads the Hello, answers it, and has the secret proved. The worker has been welcomed when this is done.
pub(super) async fn greet<R, W>(
    setup: &Setup,
    registry: &Registry,
    peer: Origin,
    reader: &mut FrameReader<R>,
    writer: &mut FrameWriter<W>,
) -> Result<Hello, HandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let frame = next(reader).await?;
    let Frame::Hello(hello) = frame else {
        return Err(HandshakeError::Unexpected(frame.name(), "hello"));
    };
    let refused = |refuse| HandshakeError::refused(&hello, refuse);
    let router = &setup.name;
    check(&hello).map_err(|misfit| refused(misfit.refuse(RefuseReason::BadHello, router)))?;
    // the fleet's fingerprints are for those who know the secret
    if setup.auth.is_none() {
        registry.may_join(&hello, peer).map_err(refused)?;
    }
    let challenge = setup.auth.map(|_| setup.random_bytes::<NONCE_BYTES>());
    let proof = setup.auth.map(|key| key.proof(Side::Router, &hello.nonce));
    let hash_key = setup.auth.is_none().then_some(setup.hash_key.0);
    let heartbeat = setup.config.fleet.heartbeat.as_millis();
    let welcome = Welcome {
        protocol: PROTOCOL,
        router: setup.name.clone(),
        heartbeat_ms: u32::try_from(heartbeat).expect("an hour at most, says config"),
        challenge: challenge.map(Vec::from).unwrap_or_default(),
        proof: proof.map(Vec::from).unwrap_or_default(),
        hash_key: hash_key.map(Vec::from).unwrap_or_default(),
    };
    send(writer, Frame::Welcome(welcome)).await?;
    if let (Some(key), Some(challenge)) = (setup.auth, challenge) {
        let frame = next(reader).await?;
        let Frame::Prove(prove) = frame else {
            return Err(HandshakeError::Unexpected(frame.name(), "prove"));
        };
        if !key.verify(Side::Worker, &challenge, &prove.proof) {
            let misfit = Misfit {
                field: "secret".into(),
                expected: "the secret of this deployment".into(),
                got: "another one".into(),
                message: "give worker and router the same --secret-file",
            };
            return Err(refused(misfit.refuse(RefuseReason::Secret, router)));
        }
    }
    Ok(hello)
}

async fn next<R: AsyncRead + Unpin>(reader: &mut FrameReader<R>) -> Result<Frame, HandshakeError> {
    reader.next().await?.ok_or(HandshakeError::Closed)
}

/// Sends one frame.
pub(super) async fn send<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    frame: Frame,
) -> Result<(), std::io::Error> {
    writer.push(&frame).map_err(std::io::Error::other)?;
    writer.flush().await
}

//! From the dial of a worker to its welcome or its refusal.

use std::fmt::Display;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use super::Setup;
use super::codec::{FrameReader, FrameWriter, ReadError};
use super::lobby::Peer;
use super::registry::Registry;
use crate::core::blocks::HASH_SCHEME;
use crate::core::frame::{Frame, Hello, PROTOCOL, Refuse, Role, StepCost, Welcome};
use crate::core::secret::Side;

/// Longest frame before the handshake is over. A Hello has a few hundred bytes.
pub(super) const HELLO_BYTES: usize = 64 << 10;
/// Bytes of a challenge.
const NONCE_BYTES: usize = 16;
/// Longest name of a worker or model.
const NAME_BYTES: usize = 256;
/// More of anything than a worker can have.
const SANE: u32 = 1 << 30;
/// More KV blocks than a device can have: of one token each, they would be two terabytes of 32 KiB.
const SANE_BLOCKS: u32 = 1 << 26;
/// Ways to pull KV from one worker.
const TRANSFER_WAYS: usize = 16;
/// More bytes than a KV block can have.
const SANE_BLOCK_BYTES: u64 = 1 << 32;
/// More ms than a token, a row or a step can cost.
const SANE_MS: f64 = 1e6;

/// Why a worker did not join.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The worker of this name was told why.
    #[error("refused: {}", .1.in_words())]
    Refused(String, Refuse),
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
    /// TLS failed.
    #[error("TLS failed: {0}")]
    Tls(std::io::Error),
}

impl HandshakeError {
    /// Whom it is about, if it said so.
    pub(super) fn worker(&self) -> Option<&str> {
        match self {
            Self::Refused(worker, _) => Some(worker),
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

    /// A refusal of the worker with this Hello, whose name may still have any length.
    fn refused(hello: &Hello, refuse: Refuse) -> Self {
        Self::Refused(hello.worker.chars().take(NAME_BYTES).collect(), refuse)
    }

    /// As words, for metrics.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Refused(_, refuse) => format!("refused_{}", refuse.field.replace('.', "_")),
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
}

/// Reads the Hello, answers it, and has the secret proved. The worker has been welcomed when this is done.
pub(super) async fn greet<R, W>(
    setup: &Setup,
    registry: &Registry,
    peer: Peer,
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
    check(&hello).map_err(refused)?;
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
            return Err(refused(Refuse {
                field: "secret".into(),
                expected: "the secret of this deployment".into(),
                got: "another one".into(),
                message: "give worker and router the same --secret-file".into(),
            }));
        }
    }
    Ok(hello)
}

async fn next<R: AsyncRead + Unpin>(reader: &mut FrameReader<R>) -> Result<Frame, HandshakeError> {
    reader.next().await.map_err(HandshakeError::Read)?.ok_or(HandshakeError::Closed)
}

/// Sends one frame.
pub(super) async fn send<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    frame: Frame,
) -> Result<(), std::io::Error> {
    writer.push(&frame).map_err(std::io::Error::other)?;
    writer.flush().await
}

/// What can be said of a Hello without knowing the fleet.
fn check(hello: &Hello) -> Result<(), Refuse> {
    let (prints, capacity) = (&hello.fingerprints, &hello.capacity);
    require(
        hello.protocol == PROTOCOL,
        "protocol",
        &PROTOCOL,
        &hello.protocol,
        "use the same version on both sides",
    )?;
    for (field, text) in [
        ("worker", &hello.worker),
        ("model", &hello.model),
        ("fingerprints.weights", &prints.weights),
        ("fingerprints.tokenizer", &prints.tokenizer),
        ("fingerprints.chat_template", &prints.chat_template),
        ("fingerprints.kv_layout", &prints.kv_layout),
    ] {
        let fine = (1..=NAME_BYTES).contains(&text.len()) && !text.chars().any(char::is_control);
        require(fine, field, &"1 to 256 bytes of printable text", text, "name it otherwise")?;
    }
    check_transfer(hello)?;
    require(
        prints.hash_scheme == HASH_SCHEME,
        "fingerprints.hash_scheme",
        &HASH_SCHEME,
        &prints.hash_scheme,
        "use the same version on both sides",
    )?;
    for (field, n, least) in [
        ("fingerprints.block_tokens", prints.block_tokens, 1),
        ("capacity.sequences", capacity.sequences, 1),
        ("capacity.batched_tokens", capacity.batched_tokens, 1),
        ("capacity.waiting", capacity.waiting, 0),
        ("capacity.host_blocks", capacity.host_blocks, 0),
        ("capacity.disk_blocks", capacity.disk_blocks, 0),
        ("context_tokens", hello.context_tokens, 1),
    ] {
        let expected = format!("{least} to {SANE}");
        let fine = (least..=SANE).contains(&n);
        require(fine, field, &expected, &n, "no worker has that many")?;
    }
    let fine = (1..=SANE_BLOCKS).contains(&capacity.blocks);
    let expected = format!("1 to {SANE_BLOCKS}");
    require(fine, "capacity.blocks", &expected, &capacity.blocks, "no device has that many")?;
    if let Some(prior) = &hello.step_prior {
        let StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms } = *prior;
        let costs = [fixed_ms, prefill_ms, context_ms, row_ms, kv_ms];
        let fine = costs.iter().all(|ms| (0.0..=SANE_MS).contains(ms)); // NaN is in no range
        let fine = fine && costs.iter().sum::<f64>() > 0.0;
        let (expected, got) =
            ("five costs of 0 to 1e6 ms, not all of them 0", format!("{costs:?}"));
        require(fine, "step_prior", &expected, &got, "measure again, or send none")?;
    }
    if let Some(group) = &hello.group {
        let got = format!("rank {} of {}", group.rank, group.size);
        let fine = group.rank < group.size;
        require(fine, "group", &"a rank below the size", &got, "check the group")?;
    }
    let got = format!("{} bytes", hello.nonce.len());
    let fine = hello.nonce.len() == NONCE_BYTES;
    require(fine, "nonce", &"16 bytes", &got, "send 16 random bytes")
}

/// A prefill worker is of use only to those who can pull from it.
fn check_transfer(hello: &Hello) -> Result<(), Refuse> {
    let ways = &hello.transfer;
    let text = format!("{} ways", ways.len());
    let fine = |way: &String| {
        way.len() <= NAME_BYTES && way.contains(':') && !way.chars().any(char::is_control)
    };
    require(
        ways.len() <= TRANSFER_WAYS && ways.iter().all(fine),
        "transfer",
        &format!("at most {TRANSFER_WAYS} addresses such as tcp:HOST:PORT"),
        &text,
        "check --transfer-host",
    )?;
    let moves = !ways.is_empty() && hello.kv_block_bytes > 0;
    require(
        hello.role != Role::Prefill || moves,
        "transfer",
        &"a way to pull KV from a prefill worker",
        &text,
        "start it without --no-transfer, or with --role both",
    )?;
    require(
        hello.kv_block_bytes <= SANE_BLOCK_BYTES,
        "kv_block_bytes",
        &format!("0 to {SANE_BLOCK_BYTES}"),
        &hello.kv_block_bytes,
        "no block is that large",
    )
}

fn require(
    fine: bool,
    field: &str,
    expected: &dyn Display,
    got: &dyn Display,
    message: &str,
) -> Result<(), Refuse> {
    if fine {
        return Ok(());
    }
    Err(Refuse {
        field: field.into(),
        expected: expected.to_string(),
        got: got.to_string(),
        message: message.into(),
    })
}

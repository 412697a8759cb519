//! The beginning of a link: who dials in, whether both sides know the secret, and what the model is.

use std::time::Duration;

use anyhow::{Context as _, bail};
use headrace_router::core::frame::{Frame, Hello, ModelPart, Prove};
use headrace_router::core::secret::{AuthKey, HashKey, Side};
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use tokio::io::{AsyncRead, AsyncWrite};

use super::worker::Worker;

/// Bytes of one `Model` part.
const PART_BYTES: usize = 1 << 20;

/// The router does not want this worker: dialling again cannot help.
#[derive(Debug, thiserror::Error)]
#[error("{worker} was refused: {text}")]
pub(super) struct Refused {
    worker: String,
    text: String,
}

/// Shakes hands: how often to give a sign of life, and the key of the block hash.
///
/// # Errors
/// [`Refused`], or the link broke.
pub(super) async fn greet(
    worker: &Worker,
    hello: &Hello,
    reader: &mut FrameReader<impl AsyncRead + Unpin>,
    writer: &mut FrameWriter<impl AsyncWrite + Unpin>,
) -> anyhow::Result<(Duration, HashKey)> {
    writer.push(&Frame::Hello(hello.clone()))?;
    writer.flush().await?;
    let refused = |text: String| Refused { worker: hello.worker.clone(), text };
    let welcome = match reader.next().await? {
        Some(Frame::Welcome(welcome)) => welcome,
        Some(Frame::Refuse(refuse)) => {
            if refuse.is_for_now() {
                bail!(refuse.in_words());
            }
            bail!(refused(refuse.in_words()));
        }
        Some(Frame::OtherVersion(other)) => bail!(refused(other.message)),
        Some(other) => bail!("expected Welcome, got {}", other.name()),
        None => bail!("the router hung up"),
    };
    let hash_key = match (worker.secret(), welcome.challenge.is_empty()) {
        (None, true) => {
            let key = welcome.hash_key.try_into().ok().context("the hash key is not 32 bytes")?;
            HashKey(key)
        }
        (None, false) => bail!(refused("the router wants a secret: give --secret-file".into())),
        (Some(_), true) => bail!(refused("the router has no secret: leave it out".into())),
        (Some(secret), false) => {
            let key = AuthKey::derive(secret);
            if !key.verify(Side::Router, &hello.nonce, &welcome.proof) {
                bail!(refused("the router does not know the secret".into()));
            }
            let proof = key.proof(Side::Worker, &welcome.challenge).to_vec();
            writer.push(&Frame::Prove(Prove { proof }))?;
            HashKey::derive(secret)
        }
    };
    Ok((Duration::from_millis(u64::from(welcome.heartbeat_ms.max(1))), hash_key))
}

/// A model description in parts.
pub(super) fn parts(fingerprint: &str, document: &[u8]) -> Vec<ModelPart> {
    let chunks: Vec<_> = document.chunks(PART_BYTES).collect();
    let part = |(number, data): (usize, &&[u8])| ModelPart {
        fingerprint: fingerprint.to_owned(),
        part: u32::try_from(number).expect("few parts"),
        last: number + 1 == chunks.len(),
        data: data.to_vec(),
    };
    chunks.iter().enumerate().map(part).collect()
}

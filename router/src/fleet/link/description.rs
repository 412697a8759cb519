//! The description of a model, while its parts come in.

use tokio::time::Instant;

use super::error::LinkError;
use crate::core::frame::ModelPart;

/// Longest description of a model. Tokenisers of 250,000 tokens have about 35 MB.
const MODEL_BYTES: usize = 256 << 20;

/// What has come so far.
#[derive(Debug)]
pub(super) struct Description {
    pub(super) fingerprint: String,
    pub(super) since: Instant,
    pub(super) document: Vec<u8>,
    parts: u32,
}

impl Description {
    /// Asked for, nothing has come.
    pub(super) fn new(fingerprint: String, since: Instant) -> Self {
        Self { fingerprint, since, document: Vec::new(), parts: 0 }
    }

    /// Takes in the next part.
    pub(super) fn take_in(&mut self, part: &ModelPart) -> Result<(), LinkError> {
        let wrong = |what: &str| Err(LinkError::Model(what.to_owned()));
        if part.fingerprint != self.fingerprint {
            return wrong("has another fingerprint than asked for");
        }
        if part.part != self.parts {
            return wrong("has parts out of order");
        }
        if self.document.len() + part.data.len() > MODEL_BYTES {
            return wrong("is too long");
        }
        self.parts += 1;
        self.document.extend_from_slice(&part.data);
        Ok(())
    }
}

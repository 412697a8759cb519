//! The description of a model, while its parts come in.

use tokio::time::Instant;

use super::error::LinkError;
use crate::core::frame::ModelPart;
use crate::fleet::budget::{DescriptionBytes, DescriptionCharge};

/// Longest description of a model. Tokenizers of 250,000 tokens have about 35 MB.
const MODEL_BYTES: usize = 96 << 20;

/// What has come so far.
#[derive(Debug)]
pub(in crate::fleet) struct Description {
    pub(in crate::fleet) fingerprint: String,
    pub(super) since: Instant,
    pub(in crate::fleet) document: Vec<u8>,
    pub(in crate::fleet) charge: DescriptionCharge,
    parts: u32,
}

impl Description {
    /// Asked for, nothing has come.
    pub(super) fn new(fingerprint: String, since: Instant, charge: DescriptionCharge) -> Self {
        Self { fingerprint, since, document: Vec::new(), charge, parts: 0 }
    }

    /// Takes in the next part.
    pub(super) fn take_in(
        &mut self,
        part: &ModelPart,
        all: &DescriptionBytes,
    ) -> Result<(), LinkError> {
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
        if !all.more(&mut self.charge, part.data.len()) {
            return wrong(
                "does not fit beside those of other models: raise --max-description-bytes",
            );
        }
        self.parts += 1;
        self.document.extend_from_slice(&part.data);
        Ok(())
    }
}

//! What one worker pulled from others, for `/workers`.

use serde_json::{Value, json};

use crate::core::frame::{TransferBackend, TransferFailure, Transferred, Word};
use crate::metrics::backend_label;

/// Counts by back-end.
#[derive(Debug, Default, Clone)]
pub(super) struct Pulls {
    /// One for each of `BACKENDS`.
    done: [Pulled; BACKENDS],
    failed: u64,
    last_error: Option<TransferFailure>,
}

/// The back-ends, and none.
const BACKENDS: usize = TransferBackend::ALL.len() + 1;

#[derive(Debug, Default, Clone, Copy)]
struct Pulled {
    pulls: u64,
    blocks: u64,
    bytes: u64,
    ms: f64,
}

impl Pulls {
    pub(super) fn note(&mut self, pull: &Transferred) {
        if let Some(error) = pull.error {
            self.failed += 1;
            self.last_error = Some(error);
            return;
        }
        let place = TransferBackend::ALL.iter().position(|known| Some(*known) == pull.backend);
        let sum = &mut self.done[place.unwrap_or(BACKENDS - 1)];
        sum.pulls += 1;
        sum.blocks += u64::from(pull.blocks);
        sum.bytes = sum.bytes.saturating_add(pull.bytes);
        sum.ms += if pull.ms.is_finite() { pull.ms.max(0.0) } else { 0.0 };
    }

    pub(super) fn as_json(&self) -> Value {
        let known = TransferBackend::ALL.iter().copied().map(Some).chain([None]);
        let used = known.zip(self.done).filter(|(_, sum)| sum.pulls > 0);
        let backends: serde_json::Map<String, Value> = used
            .map(|(backend, Pulled { pulls, blocks, bytes, ms })| {
                let sums = json!({"pulls": pulls, "blocks": blocks, "bytes": bytes, "ms": ms});
                (backend_label(backend).to_owned(), sums)
            })
            .collect();
        json!({"backends": backends, "failed": self.failed, "last_error": self.last_error})
    }
}

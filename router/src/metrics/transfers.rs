//! KV that went from worker to worker, as the workers tell it.

use std::time::Duration;

use super::kinds::labels::ByPull;
use super::kinds::{Counter, Histogram, Labelled, group};
use crate::core::frame::{TransferBackend, Transferred, Word};

/// Back-end of a pull as a label, also of one that did not come to any.
pub(crate) fn backend_label(backend: Option<TransferBackend>) -> &'static str {
    backend.map_or("none", Word::as_str)
}

group! {
    /// KV that went from worker to worker, as the workers tell it.
    Transfers {
        pulls: Labelled<ByPull> = "headrace_transfers_total",
            "Pulls of KV between workers. Where one failed, the decode worker computed the prompt.";
        bytes: Counter = "headrace_transfer_bytes_total",
            "KV that was pulled.";
        seconds: Histogram = "headrace_transfer_seconds",
            "Pulls of KV between workers that went well.";
    }
}

impl Transfers {
    /// A pull ended, well or not.
    pub(crate) fn pulled(&self, pull: &Transferred) {
        let outcome = pull.error.map_or("ok", Word::as_str);
        self.pulls.inc(ByPull { backend: backend_label(pull.backend), outcome });
        if pull.error.is_none() {
            self.bytes.inc_by(pull.bytes);
            let seconds = if pull.ms > 0.0 { (pull.ms / 1e3).min(1e6) } else { 0.0 }; // of NaN, too
            self.seconds.observe(Duration::from_secs_f64(seconds));
        }
    }
}

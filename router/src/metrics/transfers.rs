//! KV that went from worker to worker, as the workers tell it.

use std::time::Duration;

use super::kinds::{Counter, Histogram, Labelled, group};
use super::labels::ByPull;

/// Words of workers that become labels; any other word becomes `other`, so that nobody can make labels without end.
pub(crate) const BACKENDS: [&str; 5] = ["shm", "tcp", "nixl", "cuda-ipc", "none"];
pub(crate) const OUTCOMES: [&str; 10] = [
    "ok",
    "lost",
    "revoked",
    "expired",
    "checksum",
    "timeout",
    "refused",
    "layout",
    "no_room",
    "cancelled",
];

/// `word`, if it is one of `words`.
pub(crate) fn known_word<'a>(words: &[&'a str], word: &str) -> &'a str {
    words.iter().find(|known| **known == word).copied().unwrap_or("other")
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
    /// A pull ended, with this error or well.
    pub(crate) fn pulled(&self, backend: &str, bytes: u64, ms: f64, error: Option<&str>) {
        let outcome = known_word(&OUTCOMES, error.unwrap_or("ok"));
        self.pulls.inc(ByPull { backend: known_word(&BACKENDS, backend), outcome });
        if error.is_none() {
            self.bytes.inc_by(bytes);
            let seconds = if ms > 0.0 { (ms / 1e3).min(1e6) } else { 0.0 }; // of NaN, too
            self.seconds.observe(Duration::from_secs_f64(seconds));
        }
    }
}

//! What the scheduler remembers of a leg from its placement to its end.

mod deadlines;
mod leases;

use std::sync::Arc;

pub use self::deadlines::LegDeadlines;
use super::{PlacementRequest, Withdrawal};
use crate::core::candidate::WorkerId;
use crate::core::frame::RequestId;

/// Booked blocks count as there for this long, or for so many times the predicted time to the first token, whichever is
/// longer. A guess: twice would do if predictions were always right.
const LEASE_MS: f64 = 10_000.0;
const LEASE_TTFTS: f64 = 3.0;

/// How much of a request a leg is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LegPart {
    /// All of it.
    Whole,
    /// Its prompt, with the first token.
    Prefill,
    /// The rest; the KV of the prompt comes from elsewhere.
    Decode,
}

/// A prompt on the same worker that computes blocks which another one counts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AwaitedLeg {
    pub(super) request: RequestId,
    /// Tokens that it may still have to compute then.
    pub(super) left: u32,
}

/// What one worker is booked for.
#[derive(Debug)]
pub(super) struct BookedLeg {
    pub(super) part: LegPart,
    pub(super) worker: WorkerId,
    pub(super) tenant: u64,
    /// It makes way for others.
    pub(super) yields: bool,
    pub(super) prompt_tokens: u32,
    /// Prompt and longest answer, as far as they are its own.
    pub(super) tokens: u64,
    pub(super) keys: Arc<[u64]>,
    /// Leading blocks that the worker said it holds, at the placement and ever since.
    pub(super) held_blocks: u32,
    /// Leading tokens that its placement counted on.
    pub(super) cached_tokens: u32,
    /// Who computes what it counts on and what is not there yet.
    pub(super) awaits: Option<AwaitedLeg>,
    /// Its blocks count as there.
    pub(super) booked: bool,
    pub(super) placed_ms: f64,
    pub(super) lease_ms: f64,
    pub(super) predicted_ttft_ms: f64,
    /// By how much later it is predicted since others were placed behind it; and those that came in the same moment.
    pub(super) delayed_ms: f64,
    pub(super) settled_ms: f64,
    pub(super) expected_block_seconds: f64,
    /// Reports of the worker before it was booked.
    pub(super) reports: u64,
    /// Its first token came.
    pub(super) begun: bool,
    /// When the first token came; before that nothing.
    pub(super) begun_ms: f64,
    /// Of each token after the first.
    pub(super) predicted_tpot_ms: f64,
}

impl BookedLeg {
    pub(super) fn new(
        wanted: &PlacementRequest,
        part: LegPart,
        worker: WorkerId,
        now_ms: f64,
        predicted_ttft_ms: f64,
    ) -> Self {
        let answer = if part == LegPart::Prefill { 0 } else { wanted.max_tokens };
        Self {
            part,
            worker,
            tenant: wanted.tenant,
            yields: wanted.yields,
            prompt_tokens: wanted.prompt_tokens,
            tokens: u64::from(wanted.prompt_tokens) + u64::from(answer),
            keys: Arc::clone(&wanted.keys),
            held_blocks: 0,
            cached_tokens: 0,
            awaits: None,
            booked: false,
            placed_ms: now_ms,
            lease_ms: now_ms + LEASE_MS.max(LEASE_TTFTS * predicted_ttft_ms),
            predicted_ttft_ms,
            delayed_ms: 0.0,
            settled_ms: 0.0,
            expected_block_seconds: 0.0,
            reports: 0,
            begun: false,
            begun_ms: 0.0,
            predicted_tpot_ms: 0.0,
        }
    }

    /// What its tenant pays for, if it ends now.
    pub(super) fn ended(&self, output_tokens: u32, block_tokens: u32, now_ms: f64) -> Ended {
        let tokens = f64::from(self.prompt_tokens) + f64::from(output_tokens) / 2.0;
        let seconds = (now_ms - self.placed_ms).max(0.0) / 1e3;
        Ended {
            worker: self.worker,
            tenant: self.tenant,
            block_seconds: tokens / f64::from(block_tokens) * seconds,
            expected_block_seconds: self.expected_block_seconds,
        }
    }
}

/// A leg got its first token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Begun {
    /// The worker that the leg is on.
    pub worker: WorkerId,
    /// Prompt tokens that the worker had said it holds.
    pub held_tokens: u32,
    /// Those that were in its own cache.
    pub cached_tokens: u32,
    /// Placement to the first token of this leg, as predicted; in a split the second one's is that of its decode leg.
    pub predicted_ttft_ms: f64,
    /// The same, with those that were placed behind it in the same moment.
    pub settled_ttft_ms: f64,
    /// The same, with all that were placed behind it.
    pub last_ttft_ms: f64,
    /// As it was.
    pub ttft_ms: f64,
    /// Set if the worker is not believed any more: ask it for a snapshot.
    pub withdrawn: Option<Withdrawal>,
}

/// What a leg gave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LegOutput {
    /// Tokens that came.
    pub tokens: u32,
    /// It came to its own end: these tokens tell how long answers are.
    pub complete: bool,
}

/// What the outputs of a step gave to requests that had their first token before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Given {
    /// Requests that got tokens.
    pub rows: u32,
    /// Tokens that they got together.
    pub tokens: u32,
}

impl Given {
    /// One more request got so many.
    pub fn add(&mut self, tokens: usize) {
        self.rows = self.rows.saturating_add(1);
        self.tokens = self.tokens.saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
    }
}

/// A leg ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ended {
    /// The worker that the leg is on.
    pub worker: WorkerId,
    /// Whose it was.
    pub tenant: u64,
    /// KV blocks that it held, times the seconds.
    pub block_seconds: f64,
    /// As predicted at its placement.
    pub expected_block_seconds: f64,
}

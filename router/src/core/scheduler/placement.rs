//! What asks for a place, and the place that it gets. A request is described once: whoever waits in the queue, whoever is
//! chosen for it and what is booked all go by this description.

use std::sync::Arc;

use crate::core::candidate::WorkerId;
use crate::core::decision::{Decision, NoPlace};
use crate::core::frame::RequestId;

/// A request, or the rest of one that began before, to be placed.
#[derive(Debug, Clone)]
pub struct PlacementRequest {
    /// Name on the links, and in the queue; unique, and later ones are greater.
    pub request: RequestId,
    /// Name of its prefill leg, if it comes to a split; unique, too.
    pub prefill_request: RequestId,
    /// Name that its client knows.
    pub name: Arc<str>,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the longest answer that it may get.
    pub max_tokens: u32,
    /// Keys of all full blocks of the prompt.
    pub keys: Arc<[u64]>,
    /// It can use what is cached. One that wants its prompt's log-probabilities has to compute the prompt.
    pub reuses: bool,
    /// What names the session: the key of `session-hash`, a hint for `kv`.
    pub session: Option<String>,
    /// Whose request it is.
    pub tenant: u64,
    /// Higher goes first.
    pub priority: i8,
    /// Its tenant has many answers in flight: it leaves the last places to others.
    pub yields: bool,
    /// When the first token is wanted, in the scheduler's time.
    pub deadline_ms: Option<f64>,
    /// Workers that failed it before.
    pub excluded: Vec<WorkerId>,
    /// Its client has a part of the answer: it is never refused for want of a worker but waits, and where only workers that
    /// failed it take work, one of them is taken.
    pub resumes: bool,
    /// The decision about it is to be explained, with all its candidates.
    pub explains: bool,
}

impl PlacementRequest {
    /// Its memory while it waits. The prompt itself waits, too.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let own = size_of::<Self>() + self.name.len() + 8 * self.keys.len();
        own as u64 + 4 * u64::from(self.prompt_tokens)
    }
}

/// Where a leg goes; booked.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Number of the leg on the worker's link.
    pub request: RequestId,
    /// Where; in a split, the worker that decodes.
    pub worker: WorkerId,
    /// Who computes the prompt, where that is another worker.
    pub prefill: Option<PrefillLeg>,
    /// KV blocks that it is likely to hold, times the seconds.
    pub expected_block_seconds: f64,
    /// How that came about.
    pub decision: Arc<Decision>,
}

/// There is no place, and why.
#[derive(Debug)]
pub struct NotPlaced {
    /// The first reason.
    pub no_place: NoPlace,
    /// Workers that were left out because they failed it before, if no other one has room for anybody.
    pub where_it_failed: Option<Vec<WorkerId>>,
    /// How that came about.
    pub decision: Arc<Decision>,
}

/// The other half of a split request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillLeg {
    /// Which leg: [`PlacementRequest::prefill_request`].
    pub request: RequestId,
    /// The worker that the leg is on.
    pub worker: WorkerId,
}

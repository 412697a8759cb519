//! A worker as one decision sees it: numbers only, copied out of the scheduler's state, so that a decision can be written
//! down and made again elsewhere.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::core::estimate::{
    DecodeLeg, Demand, Estimate, PromptQueue, Source, WorkerLoad, of_role,
};
use crate::core::frame::Role;
use crate::core::transfer::Sources;

/// One link of a worker to this router; a worker that dials again gets a new one. They grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u32);

/// Name of a worker, with its digest, which every decision about a session needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Arc<str>", into = "Arc<str>")]
pub struct WorkerName {
    text: Arc<str>,
    digest: u64,
}

impl WorkerName {
    /// The name as a number, by [`digest`].
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// As text that can be kept.
    #[must_use]
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }
}

impl From<Arc<str>> for WorkerName {
    fn from(text: Arc<str>) -> Self {
        let digest = digest(&text);
        Self { text, digest }
    }
}

impl From<String> for WorkerName {
    fn from(text: String) -> Self {
        Arc::<str>::from(text).into()
    }
}

impl From<WorkerName> for Arc<str> {
    fn from(name: WorkerName) -> Self {
        name.text
    }
}

impl Deref for WorkerName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for WorkerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Why a worker is not chosen, whatever it would cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exclusion {
    /// It takes no new work: joining, suspect or draining.
    Closed,
    /// It failed this request before.
    Failed,
    /// Batch and queue are taken.
    Full,
    /// Like all others of its kind, it has more ms of prompts ahead than `--worker-queue-ms`.
    Backlog,
    /// It only computes prompts, and their KV cannot be moved.
    NoTransfer,
}

/// The place of a worker in an expert-parallel group, whose ranks step together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRank {
    /// Name of the group.
    pub group: Arc<str>,
    /// Its number in it.
    pub rank: u32,
}

/// A worker, as far as the choice is concerned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The worker's number.
    pub id: WorkerId,
    /// The worker's name, with its digest.
    pub name: WorkerName,
    /// What it does.
    #[serde(default = "both", skip_serializing_if = "does_both")]
    pub role: Role,
    /// Its place in a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupRank>,
    /// Set if it cannot be chosen.
    pub excluded: Option<Exclusion>,
    /// Requests that it has, as far as is known.
    pub occupied: u32,
    /// Sequences that may run at once.
    pub sequences: u32,
    /// Prompts and longest answers that this router has there.
    pub booked_tokens: u64,
    /// Leading tokens of the prompt that it says it holds, as far as it is believed. Never the last one.
    pub held_tokens: u32,
    /// The same with what is booked to be computed there: what whoever computes the prompt there counts on.
    pub cached_tokens: u32,
    /// Leading tokens that others pull there: with those cached, what a decode leg counts on.
    #[serde(default, skip_serializing_if = "no_tokens")]
    pub coming_tokens: u32,
    /// Leading tokens that it holds in a lower tier. Shown, not counted: nothing says yet what fetching them costs.
    pub lower_tier_tokens: u32,
    /// How it stands.
    pub worker_load: WorkerLoad,
    /// The prompts that it has.
    #[serde(default, skip_serializing_if = "PromptQueue::is_empty")]
    pub queue: PromptQueue,
    /// What pulling KV costs it; only where it can, and there are prefill workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sources: Option<Arc<Sources>>,
}

fn both() -> Role {
    Role::Both
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn no_tokens(tokens: &u32) -> bool {
    *tokens == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn does_both(role: &Role) -> bool {
    *role == Role::Both
}

impl Candidate {
    /// What a worker of its role costs: one that only computes prompts, that of the prompt, any other, that of the whole
    /// request.
    #[must_use]
    pub fn estimate(&self, ask: &Ask) -> Estimate {
        of_role(self.role, &self.worker_load, &self.queue, &ask.demand(self.cached_tokens))
    }

    /// It could take the answers of requests, and whole ones.
    #[must_use]
    pub fn decodes(&self) -> bool {
        self.role != Role::Prefill
    }

    /// What a decode leg counts on.
    #[must_use]
    pub fn decode_cached_tokens(&self) -> u32 {
        self.cached_tokens.max(self.coming_tokens)
    }

    pub(super) fn source(&self, ask: &Ask, leg: &Estimate) -> Source {
        Source::new(&self.worker_load, &ask.demand(self.cached_tokens), leg)
    }

    pub(super) fn decode_leg(&self, ask: &Ask, alone: &Estimate) -> DecodeLeg {
        let demand = ask.demand(self.decode_cached_tokens());
        DecodeLeg::new(&self.worker_load, &self.queue, &demand, ask.block_bytes as f64, alone)
    }
}

#[cfg(test)]
impl Candidate {
    /// A worker that stands like this and holds nothing.
    pub(crate) fn with(id: u32, role: Role, worker_load: WorkerLoad) -> Self {
        Self {
            id: WorkerId(id),
            name: format!("worker-{id}").into(),
            role,
            group: None,
            excluded: None,
            occupied: 0,
            sequences: 64,
            booked_tokens: 0,
            held_tokens: 0,
            cached_tokens: 0,
            coming_tokens: 0,
            lower_tier_tokens: 0,
            worker_load,
            queue: PromptQueue::default(),
            sources: None,
        }
    }
}

/// What is to be placed, as far as the choice is concerned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ask {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the longest answer that it may get.
    pub max_tokens: u32,
    /// Answer as long as answers were of late, but no longer than `max_tokens`.
    pub output_tokens: f64,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Bytes of a block, where it may have to be moved.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub block_bytes: u64,
    /// Digest of the session: the key of `session-hash`, a hint for `kv`.
    pub session: Option<u64>,
    /// The first token is wanted within this many ms from now.
    pub deadline_ms: Option<f64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

impl Ask {
    /// What it asks of a worker that need not compute so many tokens of the prompt.
    #[must_use]
    pub fn demand(&self, cached_tokens: u32) -> Demand {
        Demand {
            prompt_tokens: self.prompt_tokens.into(),
            cached_tokens: cached_tokens.into(),
            output_tokens: self.output_tokens,
            block_tokens: self.block_tokens.into(),
        }
    }
}

/// A small generator of random numbers (SplitMix64). Good for choosing, not for secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number from 0 to `n - 1`; `n` is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let wide = u128::from(mix(self.0)) * n as u128;
        usize::try_from(wide >> 64).expect("less than n")
    }
}

/// Digest of a name or a session, the same in every router and every run: two routers agree on a session's worker.
#[must_use]
pub fn digest(text: &str) -> u64 {
    let hash = blake3::hash(text.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"))
}

/// Mixes all bits into all others (the finaliser of SplitMix64).
pub(super) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

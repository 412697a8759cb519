//! Frames by which a worker joins: who it is, what it can do, and whether either side knows the secret.

use serde::{Deserialize, Serialize};

use super::words::words;

words! {
    /// What a worker does for a request.
    Role {
        /// Computes prompts only.
        Prefill = "prefill",
        /// Generates only; its prompts' KV comes from a prefill worker.
        Decode = "decode",
        /// Computes prompts and generates.
        Both = "both",
    }
}

words! {
    /// How a worker shares a step's tokens among the prompts that it has.
    QueueRule {
        /// In order: each takes what it lacks, as far as there are tokens left.
        Fifo = "fifo",
        /// In order, but one that does not fit takes at most half of what is left while others wait behind it.
        Halves = "halves",
    }
}

impl Default for QueueRule {
    /// That of the engine of this repository.
    fn default() -> Self {
        Self::Halves
    }
}

/// What must agree between two sides before they may share KV or hashes. Each is a short printable digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprints {
    /// Of the weights and the model's configuration.
    pub weights: String,
    /// Of the file `tokenizer.json`.
    pub tokenizer: String,
    /// Of the chat template.
    pub chat_template: String,
    /// Of dtype, layers, heads and their order inside a block.
    pub kv_layout: String,
    /// Name of the block hash, `blake3-chain-v2`.
    pub hash_scheme: String,
    /// Tokens in one block.
    pub block_tokens: u32,
}

/// Upper bounds of one worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// KV blocks in the pool.
    pub blocks: u32,
    /// Sequences that may run at once.
    pub sequences: u32,
    /// Tokens of one step, prefill and decode together.
    pub batched_tokens: u32,
    /// Requests that may wait inside the worker.
    pub waiting: u32,
    /// KV blocks in host memory, tier 1; 0 where there is no such tier.
    pub host_blocks: u32,
    /// KV blocks on disk, tier 2; 0 where there is no such tier.
    pub disk_blocks: u32,
}

impl Capacity {
    /// Blocks by tier, as `Blocks.tier` counts them.
    #[must_use]
    pub fn tiers(&self) -> [u32; 3] {
        [self.blocks, self.host_blocks, self.disk_blocks]
    }
}

/// What a step costs: `fixed_ms + prefill_ms * prefill_tokens + context_ms * prefill_context + row_ms * decode_rows +
/// kv_ms * kv_tokens`, with the counts of [`Step`](super::Step).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    /// Of any step.
    pub fixed_ms: f64,
    /// Of each prompt token computed.
    pub prefill_ms: f64,
    /// Of each token that a prompt token looks back at.
    pub context_ms: f64,
    /// Of each sequence that decodes.
    pub row_ms: f64,
    /// Of each KV token read.
    pub kv_ms: f64,
}

/// The place of a worker in an expert-parallel group, whose ranks step together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Name of the group.
    pub id: String,
    /// This worker's place in it.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Start of the group, greater at each start; the same for all its ranks. Ranks of two epochs do not belong together.
    pub epoch: u64,
    /// What carries rows between the ranks, in words: shown, never compared.
    pub transport: String,
}

/// First frame of a link. In every version it is number 1 and begins with `protocol`: the rest is read only where that is
/// the reader's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// `PROTOCOL` of the worker.
    pub protocol: u16,
    /// Name of the worker, unique in the fleet; a second link with the same name and a newer epoch replaces the first once that is silent.
    pub worker: String,
    /// Start time of the worker in ms since 1970: a restart makes it grow.
    pub epoch: u64,
    /// What it does.
    pub role: Role,
    /// Name under which clients ask for its model.
    pub model: String,
    /// What must agree.
    pub fingerprints: Fingerprints,
    /// How many requests, tokens and blocks it takes.
    pub capacity: Capacity,
    /// Longest sequence in tokens, prompt and answer together.
    pub context_tokens: u32,
    /// Its expert-parallel group.
    pub group: Option<Group>,
    /// Ways to pull KV from it, best first, as `scheme://address`.
    pub transfer: Vec<String>,
    /// 16 random bytes for the router to prove that it knows the deployment secret.
    #[serde(with = "serde_bytes")]
    pub nonce: Vec<u8>,
    /// What its steps are expected to cost, until the router has measured them.
    pub step_prior: Option<StepCost>,
    /// Bytes of one KV block; 0 where its KV cannot be moved.
    pub kv_block_bytes: u64,
    /// Type of the weights in which it computes, such as `bfloat16` or `int8`: shown, never compared.
    pub dtype: String,
    /// Other names under which clients may ask for its model.
    pub aliases: Vec<String>,
    /// Values of a pooled prompt: the width of the model's hidden states; 0 where the worker pools none.
    pub pooled_width: u32,
    /// How it shares its steps among prompts.
    pub queue_rule: QueueRule,
}

/// Proof that the worker knows the deployment secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prove {
    /// BLAKE3 keyed by the secret's key over `"headrace worker" || Welcome.challenge`, 32 bytes.
    #[serde(with = "serde_bytes")]
    pub proof: Vec<u8>,
}

/// The worker is part of the fleet (after `Prove`, where there is a secret).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// `PROTOCOL` of the router.
    pub protocol: u16,
    /// Name of the router, new at each start.
    pub router: String,
    /// The worker sends a `Step` at least this often.
    pub heartbeat_ms: u32,
    /// 16 random bytes to be answered with `Prove`; empty where no secret is set.
    #[serde(with = "serde_bytes")]
    pub challenge: Vec<u8>,
    /// BLAKE3 keyed by the secret's key over `"headrace router" || Hello.nonce`; empty where no secret is set.
    #[serde(with = "serde_bytes")]
    pub proof: Vec<u8>,
    /// Key of the block hash, 32 bytes, where no secret is set; otherwise empty: both sides derive it.
    #[serde(with = "serde_bytes")]
    pub hash_key: Vec<u8>,
}

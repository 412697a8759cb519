//! Every message between router and worker, as types. Bytes are `fleet::codec`'s business.
//!
//! On the wire a frame is the msgpack array `[type, fields...]`, fields in the order in which they stand here; nested
//! structs are arrays too. `tests/golden/` holds frames that Rust and Python both read and write byte for byte.

mod failure;
mod grammar;
mod group_totals;
mod handshake;
mod migration;
mod other_prompts;
mod refusal;
mod trace;
mod words;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::failure::{Failed, FailureKind};
pub use self::grammar::{
    Grammar, GrammarKind, GrammarTotals, MAX_GRAMMAR_BYTES, MAX_MARKER_TOKENS, Reasoning,
};
pub use self::group_totals::GroupTotals;
pub use self::handshake::{
    Capacity, Fingerprints, Group, Hello, Prove, QueueRule, Role, StepCost, Welcome,
};
pub use self::migration::{
    Continue, Fetch, KvFrom, KvReady, KvTransfer, MAX_TICKET_BYTES, MigrationOrder, NAME_BYTES,
    Offer, Ticket, TransferBackend, TransferFailure, Transferred,
};
pub use self::other_prompts::{MOST_OTHER_PROMPTS, OtherPrompt, OtherPrompts};
pub use self::refusal::{OtherVersion, Refuse, RefuseReason};
pub use self::trace::{
    MAX_TRACE_STATE_BYTES, NoTraceParent, NoTraceState, TraceContext, TraceParent, TraceState,
};
pub use self::words::Word;
use self::words::words;

/// Version of this protocol. A peer that speaks another one is refused with both numbers ([`OtherVersion`]).
pub const PROTOCOL: u16 = 9;

/// Longest frame body in bytes. A longer one closes the link.
pub const MAX_FRAME_BYTES: usize = 64 << 20;

/// Longest [`Submit::request_id`] in bytes.
pub const MAX_REQUEST_ID_BYTES: usize = 128;

/// Names a request on one router's links; unique for the life of that router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

/// One message. The number is its type on the wire.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Frame {
    /// 1, worker -> router: who dials in, and what it can do.
    Hello(Hello),
    /// 2, worker -> router: answer to `Welcome.challenge`.
    Prove(Prove),
    /// 3, worker -> router: part of the list of all cached blocks.
    Snapshot(Snapshot),
    /// 4, worker -> router: blocks that came or went since the last `Snapshot` or `Blocks`.
    Blocks(Blocks),
    /// 5, worker -> router: one engine step, all its tokens, and the load after it. Doubles as the heartbeat.
    Step(Step),
    /// 6, worker -> router: part of the model description asked for by `Describe`.
    Model(ModelPart),
    /// 7, worker -> router: the KV of a request is ready to be pulled.
    KvReady(KvReady),
    /// 8, worker -> router: the blocks of a finished or cancelled request are free.
    Freed(Freed),
    /// 9, worker -> router: a request failed; the worker goes on.
    Failed(Failed),
    /// 10, worker -> router: no new work please, this worker leaves.
    Bye(Bye),
    /// 11, worker -> router: a pull of KV ended, well or not.
    Transferred(Transferred),
    /// 12, worker -> router: the hottest blocks of a worker that leaves, for others to pull.
    Offer(Offer),
    /// 13, worker -> router: what a rank of a group did beside steps.
    GroupTotals(GroupTotals),
    /// 14, worker -> router: what was spent on the grammars of answers.
    GrammarTotals(GrammarTotals),
    /// 15, worker -> router: the prompts that it has of other routers, sent before a `Step` where that has changed.
    OtherPrompts(OtherPrompts),
    /// 32, router -> worker: the Hello was accepted.
    Welcome(Welcome),
    /// 33, router -> worker: the Hello is of another version of the protocol; the link closes.
    OtherVersion(OtherVersion),
    /// 34, router -> worker: work.
    Submit(Submit),
    /// 35, router -> worker: send the `Model` of this fingerprint.
    Describe(Describe),
    /// 36, router -> worker: stop this request and free its blocks.
    Cancel(Cancel),
    /// 37, router -> worker: take nothing new, finish what runs, leave.
    Drain(Drain),
    /// 38, router -> worker: answer with a `Step`.
    Ping(Ping),
    /// 39, router -> worker: the view of the cached blocks is lost, send the snapshot again.
    Resync(Resync),
    /// 40, router -> worker: the ticket for the KV that a leg waits for.
    Ticket(Ticket),
    /// 41, router -> worker: the first token is known (or will not come), go on from it.
    Continue(Continue),
    /// 42, router -> worker: pull these blocks into the prefix cache.
    Fetch(Fetch),
    /// 43, router -> worker: the Hello was not accepted; the link closes.
    Refuse(Refuse),
}

/// Part of the full list of cached blocks on the device. `last` ends it; deltas follow with growing `sequence`. No `Blocks` stand
/// between the parts of one snapshot. It comes after `Welcome`, and again after a `Resync` or where a delta would be
/// longer than a snapshot; it replaces all that was said
/// before, of lower tiers too: what they hold follows as deltas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Epoch of the worker.
    pub epoch: u64,
    /// Number of the last delta that this snapshot contains; a number of its own, as if it were a delta, where it was not
    /// asked for (otherwise it would pass for an old one).
    pub sequence: u64,
    /// Block keys, parents before children, 8 bytes each, little-endian.
    #[serde(with = "serde_bytes")]
    pub hashes: Vec<u8>,
    /// True on the last part.
    pub last: bool,
}

/// A run of blocks, each the child of the one before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredRun {
    /// Key of the block before the first one; `None` at the root.
    pub parent: Option<u64>,
    /// Block keys, 8 bytes each, little-endian.
    #[serde(with = "serde_bytes")]
    pub hashes: Vec<u8>,
}

/// What changed in a worker's cache, sent before the `Step` that changed it. Order of application: cleared, removed,
/// stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// Epoch of the worker.
    pub epoch: u64,
    /// One more than the `sequence` before, otherwise something was lost.
    pub sequence: u64,
    /// Blocks that are held from now on, in runs that follow one another.
    pub stored: Vec<StoredRun>,
    /// Keys of evicted blocks, 8 bytes each, little-endian.
    #[serde(with = "serde_bytes")]
    pub removed: Vec<u8>,
    /// The whole cache went.
    pub cleared: bool,
    /// 0 device, 1 host, 2 disk.
    pub tier: u8,
}

/// Pool and queue of a worker after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Load {
    /// Blocks held by running requests.
    pub blocks_used: u32,
    /// Blocks that only the prefix cache holds.
    pub blocks_cached: u32,
    /// Requests in the batch.
    pub running: u32,
    /// Requests that wait inside the worker.
    pub waiting: u32,
    /// Times since its start that a running request gave its blocks back, to be computed again later.
    pub preemptions: u64,
}

words! {
    /// Why a sequence ended on the worker.
    Finish {
        /// A stop token.
        Stop = "stop",
        /// `max_tokens` or the context was reached.
        Length = "length",
        /// `Cancel` or the deadline ended it.
        Cancelled = "cancelled",
    }
}

words! {
    /// Which hidden states of a prompt, after the last norm, its vector is made of.
    Pooling {
        /// That of the last token.
        Last = "last",
        /// The mean of all.
        Mean = "mean",
    }
}

/// A token and its log-probability.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ranked(pub u32, pub f64);

/// Log-probability of the token at one place, and of the most probable ones there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Of the token that stands there.
    pub logprob: f64,
    /// The most probable tokens, best first.
    pub top: Vec<Ranked>,
}

/// What one sequence got from a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// Number of the request on this link.
    pub request: RequestId,
    /// New tokens, in order. A stop token is among them.
    pub ids: Vec<u32>,
    /// One for each of `ids`, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Set on the last output of a request.
    pub finish: Option<Finish>,
    /// Prompt tokens that came from the prefix cache; set on the first output.
    pub cached_tokens: Option<u32>,
    /// For the prompt's tokens from the second on, when asked for; set on the first output.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// Draft tokens that were proposed for this sequence and checked.
    pub drafted: u32,
    /// How many of `ids` were drafts: at most `drafted`.
    pub accepted: u32,
    /// The prompt as a vector, where `Submit.pooling` asked for it: `Hello.pooled_width` values, f32 little-endian. On the
    /// only output of the request, with `Finish::Length`.
    #[serde(with = "serde_bytes")]
    pub pooled: Option<Vec<u8>>,
}

/// One engine step. A frame with `outputs` empty and the `step` of before is a heartbeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counts from 1; the same number again says that no step ran since.
    pub step: u64,
    /// Wall time of the step in ms, as requests feel it: all since the end of the step before, or since the arrival that
    /// ended an idle time.
    pub ms: f64,
    /// How much of `ms` this rank waited for other ranks of its group, in us; 0 outside a group.
    pub waited_us: u32,
    /// Prompt tokens computed.
    pub prefill_tokens: u32,
    /// Their positions in their sequences, added up: a chunk of n tokens from position s on adds n*s + n*(n-1)/2.
    pub prefill_context: u64,
    /// Sequences that decoded. A token computed once more after a preemption counts as one of a prompt.
    pub decode_rows: u32,
    /// KV tokens read by attention: the length of each sequence in the step, after it.
    pub kv_tokens: u64,
    /// Prompt tokens still to be computed, of requests that wait and of those whose prompt is in flight. What the prefix
    /// cache gives is left out from a request's start on. As `load`, it is as of this frame.
    pub waiting_tokens: u64,
    /// Draft tokens checked, of all sequences.
    pub drafted: u32,
    /// Draft tokens accepted.
    pub accepted: u32,
    /// As of this frame.
    pub load: Load,
    /// What requests got from the step.
    pub outputs: Vec<Output>,
}

/// Part of a model description: the bytes of all parts, put together, are a JSON document (`prompt::ModelDoc`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelPart {
    /// As in the `Describe` that this answers.
    pub fingerprint: String,
    /// Counts from 0.
    pub part: u32,
    /// True on the last part.
    pub last: bool,
    /// Bytes of this part.
    #[serde(with = "serde_bytes")]
    pub data: Vec<u8>,
}

/// All blocks of a request are free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freed {
    /// Number of the request on this link.
    pub request: RequestId,
    /// Blocks that it gave back (to the free list or to the prefix cache).
    pub blocks: u32,
}

/// The worker leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bye {
    /// The reason, for people.
    pub reason: String,
}

/// How tokens are chosen. Neutral values switch a step off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Keep the k most probable; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set with this probability; 1 keeps all.
    pub top_p: f64,
    /// Keep what has this share of the best one's probability; 0 keeps all.
    pub min_p: f64,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or answer; 1 is off.
    pub repetition_penalty: f64,
    /// Subtracted from the logit of each token in the answer; 0 is off.
    pub presence_penalty: f64,
    /// Subtracted once for each time a token stands in the answer; 0 is off.
    pub frequency_penalty: f64,
    /// With the position in the sequence, the only source of randomness.
    pub seed: u64,
    /// Log-probabilities of the answer: `None` off, `Some(k)` with the k best.
    pub logprobs: Option<u32>,
    /// The same for the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Added to the logits before all else.
    pub logit_bias: Vec<Ranked>,
    /// Generate past stop tokens.
    pub ignore_eos: bool,
    /// No stop token before this many tokens.
    pub min_tokens: u32,
    /// What the answer has to follow, token by token.
    pub grammar: Option<Grammar>,
    /// The answer reasons before that, for so long.
    pub reasoning: Option<Reasoning>,
    /// What is never chosen.
    pub limits: Option<TokenLimits>,
}

/// Tokens that are never chosen. Which these are follows from the tokens of the answer alone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TokenLimits {
    /// All others are not, unless there are none here.
    pub allowed: Vec<u32>,
    /// Tokens of banned words, one word after the other: the last one of a word is never chosen where the answer ends with
    /// those before it.
    pub banned: Vec<u32>,
    /// How many of `banned` belong to each word, at least 1.
    pub lengths: Vec<u32>,
}

impl Default for Sampling {
    /// Greedy, everything else off.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
            logit_bias: Vec::new(),
            ignore_eos: false,
            min_tokens: 0,
            grammar: None,
            reasoning: None,
            limits: None,
        }
    }
}

/// State of a request that began on another worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// Tokens generated so far, u32 little-endian; `Submit.max_tokens` counts them too.
    #[serde(with = "serde_bytes")]
    pub generated: Vec<u8>,
    /// Draws made so far by the request's random generator: one for each token of `generated`.
    pub rng_counter: u64,
}

/// One leg of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Submit {
    /// Name for all later frames about it.
    pub request: RequestId,
    /// Prompt, u32 little-endian.
    #[serde(with = "serde_bytes")]
    pub tokens: Vec<u8>,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Tokens that end the answer.
    pub stop_ids: Vec<u32>,
    /// Longest answer. 0 is allowed with `prompt_logprobs` and `pooling`: the prompt is computed, nothing is generated.
    pub max_tokens: u32,
    /// The worker gives up (`Finish::Cancelled`) this long after it read the frame.
    pub deadline_ms: Option<u64>,
    /// Higher goes first.
    pub priority: i8,
    /// Enters the block hash at the root: requests with other salts share no cache.
    #[serde(with = "serde_bytes")]
    pub salt: Vec<u8>,
    /// Split serving: pull the prompt's KV as soon as its [`Ticket`] is here.
    pub kv_from: Option<KvFrom>,
    /// Migration: go on from here.
    pub resume: Option<Resume>,
    /// Split serving: compute the prompt and one token, and keep the KV for another worker.
    pub kv_transfer: Option<KvTransfer>,
    /// The prompt as a vector, in place of an answer: with `max_tokens` 0, in one leg.
    pub pooling: Option<Pooling>,
    /// `X-Request-ID` of the HTTP request, for logs and spans: at most [`MAX_REQUEST_ID_BYTES`] of visible ASCII; empty where
    /// there is none.
    pub request_id: Arc<str>,
    /// What the leg's spans are under; `None` where the router does not trace.
    pub trace: Option<Box<TraceContext>>,
}

/// Asks for a model description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Describe {
    /// `fingerprints.tokenizer` of the worker.
    pub fingerprint: String,
}

/// Ends a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// Number of the request on this link.
    pub request: RequestId,
}

/// Ends a worker's work in good order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// What runs may run this long.
    pub budget_ms: u64,
    /// Offer the hottest cached blocks first; `None` offers none, and ends an offer made before.
    pub migration: Option<MigrationOrder>,
}

/// Asks for a sign of life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ping {
    /// For the log.
    pub nonce: u64,
}

/// Asks for the snapshot again: its parts, then deltas from its `sequence` on. What comes before the first part is
/// ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resync {
    /// What was wrong with the events, for people.
    pub reason: String,
}

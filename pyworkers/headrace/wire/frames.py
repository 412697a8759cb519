"""Every message between router and worker: the twin of `router/src/core/frame.rs`, which says what each field is.

A body is the msgpack array `[type, field, field, ...]`; nested dataclasses are arrays too. `codec.py` makes it from the
annotations below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple, TypeAlias

from headrace.wire.schema import I8, I32, U8, U16, U32, U64

PROTOCOL: Final = 9
MAX_FRAME_BYTES: Final = 64 << 20
MAX_TICKET_BYTES: Final = 256
PULL_KEY_BYTES: Final = 32
MAX_GRAMMAR_BYTES: Final = 64 << 10  # of a source, in UTF-8
MAX_MARKER_TOKENS: Final = 64  # of what begins or ends reasoning
MOST_OTHER_PROMPTS: Final = 16
MAX_REQUEST_ID: Final = 128  # visible characters
MAX_TRACE_STATE: Final = 512  # printable characters
NAME_BYTES: Final = 16  # of a block's full name; its key is the first half


# Closed sets of words: one that is not here is no frame.

Role: TypeAlias = Literal["prefill", "decode", "both"]
QueueRule: TypeAlias = Literal["fifo", "halves"]  # how a step is shared among prompts
Finish: TypeAlias = Literal["stop", "length", "cancelled"]


class FailureKind(StrEnum):
    """Why a worker does not serve a request. The kind alone says whether another worker may succeed."""

    QUEUE_FULL = "queue_full"
    DUPLICATE_REQUEST = "duplicate_request"
    EMPTY_PROMPT = "empty_prompt"
    TOO_LONG = "too_long"
    TOO_BIG_FOR_POOL = "too_big_for_pool"
    BAD_TOKEN = "bad_token"
    BAD_SAMPLING = "bad_sampling"
    BAD_RESUME = "bad_resume"
    GRAMMAR = "grammar"  # no token may go on
    UNSUPPORTED = "unsupported"
    DRAINING = "draining"
    ENGINE = "engine"


class RefuseReason(StrEnum):
    """Why a worker may not join."""

    BAD_HELLO = "bad_hello"
    SECRET = "secret"
    MISMATCH = "mismatch"
    TOO_MANY_MODELS = "too_many_models"
    SUPERSEDED = "superseded"
    CIRCUIT = "circuit"
    NAME_TAKEN = "name_taken"
    ALREADY_JOINED = "already_joined"

    @property
    def says_when(self) -> bool:
        """Whether the worker may dial again, after `Refuse.retry_after_ms`."""
        return self in {RefuseReason.CIRCUIT, RefuseReason.NAME_TAKEN}


class TransferBackend(StrEnum):
    """What moves the bytes of a pull."""

    SHM = "shm"
    TCP = "tcp"
    NIXL = "nixl"
    CUDA_IPC = "cuda-ipc"
    MOCK = "mock"


class TransferFailure(StrEnum):
    """Why a pull did not bring its blocks."""

    LOST = "lost"  # the peer is gone, silent, or cannot be reached
    REVOKED = "revoked"  # the source took its blocks back
    EXPIRED = "expired"  # the lease was over
    CHECKSUM = "checksum"
    TIMEOUT = "timeout"  # of the pull as a whole
    REFUSED = "refused"  # unknown or used ticket, another pull key, another version
    LAYOUT = "layout"  # the pools differ
    NO_ROOM = (
        "no_room"  # one end has as much under way as it takes; neither way nor source is to blame
    )
    CANCELLED = "cancelled"  # the puller gave it up


# --- worker -> router ---


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What must agree between two sides before they may share KV or hashes."""

    weights: str
    tokenizer: str
    chat_template: str
    kv_layout: str
    hash_scheme: str
    block_tokens: U32


@dataclass(frozen=True, slots=True)
class Capacity:
    """Upper bounds of one worker."""

    blocks: U32
    sequences: U32
    batched_tokens: U32
    waiting: U32
    host_blocks: U32 = 0
    disk_blocks: U32 = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs, as factors of the counts in `Step`."""

    fixed_ms: float
    prefill_ms: float
    context_ms: float
    row_ms: float
    kv_ms: float


@dataclass(frozen=True, slots=True)
class Group:
    """The place of a worker in an expert-parallel group, whose ranks step together."""

    id: str
    rank: U32
    size: U32
    epoch: U64  # start of the group, the same for all its ranks
    transport: str = ""  # what carries rows between the ranks: shown, never compared


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a link. `Link` fills in `nonce`. In every version it is number 1 and begins with `protocol`."""

    protocol: U16
    worker: str
    epoch: U64
    role: Role
    model: str
    fingerprints: Fingerprints
    capacity: Capacity
    context_tokens: U32
    group: Group | None = None
    transfer: list[str] = field(default_factory=list[str])
    nonce: bytes = b""
    step_prior: StepCost | None = None
    kv_block_bytes: U64 = 0
    dtype: str = ""  # of the weights: shown, never compared
    aliases: list[str] = field(default_factory=list[str])  # other names of the model
    pooled_width: U32 = 0  # floats of a pooled prompt; 0 where it pools none
    queue_rule: QueueRule = "halves"


@dataclass(frozen=True, slots=True)
class Prove:
    """Proof that the worker knows the deployment secret."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Part of the full list of cached blocks. `hashes` are block keys of 8 bytes, little-endian.

    No `Blocks` stand between the parts of one snapshot.
    """

    epoch: U64
    sequence: U64
    hashes: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of blocks, each the child of the one before."""

    parent: U64 | None
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Blocks:
    """What changed in a worker's cache, sent before the `Step` that changed it.

    Order of application: cleared, removed, stored.
    """

    epoch: U64
    sequence: U64
    stored: Sequence[StoredRun]  # a list, or columns (`SingleRuns`)
    removed: bytes
    cleared: bool
    tier: U8


@dataclass(frozen=True, slots=True)
class Load:
    """Pool and queue of a worker after a step."""

    blocks_used: U32 = 0
    blocks_cached: U32 = 0
    running: U32 = 0
    waiting: U32 = 0
    preemptions: U64 = 0  # of running requests, since its start


class Ranked(NamedTuple):
    """A token and its log-probability (or, in `Sampling.logit_bias`, its bias)."""

    token: U32
    value: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of the token at one place, and of the most probable ones there, best first."""

    logprob: float
    top: list[Ranked]


@dataclass(frozen=True, slots=True)
class Output:
    """What one sequence got from a step."""

    request: U64
    ids: list[U32]
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    cached_tokens: U32 | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    drafted: U32 = 0
    accepted: U32 = 0
    pooled: bytes | None = None  # float32, little-endian


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. With `outputs` empty and the `step` of before it is a heartbeat."""

    step: U64
    ms: float
    waited_us: U32  # of `ms`, for other ranks of the group
    prefill_tokens: U32
    prefill_context: U64
    decode_rows: U32
    kv_tokens: U64
    waiting_tokens: U64
    drafted: U32
    accepted: U32
    load: Load
    outputs: Sequence[Output]  # a list, or columns (`Outputs`)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Part of a model description; all parts together are one JSON document."""

    fingerprint: str
    part: U32
    last: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class KvReady:
    """Permission to pull a request's KV, from when it has its blocks."""

    request: U64
    ticket: bytes
    lease_ms: U32


@dataclass(frozen=True, slots=True)
class Freed:
    """All blocks of a request are free."""

    request: U64
    blocks: U32


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that cannot be served by this worker."""

    request: U64
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Bye:
    """The worker leaves."""

    reason: str


@dataclass(frozen=True, slots=True)
class Transferred:
    """A pull of KV ended; `backend` is None where it did not come to one, `error` if all came."""

    request: U64
    worker: str
    backend: TransferBackend | None
    blocks: U32
    bytes: U64
    ms: float
    error: TransferFailure | None


@dataclass(frozen=True, slots=True)
class Offer:
    """The hottest cached blocks, pinned for others to pull: names of `NAME_BYTES`, parents before children."""

    ticket: bytes
    names: bytes
    parents: list[I32]
    hits: list[U32]
    lease_ms: U32


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """What a rank of a group did beside steps since its start, sent where that has changed.

    All ranks of a group say the same of `waves`, `refused`, `gain_s` and `cost_s`.
    """

    held_rounds: U64 = 0  # in which prompts of this rank waited for those of others
    held_ms: float = 0.0
    waves: U64 = 0
    slots: U64 = 0  # of this rank that got another expert
    bytes: U64 = 0  # that this rank sent
    refused: U64 = 0  # plans
    gain_s: float = 0.0  # predicted
    cost_s: float = 0.0  # predicted
    spent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GrammarTotals:
    """What a worker spent on grammars since its start, sent where it has changed."""

    masks: U64 = 0
    mask_us: U64 = 0
    late: U64 = 0  # steps that waited for their masks
    wait_us: U64 = 0
    compiled: U64 = 0
    compile_us: U64 = 0
    known: U64 = 0  # requests whose grammar was compiled before
    put_off: U64 = (
        0  # answers that got no token in a step, as their masks were too much work for it
    )
    refused: U64 = 0  # grammars that were not compiled, as those in use hold too much memory
    memory_bytes: U64 = 0  # what grammars and the answers that follow them hold now


@dataclass(frozen=True, slots=True)
class OtherPrompt:
    """A prompt of another router, or several in the last entry of a list."""

    behind: U32  # prompts of the reader's own before it
    tokens: U32
    left: U32  # to be computed after the last step that ended
    prompts: U32 = 1


@dataclass(frozen=True, slots=True)
class OtherPrompts:
    """Prompts of other routers without a first token, in the worker's order, sent where that has changed."""

    prompts: list[OtherPrompt] = field(default_factory=list[OtherPrompt])


# --- router -> worker ---


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is part of the fleet (after `Prove`, where there is a secret)."""

    protocol: U16
    router: str
    heartbeat_ms: U32
    challenge: bytes
    proof: bytes
    hash_key: bytes


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """The worker speaks another version of the protocol. This frame is the same in every version."""

    field: str
    expected: str
    got: str
    message: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Why a worker may not join.

    Programs read `reason`, `router` and `retry_after_ms`; the other texts are for people.
    """

    reason: RefuseReason
    router: str
    retry_after_ms: U32 | None  # set exactly where the reason `says_when`
    field: str
    expected: str
    got: str
    message: str


class GrammarKind(StrEnum):
    """In what a grammar is written."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"  # matched by the whole answer
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to follow. Its state follows from the tokens of the answer alone."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What comes before an answer. Where it is follows from the tokens alone; a grammar begins behind it.

    Tokens of markers stand for what they write: special ones are found by their id, all others by their text.
    """

    begin: list[U32]  # first tokens of the answer that open it; none where the prompt has
    end: list[U32]
    max_tokens: U32 | None = None  # then `end` is forced
    begun: U32 = (
        0  # tokens of `end` that stand at the end of the prompt; `begin` then counts for nothing
    )
    ends_too: list[U32] = field(default_factory=list[U32])  # ends it as well, and is never forced


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Tokens that are never chosen: all but `allowed`, where there are any, and what would complete a banned word.

    `banned` are the tokens of all words, `lengths` how many belong to each. A word counts in the answer alone.
    """

    allowed: list[U32] = field(default_factory=list[U32])
    banned: list[U32] = field(default_factory=list[U32])
    lengths: list[U32] = field(default_factory=list[U32])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy, with everything else off."""

    temperature: float = 0.0
    top_k: U32 = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: U64 = 0
    logprobs: U32 | None = None
    prompt_logprobs: U32 | None = None
    logit_bias: list[Ranked] = field(default_factory=list[Ranked])
    ignore_eos: bool = False
    min_tokens: U32 = 0
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None
    limits: TokenLimits | None = None


class Pooling(StrEnum):
    """Which hidden states of a prompt its vector is made of."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class KvFrom:
    """Where the KV of a prompt comes from, when not from this worker."""

    worker: str
    transfer: list[str]
    timeout_ms: U32
    pull_key: bytes = field(repr=False)  # as the source has it: in no log


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Makes a leg one that computes the prompt and one token, and keeps the KV for another worker."""

    lease_ms: U32
    pull_key: bytes = field(repr=False)  # the ticket is of use only with it: in no log


@dataclass(frozen=True, slots=True)
class Resume:
    """State of a request that began on another worker. `generated` is u32 little-endian."""

    generated: bytes
    rng_counter: U64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that a leg's spans are under, in the texts of W3C's Trace Context."""

    parent: str  # a traceparent of version 00
    state: str | None = None  # a tracestate, to be passed on


@dataclass(frozen=True, slots=True)
class Submit:
    """One leg of a request. `tokens` is the prompt, u32 little-endian."""

    request: U64
    tokens: bytes
    sampling: Sampling
    stop_ids: list[U32]
    max_tokens: U32
    deadline_ms: U64 | None = None
    priority: I8 = 0
    salt: bytes = b""
    kv_from: KvFrom | None = None
    resume: Resume | None = None
    kv_transfer: KvTransfer | None = None
    pooling: Pooling | None = None  # the prompt as a vector, in place of an answer
    request_id: str = ""  # `X-Request-ID` of the HTTP request, for logs and spans
    trace: TraceContext | None = None  # None: the router does not trace


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for a model description."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request."""

    request: U64


@dataclass(frozen=True, slots=True)
class MigrationOrder:
    """Has a worker that leaves offer its hottest cached blocks."""

    blocks: U32  # at most
    pull_key: bytes = field(repr=False)  # the offer's ticket is of use only with it: in no log


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new, finish what runs, leave."""

    budget_ms: U64
    migration: MigrationOrder | None = None  # None ends an offer made before


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a `Step` as a sign of life."""

    nonce: U64


@dataclass(frozen=True, slots=True)
class Resync:
    """The view of the cached blocks is lost: send the snapshot again, then deltas from there on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """Passes a `KvReady` on to the leg that waits for it."""

    request: U64
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Continue:
    """Lets a leg with `kv_from` generate, after these tokens (u32 little-endian); none: all by itself."""

    request: U64
    generated: bytes


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for blocks of an `Offer`; `offset` are their places in it, `parents` places in these `names`."""

    request: U64
    kv_from: KvFrom
    ticket: bytes
    names: bytes
    parents: list[I32]
    offset: list[U32]


FromWorker: TypeAlias = (
    Hello
    | Prove
    | Snapshot
    | Blocks
    | Step
    | ModelPart
    | KvReady
    | Freed
    | Failed
    | Bye
    | Transferred
    | Offer
    | GroupTotals
    | GrammarTotals
    | OtherPrompts
)
FromRouter: TypeAlias = (
    Welcome
    | OtherVersion
    | Refuse
    | Submit
    | Describe
    | Cancel
    | Drain
    | Ping
    | Resync
    | Ticket
    | Continue
    | Fetch
)
Frame: TypeAlias = FromWorker | FromRouter

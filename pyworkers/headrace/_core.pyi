"""The Rust side of Headrace. stubtest compares this file with the build."""

from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import Any, Final, Literal, Protocol, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

__all__ = [
    "HASH_SCHEME",
    "OPT_LEVEL",
    "AnswerRules",
    "BlockIndex",
    "CompiledGrammar",
    "CountColumns",
    "Etcd",
    "EtcdWatch",
    "Experts",
    "GrammarRows",
    "GrammarVocabulary",
    "HeadMatrices",
    "InputColumns",
    "Program",
    "Router",
    "SamplingColumns",
    "SharedExchange",
    "SharedParcels",
    "Slots",
    "Table",
    "Value",
    "Weight",
    "argmax_of_few",
    "auth_proof",
    "bench_main",
    "check_key_line",
    "check_router",
    "copy_segments",
    "crc32",
    "cut_answers",
    "decode_frame",
    "derive_hash_key",
    "edit_logits",
    "encode_frame",
    "encode_outputs",
    "encode_step",
    "end_on_signals",
    "hash_blocks",
    "hash_next_blocks",
    "highest_logits",
    "mask_logits",
    "noise_keys",
    "order_of_sends",
    "plan_sends",
    "race",
    "read_config",
    "router_flags",
    "router_main",
]

_Bytes: TypeAlias = Buffer | NDArray[np.uint8]
_I32: TypeAlias = NDArray[np.int32]
_I64: TypeAlias = NDArray[np.int64]
_I32Rows: TypeAlias = NDArray[np.int32]  # two dimensions
_Flags: TypeAlias = NDArray[np.bool_]

HASH_SCHEME: Final = "blake3-chain-v2"
"""Name of the block hash, for `Fingerprints.hash_scheme`."""

OPT_LEVEL: Final[str]
"""How the compiler optimised this module: "3" as it is shipped, "0" as `make setup` builds it."""

def hash_blocks(
    tokens: bytes,
    block_tokens: int,
    key: bytes,
    salt: bytes | None = None,
    parent: bytes | None = None,
) -> list[bytes]:
    """Chained hashes (16 bytes each) of the full blocks of `tokens`, u32 little-endian.

    `key` has 32 bytes. The chain begins at the root of `salt`, or goes on from the block `parent`;
    giving both is a ValueError. The first 8 bytes of a hash are the block key of the events.
    """

def derive_hash_key(secret: bytes) -> bytes:
    """Key of the block hash in a deployment with this secret, 32 bytes."""

def auth_proof(secret: bytes, side: Literal["worker", "router"], challenge: bytes) -> bytes:
    """Proof (32 bytes) that `side` knows the secret, for the random bytes the other side sent."""

def crc32(parts: Sequence[_Bytes], value: int = 0) -> int:
    """CRC-32 (that of zlib) of all these contiguous bytes, one part after the other; with the GIL released.

    Goes on from `value`, the sum of what came before.
    """

def copy_segments(
    source: _Bytes,
    source_starts: NDArray[np.uint64],
    target: _Bytes,
    target_starts: NDArray[np.uint64],
    nbytes: int,
) -> None:
    """Copy `nbytes` from each start in the source to that in the target; with the GIL released once for all.

    Raises ValueError, before a byte is copied, for a segment that does not lie inside its memory.
    """

def encode_frame(frame: dict[str, dict[str, Any]]) -> bytes:
    """The body of a frame given as `{"Ping": {"nonce": 1}}`. Raises WireError."""

def decode_frame(body: bytes) -> dict[str, dict[str, Any]]:
    """The frame with this body, as `encode_frame` takes it. Raises a subclass of WireError."""

def encode_outputs(
    requests: NDArray[np.uint64],
    counts: _I64,
    ids: _I64,
    *,
    drafted: _I64,
    accepted: _I64,
    special: Sequence[tuple[int, bytes]],
) -> bytes:
    """The field `outputs` of a `Step`, as msgpack; with the GIL released.

    A row for each of `requests`; `ids` has `counts` for each, row after row. `special` are places, ascending, of rows
    that are written already, and have no ids here. ValueError where these do not fit together, or a number is not one
    of 32 bits without a sign.
    """

def encode_step(
    numbers: tuple[int, int, int, int, int, int, int, int, int],
    ms: float,
    load: tuple[int, int, int, int, int],
    requests: NDArray[np.uint64],
    counts: _I64,
    ids: _I64,
    *,
    drafted: _I64,
    accepted: _I64,
) -> bytes:
    """The body of a `Step`, whose `numbers` and `load` are its fields in their order, with plain outputs in columns.

    ValueError, TypeError or OverflowError where a field is not what it is to be.
    """

def hash_next_blocks(tokens: _I32, key: bytes, parents: Sequence[bytes]) -> list[bytes]:
    """The hash of one block after each of `parents`; `tokens` is `[blocks, block_tokens]`. See `hash_blocks`."""

# What a step does to the engine's arrays, a stage in each call. All keep the GIL. A batch row that is not there,
# columns of other lengths and an array that is in use raise ValueError before anything is changed, other dtypes
# TypeError.

@final
class CountColumns:
    """The arrays of a `RowCounts`, of whose rows each call names some.

    `counts` is `[12, rows]`, in the order of `row_counts.TOTAL` and so on; `facts` is `[4, rows]`: `prompt_len`,
    `limit`, `link`, `epoch`; `flags` is `[3, rows]`: `exports_kv`, `plain`, `taken`. The arrays are kept, not copied.
    """

    def __new__(
        cls,
        *,
        counts: _I64,
        facts: _I64,
        flags: _Flags,
        requests: NDArray[np.uint64],
        recent: _I32,
        block_tokens: int,
    ) -> CountColumns: ...
    def plan(self, batch_rows: _I64) -> tuple[_I64 | None, list[int], _I64, int]:
        """Those that decode (None: all), those with more than a token to compute; those that decode and lack blocks,
        and the most blocks that one of them lacks.
        """

    def hold(self, batch_rows: _I64) -> None:
        """Each has one block more."""

    def lookahead(
        self, batch_rows: _I64, rows_left: int, most: int
    ) -> tuple[_I64, _I64, _I64, int]:
        """How many drafts each may check, at most `most` of each and `rows_left` of all; the places of those that are
        without room for these and for `most` more; the rows of which that lack blocks, and the most that one lacks.
        """

    def with_room(self, batch_rows: _I64, drafts: _I64) -> _I64:
        """As many of the drafts of each as its blocks have room for."""

    def decoding(self, batch_rows: _I64) -> tuple[_I64, _I64, _I64, _Flags, _Flags, list[int]]:
        """The fields of `StepWork` with one token of each: `epochs`, `starts`, `counts`, `decodes`, `chooses`; and the
        places of those that are not plain.
        """

    def begin(
        self,
        batch_rows: _I64,
        *,
        starts: _I64,
        counts: _I64,
        drafts: _I64,
        chooses: _Flags,
        decodes: _Flags,
    ) -> tuple[_I64, _I64, _I64, list[int], list[int], int, int]:
        """This work is ordered: the rows count on what it brings.

        Returns the fields of `GrownTables` but for the blocks: `batch_rows`, `places`, `keys_from`, whose tables have
        these blocks from now on; the batch rows that grew by more than a block; the places of those that export KV; how
        many decode; how many tokens are read.
        """

    def still_there(
        self, batch_rows: _I64, epochs: _I64, places: _I64, counts: _I64
    ) -> tuple[_Flags | None, list[int]]:
        """Who has the batch row of then (None: all); and the batch rows that have to list their tokens before those at
        `places` get so many.
        """

    def take_in(
        self,
        batch_rows: _I64,
        *,
        there: _Flags | None,
        counts: _I64,
        chooses: _Flags,
        drafts: _I64,
        computed: _I64,
        drafted: _I64,
        keys_from: _I64,
        keys_to: _I64,
        places: _I64,
        new_tokens: _I64,
        ids: _I64,
    ) -> None:
        """Work that was ordered has ended: its sequences, those that are `there`, stand where `computed` and the three
        after it say, and those at `places` have so many new tokens of `ids`.
        """

    def filled(self, batch_rows: _I64, prompts_only: bool) -> tuple[_I64, _I64, list[bool]]:
        """Those with blocks, of their prompts if only these count, that are full or not any more, and have a name or
        not: how many have one, and whether just the next one is full, in `recent`, and not exported.
        """

    def told(
        self,
        batch_rows: _I64,
        places: _I64,
        there: _Flags | None,
        *,
        finish: NDArray[np.int8],
        counts: _I64,
        drafted: _I64,
        accepted: _I64,
    ) -> tuple[_Flags | None, _I64, NDArray[np.uint64], int | None, list[int]]:
        """Of the work at `places`: for whom tokens are all that there is to say (None: for all), the links, the
        requests, the link if there is just one, and the sums of `drafted` and `accepted`.
        """

    def block_at(self, batch_rows: _I64, places: _I64) -> _I32:
        """The tokens of one full block of each, which are in `recent`: `[batch_rows, block_tokens]`."""

    def prompt_tokens(self, batch_rows: _I64) -> int:
        """Tokens to compute, of those that do not decode."""

# Of `cut_answers`.
_Cut: TypeAlias = tuple[_I64, tuple[_I64, _I64, NDArray[np.int8], _I64, _I64]]
_DraftRows: TypeAlias = tuple[_I32, _I64, _I32, _I32, _I32]

@final
class InputColumns:
    """The arrays of an `InputBatch`, of whose rows each call names some.

    `facts` is `[8, rows]`: `prompt_len`, `limit`, `computed`, `total`, `drafted`, `keys_from`, `keys_to`, and how many
    blocks are known; `flags` is `[3, rows]`: `answers`, `ended`, `penalised`; `stops`, `drafts` and `blocks` are
    `[rows, ...]`. The arrays are kept, not copied.
    """

    def __new__(
        cls,
        *,
        facts: _I64,
        flags: _Flags,
        newest: _I32,
        stops: _I64,
        drafts: _I32,
        blocks: _I32,
        block_tokens: int,
    ) -> InputColumns: ...
    def live(self, batch_rows: _I64) -> _Flags | None:
        """Who has not ended; None: all."""

    def grow(self, batch_rows: _I64, places: _I64, blocks: _I64, keys_from: _I64) -> None:
        """Each has another block, at its place."""

    def build(
        self, batch_rows: _I64, *, counts: _I64, drafts: _I64, scores: _Flags, on_device: bool
    ) -> tuple[
        tuple[_I32, _I32, _I64, _I32, _I32, _I32, _I32, _I32],
        tuple[_I64, _I64, _I64, _I64, _I32],
        list[tuple[int, int, int, int]],
        list[int],
    ]:
        """The next `counts` tokens of each, at most so many of its drafts after its newest one.

        Returns `tokens`, `positions`, `slots`, `seq_starts`, `context_lens`, `block_tables`, `logit_rows`,
        `prompt_lens` of a `Batch`; `sampled` of `Prepared` and `batch_rows`, `counts`, `totals`, `drafts` of its rows;
        of those whose tokens are still to be filled in the place, the positions from and to, and the first row; and
        the places of those that are scored. With `on_device` newest tokens are named by their batch row.
        """

    def ends(self, batch_rows: _I64, most: int) -> tuple[_I64, _I64]:
        """The limits of these, and their first `most` stop tokens, `[batch_rows, most]`."""

    def settle(
        self,
        batch_rows: _I64,
        known: _I64,
        *,
        sampled_of: _I64,
        rows: _I64,
        drafts: _I32,
        ids: _I64,
        put_off: list[int],
        most_stops: int,
        more_stops: Mapping[int, Collection[int]],
    ) -> tuple[_Cut, list[int]]:
        """So many tokens of each are computed, and those of `sampled_of` get what `cut_answers` says.

        Those at `put_off`, places in `sampled_of`, got none: they go on, and compute their newest token again.

        `more_stops` is by batch row. Returns that, and the places, in `sampled_of`, of those with penalties.
        """

    def after(self, batch_rows: _I64) -> tuple[_I64, _I64, _I64, _I64]:
        """`computed`, `drafted`, `keys_from`, `keys_to` of these."""

    def drafting(self, batch_rows: _I64, most: int) -> tuple[_I64, _I64]:
        """The places of those that have just their newest token to compute, and how much each may draft."""

    def follow(
        self,
        batch_rows: _I64,
        *,
        seq_starts: _I32,
        positions: _I32,
        tokens: _I32,
        drafts: _I64,
        follows: _Flags | None = None,
    ) -> tuple[_I64, _I64, _I64, _I64, _DraftRows, _I32, _I32, _I32, list[tuple[int, int, int]]]:
        """A drafting pass over what a step made known of those that it `follows` (None: of all).

        Returns their places, their batch rows, the ends of their keys, their drafts; the rows as `draft_rows`; the
        `tokens`, `hidden_from` and `first_keys` of a `DraftBatch`; and of tokens that only a prompt has the row, the
        place and the position.
        """

    def draft_rows(self, batch_rows: _I64, starts: _I64, stops: _I64) -> _DraftRows:
        """`positions`, `slots`, `seq_starts`, `context_lens`, `block_tables` of a row for each of these positions."""

    def keep_drafts(self, batch_rows: _I64, guesses: _I64, made: _I64) -> None:
        """The first `made` of the guesses of each, `[batch_rows, most]`, are its drafts."""

@final
class GrammarVocabulary:
    """The tokens of a model as the bytes that they add to a text, and grammars compiled for them.

    `document` is the one that a worker sends about its model. Raises `ValueError` where it cannot be used.
    """

    def __new__(cls, document: bytes, *, memory_bytes: int = ...) -> GrammarVocabulary:
        """Its grammars and the answers that follow them may hold so much; 0 is no bound."""

    @staticmethod
    def of_tokens(
        tokens: list[bytes], ends: list[int], *, memory_bytes: int = ...
    ) -> GrammarVocabulary:
        """These tokens; those at `ends` end an answer."""

    def knows(self, kind: str, source: str) -> bool:
        """Whether it was compiled before, and is still kept."""

    def prepare(self, kind: str, source: str) -> None:
        """Compiled now, where it was not before, for a request that comes to `compile` later. Whether it is a grammar
        is said there. Raises `MemoryError` where the grammars in use leave no room.
        """

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        """For a request: compiled now, or found among those compiled before. Raises `ValueError` that says what is
        wrong, or `MemoryError` where the grammars in use leave no room.
        """

    @property
    def tokens(self) -> int:
        """How many there are."""

    @property
    def compiled(self) -> int:
        """Grammars that were compiled so far."""

    @property
    def found(self) -> int:
        """Requests whose grammar another one had before."""

    @property
    def refused(self) -> int:
        """Grammars that were not compiled, as those in use hold too much."""

    @property
    def memory_bytes(self) -> int:
        """What grammars and the answers that follow them hold: counted, and in part estimated from above."""

    @property
    def compile_us(self) -> int:
        """Of all that were compiled."""

@final
class CompiledGrammar:
    """A grammar at its beginning, for the tokens of one vocabulary."""

@final
class AnswerRules:
    """What one answer has to follow: `reasoning` if there is any, which ends, and behind it a grammar, if there is one.

    `reasoning` is the fields of the frame of that name. With `vocabulary` its markers are found by what they write,
    else by their tokens alone. Raises `ValueError` where no tokens write them.
    """

    def __new__(
        cls,
        grammar: CompiledGrammar | None,
        reasoning: tuple[list[int], list[int], int | None, int, list[int]] | None = None,
        vocabulary: GrammarVocabulary | None = None,
    ) -> AnswerRules: ...

@final
class GrammarRows:
    """Where the answers with rules stand that have one of `rows` batch rows, of a model with so many tokens.

    A thread of its own knows.
    """

    def __new__(
        cls, tokens: int, rows: int, *, work_beside: int = ..., work_late: int = ...
    ) -> GrammarRows:
        """The masks of a step may take so much work before it waits for them, and so much after that; by default as
        much as they want."""

    def take(self, row: int, rules: AnswerRules, tokens: list[int]) -> None:
        """An answer with these tokens has this batch row. Raises `ValueError` where a marker has other tokens."""

    def leave(self, row: int) -> None:
        """Nobody with rules has this batch row."""

    def begin(self, rows: _I64, counts: _I64, drafts: NDArray[np.int32]) -> None:
        """Begin to fill masks: `counts` rows for each batch row, all but the first behind one more of its drafts.

        `drafts` has one for each row; that of a first row means nothing.
        """

    def masks(self) -> tuple[NDArray[np.uint32], _I64, NDArray[np.uint32], NDArray[np.bool_]]:
        """Wait for them: `[rows, words]`, one bit a token, lowest first; none where nothing may be chosen.

        The tokens of masks that allow few are listed, too: the places in the list where those of each row begin,
        `[rows + 1]`, and the list. Last come the answers that were put off, as their masks were too much work for the
        step: they get no token in it.
        """

    def advance(self, rows: _I64, counts: _I64, ids: _I64) -> NDArray[np.bool_]:
        """The answers have so many of `ids` more. Returns which are complete."""

    def count_allowed(self, rows: _I64, counts: _I64, drafts: _I64) -> _I64:
        """How many of so many drafts of each its grammar allows, one after the other."""

    def error(self, row: int) -> str | None:
        """Why nothing may follow there, where that is not because the answer is complete."""

    def times(self) -> tuple[int, int, int, int, int]:
        """Masks so far, the microseconds of filling them, the steps that waited for it, and for how many."""

def mask_logits(logits: NDArray[np.float32], rows: _I64, masks: NDArray[np.uint32]) -> None:
    """Set what the mask of a row does not allow to -inf, in place."""

def argmax_of_few(
    logits: NDArray[np.float32], of: _I64, starts: _I64, ids: NDArray[np.uint32]
) -> tuple[_I64, NDArray[np.float32]]:
    """The best of a few tokens of each row, on a tie the lowest, and its logit; -1 in rows without.

    Row i has `ids[starts[of[i]] : starts[of[i] + 1]]`, and none where `of[i]` is -1.
    """

def edit_logits(
    logits: NDArray[np.float32],
    *,
    added: tuple[_I64, NDArray[np.float32]],
    penalised: tuple[_I64, NDArray[np.float32], NDArray[np.float32]],
    forbidden: _I64,
    kept: list[tuple[int, _I64]],
) -> None:
    """Change logits in place: add; divide or multiply by the factor of repetition and subtract; set to -inf; and leave
    a row nothing but some of its columns. The first item of each is places, which count through all rows.

    Raises ValueError, and then nothing has changed, for a place that is not there.
    """

def highest_logits(logits: NDArray[np.float32], k: _I64) -> tuple[_I64, NDArray[np.float64]]:
    """At least the `k` greatest of each row: columns and logits `[rows, most]`, the greatest first, on a tie the lowest
    column first. Behind the last one are 0 and -inf.
    """

@final
class SamplingColumns:
    """How the tokens of each batch row are drawn.

    `numbers` is `[3, rows]`: temperature, top-p, min-p. The arrays are kept, not copied.
    """

    def __new__(
        cls, *, numbers: NDArray[np.float64], top_k: _I64, seeds: NDArray[np.uint64]
    ) -> SamplingColumns: ...
    def drawn(self, batch_rows: _I64, best: NDArray[np.float32]) -> _I64 | None:
        """The places of those with a temperature, whose highest logit is a number; None: all."""

    def draws(
        self, batch_rows: _I64, positions: _I64
    ) -> tuple[
        NDArray[np.float64],
        _I64,
        NDArray[np.float64],
        NDArray[np.float64],
        NDArray[np.uint32],
        NDArray[np.uint32],
    ]:
        """The fields of `Draws` but for `best`."""

def noise_keys(
    seeds: NDArray[np.uint64], positions: _I64
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Two key words for each seed and position, by splitmix64."""

def cut_answers(
    ids: _I64,
    *,
    rows: _I64,
    drafts: _I32,
    totals: _I64,
    limits: _I64,
    stops: _I64,
    more_stops: Mapping[int, Collection[int]],
) -> _Cut:
    """What each sequence gets, which has so many rows of `ids`: the tokens that equal the draft of the next row, and
    the one after them, unless that is below 0; up to its first stop token.

    `stops` is `[sequences, some]`, `more_stops` is instead of its row. Returns how many tokens of each were right, then
    the tokens of all, how many each has, how each ends (0: it goes on, 1: a stop token, 2: its limit), how many drafts
    it had, and how many of its tokens are drafts.
    """

@final
class BlockIndex:
    """Which places (workers' tiers) hold which KV blocks; the one the router schedules by.

    A block key is an int below 2**64. Keys are given as a sequence of ints, or, which is quicker, as
    an array of uint64 (numpy, `array`) or as bytes, 8 for each key, little-endian. Who holds a block
    of a prompt is taken to hold those before it: workers evict the last ones first. Any thread may
    call; calls take turns.
    """

    def __new__(cls) -> BlockIndex: ...
    def join(self, capacity: int) -> int:
        """The number of a new place, which holds at most `capacity` blocks.

        Numbers are used again some time after `leave`. OverflowError if all 65,536 are taken.
        """

    def leave(self, place: int) -> None:
        """Forget the place and what it holds; nothing of one that is not there."""

    def store(self, place: int, keys: Sequence[int] | NDArray[np.uint64]) -> int:
        """Say that the place holds these blocks; how many of them were new.

        ValueError past its capacity, with those that fitted stored, and of a place that is not there.
        """

    def remove(self, place: int, keys: Sequence[int] | NDArray[np.uint64]) -> int:
        """Say that the place no longer holds these blocks; how many of them it did hold."""

    def overlaps(self, prompt: Sequence[int] | NDArray[np.uint64]) -> list[int]:
        """How many leading blocks of the prompt each place holds, by its number."""

    def held(self, place: int) -> int:
        """How many blocks the place holds; 0 of one that is not there."""

    @property
    def places(self) -> int:
        """Numbers in use are below this."""

    @property
    def nbytes(self) -> int:
        """Memory in use."""

    def __len__(self) -> int:
        """Blocks with an entry, some of which only left places held."""

class _RouterFlag(TypedDict):
    """One flag of the router, as its help shows it."""

    name: str
    """With its dashes, such as `--policy`."""
    also: list[str]
    """Other names of it, with their dashes."""
    group: str | None
    """The group of the help in which the flag stands; None is the first group."""
    value: str | None
    """What stands for the value in the help, such as `MS`; None for a flag that takes no value."""
    choices: list[str]
    """The words that the value may be; empty where it may be others."""
    default: str | None
    repeated: bool
    """The flag may be given several times."""
    variable: str | None
    """The variable of the environment that is read where the flag is not given."""
    reloads: bool
    """The flag takes effect at SIGHUP where a file of configuration sets it."""
    help: str

def router_flags() -> list[_RouterFlag]:
    """Every flag that the help of the router shows, in the order of the help."""

class _ConfigSetting(TypedDict):
    """A key of a file of configuration."""

    command: str
    """The table that it stands in."""
    key: str
    """A flag without its dashes."""
    line: int
    """Where it stands, counted from 1."""
    value: bool | str | list[str]
    """Texts as they would be typed, numbers too; a bool is for a flag that takes no value."""

def read_config(path: str | PathLike[str]) -> list[_ConfigSetting]:
    """What a file of configuration (TOML) says, in the order of its lines.

    Raises `ConfigError` with the file and the line: it cannot be read, is longer than 1 MiB or no TOML, or has a table
    that is no command's.
    """

def check_router(flags: Sequence[str], usage: str) -> None:
    """Raise `ConfigError` for what the router would refuse of `flags`; nothing is started, files are read.

    The text is for the person who typed the flags, and ends with `usage`.
    """

def check_key_line(line: str) -> None:
    """Raise `ConfigError` for what could not stand in a file of keys of clients. The text shows no key."""

def router_main(argv: list[str]) -> int:
    """Run the program `headrace-router` with these arguments, the first of which is its name.

    Returns its exit status once a signal has ended it. Only for the main thread of a process that
    does nothing else: the handler of SIGINT is taken away.
    """

def end_on_signals(numbers: list[int], drain_s: float | None = None) -> None:
    """Have this process end after the signals with these numbers, whatever its threads are at.

    `drain_s` after the first one, at most 2 s after the second, at once with a third; the exit status
    is 128 and the number of the second, or 1. Handlers that Python has now stay, and do the rest.
    OSError if a signal cannot be caught.
    """

def bench_main(argv: list[str]) -> int:
    """Run the program `headrace-bench` with these arguments, the first of which is its name.

    Returns its exit status. Only for the main thread of a process that does nothing else: the handler
    of SIGINT is taken away.
    """

@final
class Router:
    """A router in this process, on threads of its own; the same code as `headrace-router`.

    `args` holds the flags of `headrace router` with underscores, such as `{"port": 0}`. What is
    wrong raises ConfigError. Dropping a running router ends it at once.
    """

    def __new__(cls, args: dict[str, Any], /) -> Router: ...
    def start(self) -> None:
        """Bind both addresses and serve. Raises StartError, after which it can be tried again."""

    @property
    def address(self) -> str:
        """HOST:PORT for clients, with the port that was taken. RuntimeError before the start."""

    @property
    def worker_address(self) -> str:
        """Where workers dial in, HOST:PORT or unix:PATH. RuntimeError before the start."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the router has ended, False after the time-out. Ctrl-C gets through."""

    def stop(self, timeout_s: float | None = None) -> bool:
        """Drain, then end: after `timeout_s`, or else after the configured drain time-out.

        True if all that ran was finished in time. What is still busy 8 s later is left behind, on
        threads of its own. Stopping again does nothing.
        """

@final
class Etcd:
    """All members of one etcd, `HOST:PORT` each; entered as the variables HEADRACE_ETCD_... say.

    Raises ConfigError where these make no sense. Calls wait, with the GIL released, and raise
    EtcdFailed; a call ends within seconds for each member.
    """

    def __new__(cls, endpoints: Sequence[str], /) -> Etcd: ...
    def read(self, prefix: bytes, limit: int) -> tuple[list[tuple[bytes, bytes]], int]:
        """At most `limit` keys that begin with `prefix`, their values, and the revision that they are of."""

    def watch(self, prefix: bytes, revision: int) -> EtcdWatch:
        """What changes from `revision` on. The watch stands when this returns."""

@final
class EtcdWatch:
    """Changes of a prefix, as they come. Dropping it ends the watch."""

    def next(self) -> list[tuple[bytes, bytes | None]]:
        """The next changes; a value is None where its key went. Waits for them, for ever if need be.

        Raises EtcdCompacted, or EtcdFailed where the watch ended otherwise or was closed.
        """

    def close(self) -> None:
        """End it. A thread that waits in `next` is back at once."""

def plan_sends(
    ids: _I32Rows,
    weights: NDArray[np.float32],
    *,
    owners: _I64,
    slots: _I32,
    ranks: int,
    partial: bool,
) -> tuple[_I64, list[int], _I32Rows, NDArray[np.float32], _I32Rows, list[int]]:
    """The fields of a `SendPlan` of `headrace_kernels.moe.dispatch`. ValueError where sizes do not fit."""

def order_of_sends(places: _I32Rows, counts: list[int]) -> tuple[_I64, list[int]]:
    """Results of received rows in the order in which they were sent, and how many go back to each rank.

    `places` has a row for each received one, `counts` the received rows of each rank.
    """

@final
class SharedParcels:
    """What one rank of a group exchanges with the others through memory that all of them map.

    A parcel is some rows of columns that lie side by side in memory, of as many bytes a row on all ranks. One thread at
    a time calls this, but for `abort` and `close`. All that wait raise `StepAborted` and `RankLost` of
    `headrace_kernels.moe.transport`, the latter for a rank that ended, or from which nothing came for `timeout_ms`.
    """

    def __new__(
        cls, memory: Buffer, *, rank: int, ranks: int, slice_bytes: int, timeout_ms: int
    ) -> SharedParcels:
        """`memory` is shared, begins at a page, and has been all zero when the first rank saw it."""

    @staticmethod
    def memory_bytes(ranks: int, slice_bytes: int) -> int:
        """Bytes that a group needs. ValueError where a size cannot be."""

    def join(self, timeout_ms: int) -> int | None:
        """Wait for all ranks; the first one that has not come. It may be called again.

        ValueError where ranks were started with different sizes, or one twice.
        """

    def begin(self, round_number: int) -> None:
        """A later round begins; what is left of the one before is void."""

    def post(
        self,
        columns: Sequence[_Bytes],
        row_bytes: Sequence[int],
        parcels: Sequence[tuple[int, int]],
    ) -> None:
        """Send each rank its rows `[start, end)`, as far as there is room. The columns must not change until `take`."""

    def arrived(self) -> list[int]:
        """Wait until it is known how many rows come from each rank."""

    def take(self, columns: Sequence[_Bytes], row_bytes: Sequence[int]) -> None:
        """Wait for the rows, and put them into `columns` in the order of ranks. Ends the exchange."""

    @property
    def waited_s(self) -> float:
        """Seconds that programs waited in a `SharedExchange` so far. What waits here is not in it."""

    @property
    def waits_s(self) -> float:
        """So long a program waits there now; 0 where none does."""

    def abort(self, reason: str) -> None:
        """End the round on all ranks."""

    def close(self) -> None:
        """Leave the group. Whoever waits for this rank, here or elsewhere, learns it at once."""

@final
class SharedExchange:
    """One layer's exchange of rows through `parcels`, which a recorded program does by itself, without the GIL.

    `owners` and `slots` are where this rank sends the rows of each expert (`Replicas` in `moe/placement.py`). Parcels
    have the bytes of `AllToAll`. What a program raises is what that would; a `RankLost` is given to `on_lost` first,
    which may raise what names another rank. From `rows_apart` rows a slot on own rows are computed by themselves.
    """

    def __new__(
        cls,
        parcels: SharedParcels,
        *,
        owners: NDArray[np.int64],
        slots: NDArray[np.int32],
        partial: bool,
        on_lost: Callable[[Any], object] | None = None,
        rows_apart: int | None = None,
    ) -> SharedExchange:
        """ValueError where `owners` and `slots` are not of as many experts."""

    def follow(self, other: SharedExchange) -> None:
        """Send rows to where `other` does from the next pass on."""

    @property
    def slots_s(self) -> float:
        """Seconds that the slots of this rank computed so far."""

@final
class Weight:
    """A matrix of a model, packed for the CPU kernels; the array is not kept.

    `parts` are 2-D arrays stacked on top of each other: float32, or uint16 with the bits of what
    `stored` names ("bfloat16", "float16"). `dtype` is how it is kept: "float32", "bfloat16",
    "float16" or "int8" (a scale per output and 64 inputs).
    """

    def __new__(
        cls,
        parts: Sequence[NDArray[np.float32] | NDArray[np.uint16]],
        stored: str,
        dtype: str,
        bias: Sequence[float] | None = None,
    ) -> Weight: ...
    @staticmethod
    def mapped(
        buffer: Buffer,
        start: int,
        *,
        n: int,
        k: int,
        dtype: str,
        bias: Sequence[float] | None = None,
    ) -> Weight:
        """`[n, k]`, read where its image lies, from byte `start` of a buffer that nobody can write to.

        Raises ValueError where no image can be: behind the end, not aligned to 64 bytes, on a big-endian machine.
        """

    def image(self) -> NDArray[np.uint8]:
        """All that is packed, without the bias: what `mapped` takes."""

    @property
    def nbytes(self) -> int:
        """Bytes that one row reads."""

@final
class Table:
    """Rows to look up by token, kept as they are stored (see `Weight`)."""

    def __new__(cls, rows: NDArray[np.float32] | NDArray[np.uint16], stored: str) -> Table: ...
    @staticmethod
    def mapped(buffer: Buffer, start: int, *, rows: int, width: int, stored: str) -> Table:
        """Rows that lie one after the other in a buffer, as with `Weight.mapped`."""

@final
class HeadMatrices:
    """What makes keys and values of latents: `rows` is `[heads * (nope_dim + v_dim), kv_lora_rank]`.

    See `Weight` for the rest. What does not fit together raises ValueError.
    """

    def __new__(
        cls,
        rows: NDArray[np.float32] | NDArray[np.uint16],
        stored: str,
        dtype: str,
        *,
        heads: int,
        nope_dim: int,
        v_dim: int,
    ) -> HeadMatrices: ...
    @staticmethod
    def mapped(
        buffer: Buffer,
        start: int,
        *,
        heads: int,
        nope_dim: int,
        v_dim: int,
        kv_lora_rank: int,
        dtype: str,
    ) -> HeadMatrices:
        """Read where their image lies, as with `Weight.mapped`."""

    def image(self) -> NDArray[np.uint8]:
        """The bytes that `mapped` reads: a copy."""

    @property
    def nbytes(self) -> int:
        """Bytes that one row reads."""

class _RankExchange(Protocol):
    """What moves rows between ranks: called in this order for each layer, on the thread of the step."""

    def send(
        self, x: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32], /
    ) -> None: ...
    def receive(self) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]: ...
    def collect(
        self, y: NDArray[np.float32], places: NDArray[np.int32], /
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]: ...

@final
class Slots:
    """The experts of a layer that are here, `count` of rows that are `hidden` wide, until an `Experts` takes them.

    Of each `gate_up` holds `[2 * width, hidden]` and `down` `[hidden, width]`, each with its `stored`; for that and
    `dtype` see `Weight`. They are asked for one by one, and let go of before the next. What does not fit together
    raises ValueError, and so do slots that were taken.
    """

    def __new__(
        cls,
        gate_up: Sequence[tuple[NDArray[np.float32] | NDArray[np.uint16], str]],
        down: Sequence[tuple[NDArray[np.float32] | NDArray[np.uint16], str]],
        shape: tuple[int, int],
        dtype: str,
    ) -> Slots: ...
    @staticmethod
    def mapped(
        buffer: Buffer, start: int, *, count: int, hidden: int, width: int, dtype: str
    ) -> Slots:
        """Read where their parts lie one after the other, as with `Weight.mapped`."""

    @property
    def parts(self) -> int:
        """Of how many parts the bytes consist that `mapped` reads."""

    def image(self, part: int) -> NDArray[np.uint8]:
        """A part, some of which are empty: a copy."""

@final
class Experts:
    """Router and experts of one layer; `Routing` explains the rest.

    `gate` is `[experts, hidden]`, and stays float32. What does not fit together raises ValueError.

    `shared` is the expert that all rows go through: its `[2 * width, hidden]` and `[hidden, width]`. With an `exchange`
    `slots` are this rank's, and a step fails with what it raises; without one they are all experts in their order.
    `partial` has results summed before they are returned to the ranks that they are for (`Combine` in
    `moe/dispatch.py`).
    """

    def __new__(
        cls,
        gate: NDArray[np.float32],
        bias: Sequence[float],
        slots: Slots,
        *,
        top_k: int,
        groups: int,
        top_groups: int,
        normalise: bool,
        scale: float,
        shared: tuple[Weight, Weight] | None = None,
        exchange: _RankExchange | SharedExchange | None = None,
        partial: bool = False,
    ) -> Experts: ...
    def overwrite(
        self,
        slot: int,
        gate_up: tuple[NDArray[np.float32] | NDArray[np.uint16], str],
        down: tuple[NDArray[np.float32] | NDArray[np.uint16], str],
    ) -> None:
        """Put another expert into a slot, in the same place in memory. Waits while this layer computes.

        ValueError, and nothing is changed, where there is no such slot or the expert has another shape.
        """

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot's image."""

    def read_slot(self, slot: int) -> NDArray[np.uint8]:
        """The image of a slot: its expert as it is packed, alike on all machines."""

    def write_slot(self, slot: int, image: NDArray[np.uint8]) -> None:
        """Like `overwrite`, with an image of the same shape and dtype: the same bits."""

    @property
    def counts(self) -> NDArray[np.uint64]:
        """Rows that chose each expert so far. Any thread may ask."""

    @property
    def nbytes(self) -> int:
        """Bytes of all experts and the router."""

@final
class Value:
    """A value `[rows, width]` of a `Program`."""

def race(
    logits: NDArray[np.float32],
    tokens: NDArray[np.uint32],
    *,
    best: NDArray[np.float32],
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    key: NDArray[np.uint32],
    key2: NDArray[np.uint32],
    few: tuple[_I64, _I64, NDArray[np.uint32]] | None = None,
) -> NDArray[np.int64]:
    """The tokens drawn from rows of logits, `[rows, columns]`, by `narrow.race` on the CPU.

    `tokens` are the ids of the columns; `best` is the greatest logit of each row, and like the others `[rows]`.
    Rows with `few` columns, as in `argmax_of_few`, are drawn from these alone.
    ValueError where lengths differ.
    """

@final
class Program:
    """A forward pass: recorded once through the methods named as operations, then run for each step.

    The last operation is the result. `simd` forces an instruction set ("avx512vnni", "avx512",
    "avx2", "portable"); results are the same bits with all. A cache or an operand that does not fit raises
    ValueError.
    """

    def __new__(
        cls,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        layers: int,
        block_tokens: int,
        scale: float,
        inv_freq: Sequence[float],
        rope_scale: float,
        simd: str | None = None,
    ) -> Program: ...
    @staticmethod
    def latent(
        *,
        heads: int,
        kv_lora_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        layers: int,
        block_tokens: int,
        scale: float,
        inv_freq: Sequence[float],
        rope_scale: float,
        rope_interleave: bool,
        hidden_tail: int,
        simd: str | None = None,
    ) -> Program:
        """Where heads share a latent. `hidden_tail` floats end each block of the cache."""

    def embed(self, table: Table) -> Value: ...
    def rms_norm(self, x: Value, weight: Sequence[float], eps: float) -> Value: ...
    def linear(self, x: Value, weight: Weight, residual: Value | None = None) -> Value: ...
    def rope_and_store_kv(self, qkv: Value, layer: int) -> Value: ...
    def paged_attention(self, qkv: Value, layer: int) -> Value: ...
    def mla_store(
        self, q: Value, latent: Value, norm: Sequence[float], eps: float, layer: int
    ) -> Value: ...
    def mla_attention(self, q: Value, kv_b: HeadMatrices, layer: int) -> Value: ...
    def silu_mul(self, gate_up: Value) -> Value: ...
    def moe(self, x: Value, experts: Experts, residual: Value) -> Value: ...
    def columns(self, x: Value, start: int, stop: int) -> Value: ...
    def concat(self, a: Value, b: Value) -> Value: ...
    def wanted_rows(self, x: Value) -> Value: ...
    def keep_hidden(self, x: Value) -> None: ...
    def pool_rows(self, x: Value, weight: Sequence[float] | None = None, eps: float = 0.0) -> None:
        """Give the rows that a step pools to who runs it, normed where there is a weight."""

    def hidden(self) -> Value:
        """Rows that another program kept. A program with it is a draft pass."""

    def finish(self) -> None:
        """End the recording."""

    @property
    def out_width(self) -> int:
        """Width of the result."""

    @property
    def kept_width(self) -> int:
        """Floats of each row that `keep_hidden` keeps; 0 where it does not."""

    @property
    def pooled_width(self) -> int:
        """Floats of each row that `pool_rows` gives; 0 where it gives none."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the cache: all layers, and the tail."""

    @property
    def simd(self) -> str:
        """The instruction set in use."""

    def run(
        self,
        *,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int64],
        seq_starts: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        kv: NDArray[np.float32],
        out: NDArray[np.float32],
        kept: NDArray[np.float32] | None = None,
        hidden: NDArray[np.float32] | None = None,
        hidden_from: NDArray[np.int32] | None = None,
        first_keys: NDArray[np.int32] | None = None,
        progress: Callable[[int], object] | None = None,
        layers_per_group: int = 1,
        pool_rows: NDArray[np.int32] | None = None,
        pooled: NDArray[np.float32] | None = None,
    ) -> None:
        """Compute one step (`Batch` explains the arrays) with the GIL released.

        Each time that keys and values of `layers_per_group` more layers, or of all, are stored, `progress` is told
        how many such groups there are now. What it raises comes out here, once the step is computed.

        `kv` is whole blocks of `block_bytes`; `out` is `[len(logit_rows), width]`, `kept` is
        `[len(tokens), kept_width]`, which another array of it can be `hidden` of a draft pass
        (`DraftBatch` explains its two fields), `pooled` is `[len(pool_rows), pooled_width]`. A step that does not
        fit together, or does not fit the cache, raises ValueError and changes nothing.
        """

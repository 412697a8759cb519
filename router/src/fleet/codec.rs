//! Frames to bytes and back. `core::frame` says what a frame is, `codec::msgpack` how its parts are written.
//!
//! One pass reads and checks: whatever the bytes, the result is a frame or a [`CodecError`] that names the place. A
//! length is believed only as far as the bytes after it allow, so decoding takes at most a small multiple of the input
//! in memory; nesting is as deep as the types and no deeper.

mod columns;
mod io;
mod msgpack;
mod rules;

pub use columns::{ColumnsError, OutputColumns};
pub use io::{FrameArrival, FrameReader, FrameWriter, ReadError};

use self::msgpack::{BodyReader, Fault, FaultKind, Item, Read, Wire, put_array_len, put_uint};
use crate::core::frame::{
    Blocks, Bye, Cancel, Capacity, Continue, Describe, Drain, Failed, Fetch, Fingerprints, Frame,
    Freed, Grammar, GrammarTotals, Group, GroupTotals, Hello, KvFrom, KvReady, KvTransfer, Load,
    MAX_FRAME_BYTES, MOST_OTHER_PROMPTS, MigrationOrder, ModelPart, Offer, OtherPrompt,
    OtherPrompts, OtherVersion, Output, PROTOCOL, Ping, Prove, Ranked, Reasoning, Refuse, Resume,
    Resync, Sampling, Snapshot, Step, StepCost, StoredRun, Submit, Ticket, TokenLimits,
    TokenLogprob, TraceContext, Transferred, Welcome,
};

/// Why bytes are not a frame (or, for [`CodecError::TooLong`], why a frame cannot be sent).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The body is longer than this side takes now.
    #[error("frame of {got} bytes, the limit is {limit}")]
    TooLong {
        /// Bytes of the body.
        got: usize,
        /// Most bytes allowed.
        limit: usize,
    },
    /// The bytes end too early, or a length says more than the bytes after it.
    #[error("frame ends inside {at}")]
    Truncated {
        /// Frame and field, such as `step.outputs[3].ids`.
        at: String,
    },
    /// No frame has this type.
    #[error("unknown frame type {number}")]
    UnknownType {
        /// The type that its sender wrote.
        number: u64,
    },
    /// A Hello of another version of the protocol. Its other fields were not read.
    #[error("a peer of protocol version {got}, this side speaks {}", PROTOCOL)]
    OtherVersion {
        /// The version that the Hello names.
        got: u16,
    },
    /// A field is missing, too many, of another type, or out of range.
    #[error("{at}: expected {expected}, got {got}")]
    Malformed {
        /// Frame and field, such as `hello.fingerprints.tokenizer`.
        at: String,
        /// What the field may hold.
        expected: String,
        /// What it held.
        got: String,
    },
    /// The frame is complete and bytes follow.
    #[error("{extra} bytes after the end of a {frame} frame")]
    TrailingBytes {
        /// Name of the kind of frame.
        frame: &'static str,
        /// How many bytes.
        extra: usize,
    },
}

/// Appends the body of `frame` to `out`.
///
/// # Errors
/// [`CodecError::TooLong`]; `out` is as it was.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) -> Result<(), CodecError> {
    let start = out.len();
    write_frame(frame, out);
    let got = out.len() - start;
    if got > MAX_FRAME_BYTES {
        out.truncate(start);
        return Err(CodecError::TooLong { got, limit: MAX_FRAME_BYTES });
    }
    Ok(())
}

/// The frame with this body.
///
/// # Errors
/// Says what is wrong where.
pub fn decode(body: &[u8]) -> Result<Frame, CodecError> {
    if body.len() > MAX_FRAME_BYTES {
        return Err(CodecError::TooLong { got: body.len(), limit: MAX_FRAME_BYTES });
    }
    let mut reader = BodyReader::new(body);
    let (len, number) = read_head(&mut reader).map_err(|fault| named(*fault, "frame"))?;
    if number == HELLO && len > 1 {
        let got =
            reader.peek::<u16>().map_err(|fault| named(*fault.inside("protocol"), "hello"))?;
        if got != PROTOCOL {
            return Err(CodecError::OtherVersion { got });
        }
    }
    let (name, frame) = read_frame(number, len - 1, &mut reader)?;
    match reader.left() {
        0 => Ok(frame),
        extra => Err(CodecError::TrailingBytes { frame: name, extra }),
    }
}

fn read_head(reader: &mut BodyReader<'_>) -> Read<(usize, u64)> {
    let len = reader.array_len()?;
    if len == 0 {
        return Err(Fault::malformed("a type number", "an empty array"));
    }
    Ok((len, u64::read(reader)?))
}

/// The error for a fault inside the frame `name`.
fn named(fault: Fault, name: &str) -> CodecError {
    let at = format!("{name}{}", fault.path);
    match fault.kind {
        FaultKind::Truncated => CodecError::Truncated { at },
        FaultKind::Malformed { expected, got } => CodecError::Malformed { at, expected, got },
    }
}

/// Number of the frame that says which version its sender speaks.
const HELLO: u64 = 1;

/// Type number and name of each frame.
macro_rules! frames {
    ($($number:literal $name:literal $variant:ident,)*) => {
        fn write_frame(frame: &Frame, out: &mut Vec<u8>) {
            match frame {
                $(Frame::$variant(fields) => {
                    put_array_len(out, 1 + fields.count());
                    put_uint(out, $number);
                    fields.write_fields(out);
                })*
            }
        }

        fn read_frame(
            number: u64,
            len: usize,
            reader: &mut BodyReader<'_>,
        ) -> Result<(&'static str, Frame), CodecError> {
            match number {
                $($number => match Fields::read_fields(len, reader) {
                    Ok(fields) => Ok(($name, Frame::$variant(fields))),
                    Err(fault) => Err(named(*fault, $name)),
                },)*
                _ => Err(CodecError::UnknownType { number }),
            }
        }

        impl Frame {
            /// Its name in errors and logs.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }
        }
    };
}

frames! {
    1 "hello" Hello,
    2 "prove" Prove,
    3 "snapshot" Snapshot,
    4 "blocks" Blocks,
    5 "step" Step,
    6 "model" Model,
    7 "kv_ready" KvReady,
    8 "freed" Freed,
    9 "failed" Failed,
    10 "bye" Bye,
    11 "transferred" Transferred,
    12 "offer" Offer,
    13 "group_totals" GroupTotals,
    14 "grammar_totals" GrammarTotals,
    15 "other_prompts" OtherPrompts,
    32 "welcome" Welcome,
    33 "other_version" OtherVersion,
    34 "submit" Submit,
    35 "describe" Describe,
    36 "cancel" Cancel,
    37 "drain" Drain,
    38 "ping" Ping,
    39 "resync" Resync,
    40 "ticket" Ticket,
    41 "continue" Continue,
    42 "fetch" Fetch,
    43 "refuse" Refuse,
}

/// Runs of blocks in one frame. A worker's step begins some thousand at most, while a frame of empty ones would take ten
/// times its bytes of memory, and as long to give back.
const MOST_RUNS: usize = 1 << 18;

/// A struct as a run of fields, without the array around them.
trait Fields: Sized {
    fn count(&self) -> usize;
    fn write_fields(&self, out: &mut Vec<u8>);
    fn read_fields(len: usize, reader: &mut BodyReader<'_>) -> Read<Self>;
}

/// Fields in wire order, which is the order of declaration in `core::frame` (a test holds the two together), the
/// most of them that an array may have, and the rule that they have to keep.
macro_rules! structs {
    ($($name:ident $([$most:expr])? { $($field:tt),* $(,)? } $(=> $rule:path)?)*) => {$(
        impl Fields for $name {
            fn count(&self) -> usize {
                const { [$(stringify!($field)),*].len() }
            }

            fn write_fields(&self, out: &mut Vec<u8>) {
                $(self.$field.write(out);)*
            }

            fn read_fields(len: usize, reader: &mut BodyReader<'_>) -> Read<Self> {
                let count = const { [$(stringify!($field)),*].len() };
                if len != count {
                    return Err(Fault::malformed(format!("{count} fields"), len));
                }
                let read = Self {
                    $($field: Wire::read(reader).map_err(|fault| fault.inside(stringify!($field)))?,)*
                };
                $($rule(&read)?;)?
                Ok(read)
            }
        }

        impl Wire for $name {
            const MIN_BYTES: usize = 1 + [$(stringify!($field)),*].len();

            fn write(&self, out: &mut Vec<u8>) {
                put_array_len(out, self.count());
                self.write_fields(out);
            }

            fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
                let len = reader.array_len()?;
                Self::read_fields(len, reader)
            }
        }

        impl Item for $name {
            $(const MOST: usize = $most;)?
        }
    )*};
}

structs! {
    Hello {
        protocol, worker, epoch, role, model, fingerprints, capacity, context_tokens, group, transfer, nonce,
        step_prior, kv_block_bytes, dtype, aliases, pooled_width, queue_rule,
    }
    Fingerprints { weights, tokenizer, chat_template, kv_layout, hash_scheme, block_tokens }
    Capacity { blocks, sequences, batched_tokens, waiting, host_blocks, disk_blocks }
    StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms }
    Group { id, rank, size, epoch, transport }
    Prove { proof }
    Snapshot { epoch, sequence, hashes, last }
    Blocks { epoch, sequence, stored, removed, cleared, tier }
    StoredRun[MOST_RUNS] { parent, hashes }
    Step {
        step, ms, waited_us, prefill_tokens, prefill_context, decode_rows, kv_tokens, waiting_tokens, drafted,
        accepted, load, outputs,
    }
    Load { blocks_used, blocks_cached, running, waiting, preemptions }
    Output { request, ids, logprobs, finish, cached_tokens, prompt_logprobs, drafted, accepted, pooled }
    TokenLogprob { logprob, top }
    Ranked { 0, 1 }
    ModelPart { fingerprint, part, last, data }
    KvReady { request, ticket, lease_ms } => rules::kv_ready
    Freed { request, blocks }
    Failed { request, kind, message }
    Bye { reason }
    Transferred { request, worker, backend, blocks, bytes, ms, error }
    Offer { ticket, names, parents, hits, lease_ms } => rules::offer
    GrammarTotals {
        masks, mask_us, late, wait_us, compiled, compile_us, known, put_off, refused, memory_bytes,
    }
    OtherPrompts { prompts }
    OtherPrompt[MOST_OTHER_PROMPTS] { behind, tokens, left, prompts }
    GroupTotals { held_rounds, held_ms, waves, slots, bytes, refused, gain_s, cost_s, spent_s }
    Welcome { protocol, router, heartbeat_ms, challenge, proof, hash_key }
    OtherVersion { field, expected, got, message }
    Refuse { reason, router, retry_after_ms, field, expected, got, message } => rules::refuse
    Submit {
        request, tokens, sampling, stop_ids, max_tokens, deadline_ms, priority, salt, kv_from, resume,
        kv_transfer, pooling, request_id, trace,
    } => rules::submit
    TraceContext { parent, state }
    Sampling {
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, logprobs,
        prompt_logprobs, logit_bias, ignore_eos, min_tokens, grammar, reasoning, limits,
    }
    TokenLimits { allowed, banned, lengths } => rules::token_limits
    Grammar { kind, source } => rules::grammar
    Reasoning { begin, end, max_tokens, begun, ends_too } => rules::reasoning
    KvFrom { worker, transfer, timeout_ms, pull_key }
    KvTransfer { lease_ms, pull_key }
    MigrationOrder { blocks, pull_key }
    Resume { generated, rng_counter }
    Describe { fingerprint }
    Cancel { request }
    Drain { budget_ms, migration }
    Ping { nonce }
    Resync { reason }
    Ticket { request, ticket } => rules::pass_on
    Continue { request, generated } => rules::go_on
    Fetch { request, kv_from, ticket, names, parents, offset } => rules::fetch
}

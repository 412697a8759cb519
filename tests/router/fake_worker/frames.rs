//! The model that fake workers serve, and the frames in which they speak of it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use headrace_router::core::blocks::HASH_SCHEME;
use headrace_router::core::frame::*;
use serde_json::{Value, json};

/// Name of the model that fake workers serve.
pub(crate) const MODEL: &str = "fake";
/// Ends an answer: `<|im_end|>`.
pub(crate) const EOS: u32 = 2;
/// Longest sequence that fake workers take.
pub(crate) const CONTEXT_TOKENS: u32 = 4096;

const TOKENIZER: &str = include_str!("../../data/tokenizer_byte_level.json");
const CHAT_TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] \
    + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The description of the fake model.
pub(crate) fn doc() -> Value {
    json!({
        "tokenizer": TOKENIZER,
        "chat_template": CHAT_TEMPLATE,
        "eos_token_ids": [EOS],
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": null,
        "unk_token": null,
        "context_tokens": CONTEXT_TOKENS,
        "vocab_size": 577,
        "generation": {},
    })
}

/// The tokens of printable ASCII, one for each character.
pub(crate) fn letters(text: &str) -> Vec<u32> {
    let letter = |c: char| match c {
        ' ' => 223, // written as U+0120 in the vocabulary
        '!'..='~' => u32::from(c) - u32::from('!') + 3,
        _ => panic!("{c:?} is not printable ASCII"),
    };
    text.chars().map(letter).collect()
}

/// A Hello that is accepted. Epochs grow.
pub(crate) fn hello(worker: &str) -> Hello {
    static EPOCH: AtomicU64 = AtomicU64::new(1);
    Hello {
        protocol: PROTOCOL,
        worker: worker.into(),
        epoch: EPOCH.fetch_add(1, Relaxed),
        role: Role::Both,
        model: MODEL.into(),
        fingerprints: Fingerprints {
            weights: "weights-1".into(),
            tokenizer: "tokenizer-1".into(),
            chat_template: "template-1".into(),
            kv_layout: "layout-1".into(),
            hash_scheme: HASH_SCHEME.into(),
            block_tokens: 16,
        },
        capacity: Capacity {
            blocks: 1024,
            sequences: 8,
            batched_tokens: 512,
            waiting: 8,
            host_blocks: 0,
            disk_blocks: 0,
        },
        context_tokens: CONTEXT_TOKENS,
        group: None,
        transfer: Vec::new(),
        nonce: vec![7; 16],
        step_prior: None,
        kv_block_bytes: 0,
        dtype: "float32".into(),
        aliases: Vec::new(),
        pooled_width: 4,
        queue_rule: QueueRule::Halves,
    }
}

/// A rank of a group's first start.
pub(crate) fn rank_of(group: &str, rank: u32, size: u32) -> Group {
    Group { id: group.into(), rank, size, epoch: 1, transport: String::new() }
}

/// A description in parts.
pub(crate) fn model_parts(fingerprint: &str, doc: &[u8]) -> Vec<Frame> {
    let parts = doc.chunks(4096).collect::<Vec<_>>();
    let frame = |(i, data): (usize, &&[u8])| {
        Frame::Model(ModelPart {
            fingerprint: fingerprint.into(),
            part: u32::try_from(i).unwrap(),
            last: i + 1 == parts.len(),
            data: data.to_vec(),
        })
    };
    parts.iter().enumerate().map(frame).collect()
}

/// A step that computed nothing and brings these outputs.
pub(crate) fn step(outputs: Vec<Output>) -> Step {
    Step {
        step: 1,
        ms: 1.0,
        waited_us: 0,
        prefill_tokens: 0,
        prefill_context: 0,
        decode_rows: 0,
        kv_tokens: 0,
        waiting_tokens: 0,
        drafted: 0,
        accepted: 0,
        load: Load::default(),
        outputs,
    }
}

/// Tokens for a request.
pub(crate) fn output(request: RequestId, ids: Vec<u32>, finish: Option<Finish>) -> Output {
    Output {
        request,
        ids,
        logprobs: None,
        finish,
        cached_tokens: None,
        prompt_logprobs: None,
        pooled: None,
        drafted: 0,
        accepted: 0,
    }
}

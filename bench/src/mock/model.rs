//! What mock workers say about their model: a description from a file, or a small built-in one.

pub(crate) mod script;

use std::path::Path;

use anyhow::Context as _;
use serde_json::{Map, Value, json};

/// Merges of a byte-level BPE, learned by `bench/presets/tokenizer.py`: English and code get about as many tokens as
/// from a real tokenizer.
const MERGES: &str = include_str!("model/merges.txt");
const SPECIAL: [&str; 4] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"];
const END: usize = 2;
/// Ids that prompts may use. Those that the tokenizer does not know make blocks, but no text.
const VOCAB: u32 = 32_768;
/// Longest sequence of the built-in model; DeepSeek-R1's is 163,840 tokens.
const CONTEXT_TOKENS: u32 = 163_840;
const CHAT_TEMPLATE: &str = include_str!("model/chat_template.jinja");
/// Tokens behind the vocabulary that models use for tool calls and thoughts, and whether they count as special: those that
/// do are not part of an answer's text. Random answers use none of them.
const NAMED: [(&str, bool); 10] = [
    ("<think>", false),
    ("</think>", false),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("[TOOL_CALLS]", false),
    ("<|python_tag|>", true),
    ("<|eom_id|>", true),
    ("<|eot_id|>", true),
];
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A model description.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    /// The document that `Describe` asks for.
    pub(crate) document: Vec<u8>,
    /// Stands for it in fingerprints.
    pub(crate) fingerprint: String,
    pub(crate) vocab_size: u32,
    pub(crate) context_tokens: u32,
    /// Answers use tokens below this one; all of them have text.
    pub(crate) answer_vocab: u32,
}

impl Model {
    /// That of a file, or else the built-in one.
    ///
    /// # Errors
    /// The file cannot be read or is no description.
    pub(crate) fn of(path: Option<&Path>) -> anyhow::Result<Self> {
        path.map_or_else(|| Ok(Self::built_in()), Self::read)
    }

    /// The built-in one.
    pub(crate) fn built_in() -> Self {
        let (tokenizer, tokens) = tokenizer();
        let document = json!({
            "tokenizer": tokenizer.to_string(),
            "chat_template": CHAT_TEMPLATE,
            "eos_token_ids": [END],
            "eos_token": SPECIAL[END],
            "context_tokens": CONTEXT_TOKENS,
            "vocab_size": VOCAB,
            "generation": {},
        });
        let document = document.to_string().into_bytes();
        let fingerprint = fingerprint(&document);
        let context_tokens = CONTEXT_TOKENS;
        Self { document, fingerprint, vocab_size: VOCAB, context_tokens, answer_vocab: tokens }
    }

    /// One from a file.
    ///
    /// # Errors
    /// The file cannot be read or is no description.
    fn read(path: &Path) -> anyhow::Result<Self> {
        let name = || path.display().to_string();
        let document = std::fs::read(path).with_context(name)?;
        let doc = headrace_router::prompt::ModelDoc::parse(&document).with_context(name)?;
        Ok(Self {
            fingerprint: fingerprint(&document),
            vocab_size: doc.vocab_size,
            context_tokens: doc.context_tokens,
            answer_vocab: doc.vocab_size,
            document,
        })
    }
}

/// `tokenizer.json`, and how many tokens it has before the named ones.
fn tokenizer() -> (Value, u32) {
    let alphabet = (0..=u8::MAX).map(|byte| letter(byte).to_string());
    let merged = MERGES.lines().map(|merge| merge.replace(' ', ""));
    let mut vocab = Map::new();
    for token in SPECIAL.iter().map(ToString::to_string).chain(alphabet).chain(merged) {
        let id = vocab.len();
        vocab.entry(token).or_insert(id.into());
    }
    let tokens = u32::try_from(vocab.len()).expect("a few thousand");
    let merges: Vec<_> = MERGES.lines().map(|merge| merge.split(' ').collect::<Vec<_>>()).collect();
    let special = SPECIAL.iter().zip(0..).map(|(content, id)| (*content, id, true));
    let named = NAMED.iter().zip(tokens..).map(|((content, special), id)| (*content, id, *special));
    let added = special.chain(named).map(|(content, id, special)| {
        json!({
            "id": id, "content": content, "special": special, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false,
        })
    });
    let byte_level = |use_regex| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex,
        })
    };
    let words = json!({
        "type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false,
    });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level(false)]},
        "post_processor": null,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    });
    (tokenizer, tokens)
}

/// How byte-level tokenizers write a byte: itself where it prints, a letter from U+0100 on where it does not.
fn letter(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|before| !prints(*before)).count();
    u32::try_from(before).ok().and_then(|n| char::from_u32(0x100 + n)).expect("below U+0200")
}

/// FNV-1a: enough to tell two documents apart.
fn fingerprint(document: &[u8]) -> String {
    let hash = document.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("mock-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use headrace_router::prompt::ModelDoc;

    use super::*;

    #[test]
    fn the_built_in_description_is_read_by_routers() {
        let model = Model::built_in();
        let doc = ModelDoc::parse(&model.document).unwrap();
        assert_eq!((doc.vocab_size, model.answer_vocab), (VOCAB, 4096));
        assert!(model.document.len() < 1 << 18, "{} bytes", model.document.len());
        assert_eq!(letter(b' '), '\u{120}');
        assert_eq!(letter(0xad), '\u{143}');
    }
}

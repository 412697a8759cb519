//! Tokenizers whose options change what happens around added tokens, and texts that show it.

use proptest::prelude::*;

use super::*;

pub(super) fn edited(tokenizer: &str, edit: impl FnOnce(&mut Value)) -> String {
    let mut json: Value = serde_json::from_str(tokenizer).unwrap();
    edit(&mut json);
    json.to_string()
}

pub(super) fn flag(tokenizer: &str, token: &str, name: &str) -> String {
    edited(tokenizer, |json| {
        let tokens = json["added_tokens"].as_array_mut().unwrap();
        let token = tokens.iter_mut().find(|t| t["content"] == token).unwrap();
        token[name] = json!(!token[name].as_bool().unwrap());
    })
}

/// Tokenizers whose options change what happens around added tokens.
pub(super) fn variants() -> Vec<(&'static str, String)> {
    let metaspace = |scheme: &str| {
        edited(BYTE_FALLBACK, |t| {
            let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
            t["normalizer"] = Value::Null;
            t["pre_tokenizer"] = metaspace.clone();
            t["decoder"] = metaspace;
        })
    };
    let normalizer = |kind: &str| {
        let normalizer = json!({ "type": kind });
        edited(BYTE_LEVEL, |t| t["normalizer"] = normalizer)
    };
    let mut variants = vec![
        ("byte level", BYTE_LEVEL.to_owned()),
        ("byte fallback", BYTE_FALLBACK.to_owned()),
        ("word piece", WORD_PIECE.to_owned()),
        ("metaspace first", metaspace("first")),
        ("metaspace always", metaspace("always")),
        ("metaspace never", metaspace("never")),
        ("NFC", normalizer("NFC")),
        ("NFKC", normalizer("NFKC")),
        ("lower case", normalizer("Lowercase")),
        (
            "prefix space",
            edited(BYTE_LEVEL, |t| {
                t["pre_tokenizer"] = json!(
                    {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}
                );
            }),
        ),
        (
            "strip",
            edited(BYTE_LEVEL, |t| {
                t["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
            }),
        ),
        (
            "white space token",
            edited(BYTE_LEVEL, |t| {
                let mut token = t["added_tokens"][0].clone();
                token["id"] = json!(10_000);
                token["content"] = json!(" \n");
                t["added_tokens"].as_array_mut().unwrap().push(token);
            }),
        ),
    ];
    for name in ["lstrip", "rstrip", "single_word", "normalized"] {
        variants.push((name, flag(BYTE_LEVEL, "<|im_start|>", name)));
        variants.push((name, flag(BYTE_LEVEL, "<|im_end|>", name)));
        variants.push((name, flag(BYTE_LEVEL, "<think>", name)));
        variants.push((name, flag(BYTE_FALLBACK, "[INST]", name)));
    }
    // A tokenizer from outside, where there is one: the default model's, for example.
    if let Some(path) = std::env::var_os("HEADRACE_TEST_TOKENIZER") {
        variants.push(("from outside", std::fs::read_to_string(path).unwrap()));
    }
    variants
}

/// Text in which added tokens meet everything that could make them matter: words, white space, marks, each other.
pub(super) fn mixed_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => prop::sample::select(vec![
            "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<s>", "</s>", "[INST]", "[/INST]",
            "[SEP]", "[CLS]", "<|im_start", "|>", "<unk>",
        ]).prop_map(str::to_owned),
        3 => prop::sample::select(vec![
            " ", "  ", "\n", " \n", "\n\n", "\t", "\u{a0}", "▁", "_", "a", "é", "e\u{301}", "\u{301}", "日本", "🙂", "\u{0}",
        ]).prop_map(str::to_owned),
        3 => "[a-zA-Z0-9 .,'\n]{0,24}",
        1 => "\\PC{0,8}",
        // Long enough to be cached.
        1 => "[a-z ]{1,12}".prop_map(|words| words.repeat(90)),
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

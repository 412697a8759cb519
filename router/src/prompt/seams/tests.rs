use std::cell::Cell;

use proptest::prelude::*;
use serde_json::json;

use super::*;

const BYTE_LEVEL: &str = include_str!("../../../../tests/data/tokenizer_byte_level.json");
const BYTE_FALLBACK: &str = include_str!("../../../../tests/data/tokenizer_byte_fallback.json");
const WORD_PIECE: &str = include_str!("../../../../tests/data/tokenizer_word_piece.json");

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

fn edited(json: &str, edit: impl FnOnce(&mut Value)) -> Tokenizer {
    let mut json: Value = serde_json::from_str(json).unwrap();
    edit(&mut json);
    json.to_string().parse().unwrap()
}

fn split(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn byte_level(use_regex: bool, prefix: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": use_regex})
}

/// The ways in which well-known models split words, on the small vocabularies of the tests.
fn families() -> Vec<(&'static str, Tokenizer)> {
    let words = |steps: Value| {
        edited(BYTE_LEVEL, |t| {
            t["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
        })
    };
    let digits = json!({"type": "Digits", "individual_digits": true});
    let metaspace = |scheme: &str, split: bool| {
        edited(BYTE_FALLBACK, |t| {
            t["normalizer"] = Value::Null;
            t["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
        })
    };
    let normalised = |normalizer: Value| edited(BYTE_LEVEL, |t| t["normalizer"] = normalizer);
    vec![
        ("GPT-2", words(json!([byte_level(true, false)]))),
        ("prefix space", words(json!([byte_level(true, true)]))),
        ("the default model's", words(json!([digits, byte_level(true, false)]))),
        ("Llama 3", words(json!([split(LLAMA_3), byte_level(false, false)]))),
        ("Qwen", words(json!([split(QWEN), byte_level(false, false)]))),
        ("o200k", words(json!([split(O200K), byte_level(false, false)]))),
        ("Mistral", words(json!([split(TEKKEN), byte_level(false, false)]))),
        (
            "DeepSeek-V3",
            words(json!([
                split(r"\p{N}{1,3}"),
                split(DEEPSEEK_IDEOGRAPHS),
                split(DEEPSEEK),
                byte_level(false, false),
            ])),
        ),
        ("NFC", normalised(json!({"type": "NFC"}))),
        ("NFKC", normalised(json!({"type": "NFKC"}))),
        (
            "NFD",
            normalised(
                json!({"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]}),
            ),
        ),
        ("empty sequence", normalised(json!({"type": "Sequence", "normalizers": []}))),
        ("Llama 2", BYTE_FALLBACK.parse().unwrap()),
        ("metaspace first", metaspace("first", false)),
        ("metaspace always", metaspace("always", true)),
        ("metaspace never", metaspace("never", false)),
        (
            "Gemma",
            edited(BYTE_FALLBACK, |t| {
                t["normalizer"] =
                    json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
                t["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "},
                    "behavior": "MergedWithPrevious", "invert": false});
            }),
        ),
        ("word piece", WORD_PIECE.parse().unwrap()),
    ]
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Tokens of `text` cut at those of its seams that `wanted` says, round and round.
fn cut(seams: &Seams, tokenizer: &Tokenizer, text: &str, wanted: &[bool]) -> (Vec<u32>, usize) {
    let (mut parts, mut start, mut cuts) = (Vec::new(), 0, 0);
    for ((end, next), _) in seams.all(text).zip(wanted.iter().cycle()).filter(|(_, cut)| **cut) {
        parts.extend(ids(tokenizer, &text[start..end]));
        (start, cuts) = (next, cuts + 1);
    }
    parts.extend(ids(tokenizer, &text[start..]));
    (parts, cuts)
}

fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        3 => "[a-zA-Z]{1,6}",
        2 => "[a-z]{1,3} [a-z]{1,3}",
        2 => prop::sample::select(vec![
            " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", ", ", ". ", "'s", "'", "\u{2019}re", "1", "23", "4567", "_", "-", "/", "(", ")",
            "=", "<", ">", "|", "\"", "\u{3002}", "\u{ff0c}", "\u{301}", "\u{338}", "\u{2581}", "\u{a0}", "\u{200b}", "\u{ad}", "\u{0}",
        ]).prop_map(str::to_owned),
        1 => prop::sample::select(vec![
            "\u{e9}", "e\u{301}", "\u{65e5}\u{672c}", "\u{304c}", "\u{304b}\u{3099}", "\u{d55c}", "\u{1112}\u{1161}\u{11ab}", "\u{43c}\u{438}",
            "\u{3b1}\u{345}", "\u{645}\u{64e}", "\u{e17}\u{e35}\u{e48}", "\u{915}\u{93c}", "\u{958}", "\u{fb01}", "\u{212a}", "\u{130}",
            "\u{1f469}\u{200d}\u{1f33e}", "\u{ff21}", "\u{2460}",
        ]).prop_map(str::to_owned),
        1 => prop::sample::select(vec![
            "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>", "[INST]", "[/INST]", "[SEP]", "im_start", "<|im",
        ]).prop_map(str::to_owned),
        1 => "\\PC{0,4}",
    ];
    prop::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
}

#[test]
fn pieces_have_the_tokens_of_the_whole() {
    let families: Vec<_> = families()
        .into_iter()
        .map(|(name, tokenizer)| {
            let seams = Seams::new(&tokenizer).unwrap_or_else(|why| panic!("{name}: {why}"));
            (name, tokenizer, seams)
        })
        .collect();
    let cuts: Vec<Cell<usize>> = vec![Cell::new(0); families.len()];
    proptest!(ProptestConfig::with_cases(300), |(
        text in text(),
        wanted in prop::collection::vec(any::<bool>(), 1..6),
    )| {
        for (i, (name, tokenizer, seams)) in families.iter().enumerate() {
            let (parts, made) = cut(seams, tokenizer, &text, &wanted);
            prop_assert_eq!(&parts, &ids(tokenizer, &text), "{}: {:?}", name, text);
            cuts[i].set(cuts[i].get() + made);
        }
    });
    for ((name, ..), cuts) in families.iter().zip(cuts) {
        let cuts = cuts.get();
        assert!(cuts > 300, "{name}: only {cuts} cuts were tried");
    }
}

#[test]
fn what_is_not_known_to_be_safe_is_not_cut() {
    let reason = |tokenizer: Tokenizer| Seams::new(&tokenizer).map(|_| ()).unwrap_err();
    let pre = |step: Value| edited(BYTE_LEVEL, |t| t["pre_tokenizer"] = step);
    let two_words = split(r"\p{L}+ \p{L}+|\s+|[^\s]");
    assert!(
        reason(pre(
            json!({"type": "Sequence", "pretokenizers": [two_words, byte_level(false, false)]})
        ))
        .contains("seams")
    );
    assert!(reason(pre(byte_level(false, false))).contains("words"));
    assert!(reason(edited(BYTE_LEVEL, |t| t["model"]["dropout"] = json!(0.1))).contains("random"));
    assert!(
        reason(edited(BYTE_LEVEL, |t| t["normalizer"] =
            json!({"type": "Strip", "strip_left": true, "strip_right": true})))
        .contains("normalises")
    );
    assert!(
        reason(edited(BYTE_LEVEL, |t| t["added_tokens"][1]["single_word"] = json!(true)))
            .contains("neighbours")
    );
    let merged = edited(BYTE_FALLBACK, |t| {
        t["added_tokens"][3]["content"] = json!("<a b>");
    });
    assert!(reason(merged).contains("across words"));
}

#[test]
fn no_seam_is_inside_an_added_token() {
    let seams = Seams::new(&BYTE_LEVEL.parse().unwrap()).unwrap();
    let text = "x<|im_start|>user\nhi<|im_end|> and, so on";
    for (end, _) in seams.all(text) {
        let (before, after) = text.split_at(end);
        assert!(!before.ends_with("<|im") && !after.starts_with("|>"), "{before:?} {after:?}");
    }
    assert!(seams.all(text).count() >= 3);
}

#[test]
fn a_piece_ends_at_the_last_seam_that_it_may_have_or_the_next_one() {
    let seams = Seams::new(&BYTE_LEVEL.parse().unwrap()).unwrap();
    let end = |text: &str, piece, most| seams.end(text, (0, text.len()), piece, most);
    assert_eq!(end("aaa bbb ccc", 20, 20), Some((11, 11)));
    assert_eq!(end("aaa bbb ccc", 8, 20), Some((7, 7)));
    assert_eq!(end("aaaaaaaaaaaaa bbb", 4, 20), Some((13, 13)));
    assert_eq!(end("aaaaaaaaaaaaa bbb", 4, 13), Some((13, 13)));
    assert_eq!(end("aaaaaaaaaaaaa bbb", 4, 12), None);
    assert_eq!(end("11111111111111111", 4, 17), Some((17, 17)));
    assert_eq!(end("11111111111111111", 4, 16), None);
}

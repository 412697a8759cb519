use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::super::tokenize::PROBES;
use super::merges::SHORT;
use super::*;

const BYTE_LEVEL: &str = include_str!("../../../../tests/data/tokenizer_byte_level.json");
const BYTE_FALLBACK: &str = include_str!("../../../../tests/data/tokenizer_byte_fallback.json");
const WORD_PIECE: &str = include_str!("../../../../tests/data/tokenizer_word_piece.json");

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const IDEOGRAPHS: &str = "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";

fn split(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// A tokenizer that was trained on the probes, and the file of it.
fn trained(steps: &Value, edit: impl FnOnce(&mut Value)) -> (Tokenizer, String) {
    let empty = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {}, "merges": []},
    });
    let mut tokenizer: Tokenizer = empty.to_string().parse().unwrap();
    let alphabet = ByteLevel::alphabet().into_iter().collect();
    let trainer = BpeTrainer::builder().vocab_size(900).initial_alphabet(alphabet);
    let trainer = trainer.min_frequency(1).show_progress(false).build();
    tokenizer.train(&mut TrainerWrapper::BpeTrainer(trainer), PROBES.iter()).unwrap();
    let mut json: Value = serde_json::to_value(&tokenizer).unwrap();
    let token = |id: u32, content: &str, normalized: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": normalized, "special": !normalized})
    };
    json["added_tokens"] = json!([
        token(900, "<|im_start|>", false),
        token(901, "<|im_end|>", false),
        token(902, "<think>", true),
        token(903, "<|im", false),
        token(904, "na\u{ef}ve", true),
    ]);
    edit(&mut json);
    let json = json.to_string();
    (json.parse().unwrap(), json)
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split})
}

/// A tokenizer on characters with spelled spaces, trained on the probes as `learns` cuts them, with tokens for bytes.
fn spelled(learns: &Value, edit: impl FnOnce(&mut Value)) -> (Tokenizer, String) {
    const BYTES: usize = 256;
    let empty = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": learns, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": {}, "merges": []},
    });
    let mut tokenizer: Tokenizer = empty.to_string().parse().unwrap();
    let trainer = BpeTrainer::builder().vocab_size(700).limit_alphabet(200);
    let trainer = trainer.min_frequency(1).show_progress(false).build();
    tokenizer.train(&mut TrainerWrapper::BpeTrainer(trainer), PROBES.iter()).unwrap();
    let mut json: Value = serde_json::to_value(&tokenizer).unwrap();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    for byte in 0..BYTES {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    vocab.insert("<unk>".to_owned(), json!(vocab.len()));
    let first = vocab.len();
    assert!(first > BYTES + 400, "there is something to merge");
    json["model"]["unk_token"] = json!("<unk>");
    let token = |id: usize, content: &str, normalized: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": normalized, "special": !normalized})
    };
    json["added_tokens"] = json!([
        token(first, "<|im_start|>", false),
        token(first + 1, "<|im_end|>", false),
        token(first + 2, "<think>", true),
        token(first + 3, "<|im", false),
        token(first + 4, "na\u{ef}ve", true),
    ]);
    edit(&mut json);
    let json = json.to_string();
    (json.parse().unwrap(), json)
}

struct Family {
    name: &'static str,
    oracle: Tokenizer,
    fast: FastEncoder,
}

/// The ways in which well-known models cut words.
static FAMILIES: LazyLock<Vec<Family>> = LazyLock::new(|| {
    let family = |name, (oracle, json): (Tokenizer, String)| {
        let fast = FastEncoder::new(&oracle, &json).unwrap_or_else(|why| panic!("{name}: {why}"));
        Family { name, oracle, fast }
    };
    let digits = json!({"type": "Digits", "individual_digits": true});
    let deepseek =
        json!([split(r"\p{N}{1,3}"), split(IDEOGRAPHS), split(DEEPSEEK), byte_level(false)]);
    let same = |_: &mut Value| {};
    let nfc = |json: &mut Value| json["normalizer"] = json!({"type": "NFC"});
    vec![
        family("GPT-2", trained(&json!([byte_level(true)]), same)),
        family("GPT-2's as an expression", trained(&json!([split(GPT2), byte_level(false)]), same)),
        family(
            "the default model's",
            trained(&json!([digits, byte_level(true)]), |json| {
                let vocab = json["model"]["vocab"].as_object_mut().unwrap();
                vocab.remove("\u{106}").unwrap(); // it lacks a byte
            }),
        ),
        family(
            "Llama 3",
            trained(&json!([split(LLAMA_3), byte_level(false)]), |json| {
                json["model"]["ignore_merges"] = json!(true);
                let vocab = json["model"]["vocab"].as_object_mut().unwrap();
                vocab.insert("\u{120}river".to_owned(), json!(899)); // which no merge makes
            }),
        ),
        family("Qwen", trained(&json!([split(QWEN), byte_level(false)]), nfc)),
        family("o200k", trained(&json!([split(O200K), byte_level(false)]), same)),
        family("Mistral", trained(&json!([split(TEKKEN), byte_level(false)]), same)),
        family("DeepSeek-V3", trained(&deepseek, same)),
        family(
            "Gemma",
            spelled(&metaspace("never", true), |json| {
                json["normalizer"] = replace();
                json["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "},
                    "behavior": "MergedWithPrevious", "invert": false});
            }),
        ),
        family(
            "Llama 2",
            spelled(&metaspace("never", true), |json| {
                let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
                json["normalizer"] =
                    json!({"type": "Sequence", "normalizers": [prepend, replace()]});
                json["pre_tokenizer"] = Value::Null;
            }),
        ),
        family(
            "Mistral's first",
            spelled(&metaspace("never", true), |json| {
                json["pre_tokenizer"] = metaspace("first", false);
            }),
        ),
        family(
            "metaspace in words",
            spelled(&metaspace("never", true), |json| {
                json["pre_tokenizer"] = metaspace("always", true);
            }),
        ),
        // its tokens reach across spaces
        family("metaspace in one", spelled(&metaspace("never", false), same)),
    ]
});

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"})
}

fn check(text: &str) -> Result<(), TestCaseError> {
    for Family { name, oracle, fast } in &*FAMILIES {
        let mut ids = Vec::new();
        // the second time words are known
        for time in ["first", "second"] {
            ids.clear();
            fast.encode(text, &mut ids);
            let expected = oracle.encode_fast(text, false).unwrap();
            prop_assert_eq!(&ids, expected.get_ids(), "{}, {} time: {:?}", name, time, text);
        }
    }
    Ok(())
}

fn text() -> impl Strategy<Value = String> {
    let pick = |parts: &'static [&'static str]| {
        prop::sample::select(parts).prop_map(str::to_owned).boxed()
    };
    let part = prop_oneof![
        4 => "[a-zA-Z]{1,8}",
        2 => " [a-z]{1,12}",
        2 => pick(&[" ", " ", "  ", "\u{2581}", "\n", "\n\n", "\r\n", "\t", "\u{b}", "\u{c}", "\u{1c}", "\u{85}", "\u{a0}", "\u{1680}",
            "\u{2003}", "\u{2028}", "\u{202f}", "\u{3000}", "\u{200b}", "\u{feff}"]),
        2 => pick(&["'s", "'S", "'ll", "'LL", "'Re", "'\u{17f}", "'d", "'D", "'m", "'T", "'ve", "'", "''", "\u{2019}s", "'x", "'l"]),
        2 => pick(&["0", "12", "345", "6789", "\u{b2}", "\u{bd}", "\u{2167}", "\u{664}\u{665}", "\u{ff11}", "\u{0be7}", "\u{3007}", "\u{1d7d8}"]),
        2 => pick(&[".", ",", "!?", "...", "(", ")", "/", "//", "\\", "_", "__", "-", "=", "+", "$", "\u{20ac}", "#", "<", ">", "|", "\"",
            "\u{3002}", "\u{ff0c}", "\u{2014}", "\u{30fb}", "\u{309b}", "^", "`"]),
        2 => pick(&["\u{e9}", "e\u{301}", "\u{301}", "a\u{308}\u{301}", "na\u{ef}ve", "\u{c9}T\u{c9}", "\u{df}", "\u{1c5}", "\u{2b0}", "\u{aa}",
            "\u{130}", "\u{212a}", "\u{fb01}", "\u{345}", "\u{200d}"]),
        2 => pick(&["\u{65e5}\u{672c}\u{8a9e}", "\u{6c34}", "\u{304b}\u{3099}", "\u{30ab}\u{30bf}", "\u{3040}", "\u{d55c}\u{ad6d}",
            "\u{1112}\u{1161}\u{11ab}", "\u{43c}\u{438}\u{440}", "\u{41c}\u{418}\u{420}", "\u{3b1}\u{3b2}", "\u{645}\u{631}\u{62d}\u{64e}",
            "\u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947}", "\u{915}\u{93c}", "\u{958}", "\u{e17}\u{e35}\u{e48}", "\u{5d0}\u{5b8}", "\u{9fa6}", "\u{20000}"]),
        1 => pick(&["\u{1f600}", "\u{1f469}\u{200d}\u{1f33e}", "\u{2764}\u{fe0f}", "\u{1f1eb}\u{1f1f7}", "\u{1f44d}\u{1f3fd}", "\u{ad}", "\u{0}", "\u{1}",
            "\u{7f}", "\u{9f}", "\u{fffd}", "\u{e000}", "\u{fffe}", "\u{10ffff}", "\u{378}"]),
        1 => pick(&["<|im_start|>", "<|im_end|>", "<think>", "<|im", "<|im_end", "na\u{ef}ve", "na\u{ef}\u{301}ve"]),
        1 => any::<char>().prop_map(|c| c.to_string()),
        1 => (any::<char>(), 1_usize..80).prop_map(|(c, times)| c.to_string().repeat(times)),
        1 => ("[a-z ']", 1_usize..200).prop_map(|(c, times)| c.repeat(times)),
        1 => "\\PC{0,6}",
    ];
    prop::collection::vec(part, 0..30).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn tokens_are_those_of_the_oracle(text in text()) {
        check(&text)?;
    }
}

#[test]
fn probes_and_known_traps_have_the_tokens_of_the_oracle() {
    let mut texts: Vec<String> = PROBES.iter().map(|probe| (*probe).to_owned()).collect();
    for space in ["", " ", "  ", "\n", " \n ", "\t", "\r\n\r\n", "\u{a0}", "\u{3000}"] {
        for word in
            ["a", "A\u{301}", "'s", "'S", "!", "1", "\u{301}x", "\u{1}", "\u{65e5}", "<think>"]
        {
            for after in ["", " ", "\n", "  b", "\n\n c", "'LL", "!/\n/", "1234567"] {
                texts.push(format!("{space}{word}{after}"));
                texts.push(format!("x{space}{word}{space}{after}{space}"));
            }
        }
    }
    texts.iter().for_each(|text| check(text).unwrap());
}

#[test]
fn long_words_have_the_tokens_of_the_oracle() {
    for part in [
        "a",
        " ",
        "\n",
        "ab",
        "the",
        "The river",
        "\u{65e5}",
        "\u{65e5}\u{672c}",
        "1",
        "!",
        "\u{301}",
        "\u{1}",
        "\u{1f600}",
        "Aa",
        "\u{2b0}A",
    ] {
        for times in [SHORT - 1, SHORT, SHORT + 1, 500, 3_000] {
            check(&part.repeat(times)).unwrap();
        }
    }
}

/// Steps that grow with the square of the length would not end within the patience of anybody: 7 * 10^10 of them.
#[test]
fn a_quarter_of_a_megabyte_takes_steps_in_proportion_to_its_length() {
    let mut bytes = 7_u64;
    let noise = std::iter::repeat_with(|| {
        bytes = bytes.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        char::from((bytes >> 56) as u8)
    });
    let noise: String = noise.take(1 << 18).collect();
    let noise_of_marks = "\u{2b0}A\u{301}".repeat(1 << 15);
    let texts = [
        "a".repeat(1 << 18),
        " ".repeat(1 << 18),
        "\n ".repeat(1 << 17),
        "\u{1}".repeat(1 << 18),
        noise,
        noise_of_marks,
    ];
    for Family { name, fast, .. } in &*FAMILIES {
        for text in &texts {
            let mut ids = Vec::new();
            fast.encode(text, &mut ids);
            assert!(ids.len() > 1_000, "{name}");
        }
        // and no memory of it is kept
        let desks = fast.desks();
        assert!(desks.iter().all(|desk| desk.symbols.is_small()), "{name}");
    }
}

#[test]
fn threads_do_not_wait_for_each_other_and_leave_their_tables() {
    let family = &FAMILIES[0];
    let expected = family.oracle.encode_fast(PROBES[0], false).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let mut ids = Vec::new();
                    family.fast.encode(PROBES[0], &mut ids);
                    assert_eq!(ids, expected.get_ids());
                }
            });
        }
    });
    assert!((1..=KEPT_DESKS).contains(&family.fast.desks().len()));
}

#[test]
fn what_is_not_written_out_says_so() {
    let reason = |json: String| {
        let tokenizer: Tokenizer = json.parse().unwrap();
        FastEncoder::new(&tokenizer, &json).map(|_| ()).unwrap_err()
    };
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_str(BYTE_LEVEL).unwrap();
        edit(&mut json);
        json.to_string()
    };
    let steps = |steps: Value| {
        edited(&|t| {
            t["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps.clone()});
        })
    };
    assert!(reason(WORD_PIECE.to_owned()).contains("not BPE"));
    assert!(reason(edited(&|t| t["normalizer"] = json!({"type": "NFKC"}))).contains("normaliser"));
    assert!(reason(edited(&|t| t["model"]["dropout"] = json!(0.1))).contains("random"));
    assert!(
        reason(edited(&|t| t["model"]["end_of_word_suffix"] = json!("</w>"))).contains("place")
    );
    assert!(
        reason(edited(&|t| t["added_tokens"][1]["rstrip"] = json!(true))).contains("neighbours")
    );
    assert!(reason(steps(json!([split(r"\w+"), byte_level(false)]))).contains("cut words"));
    assert!(reason(steps(json!([split(LLAMA_3), byte_level(true)]))).contains("cut words"));
    assert!(reason(steps(json!([split(DEEPSEEK), byte_level(false)]))).contains("cut words"));
    assert!(reason(steps(json!([split(LLAMA_3)]))).contains("bytes"));
    let prefix = json!([{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}]);
    assert!(reason(steps(prefix)).contains("space"));
    let with_fallback = |edit: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_str(BYTE_FALLBACK).unwrap();
        edit(&mut json);
        reason(json.to_string())
    };
    let lowercase = json!({"type": "Lowercase"});
    assert!(with_fallback(&|t| t["normalizer"] = lowercase.clone()).contains("normaliser"));
    let underscore =
        json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": false});
    let spells = |t: &mut Value| {
        t["normalizer"] = Value::Null;
        t["pre_tokenizer"] = underscore.clone();
    };
    assert!(with_fallback(&spells).contains("another way"));
    assert!(
        with_fallback(&|t| t["pre_tokenizer"] = metaspace("first", true)).contains("cut words")
    );
    assert!(with_fallback(&|t| t["model"]["ignore_merges"] = json!(true)).contains("whole texts"));
    let lacks = |t: &mut Value| _ = t["model"]["vocab"].as_object_mut().unwrap().remove("<0x41>");
    assert!(with_fallback(&lacks).contains("some byte"));
    let merges_bytes = |t: &mut Value| {
        t["model"]["vocab"].as_object_mut().unwrap().insert("<0x41>a".into(), json!(504));
        t["model"]["merges"].as_array_mut().unwrap().push(json!(["<0x41>", "a"]));
    };
    assert!(with_fallback(&merges_bytes).contains("merges bytes"));
    let backwards = json!({"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Removed", "invert": true});
    assert!(reason(steps(json!([backwards, byte_level(false)]))).contains("cut words"));
}

//! Templates, tokeniser and detokeniser against what `transformers` and `tokenizers` make of the same input.

use std::sync::Arc;

use headrace_router::error::RouteError;
use headrace_router::prompt::{Decoder, ModelDoc, PromptEngine, PromptError, TokenizePool};
use headrace_router::request::{ChatPrompt, Prompt};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

const BYTE_LEVEL: &str = include_str!("../data/tokenizer_byte_level.json");
const BYTE_FALLBACK: &str = include_str!("../data/tokenizer_byte_fallback.json");
const WORD_PIECE: &str = include_str!("../data/tokenizer_word_piece.json");
const TEMPLATES: &str = include_str!("../data/chat_templates.json");

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn doc(tokenizer: &str, template: Option<&str>) -> ModelDoc {
    let json = json!({
        "tokenizer": tokenizer,
        "chat_template": template,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "context_tokens": 2_000_000,
        "vocab_size": 200_000,
    });
    ModelDoc::parse(json.to_string().as_bytes()).unwrap()
}

fn pool() -> Arc<TokenizePool> {
    Arc::new(TokenizePool::new(1, 64).unwrap())
}

fn engine(tokenizer: &str, template: Option<&str>) -> PromptEngine {
    PromptEngine::new(doc(tokenizer, template), pool()).unwrap()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn chat(messages: &Value) -> ChatPrompt {
    ChatPrompt {
        messages: messages.as_array().unwrap().clone(),
        add_generation_prompt: true,
        ..ChatPrompt::default()
    }
}

fn bad_request(result: Result<impl std::fmt::Debug, RouteError>) -> (String, String) {
    let error = result.unwrap_err();
    let RouteError::BadRequest { param: Some(param), message } = error else {
        panic!("{error:?}");
    };
    (param, message)
}

// Templates

#[test]
fn templates_render_as_in_transformers() {
    let data: Value = serde_json::from_str(TEMPLATES).unwrap();
    let mut failures = Vec::new();
    for (i, case) in data["cases"].as_array().unwrap().iter().enumerate() {
        let name = case["template"].as_str().unwrap();
        let engine = engine(BYTE_LEVEL, data["templates"][name].as_str());
        let mut kwargs = case["kwargs"].as_object().cloned().unwrap_or_default();
        kwargs.insert("date_string".to_owned(), "26 Jul 2024".into());
        let prompt = ChatPrompt {
            messages: case["messages"].as_array().unwrap().clone(),
            tools: case["tools"].as_array().cloned(),
            add_generation_prompt: case["add_generation_prompt"] == true,
            continue_final_message: case["continue_final_message"] == true,
            template_kwargs: kwargs,
        };
        let got = block_on(engine.render(prompt));
        match (case["expected"].as_str(), &got) {
            (Some(expected), Ok(got)) if expected == got => {}
            (None, Err(RouteError::BadRequest { .. })) => {}
            (expected, got) => {
                failures
                    .push(format!("case {i}, {name}:\n expected {expected:?}\n got      {got:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_a_template_raises_reaches_the_client() {
    let engine = engine(BYTE_LEVEL, Some("{{ raise_exception('Roles must ' ~ 'alternate') }}"));
    let (param, message) = bad_request(block_on(engine.render(chat(&json!([])))));
    assert_eq!(param, "messages");
    assert!(message.contains("Roles must alternate"), "{message}");
}

#[test]
fn a_model_without_template_points_to_completions() {
    let engine = engine(BYTE_LEVEL, None);
    let prompt = Prompt::Chat(chat(&json!([{"role": "user", "content": "hi"}])));
    let (param, message) = bad_request(block_on(engine.encode(prompt)));
    assert_eq!(param, "messages");
    assert!(message.contains("/v1/completions"), "{message}");
}

#[test]
fn endless_templates_end() {
    let nested = "{% for a in range(100000) %}{% for b in range(100000) %}{% set x = a + b %}\
        {% endfor %}{% endfor %}";
    let recursive = "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}";
    let long = "{% for a in range(100000) %}{{ messages[0].content }}{% endfor %}";
    for (template, says) in
        [(nested, "too long"), (recursive, "recursion"), (long, "longer than 64 MiB")]
    {
        let engine = engine(BYTE_LEVEL, Some(template));
        let messages = json!([{"role": "user", "content": "x".repeat(10_000)}]);
        let (_, message) = bad_request(block_on(engine.render(chat(&messages))));
        assert!(message.contains(says), "{template}: {message}");
    }
}

#[test]
fn a_chat_of_10_000_messages_is_within_the_bounds_of_every_family() {
    let data: Value = serde_json::from_str(TEMPLATES).unwrap();
    let message = |i| json!({"role": role(i), "content": format!("message {i}")});
    let messages: Vec<Value> = (0..9_999).map(message).collect();
    let templates = data["templates"].as_object().unwrap().iter();
    for (name, template) in templates.filter(|(name, _)| *name != "python") {
        let engine = engine(BYTE_LEVEL, template.as_str());
        let mut prompt = chat(&json!(messages));
        prompt.template_kwargs.insert("date_string".to_owned(), "26 Jul 2024".into());
        let text = block_on(engine.render(prompt)).unwrap();
        assert!(text.contains("message 9998"), "{name}");
    }
}

#[test]
fn deeply_nested_messages_are_refused_where_they_are_printed() {
    let mut content = json!("deep");
    for _ in 0..120 {
        content = json!([{ "a": content }]);
    }
    for template in ["{{ messages[0].content }}", "{{ messages | tojson }}"] {
        let engine = engine(BYTE_LEVEL, Some(template));
        let messages = json!([{"role": "user", "content": content}]);
        let (_, message) = bad_request(block_on(engine.render(chat(&messages))));
        assert!(message.contains("nested"), "{message}");
    }
}

#[test]
fn template_variables_of_the_client_do_not_replace_ours() {
    let engine = engine(BYTE_LEVEL, Some("{{ messages|length }}{{ bos_token }}{{ extra }}"));
    let mut prompt = chat(&json!([{"role": "user", "content": "hi"}]));
    prompt.template_kwargs.insert("extra".to_owned(), json!(true));
    assert_eq!(block_on(engine.render(prompt.clone())).unwrap(), "1<s>True");
    prompt.template_kwargs.insert("messages".to_owned(), json!([]));
    let (param, _) = bad_request(block_on(engine.render(prompt)));
    assert_eq!(param, "chat_template_kwargs");
}

#[test]
fn strftime_now_is_the_date() {
    let engine = engine(BYTE_LEVEL, Some("{{ strftime_now('%Y') }}"));
    let year: u32 = block_on(engine.render(chat(&json!([])))).unwrap().parse().unwrap();
    assert!((2024..2200).contains(&year));
}

#[test]
fn a_last_message_cannot_be_continued_and_answered() {
    let engine = engine(BYTE_LEVEL, Some(CHATML));
    let mut prompt = chat(&json!([{"role": "assistant", "content": "Once"}]));
    prompt.continue_final_message = true;
    let (param, _) = bad_request(block_on(engine.render(prompt.clone())));
    assert_eq!(param, "continue_final_message");
    prompt.add_generation_prompt = false;
    assert_eq!(block_on(engine.render(prompt)).unwrap(), "<|im_start|>assistant\nOnce");
}

#[test]
fn broken_documents_name_their_part() {
    let error = |tokenizer: &str, template: Option<&str>| {
        PromptEngine::new(doc(tokenizer, template), pool()).unwrap_err()
    };
    assert!(matches!(error("{}", None), PromptError::Tokenizer(_)));
    let template = error(BYTE_LEVEL, Some("line one\n{% if %}"));
    assert!(matches!(&template, PromptError::Template(m) if m.contains("line 2")), "{template}");
    let ctc =
        json!({"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": true});
    let decoder = error(&edited(BYTE_LEVEL, |t| t["decoder"] = ctc.clone()), None);
    assert!(matches!(&decoder, PromptError::Decoder(m) if m.contains("CTC")), "{decoder}");
}

// Prompts

#[test]
fn chats_are_encoded_as_rendered_and_texts_with_special_tokens() {
    let engine = engine(BYTE_FALLBACK, Some("{{ bos_token }}{{ messages[0].content }}"));
    let text = block_on(engine.encode(Prompt::Text("the river".to_owned()))).unwrap();
    let messages = json!([{"role": "user", "content": "the river"}]);
    let chat = block_on(engine.encode(Prompt::Chat(chat(&messages)))).unwrap();
    assert_eq!(text, chat);
    assert_eq!(text.iter().filter(|id| **id == 1).count(), 1);
    assert_eq!(engine.decode(&text, true), "the river");
}

#[test]
fn token_prompts_are_checked() {
    let engine = engine(BYTE_LEVEL, None);
    let encode = |ids: &[u32]| block_on(engine.encode(Prompt::Tokens(ids.to_vec())));
    assert_eq!(encode(&[0, 199_999]).unwrap(), [0, 199_999]);
    let (param, message) = bad_request(encode(&[5, 200_000]));
    assert_eq!(param, "prompt");
    assert!(message.contains("200000"), "{message}");
    assert_eq!(bad_request(encode(&[])).0, "prompt");
    assert_eq!(bad_request(block_on(engine.encode(Prompt::Text(String::new())))).0, "prompt");
}

#[test]
fn a_text_that_cannot_fit_is_refused_before_it_is_tokenised() {
    let mut doc = doc(BYTE_LEVEL, None);
    doc.context_tokens = 100;
    let engine = PromptEngine::new(doc, pool()).unwrap();
    let encode = |len: usize| block_on(engine.encode(Prompt::Text("x".repeat(len))));
    let error = encode(1 << 20).unwrap_err();
    assert!(matches!(error, RouteError::ContextLength { limit: 100, .. }), "{error}");
    assert!(encode(100).is_ok());
}

fn role(turn: usize) -> &'static str {
    ["user", "assistant"][turn % 2]
}

#[test]
fn extreme_chats_are_tokenised() {
    let engine = engine(BYTE_LEVEL, Some(CHATML));
    let tokenizer: Tokenizer = BYTE_LEVEL.parse().unwrap();
    let many: Vec<Value> =
        (0..10_000).map(|i| json!({"role": role(i), "content": format!("message {i}")})).collect();
    let long = "The river\u{0}runs \u{1F9D1}\u{200D}\u{1F33E}. ".repeat(40_000);
    for messages in [json!(many), json!([{"role": "user", "content": long}])] {
        let prompt = chat(&messages);
        let text = block_on(engine.render(prompt.clone())).unwrap();
        let ids = block_on(engine.encode(Prompt::Chat(prompt))).unwrap();
        assert_eq!(ids, tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids());
        assert_eq!(engine.decode(&ids, false), text);
    }
}

// The cache

fn edited(tokenizer: &str, edit: impl FnOnce(&mut Value)) -> String {
    let mut json: Value = serde_json::from_str(tokenizer).unwrap();
    edit(&mut json);
    json.to_string()
}

fn flag(tokenizer: &str, token: &str, name: &str) -> String {
    edited(tokenizer, |json| {
        let tokens = json["added_tokens"].as_array_mut().unwrap();
        let token = tokens.iter_mut().find(|t| t["content"] == token).unwrap();
        token[name] = json!(!token[name].as_bool().unwrap());
    })
}

/// Tokenizers whose options change what happens around added tokens.
fn variants() -> Vec<(&'static str, String)> {
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
fn mixed_text() -> impl Strategy<Value = String> {
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

#[test]
fn cached_tokens_are_those_of_the_whole_text() {
    let variants = variants();
    let engines: Vec<_> = variants
        .iter()
        .map(|(name, json)| (*name, engine(json, None), json.parse::<Tokenizer>().unwrap()))
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    proptest!(ProptestConfig::with_cases(60), |(turns in prop::collection::vec(mixed_text(), 1..4), special: bool)| {
        for (name, engine, tokenizer) in &engines {
            let mut text = String::new();
            for turn in &turns {
                text.push_str(turn);
                let expected = tokenizer.encode_fast(text.as_str(), special).unwrap();
                match runtime.block_on(engine.encode_text(text.clone(), special)) {
                    Ok(ids) => prop_assert_eq!(ids, expected.get_ids(), "{}", name),
                    Err(e) => prop_assert!(expected.get_ids().is_empty(), "{}: {}", name, e),
                }
            }
        }
    });
    for (name, engine, _) in &engines {
        let stats = engine.cache_stats();
        assert!(stats.off.is_none(), "{name}: {:?}", stats.off);
        assert!(stats.hits > 0, "{name}: {stats:?}");
    }
}

#[test]
fn a_growing_chat_tokenises_only_its_tail() {
    let engine = engine(BYTE_LEVEL, Some(CHATML));
    let mut messages = Vec::new();
    for i in 0..20 {
        let content = format!("turn {i}: {}", "the water runs to the wheel. ".repeat(40));
        messages.push(json!({"role": "user", "content": content}));
        block_on(engine.encode(Prompt::Chat(chat(&json!(messages))))).unwrap();
        let stats = engine.cache_stats();
        assert_eq!((stats.misses, stats.hits), (i + 1, i * (i + 1) / 2));
    }
}

#[test]
fn the_cache_says_why_it_is_off() {
    let reason = |json: &str| engine(json, None).cache_stats().off.unwrap_or("on");
    let none = edited(BYTE_LEVEL, |t| t["added_tokens"] = json!([]));
    assert!(reason(&none).contains("added token"));
    assert!(
        reason(&edited(BYTE_LEVEL, |t| t["model"]["dropout"] = json!(0.1))).contains("dropout")
    );
    let off = PromptEngine::with_cache(doc(BYTE_LEVEL, None), pool(), 0).unwrap();
    assert_eq!(off.cache_stats().off, Some("switched off"));
    assert!(!block_on(off.encode(Prompt::Text("text".to_owned()))).unwrap().is_empty());
}

// Answers

/// Pushes `ids` in chunks of the given sizes, round and round.
fn stream(decoder: &mut Decoder, ids: &[u32], sizes: &[usize]) -> String {
    let mut text = String::new();
    let mut rest = ids;
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (now, later) = rest.split_at((*size).min(rest.len()));
        text += &decoder.push(now).text;
        rest = later;
    }
    text + &decoder.finish()
}

fn decoders() -> Vec<(&'static str, String)> {
    let mut decoders = variants();
    decoders.truncate(6);
    decoders.push(("none", edited(WORD_PIECE, |t| t["decoder"] = Value::Null)));
    decoders.push((
        "fallback without fuse",
        edited(BYTE_FALLBACK, |t| {
            t["decoder"]["decoders"].as_array_mut().unwrap().truncate(2);
        }),
    ));
    decoders.push((
        "byte level with spelled tokens",
        edited(BYTE_LEVEL, |t| {
            let mut token = t["added_tokens"][0].clone();
            for (id, content) in [(10_000, " é "), (10_007, "é"), (10_008, "ab cd")] {
                token["id"] = json!(id);
                token["content"] = json!(content);
                token["special"] = json!(false);
                t["added_tokens"].as_array_mut().unwrap().push(token.clone());
            }
        }),
    ));
    if let Some(path) = std::env::var_os("HEADRACE_TEST_TOKENIZER") {
        decoders.push(("from outside", std::fs::read_to_string(path).unwrap()));
    }
    decoders
}

#[test]
fn streamed_text_is_the_decoded_whole() {
    let engines: Vec<_> = decoders()
        .into_iter()
        .map(|(name, json)| (name, engine(&json, None), json.parse::<Tokenizer>().unwrap()))
        .collect();
    // Low ids are bytes and special tokens in all of them, so both come up often.
    let id = prop_oneof![3 => 0_u32..300, 3 => 0_u32..800, 1 => 0_u32..60_000];
    proptest!(ProptestConfig::with_cases(200), |(
        ids in prop::collection::vec(id, 0..60),
        text in mixed_text(),
        sizes in prop::collection::vec(1_usize..5, 1..4),
        skip: bool,
    )| {
        for (name, engine, tokenizer) in &engines {
            let encoded = tokenizer.encode_fast(text.as_str(), false).unwrap();
            for ids in [&ids[..], encoded.get_ids()] {
                let expected = tokenizer.decode(ids, skip).unwrap();
                let got = stream(&mut engine.decoder(&[], skip), ids, &sizes);
                prop_assert_eq!(got, expected, "{}", name);
            }
        }
    });
}

#[test]
fn stop_strings_end_the_text_whatever_the_chunks() {
    let engine = engine(BYTE_LEVEL, None);
    let tokenizer: Tokenizer = BYTE_LEVEL.parse().unwrap();
    let stops = ["<end>".to_owned(), "é!".to_owned(), "\n\n".to_owned()];
    for (text, expected) in [
        ("the wheel <e <en <end> more", "the wheel <e <en "),
        ("caf\u{e9}! and", "caf"),
        ("one\ntwo\n\nthree", "one\ntwo"),
        ("no stop <en", "no stop <en"),
    ] {
        let ids = tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
        for size in 1..4 {
            let mut decoder = engine.decoder(&stops, true);
            assert_eq!(stream(&mut decoder, &ids, &[size]), expected);
            assert_eq!(decoder.stopped(), expected != text);
        }
    }
}

#[test]
fn consumed_counts_the_ids_up_to_the_stop() {
    let engine = engine(BYTE_LEVEL, None);
    let tokenizer: Tokenizer = BYTE_LEVEL.parse().unwrap();
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    let mut decoder = engine.decoder(&["bc".to_owned()], true);
    let decoded = decoder.push(&[id("a"), id("b"), id("c"), id("d")]);
    assert_eq!((decoded.text.as_str(), decoded.stopped, decoded.consumed), ("a", true, 3));
    assert_eq!(decoder.push(&[id("d")]).consumed, 0);
    assert_eq!(decoder.finish(), "");
}

#[test]
fn half_characters_wait_and_a_broken_one_is_replaced_at_the_end() {
    for (json, token) in [(BYTE_LEVEL, ["Ã", "©"]), (BYTE_FALLBACK, ["<0xC3>", "<0xA9>"])] {
        let engine = engine(json, None);
        let ids = token.map(|t| engine.token_id(t).unwrap());
        let mut decoder = engine.decoder(&[], true);
        assert_eq!(decoder.push(&ids[..1]).text, "");
        let whole = decoder.push(&ids[1..]).text + &decoder.finish();
        assert_eq!(whole, "é");
        let mut decoder = engine.decoder(&[], true);
        assert_eq!(decoder.push(&ids[..1]).text + &decoder.finish(), "\u{FFFD}");
    }
}

#[test]
fn a_long_run_of_byte_tokens_is_not_held_for_ever() {
    let engine = engine(BYTE_FALLBACK, None);
    let ids = "🙂".bytes().map(|b| engine.token_id(&format!("<0x{b:02X}>")).unwrap());
    let ids: Vec<u32> = ids.collect::<Vec<_>>().repeat(100);
    let mut decoder = engine.decoder(&[], true);
    let early = decoder.push(&ids).text;
    assert!(early.len() >= 4 * 90, "{}", early.len());
    assert_eq!(early + &decoder.finish(), "🙂".repeat(100));
}

#[test]
fn token_text_has_the_exact_bytes() {
    let byte_level = engine(BYTE_LEVEL, None);
    let id = byte_level.token_id("Ã").unwrap();
    assert_eq!(byte_level.token_text(id), ("\u{FFFD}".to_owned(), vec![0xC3]));
    let id = byte_level.token_id("Ġthe").unwrap();
    assert_eq!(byte_level.token_text(id), (" the".to_owned(), b" the".to_vec()));
    let id = byte_level.token_id("<|im_end|>").unwrap();
    assert_eq!(byte_level.token_text(id).0, "<|im_end|>");
    assert_eq!(byte_level.token_text(u32::MAX), (String::new(), Vec::new()));
    let fallback = engine(BYTE_FALLBACK, None);
    let id = fallback.token_id("<0xC3>").unwrap();
    assert_eq!(fallback.token_text(id), ("\u{FFFD}".to_owned(), vec![0xC3]));
    let id = fallback.token_id("▁the").unwrap();
    assert_eq!(fallback.token_text(id).0, " the");
}

#[test]
fn text_that_goes_on_joins_what_was_before_it() {
    for tokenizer in [BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE] {
        let engine = engine(tokenizer, None);
        let ids = block_on(engine.encode_text("the quick brown fox".into(), false)).unwrap();
        let whole = engine.decode(&ids, true);
        for at in 1..ids.len() {
            let (before, after) = ids.split_at(at);
            let mut decoder = engine.decoder(&[], true).going_on();
            let after = decoder.push(after).text + &decoder.finish();
            assert_eq!(engine.decode(before, true) + &after, whole, "from token {at}");
        }
    }
}

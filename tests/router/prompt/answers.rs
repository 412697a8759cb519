//! Answers: ids become text as they come, and stop strings end it.

use headrace_router::prompt::Decoder;
use proptest::prelude::*;

use super::variants::*;
use super::*;

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

//! The tokeniser's cache: what it gives is what the whole text would give.

use proptest::prelude::*;

use super::variants::*;
use super::*;

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
        block_on(engine.encode(Prompt::Chat(Box::new(chat(&json!(messages)))))).unwrap();
        let stats = engine.cache_stats();
        assert_eq!((stats.misses, stats.hits), (i + 1, i * (i + 1) / 2));
    }
}

/// A system prompt or a document inside one message is the usual case.
#[test]
fn what_messages_have_in_common_is_tokenised_once_wherever_they_part() {
    let words = "The river's 12 mills (of 1834) run, don't they? It\u{e9} \u{65e5}\u{672c}\u{8a9e}\u{3002}\n\n  x = y + 1;\r\n";
    let common: String = (0..120).map(|i| format!("{i} {words}")).collect();
    assert!(common.len() > 10_000);
    for (name, json) in variants() {
        let (engine, oracle) = (engine(&json, None), json.parse::<Tokenizer>().unwrap());
        for i in 0..4 {
            let own = format!("a question of its own, {i}. ").repeat(20);
            let most = common.len() - 700 * i;
            let end = (0..=most).rev().find(|at| common.is_char_boundary(*at)).unwrap();
            let text = format!("<|im_start|>user {} {own}<|im_end|>", &common[..end]);
            let ids = block_on(engine.encode_text(text.clone(), true)).unwrap();
            let expected = oracle.encode_fast(text, true).unwrap();
            assert!(ids == expected.get_ids(), "{name}, text {i}");
        }
        let stats = engine.cache_stats();
        if stats.uncut.is_none() {
            // all but the stretch in which they part
            let least = 3 * (common.len() - 3 * 700 - 2_500) as u64;
            assert!(stats.hit_bytes >= least, "{name}: {stats:?}, {least}");
        }
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
    let off =
        PromptEngine::with_cache(doc(BYTE_LEVEL, None), pool(), PrefixCache::new(0), STRETCH_BYTES);
    let off = off.unwrap();
    assert_eq!(off.cache_stats().off, Some("switched off"));
    assert!(!block_on(off.encode(Prompt::Text("text".to_owned()))).unwrap().is_empty());
}

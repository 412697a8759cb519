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
    let off =
        PromptEngine::with_cache(doc(BYTE_LEVEL, None), pool(), PrefixCache::new(0), STRETCH_BYTES);
    let off = off.unwrap();
    assert_eq!(off.cache_stats().off, Some("switched off"));
    assert!(!block_on(off.encode(Prompt::Text("text".to_owned()))).unwrap().is_empty());
}

//! What the tokeniser and its cache allocate, measured. Alone in its process, because the allocator counts for all threads.

use std::alloc::System;
use std::sync::Arc;

use headrace_router::config::STRETCH_BYTES;
use headrace_router::error::RouteError;
use headrace_router::prompt::{ModelDoc, PrefixCache, Prompt, PromptEngine, TokenizePool};
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BYTE_LEVEL: &str = include_str!("../data/tokenizer_byte_level.json");
const WORDS: &str = "The river's 12 mills (of 1834) run, don't they? ";

/// Allocated in `region` and not freed again.
fn held(region: &Region<'_, System>) -> usize {
    let change = region.change();
    change.bytes_allocated.saturating_sub(change.bytes_deallocated)
}

fn engine(context_tokens: u32, cache: &Arc<PrefixCache>) -> PromptEngine {
    let doc =
        json!({"tokenizer": BYTE_LEVEL, "context_tokens": context_tokens, "vocab_size": 200_000});
    let doc = ModelDoc::parse(doc.to_string().as_bytes()).expect("it is complete");
    let pool = Arc::new(TokenizePool::new(1, 64).expect("the threads start"));
    PromptEngine::with_cache(doc, pool, Arc::clone(cache), STRETCH_BYTES)
        .expect("the tokenizer is supported")
}

/// One test, as two at once would count each other's allocations.
#[test]
fn the_cache_is_charged_what_it_takes_and_texts_take_memory_by_the_piece() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let cache = PrefixCache::new(2 << 20);
    let engine = engine(1 << 20, &cache);
    let encode = |text: String| runtime.block_on(engine.encode(Prompt::Text(text)));

    // warm: the tokenizer has a cache of words of its own
    for i in 0..50 {
        encode(format!("{i} {}", WORDS.repeat(12))).unwrap();
    }
    // what is in it now is counted as allocated later, too, which 50 entries of thousands do not change much
    let (region, before) = (Region::new(ALLOCATOR), cache.bytes());
    for round in 0..4 {
        for i in 0..1_000 {
            encode(format!("{round} {i} {}", WORDS.repeat(12 + i % 40))).unwrap();
        }
        let (charged, taken) = (cache.bytes() - before, held(&region));
        assert!(charged >= taken, "round {round}: {charged} charged, {taken} taken");
        assert!(charged * 100 <= taken * 115, "round {round}: {charged} charged, {taken} taken");
        assert!(cache.bytes() <= 2 << 20);
    }
    assert!(cache.entries() > 500, "{}", cache.entries());

    // a text of many pieces takes its own bytes, its tokens and one piece at a time; whole, it would take some 700 MB
    let text = WORDS.repeat(40_000);
    let bytes = text.len();
    let region = Region::new(ALLOCATOR);
    let (peak, tokens) = std::thread::scope(|scope| {
        let working = scope.spawn(|| encode(text).unwrap().len());
        let mut peak = 0;
        while !working.is_finished() {
            peak = peak.max(held(&region));
            std::thread::yield_now();
        }
        (peak, working.join().unwrap())
    });
    assert!(tokens > 400_000);
    assert!(peak < 20 * bytes, "{peak} for {bytes} bytes");

    // what cannot fit takes nothing at all
    let small = self::engine(8_192, &cache);
    let text = "0123456789".repeat(1_500_000);
    let region = Region::new(ALLOCATOR);
    let refused = runtime.block_on(small.encode(Prompt::Text(text)));
    assert!(matches!(refused, Err(RouteError::ContextLengthAtLeast { .. })));
    assert!(region.change().bytes_allocated < 10_000, "{:?}", region.change());
}

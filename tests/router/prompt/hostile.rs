//! Texts that are made to cost much: what cannot fit is refused before any work, and what can is done in pieces.

use std::sync::Mutex;
use std::time::Duration;

use headrace_router::prompt::Room;

use super::variants::*;
use super::*;

/// Generous: an unoptimised build refuses 3 MB within milliseconds, and takes minutes to tokenise them.
const SOON: Duration = Duration::from_secs(10);

/// An engine for a context of 8,192 tokens.
fn small(tokenizer: &str) -> PromptEngine {
    small_with(tokenizer, pool(), STRETCH_BYTES)
}

fn small_with(tokenizer: &str, pool: Arc<TokenizePool>, stretch_bytes: usize) -> PromptEngine {
    let mut doc = doc(tokenizer, Some(CHATML));
    doc.context_tokens = 8_192;
    PromptEngine::with_cache(doc, pool, PrefixCache::new(1 << 20), stretch_bytes).unwrap()
}

/// The families of tokenizers, with their normalisers.
fn families() -> Vec<(&'static str, String)> {
    let wanted = |(i, (name, _)): &(usize, (&str, String))| *i < 11 || *name == "from outside";
    let variants = variants().into_iter().enumerate().filter(wanted);
    let mut families: Vec<_> = variants.map(|(_, variant)| variant).collect();
    families.push((
        "empty sequence",
        edited(BYTE_LEVEL, |t| t["normalizer"] = json!({"type": "Sequence", "normalizers": []})),
    ));
    families.push((
        "default model's",
        edited(BYTE_LEVEL, |t| {
            t["model"]["vocab"].as_object_mut().unwrap().remove("\u{106}").unwrap();
            t["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": true},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            ]});
        }),
    ));
    families
}

fn texts() -> [(&'static str, String); 3] {
    let bytes = 3 << 20;
    let fill = |part: &str| part.repeat(bytes / part.len());
    [
        ("digits", fill("0123456789")),
        ("English", fill("The river runs down to the mill, and the race carries the water. ")),
        ("one letter", fill("a")),
    ]
}

fn at_least(error: &RouteError) -> Option<usize> {
    if let RouteError::ContextLengthAtLeast { prompt, limit: 8_192, .. } = error {
        return Some(*prompt);
    }
    None
}

#[test]
fn megabytes_are_refused_by_every_family_at_once() {
    for (name, tokenizer) in families() {
        let engine = small(&tokenizer);
        for (what, text) in texts() {
            let error = block_on(engine.encode(Prompt::Text(text))).unwrap_err();
            // the count so far tells how much of the text was looked at: some pieces past the limit, not all of it
            let refused = at_least(&error).is_some_and(|n| (8_193..100_000).contains(&n));
            assert!(refused, "{name}, {what}: {error}");
        }
    }
}

#[test]
fn what_its_length_tells_is_refused_without_a_thread() {
    let pool = Arc::new(TokenizePool::new(1, 4).unwrap());
    pool.shutdown();
    for tokenizer in [BYTE_LEVEL, BYTE_FALLBACK] {
        let engine = small_with(tokenizer, Arc::clone(&pool), STRETCH_BYTES);
        for (what, text) in texts() {
            let error = block_on(engine.encode(Prompt::Text(text))).unwrap_err();
            assert!(at_least(&error).is_some(), "{what}: {error}");
        }
        let short = Prompt::Text("short".into());
        assert!(matches!(block_on(engine.encode(short)), Err(RouteError::ShuttingDown)));
    }
}

#[test]
fn room_for_the_answer_is_kept() {
    let engine = small(BYTE_LEVEL);
    let text = || Prompt::Text("7".repeat(6_000));
    let with = |answer| block_on(engine.encode_within(text(), Room { context: 8_192, answer }));
    let tokens = with(0).unwrap().len();
    assert_eq!(with(8_192 - tokens).unwrap().len(), tokens);
    for answer in [8_193 - tokens, 8_000, 8_192, usize::MAX] {
        let error = with(answer).unwrap_err();
        assert!(at_least(&error).is_some_and(|n| n <= tokens), "{error}");
        assert!(error.to_string().contains("at least"), "{error}");
    }
}

#[test]
fn a_text_that_may_fit_by_its_length_is_given_up_as_soon_as_it_does_not() {
    // one letter in a word of its own: 2 bytes a token, where the longest token has many more
    let engine = small(BYTE_LEVEL);
    let text = "a ".repeat(40_000);
    assert!(text.len() < engine.longest_text());
    let error = block_on(engine.encode(Prompt::Text(text))).unwrap_err();
    // all of it was not tokenised: only a first part, and a bound for the rest
    assert!(at_least(&error).is_some_and(|n| n > 8_192 && n < 40_000), "{error}");
}

#[test]
fn chats_are_refused_by_the_length_of_what_they_become() {
    let engine = small(BYTE_LEVEL);
    for (what, text) in texts() {
        let messages = json!([{"role": "user", "content": text}]);
        let error = block_on(engine.encode(Prompt::Chat(Box::new(chat(&messages))))).unwrap_err();
        assert!(at_least(&error).is_some(), "{what}: {error}");
    }
}

#[test]
fn a_long_text_has_the_tokens_of_the_whole_in_every_family() {
    let words = "The river's 12 mills (of 1834) run, don't they? It\u{e9} \u{65e5}\u{672c}\u{8a9e}\u{3002}\n\n  x = y + 1;\r\n";
    let text = words.repeat(1_500); // more than three pieces
    assert!(text.len() > 100_000);
    for (name, tokenizer) in families() {
        let engine = engine(&tokenizer, None);
        let expected: Tokenizer = tokenizer.parse().unwrap();
        for special in [false, true] {
            let ids = block_on(engine.encode_text(text.clone(), special)).unwrap();
            let expected = expected.encode_fast(text.as_str(), special).unwrap();
            assert!(ids == expected.get_ids(), "{name}");
        }
        assert!(engine.cache_stats().uncut.is_none() || name == "strip", "{name}");
    }
}

#[test]
fn what_cannot_be_cut_is_bounded_and_refused_by_name() {
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    let uncut = edited(BYTE_LEVEL, |t| t["normalizer"] = strip);
    let engine = small_with(&uncut, pool(), 100_000);
    assert!(engine.cache_stats().uncut.is_some());
    let encode = |len: usize| block_on(engine.encode(Prompt::Text("a b ".repeat(len / 4))));
    assert!(encode(10_000).is_ok());
    assert!(encode(100_000).is_err_and(|e| at_least(&e).is_some()));
    let error = encode(110_000).unwrap_err();
    let named = matches!(error, RouteError::TextWithoutBreaks { at: 0, limit: 100_000, .. });
    assert!(named, "{error}");
    // a word of 200,000 letters among others
    let engine = small_with(WORD_PIECE, pool(), 100_000);
    let text = format!("one two {} three", "x".repeat(200_000));
    let error = block_on(engine.encode(Prompt::Text(text))).unwrap_err();
    assert!(matches!(error, RouteError::TextWithoutBreaks { at: 7, .. }), "{error}");
}

#[tokio::test]
async fn a_short_text_is_served_before_long_ones() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let engine = PromptEngine::new(doc(BYTE_LEVEL, Some(CHATML)), Arc::clone(&pool)).unwrap();
    let engine = Arc::new(engine);
    let words = "word ".repeat(50_000);
    let served = Arc::new(Mutex::new(Vec::new()));
    let ask = |name: String, prompt: Prompt| {
        let (engine, served) = (Arc::clone(&engine), Arc::clone(&served));
        tokio::spawn(async move {
            engine.encode(prompt).await.unwrap();
            served.lock().unwrap().push(name);
        })
    };
    // the thread is busy until everything waits
    let (busy, (open, gate)) = (Arc::clone(&pool), std::sync::mpsc::channel::<()>());
    let busy = tokio::spawn(async move { busy.run(move || gate.recv().unwrap()).await });
    let long = (0..8).map(|i| ask(format!("long {i}"), Prompt::Text(format!("{i} {words}"))));
    let mut all: Vec<_> = long.collect();
    let messages = json!([{"role": "user", "content": "hi ".repeat(10_000)}]);
    all.push(ask("short".to_owned(), Prompt::Chat(Box::new(chat(&messages)))));
    while pool.queued() < 9 {
        tokio::task::yield_now().await;
    }
    open.send(()).unwrap();
    busy.await.unwrap().unwrap();
    for task in all {
        task.await.unwrap();
    }
    let served = served.lock().unwrap();
    let before = served.iter().position(|name| name == "short").unwrap();
    assert!(before <= 1, "{served:?}");
}

#[tokio::test]
async fn who_hangs_up_frees_the_thread_at_the_next_piece() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let engine = PromptEngine::new(doc(BYTE_LEVEL, None), Arc::clone(&pool)).unwrap();
    let engine = Arc::new(engine);
    // minutes of work, were it done
    let text = Prompt::Text("The river runs. ".repeat(500_000));
    let spawned = Arc::clone(&engine);
    let long = tokio::spawn(async move { spawned.encode(text).await });
    tokio::task::yield_now().await; // it is in the pool now: it waits for its first turn, or has it
    assert!(!long.is_finished(), "refused");
    long.abort();
    assert!(long.await.unwrap_err().is_cancelled());
    engine.encode(Prompt::Text("short".into())).await.unwrap();
    // the short one may have gone before the turn in which the pool sees that nobody waits
    let empty = async {
        while (pool.queued(), pool.queued_bytes()) != (0, 0) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, empty).await.expect("the pool gives up what nobody waits for");
}

#[test]
fn unique_prefixes_stay_within_the_bound_of_the_cache() {
    let cache = PrefixCache::new(256 << 10);
    let [first, second] = [BYTE_LEVEL, BYTE_FALLBACK].map(|tokenizer| {
        let (doc, cache) = (doc(tokenizer, None), Arc::clone(&cache));
        PromptEngine::with_cache(doc, pool(), cache, STRETCH_BYTES).unwrap()
    });
    for i in 0..400 {
        for engine in [&first, &second] {
            let text = format!("{i} {}", "water ".repeat(100 + i % 50));
            block_on(engine.encode_text(text, false)).unwrap();
            assert!(cache.bytes() <= 256 << 10);
        }
    }
    assert!(cache.entries() > 100 && cache.bytes() > 200 << 10);
    assert_eq!((first.cache_stats().misses, second.cache_stats().misses), (400, 400));
}

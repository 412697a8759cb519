//! What a request costs before its first token and per token after: `cargo bench -p headrace-router --bench prompt`.
//!
//! Uses the tests' small tokenizers, or the tokenizer.json named by `HEADRACE_TEST_TOKENIZER`.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use headrace_router::config::STRETCH_BYTES;
use headrace_router::prompt::{
    ChatPrompt, ModelDoc, PrefixCache, Prompt, PromptEngine, TokenizePool,
};
use serde_json::json;

const BYTE_LEVEL: &str = include_str!("../../tests/data/tokenizer_byte_level.json");
const BYTE_FALLBACK: &str = include_str!("../../tests/data/tokenizer_byte_fallback.json");
const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const WORDS: &str =
    "The river runs down to the mill, and the mill race carries the water to the wheel. ";

fn engine(tokenizer: &str, cache_bytes: usize) -> PromptEngine {
    let outside = std::env::var_os("HEADRACE_TEST_TOKENIZER");
    let outside =
        outside.map(|path| std::fs::read_to_string(path).expect("the tokenizer is readable"));
    let json = json!({
        "tokenizer": outside.as_deref().unwrap_or(tokenizer),
        "chat_template": CHATML,
        "context_tokens": 1 << 20,
        "vocab_size": 1 << 20,
    });
    let doc = ModelDoc::parse(json.to_string().as_bytes()).expect("the document is complete");
    let pool = TokenizePool::new(1, 16).expect("the thread starts");
    PromptEngine::with_cache(doc, Arc::new(pool), PrefixCache::new(cache_bytes), STRETCH_BYTES)
        .expect("the tokenizer is supported")
}

fn chat(turns: usize) -> ChatPrompt {
    let messages = (0..turns)
        .map(|i| json!({"role": role(i), "content": format!("{i} {}", WORDS.repeat(10))}))
        .collect();
    ChatPrompt { messages, add_generation_prompt: true, ..ChatPrompt::default() }
}

fn role(turn: usize) -> &'static str {
    ["user", "assistant"][turn % 2]
}

fn prompts(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
    let engine = engine(BYTE_LEVEL, 64 << 20);
    let mut group = c.benchmark_group("prompt");
    let short = ChatPrompt {
        messages: vec![json!({"role": "user", "content": "What is the capital of France?"})],
        add_generation_prompt: true,
        ..ChatPrompt::default()
    };
    group.bench_function("short chat, whole way", |b| {
        b.iter_batched(
            || Prompt::Chat(Box::new(short.clone())),
            |prompt| runtime.block_on(engine.encode(prompt)).expect("it is valid"),
            BatchSize::SmallInput,
        );
    });
    group.bench_function("20 turns, all but the last cached", |b| {
        b.iter_batched(
            || Prompt::Chat(Box::new(chat(20))),
            |prompt| runtime.block_on(engine.encode(prompt)).expect("it is valid"),
            BatchSize::SmallInput,
        );
    });
    let uncached = self::engine(BYTE_LEVEL, 0);
    group.bench_function("20 turns, without cache", |b| {
        b.iter_batched(
            || Prompt::Chat(Box::new(chat(20))),
            |prompt| runtime.block_on(uncached.encode(prompt)).expect("it is valid"),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

fn tokens(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
    let mut group = c.benchmark_group("token");
    for (name, tokenizer) in [("byte level", BYTE_LEVEL), ("byte fallback", BYTE_FALLBACK)] {
        let engine = engine(tokenizer, 0);
        let ids = runtime.block_on(engine.encode_text(WORDS.repeat(20), false));
        let ids = ids.expect("it is valid");
        group.throughput(Throughput::Elements(ids.len() as u64));
        for (what, stop) in [("", vec![]), (", 4 stop strings", stops())] {
            group.bench_function(format!("{name}{what}"), |b| {
                b.iter(|| {
                    let mut decoder = engine.decoder(&stop, true);
                    for id in &ids {
                        black_box(decoder.push(std::slice::from_ref(id)));
                    }
                    decoder.finish()
                });
            });
        }
    }
    group.finish();
}

fn stops() -> Vec<String> {
    ["\n\nUser:", "<|end|>", "the mill pond", "###"].map(str::to_owned).to_vec()
}

criterion_group!(benches, prompts, tokens);
criterion_main!(benches);

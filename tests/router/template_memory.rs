//! How much memory chat templates take, measured. Alone in its process, because the allocator counts for all threads.

use std::alloc::System;
use std::sync::Arc;

use headrace_router::prompt::ChatPrompt;
use headrace_router::prompt::{ModelDoc, PromptEngine, TokenizePool};
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[allow(dead_code, reason = "the engine's own tests use the rest")]
#[path = "../../router/src/prompt/jinja/tests/grammar.rs"]
mod grammar;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const TOKENIZER: &str = include_str!("../data/tokenizer_byte_level.json");

/// All that one rendering may allocate, given back or not, and what a request takes beside it.
const BOUND: usize = (256 << 20) + (4 << 20);

fn engine(template: &str) -> Option<PromptEngine> {
    let doc = json!({
        "tokenizer": TOKENIZER,
        "chat_template": template,
        "context_tokens": 2_000_000,
        "vocab_size": 200_000,
    });
    let doc = ModelDoc::parse(doc.to_string().as_bytes()).expect("the document is complete");
    PromptEngine::new(doc, Arc::new(TokenizePool::new(1, 64).expect("the thread starts"))).ok()
}

/// What rendering a message of so many bytes allocates, freed again or not.
fn allocated(engine: &PromptEngine, bytes: usize) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
    let mut chat = ChatPrompt {
        messages: vec![json!({ "role": "user", "content": "x".repeat(bytes) })],
        ..ChatPrompt::default()
    };
    let given = json!({
        "n": 3, "s": "The river runs", "list": [3, 1, 2], "map": { "z": 1, "a": { "k": [1] } }, "x": 2.5,
        "words": ["b", "A"], "nested": [[1, [2]]], "people": [{ "name": "Ann", "age": 3 }], "u": "é🙂",
    });
    chat.template_kwargs.extend(given.as_object().cloned().expect("it is an object"));
    let region = Region::new(ALLOCATOR);
    runtime.block_on(engine.render(chat)).ok();
    region.change().bytes_allocated
}

#[test]
fn templates_allocate_no_more_than_they_may() {
    // `c` once for each character of the message, of which the engine itself tries two.
    for body in [
        "{% set ns.v = ns.v + ns.v %}",
        "{% set ns.v = [ns.v, ns.v] %}{{ ns.v | tojson }}",
        "{% set ns.v = ns.v ~ [ns.v] %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = [ns.l, ns.l] %}",
        "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{{ ns.l | string | length }}",
        "{% set ns.l = (ns.l | batch(2, 1)) + ns.l %}",
        "{% set ns.v %}{{ ns.v }}{{ ns.v | upper }}{% endset %}",
        "{% set ns.v = ns.v.replace('', 'ab') %}",
        "{% set ns.l = (ns.v | list) + (ns.v | list) %}{% set ns.v = ns.l | join %}",
        "{% set ns.l = ns.l + (ns.l | map('string') | list) + (ns.l | sort) + (ns.l | unique) %}",
        "{% set ns.l = ns.l + (ns.v.split('a')) %}{% set ns.v = ns.v + ns.v %}",
        "{% for i in range(c | length * 1000) %}{% set ns.l = namespace(l=ns.l, i=i) %}{% endfor %}",
        "{% for i in range(c | length * 1000) %}{% macro f() %}{{ ns }}{{ i }}{% endmacro %}{% endfor %}",
        "{% for i in range(c | length * 1000) %}{% set ns.l = [loop, i] %}{% endfor %}",
        "{% for i in range(c | length * 1000) %}{{ dict(a=i, b=c, c=1).items() | list | length }}{% endfor %}",
    ] {
        let source = format!(
            "{{% set ns = namespace(v='ab', l=[1]) %}}{{% for c in messages[0].content %}}{body}{{% endfor %}}"
        );
        let engine = engine(&source).expect("it ends with a short message");
        let used = allocated(&engine, 300);
        assert!(used < BOUND, "{used} for {source}");
    }
}

#[test]
fn random_templates_allocate_no_more_than_they_may() {
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u16
    };
    for _ in 0..40 {
        let choices: Vec<u16> = (0..160).map(|_| random()).collect();
        let source = grammar::template(&mut grammar::Choices::new(&choices, true));
        let Some(engine) = engine(&source) else { continue };
        let used = allocated(&engine, 1_000);
        assert!(used < BOUND, "{used} for {source}");
    }
}

//! Chat templates: whatever a template is, a chat is rendered or refused within its bounds.
#![no_main]

use std::sync::{Arc, OnceLock};

use headrace_fuzz::{abort_on_panic, text};
use headrace_router::prompt::{ChatPrompt, ModelDoc, PromptEngine, TokenizePool};
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

struct Bench {
    runtime: Runtime,
    pool: Arc<TokenizePool>,
}

fn bench() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| Bench {
        runtime: Builder::new_multi_thread().worker_threads(1).build().expect("it starts"),
        pool: Arc::new(TokenizePool::new(1, 8).expect("it starts")),
    })
}

fuzz_target!(|bytes: &[u8]| {
    abort_on_panic();
    let template = text(bytes);
    let document = json!({
        "tokenizer": include_str!("../../tests/data/tokenizer_byte_level.json"),
        "chat_template": template, "context_tokens": 4096, "vocab_size": 1024,
        "eos_token_ids": [0], "bos_token": "<s>", "eos_token": "</s>",
    });
    let doc = ModelDoc::parse(document.to_string().as_bytes()).expect("the rest is right");
    let bench = bench();
    let _guard = bench.runtime.enter();
    let Ok(engine) = PromptEngine::new(doc, Arc::clone(&bench.pool)) else { return };
    let chat = ChatPrompt {
        messages: vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": "Hello"}),
            json!({"role": "assistant", "content": null, "reasoning_content": "so", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, {"b": null}]}}}]}),
            json!({"role": "tool", "tool_call_id": "1", "content": "2"}),
        ],
        tools: Some(vec![json!({"type": "function", "function": {"name": "f", "parameters": {}}})]),
        add_generation_prompt: true,
        ..ChatPrompt::default()
    };
    let _ = bench.runtime.block_on(engine.render(chat));
});

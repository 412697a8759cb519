//! What a worker says of its model: tokenizer, template, limits. It is refused, or it encodes and decodes text.
//!
//! `tokenizers` panics on some documents while it reads them. The router reads them where a panic refuses the worker, and so
//! does this. What was read has to work.
#![no_main]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use headrace_router::error::RouteError;
use headrace_router::prompt::{ModelDoc, Prompt, PromptEngine, TokenizePool};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};

const TEXT: &str = "Water flows  down\n\n a hill: 12345 \u{e9}\u{4e2d}\u{1f600} don't <|im_end|>";

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME
        .get_or_init(|| Builder::new_multi_thread().worker_threads(1).build().expect("it starts"))
}

/// In the place of libFuzzer's hook, which ends the process whether or not the panic is caught.
fn let_panics_be_caught() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| std::panic::set_hook(Box::new(|panic| eprintln!("{panic}"))));
}

fn fault(why: &dyn std::fmt::Debug) -> ! {
    eprintln!("{why:?}");
    std::process::abort()
}

fuzz_target!(|bytes: &[u8]| {
    let_panics_be_caught();
    let Ok(doc) = ModelDoc::parse(bytes) else { return };
    let _guard = runtime().enter();
    let pool = Arc::new(TokenizePool::new(1, 8).expect("it starts"));
    let read = catch_unwind(AssertUnwindSafe(|| PromptEngine::new(doc, pool)));
    let Ok(Ok(engine)) = read else { return };
    match runtime().block_on(engine.encode(Prompt::Text(TEXT.to_owned()))) {
        Ok(ids) => {
            let decoded = catch_unwind(AssertUnwindSafe(|| engine.decode(&ids, true)));
            decoded.unwrap_or_else(|_| fault(&"a panic while decoding"));
        }
        Err(error @ RouteError::Internal { .. }) => fault(&error),
        Err(_) => {}
    }
});

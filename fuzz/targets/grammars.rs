//! Schemas, expressions and grammars of strangers: compiled or refused, within the bounds.
#![no_main]

use headrace_fuzz::text;
use headrace_router::core::frame::{Grammar, GrammarKind};
use headrace_router::request::grammar::{check_grammar, check_schema, lark_of_gbnf};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, rest)) = input.split_first() else { return };
    let text = text(rest);
    match kind % 3 {
        0 => {
            let Ok(schema) = serde_json::from_str::<serde_json::Value>(text) else { return };
            if check_schema(&schema).is_ok() {
                let source = schema.to_string().into();
                check_grammar(&Grammar { kind: GrammarKind::Json, source })
                    .expect("it was checked");
            }
        }
        1 => drop(check_grammar(&Grammar { kind: GrammarKind::Regex, source: text.into() })),
        _ => {
            let Ok(lark) = lark_of_gbnf(text) else { return };
            drop(check_grammar(&Grammar { kind: GrammarKind::Lark, source: lark.into() }));
        }
    }
});

//! From the text of a grammar to what follows it, within bounds of time, depth and memory.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, panic_utils};
use serde_json::{Map, Value, json};

use super::follower::Follower;
use super::formats;
use super::memory::Meter;
use super::vocabulary::GrammarTokens;
use crate::core::frame::{Grammar, GrammarKind, MAX_GRAMMAR_BYTES};

/// Brackets within brackets of a regular expression or a Lark grammar. A guess; JSON has its own bound.
const MAX_NESTING: usize = 64;

/// Of a Lark grammar, rules and brackets together. A guess: one in six bytes of the longest source.
pub(super) const MAX_LEVELS: usize = 10_000;

/// `llguidance` walks rules within rules, and brackets in them, by recursion: as many as there may be fit onto this stack, of a
/// build without optimisations, too. It takes memory only where it is used.
pub(super) const STACK_BYTES: usize = 256 << 20;

/// Longest message of a failure: part of the source stands in some of them.
const MAX_MESSAGE_CHARS: usize = 300;

/// Why `oneOf` may not be followed.
const SEVERAL_CASES: &str = "a value may be valid under several cases of `oneOf`, which is not supported; use `anyOf`, or give each case a required property with a `const` of its own";

/// White space between two tokens of JSON: a new line with its indent, but no endless run of spaces, which models fall into.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// Bounds of one grammar. At `llguidance`'s own speeds 20 ms to compile and 20 ms for a mask; a lexer of at most 40 MB.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_items_in_row: 2_000,
        max_lexer_states: 20_000,
        max_grammar_size: 100_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Why a grammar cannot be followed, for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub(super) String);

impl GrammarError {
    pub(super) fn new(message: impl std::fmt::Display) -> Self {
        let message = message.to_string();
        // `llguidance` adds where in its code that was, or that it does not say so
        let first = message.split("\n<").next().unwrap_or_default().trim();
        // its own remedy is an option that nobody here has
        let first = if first.contains("coerce_one_of") { SEVERAL_CASES } else { first };
        Self(match first.char_indices().nth(MAX_MESSAGE_CHARS) {
            Some((end, _)) => format!("{}...", &first[..end]),
            None => first.to_owned(),
        })
    }
}

/// A grammar at its beginning, for the tokens of one vocabulary. Answers share what they learn of it.
pub struct Compiled {
    start: Arc<Mutex<Matcher>>,
    ends: Arc<[u32]>,
    meter: Arc<Meter>,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Compiled")
    }
}

impl Compiled {
    /// An answer that has no token yet.
    #[must_use]
    pub fn follower(&self) -> Follower {
        Follower::new(Arc::clone(&self.start), Arc::clone(&self.ends), Arc::clone(&self.meter))
    }
}

/// # Errors
/// What is wrong with the grammar, or which bound it passes.
pub(super) fn compile(tokens: &GrammarTokens, grammar: &Grammar) -> Result<Compiled, GrammarError> {
    let Grammar { kind, source } = grammar;
    if source.len() > MAX_GRAMMAR_BYTES {
        let text = format!("it is {} bytes long, the limit is {MAX_GRAMMAR_BYTES}", source.len());
        return Err(GrammarError(text));
    }
    let top = match kind {
        GrammarKind::Json => TopLevelGrammar::from_json_schema(with_options(
            serde_json::from_str(source).map_err(GrammarError::new)?,
        )),
        GrammarKind::Regex => {
            check_nesting(source)?;
            TopLevelGrammar::from_regex(source)
        }
        GrammarKind::Lark => {
            check_nesting(source)?;
            check_levels(source)?;
            TopLevelGrammar::from_lark(source.to_string())
        }
    };
    compile_top(tokens, top, source.len())
}

pub(super) fn compile_schema(
    tokens: &GrammarTokens,
    schema: Value,
) -> Result<Compiled, GrammarError> {
    // only looked at, and dropped
    compile_top(tokens, TopLevelGrammar::from_json_schema(with_options(schema)), 0)
}

fn compile_top(
    tokens: &GrammarTokens,
    top: TopLevelGrammar,
    source_bytes: usize,
) -> Result<Compiled, GrammarError> {
    let create = || tokens.factory().create_parser(top);
    let work = || panic_utils::catch_unwind(AssertUnwindSafe(create));
    let parser = on_a_deep_stack(work)?.map_err(|error| GrammarError::new(format!("{error:#}")))?;
    let meter = Meter::new(parser.parser.clone(), source_bytes, Arc::clone(tokens.memory()));
    let matcher = Matcher::new(Ok(parser));
    match matcher.get_error() {
        Some(error) => Err(GrammarError::new(error)),
        None => Ok(Compiled {
            start: Arc::new(Mutex::new(matcher)),
            ends: tokens.ends(),
            meter: Arc::new(meter),
        }),
    }
}

fn on_a_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, GrammarError> {
    std::thread::scope(|scope| {
        let builder =
            std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
        let thread = builder.spawn_scoped(scope, work).map_err(GrammarError::new)?;
        thread.join().map_err(|_| GrammarError("the compiler of grammars failed".to_owned()))
    })
}

/// Whether answers can follow a grammar.
///
/// # Errors
/// What is wrong with it, or which bound it passes.
pub fn check_grammar(grammar: &Grammar) -> Result<(), GrammarError> {
    compile(GrammarTokens::of_bytes(), grammar).map(drop)
}

/// The schema with how JSON is written: our white space, dates that exist, everything checked.
fn with_options(mut schema: Value) -> Value {
    formats::spell_out(&mut schema);
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        Value::Bool(false)
        | Value::Null
        | Value::Number(_)
        | Value::String(_)
        | Value::Array(_) => return schema,
    };
    schema.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": WHITESPACE }));
    Value::Object(schema)
}

/// A path through a grammar enters each rule and each bracket once at most.
fn check_levels(source: &str) -> Result<(), GrammarError> {
    let levels = source.bytes().filter(|byte| b":([{".contains(byte)).count();
    if levels > MAX_LEVELS {
        let text = format!("it has {levels} rules and brackets, the limit is {MAX_LEVELS}");
        return Err(GrammarError(text));
    }
    Ok(())
}

fn check_nesting(source: &str) -> Result<(), GrammarError> {
    let mut depth = 0_usize;
    for byte in source.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_NESTING {
            let text = format!("its brackets are nested deeper than {MAX_NESTING} levels");
            return Err(GrammarError(text));
        }
    }
    Ok(())
}

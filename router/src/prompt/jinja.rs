//! An engine for chat templates that a template, whatever it does, cannot make slow, large or deep.
//!
//! Templates come from whoever made the model, and what they are fed with from whoever asks. `minijinja` parses them and
//! says what they mean; it counts instructions, though, and one instruction may copy, compare, print or drop anything. So
//! the tree is walked here, over values of our own: every operation charges a [`Budget`] before it works, nothing is
//! lazy, and an operation that is not listed here does not exist. What stays in the bounds renders as minijinja renders it
//! with its `pycompat` methods (the tests compare the two), but for what `tests/differences.rs` lists.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "most functions take one or two of a dozen kinds of value, and refuse all others in one way"
)]
#![allow(clippy::needless_pass_by_value, reason = "all filters and tests have one signature")]

mod budget;
mod closure;
mod error;
mod expr;
mod fields;
mod library;
mod lower;
mod ops;
mod run;
mod scope;
mod tree;
mod value;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::thread;

use minijinja::machinery::{self, Token, WhitespaceConfig};

pub(crate) use budget::{Bound, Budget, Limits, OUTPUT};
pub(crate) use error::{Error, ErrorKind};
pub(crate) use scope::Machine;
pub(crate) use value::Value;

use lower::Lowering;
use tree::{Name, Stmt};

/// Longest source of a template. The longest of well-known models have 20 KiB.
const MAX_SOURCE: usize = 1 << 20;

/// Most tokens between `{%` and `%}`, or `{{` and `}}`: as many operators may be nested in each other where the parser
/// does not count.
const MAX_TAG_TOKENS: usize = 5_000;

/// Most `elif` in a template: the parser nests each in the one before it.
const MAX_ELIF: usize = 1_000;

/// The stack for reading a template, and for trying it: what the two bounds above may nest, some KiB for each, in a build
/// without optimisation. Only touched pages cost memory.
const DEEP_STACK: usize = 64 << 20;

/// A template that was read and checked.
#[derive(Debug)]
pub(crate) struct Program {
    body: Vec<Stmt>,
    names: Vec<Box<str>>,
    ids: HashMap<Box<str>, Name>,
}

impl Program {
    /// Reads a template.
    ///
    /// # Errors
    /// Why it is not one, or what it uses that the engine does not have, with the line.
    pub(crate) fn new(source: &str) -> Result<Self, String> {
        if source.len() > MAX_SOURCE {
            let kib = MAX_SOURCE >> 10;
            return Err(format!("it has {} bytes, and at most {kib} KiB are read", source.len()));
        }
        deep(|| Self::read(source)).unwrap_or_else(Err)
    }

    fn read(source: &str) -> Result<Self, String> {
        let space = WhitespaceConfig {
            keep_trailing_newline: false,
            lstrip_blocks: true,
            trim_blocks: true,
        };
        check_tags(source, space)?;
        let root = machinery::parse(source, "chat_template", Default::default(), space);
        let root = root.map_err(|e| parser_says(&e))?;
        let (body, names) = Lowering::default().template(&root)?;
        let ids = names.iter().enumerate().map(|(id, name)| (name.clone(), id)).collect();
        Ok(Self { body, names, ids })
    }

    /// Renders the template with `given` as its variables.
    ///
    /// # Errors
    /// What the template raised, where it went wrong, or which bound it passed.
    pub(crate) fn render<'r>(
        &'r self,
        given: impl IntoIterator<Item = (&'r str, Value<'r>)>,
        budget: Budget,
    ) -> Result<String, (Error, Budget)> {
        let mut machine = Machine::new(self, given, budget);
        match machine.run() {
            Ok(()) => Ok(machine.into_output()),
            Err(error) => Err((error, machine.into_budget())),
        }
    }

    fn find(&self, name: &str) -> Option<Name> {
        self.ids.get(name).copied()
    }
}

/// Runs `work` on a stack of its own, because how deep it goes is up to a template.
///
/// # Errors
/// If there is no thread for it, or it panicked.
pub(crate) fn deep<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("template".to_owned()).stack_size(DEEP_STACK);
        let thread = thread.spawn_scoped(scope, work);
        let thread = thread.map_err(|e| format!("no thread could be started for it: {e}"))?;
        thread.join().map_err(|_| "reading it failed".to_owned())
    })
}

/// Refuses what would nest the parser too deeply. What is no token is left to the parser.
fn check_tags(source: &str, space: WhitespaceConfig) -> Result<(), String> {
    let (mut tokens, mut elifs) = (0, 0);
    for token in machinery::tokenize(source, false, Default::default(), space) {
        let Ok((token, span)) = token else { return Ok(()) };
        match token {
            Token::BlockStart | Token::VariableStart => tokens = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        tokens += 1;
        let line = span.start_line;
        if tokens > MAX_TAG_TOKENS {
            return Err(format!(
                "a tag has more than {MAX_TAG_TOKENS} words and signs (line {line} of the template)"
            ));
        }
        if elifs > MAX_ELIF {
            return Err(format!(
                "it has more than {MAX_ELIF} `elif` (line {line} of the template)"
            ));
        }
    }
    Ok(())
}

/// The parser's error with its line, without the source that it would show.
fn parser_says(error: &minijinja::Error) -> String {
    let mut text = error.kind().to_string();
    if let Some(detail) = error.detail() {
        text = format!("{text}: {detail}");
    }
    if let Some(line) = error.line() {
        text = format!("{text} (line {line} of the template)");
    }
    text
}

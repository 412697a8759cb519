//! An engine for chat templates that a template, whatever it does, cannot make slow, large or deep.
//!
//! Templates come from whoever made the model, and what they are fed with from whoever asks. `minijinja` parses them and
//! says what they mean; it counts instructions, though, and one instruction may copy, compare, print or drop anything. So
//! the tree is walked here, over values of our own: every operation charges a [`Budget`] before it works, nothing is
//! lazy, and an operation that is not listed here does not exist. What stays in the bounds renders as minijinja renders it
//! with its `pycompat` methods (the tests compare the two), but for what `tests/differences.rs` lists.

mod args;
mod budget;
mod checks;
mod closure;
mod compare;
mod error;
mod expr;
mod filters;
mod functions;
mod lists;
mod lower;
mod methods;
mod ops;
mod print;
mod python;
mod run;
mod scope;
mod text;
mod tree;
mod value;

#[cfg(test)]
mod tests;

use std::thread;

use minijinja::machinery::{self, Token, WhitespaceConfig};

pub(crate) use budget::{Bound, Budget, Limits, OUTPUT};
pub(crate) use error::{Error, Kind};
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

/// The stack for reading a template: what the two bounds above may nest, some KiB for each, in a build without
/// optimisation. Only touched pages cost memory.
const READER_STACK: usize = 64 << 20;

/// A template that was read and checked.
#[derive(Debug)]
pub(crate) struct Program {
    body: Vec<Stmt>,
    names: Vec<Box<str>>,
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
        // On a stack of its own, because how deep parsing goes is up to the source.
        thread::scope(|scope| {
            let reader = thread::Builder::new().name("template-reader".to_owned());
            let reader = reader.stack_size(READER_STACK).spawn_scoped(scope, || Self::read(source));
            match reader.map_err(|e| format!("no thread could be started to read it: {e}"))?.join() {
                Ok(program) => program,
                Err(_) => Err("reading it failed".to_owned()),
            }
        })
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
        Ok(Self { body, names })
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
        self.names.iter().position(|known| **known == *name)
    }
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
            return Err(format!("it has more than {MAX_ELIF} `elif` (line {line} of the template)"));
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

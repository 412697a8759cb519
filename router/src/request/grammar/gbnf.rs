//! GBNF, the grammars of llama.cpp and `xgrammar`, as Lark.

use std::fmt::Write as _;

use super::compile::GrammarError;

/// Whether a grammar is GBNF: a rule is defined with `::=`.
#[must_use]
pub(super) fn is_gbnf(source: &str) -> bool {
    source.lines().any(|line| {
        let line = line.trim_start();
        !line.starts_with('#')
            && line.split_once("::=").is_some_and(|(name, _)| is_name(name.trim()))
    })
}

fn is_name(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

/// The grammar in Lark, where it is GBNF; otherwise as it is.
///
/// # Errors
/// The line of what is no GBNF.
pub fn lark_of_gbnf(source: &str) -> Result<String, GrammarError> {
    if !is_gbnf(source) {
        return Ok(source.to_owned());
    }
    let mut reader = Reader { rest: source, line: 1 };
    let mut lark = String::with_capacity(source.len() + 16);
    while let Some(token) = reader.next()? {
        match token {
            Token::Rule(name) => {
                lark.push('\n');
                push_rule(&mut lark, &name);
                lark.push_str(" :");
            }
            Token::Name(name) => {
                lark.push(' ');
                push_rule(&mut lark, &name);
            }
            Token::Literal(text) => {
                lark.push(' ');
                lark.push_str(&serde_json::to_string(&text).map_err(GrammarError::new)?);
            }
            Token::Class(class) => {
                // one whole regular expression of Lark; a slash would end it
                write!(lark, " /{}/", class.replace('/', "\\/")).map_err(GrammarError::new)?;
            }
            Token::Sign('.') => lark.push_str(" /[^\\n]/"),
            Token::Sign(sign @ ('|' | '(')) => {
                lark.push(' ');
                lark.push(sign);
            }
            Token::Sign(sign) => lark.push(sign),
            Token::Repeat(times) => lark.push_str(&times),
        }
    }
    Ok(lark)
}

/// The start rule is `root` there and `start` here; names are of small letters here, and told apart by a prefix.
fn push_rule(lark: &mut String, name: &str) {
    if name == "root" {
        lark.push_str("start");
        return;
    }
    lark.push_str("r_");
    for c in name.chars() {
        match c {
            '-' => lark.push_str("_d_"),
            c if c.is_ascii_uppercase() => {
                lark.push_str("_u_");
                lark.push(c.to_ascii_lowercase());
            }
            c => lark.push(c),
        }
    }
}

enum Token {
    /// `name ::=`
    Rule(String),
    Name(String),
    Literal(String),
    /// With its brackets.
    Class(String),
    Sign(char),
    /// `{2,5}`, with its braces as Lark writes it.
    Repeat(String),
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl Reader<'_> {
    fn wrong(&self, what: &str) -> GrammarError {
        GrammarError(format!("line {}: {what}", self.line))
    }

    fn bump(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.line += usize::from(c == '\n');
        Some(c)
    }

    fn skip_space(&mut self) {
        while let Some(c) = self.rest.chars().next() {
            match c {
                '#' => {
                    while self.rest.chars().next().is_some_and(|c| c != '\n') {
                        self.bump();
                    }
                }
                c if c.is_whitespace() => {
                    self.bump();
                }
                _ => return,
            }
        }
    }

    fn next(&mut self) -> Result<Option<Token>, GrammarError> {
        self.skip_space();
        let Some(c) = self.rest.chars().next() else { return Ok(None) };
        match c {
            '"' => self.literal().map(|text| Some(Token::Literal(text))),
            '[' => self.class().map(|class| Some(Token::Class(class))),
            '{' => self.repeat().map(|times| Some(Token::Repeat(times))),
            '|' | '(' | ')' | '*' | '+' | '?' | '.' => {
                self.bump();
                Ok(Some(Token::Sign(c)))
            }
            c if c.is_ascii_alphanumeric() || c == '_' => {
                let name: String = self
                    .rest
                    .chars()
                    .take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
                    .collect();
                self.rest = &self.rest[name.len()..];
                self.skip_space();
                if let Some(rest) = self.rest.strip_prefix("::=") {
                    self.rest = rest;
                    return Ok(Some(Token::Rule(name)));
                }
                Ok(Some(Token::Name(name)))
            }
            c => Err(self.wrong(&format!("{c:?} is not expected"))),
        }
    }

    fn literal(&mut self) -> Result<String, GrammarError> {
        self.bump();
        let mut text = String::new();
        loop {
            match self.bump() {
                None | Some('\n') => return Err(self.wrong("a string has no end")),
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escape()?),
                Some(c) => text.push(c),
            }
        }
    }

    fn escape(&mut self) -> Result<char, GrammarError> {
        let digits = match self.bump() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('"' | '\\' | '\'' | '[' | ']' | '-' | '^' | '/')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.wrong("an escape that GBNF does not have")),
        };
        let hex: String = (0..digits).map_while(|_| self.bump()).collect();
        let code = u32::from_str_radix(&hex, 16).ok().and_then(char::from_u32);
        code.ok_or_else(|| self.wrong(&format!("\\{hex} is no character")))
    }

    fn class(&mut self) -> Result<String, GrammarError> {
        self.bump();
        let mut class = String::from("[");
        if self.rest.starts_with('^') {
            self.bump();
            class.push('^');
        }
        loop {
            match self.bump() {
                None | Some('\n') => return Err(self.wrong("a set of characters has no end")),
                Some(']') => {
                    class.push(']');
                    return Ok(class);
                }
                Some('-') => class.push('-'),
                Some('\\') => {
                    let c = self.escape()?;
                    write!(class, "\\u{{{:x}}}", u32::from(c)).map_err(GrammarError::new)?;
                }
                Some(c) if c.is_alphanumeric() => class.push(c),
                Some(c) => {
                    write!(class, "\\u{{{:x}}}", u32::from(c)).map_err(GrammarError::new)?;
                }
            }
        }
    }

    fn repeat(&mut self) -> Result<String, GrammarError> {
        let end = self.rest.find('}').ok_or_else(|| self.wrong("a repetition has no end"))?;
        let times = self.rest[..=end].to_owned();
        let inside: String = times.chars().filter(|c| !c.is_whitespace()).collect();
        if !inside[1..inside.len() - 1].chars().all(|c| c.is_ascii_digit() || c == ',') {
            return Err(self.wrong("a repetition is {m}, {m,} or {m,n}"));
        }
        self.rest = &self.rest[end + 1..];
        Ok(inside)
    }
}

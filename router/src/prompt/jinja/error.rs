//! Why a template failed, in the words and with the line that the engine of the `minijinja` crate would give.

use std::borrow::Cow;

use super::budget::Bound;

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    Invalid,
    Undefined,
    TooManyArguments,
    MissingArgument,
    UnknownFilter,
    UnknownTest,
    UnknownFunction,
    UnknownMethod,
    CannotUnpack,
    /// `raise_exception` was called; the detail is what with.
    Raised,
    /// The rendering passed one of its bounds.
    Spent(Bound),
}

/// A failure of a rendering. Boxed, because nearly every function of the engine may return one.
#[derive(Debug)]
pub(crate) struct Error(Box<Parts>);

#[derive(Debug)]
struct Parts {
    kind: ErrorKind,
    detail: Cow<'static, str>,
    line: Option<u32>,
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind, "")
    }
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Parts { kind, detail: detail.into(), line: None }))
    }

    pub(crate) fn invalid(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Invalid, detail)
    }

    /// The line, unless a more exact one is known.
    pub(crate) fn at(mut self, line: u32) -> Self {
        self.0.line.get_or_insert(line);
        self
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    pub(crate) fn detail(&self) -> &str {
        &self.0.detail
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0.kind {
            ErrorKind::Invalid => "invalid operation",
            ErrorKind::Undefined => "undefined value",
            ErrorKind::TooManyArguments => "too many arguments",
            ErrorKind::MissingArgument => "missing argument",
            ErrorKind::UnknownFilter => "unknown filter",
            ErrorKind::UnknownTest => "unknown test",
            ErrorKind::UnknownFunction => "unknown function",
            ErrorKind::UnknownMethod => "unknown method",
            ErrorKind::CannotUnpack => "cannot unpack",
            ErrorKind::Raised => "raised",
            ErrorKind::Spent(_) => "a bound was passed",
        })?;
        if !self.0.detail.is_empty() {
            write!(f, ": {}", self.0.detail)?;
        }
        match self.0.line {
            Some(line) if self.0.kind != ErrorKind::Raised => {
                write!(f, " (line {line} of the template)")
            }
            _ => Ok(()),
        }
    }
}

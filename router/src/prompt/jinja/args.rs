//! Arguments of a call, and how they become what a filter, a test, a method or a function wants.

use super::error::{Error, Kind};
use super::print;
use super::scope::Machine;
use super::text::Text;
use super::value::{Map, Value};

/// The arguments of one call.
#[derive(Debug, Default)]
pub(crate) struct Args<'r> {
    pub(crate) positional: Vec<Value<'r>>,
    pub(crate) named: Option<Map<'r>>,
}

/// Arguments that are taken one by one.
pub(super) struct Reader<'r> {
    positional: std::vec::IntoIter<Value<'r>>,
    named: Option<Map<'r>>,
}

impl<'r> Args<'r> {
    pub(super) fn reader(self) -> Reader<'r> {
        Reader { positional: self.positional.into_iter(), named: self.named }
    }

    /// All of them; named ones are a map at the end, as minijinja passes them.
    pub(super) fn all(self) -> Result<Vec<Value<'r>>, Error> {
        let mut all = self.positional;
        all.extend(self.named.map(Value::map));
        Ok(all)
    }

    /// Fails if there is any.
    pub(super) fn none(self) -> Result<(), Error> {
        self.reader().finish()
    }

    /// The only one.
    pub(super) fn one(self) -> Result<Value<'r>, Error> {
        let mut args = self.reader();
        let value = args.required()?;
        args.finish()?;
        Ok(value)
    }
}

impl<'r> Reader<'r> {
    pub(super) fn required(&mut self) -> Result<Value<'r>, Error> {
        self.positional.next().ok_or_else(|| Kind::MissingArgument.into())
    }

    /// The next one, if it is there and says something.
    pub(super) fn optional(&mut self) -> Option<Value<'r>> {
        self.positional.next().filter(|value| !value.is_missing())
    }

    /// The next one, whatever it says.
    pub(super) fn next(&mut self) -> Option<Value<'r>> {
        self.positional.next()
    }

    pub(super) fn named(&mut self, name: &str) -> Option<Value<'r>> {
        self.named.as_mut().and_then(|named| named.remove(name))
    }

    pub(super) fn named_optional(&mut self, name: &str) -> Option<Value<'r>> {
        self.named(name).filter(|value| !value.is_missing())
    }

    /// The next one, or else the one of that name.
    pub(super) fn optional_or_named(&mut self, name: &str) -> Option<Value<'r>> {
        self.optional().or_else(|| self.named_optional(name))
    }

    pub(super) fn rest(&mut self) -> Vec<Value<'r>> {
        self.positional.by_ref().collect()
    }

    /// Fails if any is left.
    pub(super) fn finish(mut self) -> Result<(), Error> {
        if self.positional.next().is_some() {
            return Err(Kind::TooManyArguments.into());
        }
        let Some((name, _)) = self.named.as_ref().and_then(|named| named.entry(0)) else {
            return Ok(());
        };
        Err(match name.as_text() {
            Some(name) => {
                let why = format!("unknown keyword argument '{}'", &*name.read());
                Error::new(Kind::TooManyArguments, why)
            }
            None => Error::invalid("non string keys passed to kwargs"),
        })
    }
}

/// A string, or what prints as one.
pub(super) fn text<'r>(machine: &Machine<'r>, value: &Value<'r>) -> Result<Text<'r>, Error> {
    print::display(machine, value)
}

/// A string.
pub(super) fn string<'v, 'r>(value: &'v Value<'r>) -> Result<&'v Text<'r>, Error> {
    value.as_text().ok_or_else(|| Error::invalid("value is not a string"))
}

fn cannot(value: &Value<'_>, target: &str) -> Error {
    Error::invalid(format!("cannot convert {} to {target}", value.kind()))
}

pub(super) fn count(value: &Value<'_>) -> Result<usize, Error> {
    value.as_usize().ok_or_else(|| cannot(value, "usize"))
}

pub(super) fn signed(value: &Value<'_>) -> Result<i64, Error> {
    value.as_i64().ok_or_else(|| cannot(value, "i64"))
}

pub(super) fn flag(value: &Value<'_>) -> Result<bool, Error> {
    match value {
        Value::Bool(x) => Ok(*x),
        _ => Err(cannot(value, "bool")),
    }
}

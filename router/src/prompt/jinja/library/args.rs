//! Arguments of a call, and how they become what a filter, a test, a method or a function wants.

use crate::prompt::jinja::error::{Error, ErrorKind};
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::value::print;
use crate::prompt::jinja::value::text::Text;
use crate::prompt::jinja::value::{Map, Value};

/// The arguments of one call.
#[derive(Debug, Default)]
pub(crate) struct Args<'r> {
    pub(crate) positional: Vec<Value<'r>>,
    pub(crate) named: Option<Map<'r>>,
}

/// Arguments that are taken one by one.
pub(crate) struct ArgReader<'r> {
    positional: std::vec::IntoIter<Value<'r>>,
    named: Option<Map<'r>>,
}

impl<'r> Args<'r> {
    pub(crate) fn reader(self) -> ArgReader<'r> {
        ArgReader { positional: self.positional.into_iter(), named: self.named }
    }

    /// All of them; named ones are a map at the end, as minijinja passes them.
    pub(crate) fn all(self) -> Result<Vec<Value<'r>>, Error> {
        let mut all = self.positional;
        all.extend(self.named.map(Value::map));
        Ok(all)
    }

    /// Fails if there is any.
    pub(crate) fn none(self) -> Result<(), Error> {
        self.reader().finish()
    }

    /// The only one.
    pub(crate) fn one(self) -> Result<Value<'r>, Error> {
        let mut args = self.reader();
        let value = args.required()?;
        args.finish()?;
        Ok(value)
    }
}

impl<'r> ArgReader<'r> {
    pub(crate) fn required(&mut self) -> Result<Value<'r>, Error> {
        self.positional.next().ok_or_else(|| ErrorKind::MissingArgument.into())
    }

    /// The next one, if it is there and says something.
    pub(crate) fn optional(&mut self) -> Option<Value<'r>> {
        self.positional.next().filter(|value| !value.is_missing())
    }

    /// The next one, whatever it says.
    pub(crate) fn next(&mut self) -> Option<Value<'r>> {
        self.positional.next()
    }

    pub(crate) fn named(&mut self, name: &str) -> Option<Value<'r>> {
        self.named.as_mut().and_then(|named| named.remove(name))
    }

    pub(crate) fn named_optional(&mut self, name: &str) -> Option<Value<'r>> {
        self.named(name).filter(|value| !value.is_missing())
    }

    /// The next one, or else the one of that name.
    pub(crate) fn optional_or_named(&mut self, name: &str) -> Option<Value<'r>> {
        self.optional().or_else(|| self.named_optional(name))
    }

    pub(crate) fn rest(&mut self) -> Vec<Value<'r>> {
        self.positional.by_ref().collect()
    }

    /// Fails if any is left.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        if self.positional.next().is_some() {
            return Err(ErrorKind::TooManyArguments.into());
        }
        let Some((name, _)) = self.named.as_ref().and_then(|named| named.entry(0)) else {
            return Ok(());
        };
        Err(match name.as_text() {
            Some(name) => {
                let why = format!("unknown keyword argument '{}'", &*name.read());
                Error::new(ErrorKind::TooManyArguments, why)
            }
            None => Error::invalid("non string keys passed to kwargs"),
        })
    }
}

/// A string, or what prints as one.
pub(crate) fn text<'r>(machine: &Machine<'r>, value: &Value<'r>) -> Result<Text<'r>, Error> {
    print::display(machine, value)
}

/// The text of a value, or an error where the value is something else.
pub(crate) fn string<'v, 'r>(value: &'v Value<'r>) -> Result<&'v Text<'r>, Error> {
    value.as_text().ok_or_else(|| Error::invalid("value is not a string"))
}

fn cannot(value: &Value<'_>, target: &str) -> Error {
    Error::invalid(format!("cannot convert {} to {target}", value.kind()))
}

pub(crate) fn count(value: &Value<'_>) -> Result<usize, Error> {
    value.as_usize().ok_or_else(|| cannot(value, "usize"))
}

pub(crate) fn signed(value: &Value<'_>) -> Result<i64, Error> {
    value.as_i64().ok_or_else(|| cannot(value, "i64"))
}

pub(crate) fn flag(value: &Value<'_>) -> Result<bool, Error> {
    match value {
        Value::Bool(x) => Ok(*x),
        _ => Err(cannot(value, "bool")),
    }
}

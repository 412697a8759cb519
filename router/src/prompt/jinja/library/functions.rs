//! Functions that every template may call.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::args::{self, Args};
use crate::prompt::clock;
use crate::prompt::jinja::error::{Error, ErrorKind};
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::value::print;
use crate::prompt::jinja::value::{self, Map, Value};

/// A function by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Range,
    Dict,
    Namespace,
    Raise,
    StrftimeNow,
}

/// Most numbers that `range` gives, as in minijinja.
const MAX_RANGE: usize = 100_000;

/// Longest format of `strftime_now`: dates are short, and a directive may become 24 letters.
const MAX_FORMAT: usize = 4 << 10;

impl Function {
    pub(crate) fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "range" => Self::Range,
            "dict" => Self::Dict,
            "namespace" => Self::Namespace,
            "raise_exception" => Self::Raise,
            "strftime_now" => Self::StrftimeNow,
            _ => return None,
        })
    }

    pub(crate) fn call<'r>(
        self,
        machine: &mut Machine<'r>,
        args: Args<'r>,
    ) -> Result<Value<'r>, Error> {
        match self {
            Self::Range => range(machine, args),
            Self::Dict => dict(machine, args),
            Self::Namespace => namespace(machine, args),
            Self::Raise => {
                let words = print::display(machine, &args.one()?)?;
                machine.budget.memory(words.len())?;
                Err(Error::new(ErrorKind::Raised, words.read().to_owned()))
            }
            Self::StrftimeNow => {
                let format = print::display(machine, &args.one()?)?;
                if format.len() > MAX_FORMAT {
                    return Err(Error::invalid("strftime_now: the format is too long"));
                }
                let now = clock::strftime(&format.read(), SystemTime::now());
                Value::string(now, &machine.budget)
            }
        }
    }
}

fn range<'r>(machine: &Machine<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let number = |value: Value<'r>| {
        value
            .as_i64()
            .ok_or_else(|| Error::invalid(format!("cannot convert {} to isize", value.kind())))
    };
    let mut args = args.reader();
    let first = number(args.required()?)?;
    let upper = args.optional().map(number).transpose()?;
    let step = args.optional().map(number).transpose()?.unwrap_or(1);
    args.finish()?;
    let (start, end) = upper.map_or((0, first), |upper| (first, upper));
    let distance = match step {
        0 => return Err(Error::invalid("cannot create range with step of 0")),
        1.. => i128::from(end) - i128::from(start),
        _ => i128::from(start) - i128::from(end),
    };
    let len = distance.max(0).unsigned_abs().div_ceil(u128::from(step.unsigned_abs()));
    let len = usize::try_from(len).ok().filter(|len| *len <= MAX_RANGE);
    let len = len.ok_or_else(|| Error::invalid("range has too many elements"))?;
    let numbers = (0..len).map(|i| Value::int(i128::from(start) + i as i128 * i128::from(step)));
    Value::lazy(value::collect(numbers, len, &machine.budget)?, &machine.budget)
}

fn dict<'r>(machine: &Machine<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args;
    let named = args.named.take();
    let mut args = args.reader();
    let first = args.optional();
    args.finish()?;
    let mut map = Map::with_room(0, &machine.budget)?;
    if let Some(first) = first {
        let entries = machine.as_map(&first)?.ok_or_else(|| Error::invalid(""))?;
        for (key, value) in entries.iter() {
            map.insert(key.clone(), value.clone(), &machine.budget)?;
        }
    }
    for (key, value) in named.iter().flat_map(Map::iter) {
        map.insert(key.clone(), value.clone(), &machine.budget)?;
    }
    Ok(Value::map(map))
}

fn namespace<'r>(machine: &mut Machine<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args.all()?.into_iter();
    let defaults = args.next().filter(|value| !value.is_missing());
    if args.next().is_some() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    machine.budget.memory(128)?;
    machine.namespaces.push(BTreeMap::new());
    let id = machine.namespaces.len() - 1;
    if let Some(defaults) = defaults {
        let fields = machine.as_map(&defaults)?.ok_or_else(|| {
            let kind = defaults.kind();
            Error::invalid(format!("expected object or keyword arguments, got {kind}"))
        })?;
        for (name, value) in fields.iter() {
            if let Some(name) = name.as_text() {
                machine.set_field(id, &name.read(), value.clone())?;
            }
        }
    }
    Ok(Value::Namespace(id))
}

/// An attribute of an attribute: `a.b.0`.
pub(crate) fn path<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    path: &str,
) -> Result<Value<'r>, Error> {
    let mut value = value.clone();
    for part in path.split('.') {
        machine.budget.step()?;
        if value.is_undefined() {
            return Err(ErrorKind::Undefined.into());
        }
        let found = match part.parse::<usize>() {
            Ok(index) => machine.item(&value, &Value::count(index))?,
            Err(_) => machine.attr(&value, part)?,
        };
        value = found.unwrap_or_default();
    }
    Ok(value)
}

/// As [`path`]; a missing link gives `default`. Bounds that were passed stay failures.
pub(crate) fn path_or<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    names: &str,
    default: &Value<'r>,
) -> Result<Value<'r>, Error> {
    match path(machine, value, names) {
        Ok(found) if found.is_undefined() => Ok(default.clone()),
        Ok(found) => Ok(found),
        Err(error) if matches!(error.kind(), ErrorKind::Spent(_)) => Err(error),
        Err(_) => Ok(default.clone()),
    }
}

/// A flag among named arguments.
pub(crate) fn flag_named<'r>(args: &mut args::ArgReader<'r>, name: &str) -> Result<bool, Error> {
    args.named_optional(name).map_or(Ok(false), |value| args::flag(&value))
}

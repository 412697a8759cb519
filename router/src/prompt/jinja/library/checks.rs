//! Tests: what follows `is`.

use super::args::{self, Args};
use super::filters;
use crate::prompt::jinja::error::{Error, ErrorKind};
use crate::prompt::jinja::ops;
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::tree::Comparison;
use crate::prompt::jinja::value::compare::{Pair, coerce};
use crate::prompt::jinja::value::{Value, ValueKind};

/// A test, as in `value is defined`.
pub(crate) type Check =
    for<'m, 'r> fn(&'m mut Machine<'r>, &Value<'r>, Args<'r>) -> Result<bool, Error>;

/// The test of that name.
pub(crate) fn by_name(name: &str) -> Option<Check> {
    Some(match name {
        "undefined" => |_, v, args| is(args, v.is_undefined()),
        "defined" => |_, v, args| is(args, !v.is_undefined()),
        "none" => |_, v, args| is(args, matches!(v, Value::None)),
        "boolean" => |_, v, args| is(args, v.kind() == ValueKind::Bool),
        "number" => |_, v, args| is(args, v.kind() == ValueKind::Number),
        "integer" | "int" => |_, v, args| is(args, matches!(v, Value::Int(_))),
        "float" => |_, v, args| is(args, matches!(v, Value::Float(_))),
        "string" => |_, v, args| is(args, v.kind() == ValueKind::String),
        "sequence" => |_, v, args| is(args, v.kind() == ValueKind::Seq),
        "mapping" => |_, v, args| is(args, v.kind() == ValueKind::Map),
        "iterable" => |machine, v, args| is(args, machine.iter(v)?.is_some()),
        "true" => |_, v, args| is(args, matches!(v, Value::Bool(true))),
        "false" => |_, v, args| is(args, matches!(v, Value::Bool(false))),
        "odd" => |_, v, args| is(args, v.as_int().is_some_and(|x| x % 2 != 0)),
        "even" => |_, v, args| is(args, v.as_int().is_some_and(|x| x % 2 == 0)),
        "lower" => |machine, v, args| letters(machine, v, args, char::is_lowercase),
        "upper" => |machine, v, args| letters(machine, v, args, char::is_uppercase),
        "divisibleby" => |_, v, args| {
            Ok(match coerce(v, &args.one()?, true) {
                Some(Pair::Ints(a, b)) => a.checked_rem(b) == Some(0),
                Some(Pair::Floats(a, b)) => a % b == 0.0,
                None => false,
            })
        },
        "startingwith" => |machine, v, args| affix(machine, v, args, |text, x| text.starts_with(x)),
        "endingwith" => |machine, v, args| affix(machine, v, args, |text, x| text.ends_with(x)),
        "eq" | "equalto" | "==" => |m, v, args| m.compare(Comparison::Eq, v, &args.one()?),
        "ne" | "!=" => |m, v, args| m.compare(Comparison::Ne, v, &args.one()?),
        "lt" | "lessthan" | "<" => |m, v, args| m.compare(Comparison::Lt, v, &args.one()?),
        "le" | "<=" => |m, v, args| m.compare(Comparison::Lte, v, &args.one()?),
        "gt" | "greaterthan" | ">" => |m, v, args| m.compare(Comparison::Gt, v, &args.one()?),
        "ge" | ">=" => |m, v, args| m.compare(Comparison::Gte, v, &args.one()?),
        "in" => |machine, v, args| match ops::contains(machine, &args.one()?, v) {
            Err(error) if !matches!(error.kind(), ErrorKind::Spent(_)) => Ok(false),
            found => found,
        },
        "sameas" => |machine, v, args| {
            let other = args.one()?;
            let whole = |v: &Value<'_>| matches!(v, Value::Int(_));
            let object = |v: &Value<'_>| v.kind() >= ValueKind::Seq;
            match (object(v), object(&other)) {
                (true, true) => Ok(machine.same(v, &other)),
                (false, false) if v.kind() == other.kind() && whole(v) == whole(&other) => {
                    machine.equal(v, &other)
                }
                _ => Ok(false),
            }
        },
        "filter" => |_, v, args| {
            let known = filters::by_name(&args::string(v)?.read()).is_some();
            is(args, known)
        },
        "test" => |_, v, args| {
            let known = by_name(&args::string(v)?.read()).is_some();
            is(args, known)
        },
        _ => return None,
    })
}

fn is(args: Args<'_>, answer: bool) -> Result<bool, Error> {
    args.none().map(|()| answer)
}

fn letters(
    machine: &Machine<'_>,
    value: &Value<'_>,
    args: Args<'_>,
    test: fn(char) -> bool,
) -> Result<bool, Error> {
    let text = args::string(value)?;
    machine.budget.chars(text.len())?;
    let all = text.read().chars().all(test);
    is(args, all)
}

fn affix<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    args: Args<'r>,
    test: fn(&str, &str) -> bool,
) -> Result<bool, Error> {
    let text = args::text(machine, value)?;
    let other = args::text(machine, &args.one()?)?;
    machine.budget.bytes(other.len())?;
    Ok(test(&text.read(), &other.read()))
}

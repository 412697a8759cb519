//! Python's methods of strings, lists and maps, as far as `minijinja_contrib::pycompat` has them.

use std::collections::HashSet;

use super::args::{self, Args};
use super::filters;
use crate::prompt::jinja::error::{Error, ErrorKind};
use crate::prompt::jinja::ops;
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::value::print;
use crate::prompt::jinja::value::text::{Text, Writer};
use crate::prompt::jinja::value::{self, Value, ValueKind};

/// The value of `base.name(args)`, where `base` has such a method.
pub(crate) fn call<'r>(
    machine: &mut Machine<'r>,
    base: &Value<'r>,
    name: &str,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    match (base, name) {
        (Value::Text(text), _) => {
            if let Some(method) = of_text(name) {
                return method(machine, text, args);
            }
        }
        (Value::Loop(id), "changed" | "cycle") => return of_loop(machine, *id, name, args),
        (Value::List(list), "count") => {
            let wanted = args.one()?;
            let mut found = 0_usize;
            for item in list.read().iter() {
                found += usize::from(machine.equal(item, &wanted)?);
            }
            return Ok(Value::count(found));
        }
        (_, "keys" | "values" | "items" | "get") if base.kind() == ValueKind::Map => {
            return of_map(machine, base, name, args);
        }
        _ => {}
    }
    // Something that was stored under that name.
    match machine.attr(base, name)? {
        Some(stored) => machine.call_value(&stored, args),
        None => {
            let why = format!("{} has no method named {name}", base.kind());
            Err(Error::new(ErrorKind::UnknownMethod, why))
        }
    }
}

fn of_loop<'r>(
    machine: &mut Machine<'r>,
    id: usize,
    name: &str,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let args = args.all()?;
    if name == "cycle" {
        let index = machine.loops[id].index.unwrap_or_default();
        return match args.len() {
            0 => Ok(Value::Undefined),
            len => Ok(args[index % len].clone()),
        };
    }
    let same = match &machine.loops[id].changed {
        Some(before) if before.len() == args.len() => {
            let mut same = true;
            for (a, b) in before.iter().zip(&args) {
                same = same && machine.equal(a, b)?;
            }
            same
        }
        _ => false,
    };
    if !same {
        machine.loops[id].changed = Some(args);
    }
    Ok(Value::Bool(!same))
}

fn of_map<'r>(
    machine: &Machine<'r>,
    base: &Value<'r>,
    name: &str,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    if name == "get" {
        let mut args = args.reader();
        let key = args.required()?;
        let default = args.optional();
        args.finish()?;
        return Ok(machine.item(base, &key)?.or(default).unwrap_or(Value::None));
    }
    args.none()?;
    let map = machine.as_map(base)?.unwrap_or_default();
    match name {
        "items" => filters::pairs(machine, &map),
        name => {
            let values = map.iter().map(|(key, value)| if name == "keys" { key } else { value });
            let values = value::collect(values.cloned(), map.len(), &machine.budget)?;
            Value::lazy(values, &machine.budget)
        }
    }
}

type Method = for<'m, 'r> fn(&'m Machine<'r>, &Text<'r>, Args<'r>) -> Result<Value<'r>, Error>;

fn of_text(name: &str) -> Option<Method> {
    Some(match name {
        "upper" => |m, text, args| args.none().and_then(|()| filters::upper_text(m, text)),
        "lower" => |m, text, args| args.none().and_then(|()| filters::lower_text(m, text)),
        "title" => |m, text, args| args.none().and_then(|()| filters::title_text(m, text)),
        "capitalize" => |m, text, args| args.none().and_then(|()| filters::capital_text(m, text)),
        "islower" => |m, text, args| all(m, text, args, char::is_lowercase),
        "isupper" => |m, text, args| all(m, text, args, char::is_uppercase),
        "isspace" => |m, text, args| all(m, text, args, char::is_whitespace),
        "isdigit" | "isnumeric" => |m, text, args| all(m, text, args, char::is_numeric),
        "isalnum" => |m, text, args| all(m, text, args, char::is_alphanumeric),
        "isalpha" => |m, text, args| all(m, text, args, char::is_alphabetic),
        "isascii" => |m, text, args| all(m, text, args, |c| c.is_ascii()),
        "strip" => |m, text, args| strip(m, text, args, true, true),
        "lstrip" => |m, text, args| strip(m, text, args, true, false),
        "rstrip" => |m, text, args| strip(m, text, args, false, true),
        "replace" => replace,
        "split" => split,
        "splitlines" => split_lines,
        "count" => |m, text, args| {
            let what = args.one()?;
            let what = args::string(&what)?;
            ops::search(m, text.len() + what.len())?;
            let found = match what.is_empty() {
                true => text.read().chars().count() + 1, // as Python; minijinja would count for ever
                false => text.read().matches(&*what.read()).count(),
            };
            m.budget.items(found)?;
            Ok(Value::count(found))
        },
        "find" => |m, text, args| find(m, text, args, |text, what| text.find(what)),
        "rfind" => |m, text, args| find(m, text, args, |text, what| text.rfind(what)),
        "startswith" => |m, text, args| affix(m, text, args, "startswith", |t, x| t.starts_with(x)),
        "endswith" => |m, text, args| affix(m, text, args, "endswith", |t, x| t.ends_with(x)),
        "join" => |m, text, args| {
            let values = args.one()?;
            let mut items = m.iterate(&values)?;
            let mut out = Writer::new(&m.budget);
            let mut first = true;
            while let Some(item) = items.next() {
                if !std::mem::take(&mut first) {
                    out.push(&text.read())?;
                }
                print::write_display(m, &item, &mut out)?;
            }
            Ok(Value::Text(out.finish()?))
        },
        _ => return None,
    })
}

fn all<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    args: Args<'r>,
    test: fn(char) -> bool,
) -> Result<Value<'r>, Error> {
    args.none()?;
    machine.budget.chars(text.len())?;
    Ok(Value::Bool(text.read().chars().all(test)))
}

fn strip<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    args: Args<'r>,
    left: bool,
    right: bool,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let chars = args.optional();
    args.finish()?;
    let chars = chars.as_ref().map(args::string).transpose()?;
    trim(machine, text, chars, left, right)
}

/// Without the characters of `chars`, or spaces, at the ends that are named.
pub(crate) fn trim<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    chars: Option<&Text<'r>>,
    left: bool,
    right: bool,
) -> Result<Value<'r>, Error> {
    let read = text.read();
    let mut rest: &str = &read;
    if let Some(chars) = chars {
        machine.budget.chars(chars.len())?;
        machine.budget.room(chars.len(), 16)?;
        let set: HashSet<char> = chars.read().chars().collect();
        let inside = |c: char| set.contains(&c);
        rest = if left { rest.trim_start_matches(inside) } else { rest };
        rest = if right { rest.trim_end_matches(inside) } else { rest };
        machine.budget.work(20 * (text.len() - rest.len() + 2) as u64)?;
    } else {
        rest = if left { rest.trim_start() } else { rest };
        rest = if right { rest.trim_end() } else { rest };
        machine.budget.chars(text.len() - rest.len() + 1)?;
    }
    Ok(Value::Text(text.part_of(&read, rest)))
}

fn replace<'r>(machine: &Machine<'r>, text: &Text<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let (old, new) = (args.required()?, args.required()?);
    let count = args.optional().map(|value| args::signed(&value)).transpose()?;
    args.finish()?;
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    replaced(machine, text, args::string(&old)?, args::string(&new)?, count)
}

/// With the first `count` of `old` as `new`.
pub(crate) fn replaced<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    old: &Text<'r>,
    new: &Text<'r>,
    count: usize,
) -> Result<Value<'r>, Error> {
    ops::search(machine, text.len() + old.len())?;
    let (read, old, new) = (text.read(), old.read(), new.read());
    if !old.is_empty() && !read.contains(&*old) {
        return Ok(Value::Text(text.clone()));
    }
    let mut out = Writer::with_room(read.len(), &machine.budget)?;
    let mut done = 0;
    for (at, found) in read.match_indices(&*old).take(count) {
        machine.budget.items(1)?;
        out.push(&read[done..at])?;
        out.push(&new)?;
        done = at + found.len();
    }
    out.push(&read[done..])?;
    Ok(Value::Text(out.finish()?))
}

pub(crate) fn split<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let separator = args.optional();
    let most = args.optional().map(|value| args::signed(&value)).transpose()?;
    args.finish()?;
    let separator = separator.as_ref().map(args::string).transpose()?;
    let most = most.and_then(|most| usize::try_from(most).ok());
    let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
    ops::search(machine, text.len())?;
    let read = text.read();
    let mut parts = Vec::new();
    let mut push = |part: &str| {
        value::push(&mut parts, Value::Text(text.part_of(&read, part)), &machine.budget)
    };
    match separator {
        Some(separator) => {
            let separator = separator.read();
            machine.budget.bytes(separator.len())?;
            read.splitn(most, &*separator).try_for_each(&mut push)?;
        }
        None => words(&read, most).try_for_each(&mut push)?,
    }
    Value::list(parts, &machine.budget)
}

/// At most `most` words; the last one is all that is left.
fn words(text: &str, most: usize) -> impl Iterator<Item = &str> {
    let mut rest = text.trim_start();
    let mut left = most;
    std::iter::from_fn(move || {
        if rest.is_empty() || left == 0 {
            return None;
        }
        left -= 1;
        let end = match left {
            0 => rest.len(),
            _ => rest.find(char::is_whitespace).unwrap_or(rest.len()),
        };
        let (word, after) = rest.split_at(end);
        rest = after.trim_start();
        Some(word)
    })
}

fn split_lines<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let keep = args.optional().map(|value| args::flag(&value)).transpose()?.unwrap_or(false);
    args.finish()?;
    lines(machine, text, keep)
}

/// The lines, with what ends them if `keep`.
pub(crate) fn lines<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    keep: bool,
) -> Result<Value<'r>, Error> {
    ops::search(machine, text.len())?;
    let read = text.read();
    let mut parts = Vec::new();
    let mut push = |part: &str| {
        value::push(&mut parts, Value::Text(text.part_of(&read, part)), &machine.budget)
    };
    match keep {
        true => read.split_inclusive('\n').try_for_each(&mut push)?,
        false => read.lines().try_for_each(&mut push)?,
    }
    Value::list(parts, &machine.budget)
}

fn find<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    args: Args<'r>,
    search: fn(&str, &str) -> Option<usize>,
) -> Result<Value<'r>, Error> {
    let what = args.one()?;
    let what = args::string(&what)?;
    ops::search(machine, text.len() + what.len())?;
    let at = search(&text.read(), &what.read());
    Ok(at.map_or(Value::int(-1), Value::count))
}

fn affix<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    args: Args<'r>,
    name: &str,
    test: fn(&str, &str) -> bool,
) -> Result<Value<'r>, Error> {
    let affix = args.one()?;
    let text = text.read();
    if let Some(affix) = affix.as_text() {
        machine.budget.bytes(affix.len())?;
        return Ok(Value::Bool(test(&text, &affix.read())));
    }
    let Some(list) = affix.as_list() else {
        let kind = affix.kind();
        let why = format!("{name} argument must be string or a tuple of strings, not {kind}");
        return Err(Error::invalid(why));
    };
    for affix in list.read().iter() {
        let Some(affix) = affix.as_text() else {
            let kind = affix.kind();
            let why = format!("tuple for {name} must contain only strings, not {kind}");
            return Err(Error::invalid(why));
        };
        machine.budget.items(1)?;
        machine.budget.bytes(affix.len())?;
        if test(&text, &affix.read()) {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

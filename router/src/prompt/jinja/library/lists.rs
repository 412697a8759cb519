//! Filters that take or make lists.

use std::cmp::Ordering;

use super::args::{self, Args};
use super::checks::{self, Check};
use super::filters::{self, Filter};
use super::functions::{path, path_or};
use super::sorting::{dictsort, groupby, sort, unique};
use crate::prompt::jinja::error::{Error, ErrorKind};
use crate::prompt::jinja::ops;
use crate::prompt::jinja::run::all;
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::tree::Op;
use crate::prompt::jinja::value::pieces::pieces;
use crate::prompt::jinja::value::print;
use crate::prompt::jinja::value::text::Writer;
use crate::prompt::jinja::value::{self, Value, ValueKind};

/// The filter of that name.
pub(crate) fn by_name(name: &str) -> Option<Filter> {
    Some(match name {
        "list" => |m, v, args| {
            args.none()?;
            Value::list(items_of(m, &v)?, &m.budget)
        },
        "first" => first,
        "last" => last,
        "reverse" => reverse,
        "join" => join,
        "min" => |m, v, args| extreme(m, &v, args, Ordering::Less),
        "max" => |m, v, args| extreme(m, &v, args, Ordering::Greater),
        "sum" => sum,
        "sort" => sort,
        "dictsort" => dictsort,
        "unique" => unique,
        "groupby" => groupby,
        "batch" => batch,
        "slice" => slice,
        "map" => map,
        "select" => |m, v, args| choose(m, &v, args, false, true),
        "reject" => |m, v, args| choose(m, &v, args, false, false),
        "selectattr" => |m, v, args| choose(m, &v, args, true, true),
        "rejectattr" => |m, v, args| choose(m, &v, args, true, false),
        _ => return None,
    })
}

/// All items of a value.
pub(crate) fn items_of<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
) -> Result<Vec<Value<'r>>, Error> {
    match machine.iter(value)? {
        Some(mut iter) => all(&mut iter, &machine.budget),
        None => Err(Error::invalid("cannot convert value to list")),
    }
}

fn first<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    args.none()?;
    match m.iter(&value)?.filter(|_| !value.is_missing()) {
        Some(mut iter) => Ok(iter.next().unwrap_or_default()),
        None => Err(Error::invalid("cannot get first item from value")),
    }
}

fn last<'r>(_: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    args.none()?;
    if let Some(list) = value.as_list() {
        return Ok(list.len().checked_sub(1).and_then(|i| list.get(i)).unwrap_or_default());
    }
    let Some(text) = value.as_text() else {
        return Err(Error::invalid("cannot get last item from value"));
    };
    let c = text.read().chars().next_back().map_or(0, char::len_utf8);
    match c {
        0 => Ok(Value::Undefined),
        c => Ok(Value::Text(text.part(text.len() - c, text.len()))),
    }
}

fn reverse<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    args.none()?;
    if value.is_missing() {
        return Ok(value);
    }
    if let Some(text) = value.as_text() {
        let mut out = Writer::with_room(text.len(), &m.budget)?;
        for piece in pieces(&text.read()).rev() {
            m.budget.chars(piece.len())?;
            piece.chars().rev().try_for_each(|c| out.push_char(c))?;
        }
        return Ok(Value::Text(out.finish()?));
    }
    let Some(mut iter) = m.iter(&value)? else {
        let kind = value.kind();
        return Err(Error::invalid(format!("cannot reverse values of type {kind}")));
    };
    let mut items = all(&mut iter, &m.budget)?;
    items.reverse();
    Value::lazy(items, &m.budget)
}

fn join<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let joiner = args.optional().map(|joiner| args::text(m, &joiner)).transpose()?;
    args.finish()?;
    let Some(mut iter) = m.iter(&value)? else {
        return Err(Error::invalid(format!("cannot join value of type {}", value.kind())));
    };
    let mut out = Writer::new(&m.budget);
    let mut begun = false;
    while let Some(item) = iter.next() {
        m.budget.items(1)?;
        if std::mem::replace(&mut begun, true)
            && let Some(joiner) = &joiner
        {
            out.push(&joiner.read())?;
        }
        print::write_display(m, &item, &mut out)?;
    }
    Ok(Value::Text(out.finish()?))
}

fn extreme<'r>(
    machine: &Machine<'r>,
    value: &Value<'r>,
    args: Args<'r>,
    wanted: Ordering,
) -> Result<Value<'r>, Error> {
    args.none()?;
    let mut best: Option<Value<'r>> = None;
    let Some(mut iter) = machine.iter(value)? else {
        return Err(Error::invalid("cannot convert value to list"));
    };
    while let Some(item) = iter.next() {
        let better = match &best {
            None => true,
            // As Rust's iterators: of equal ones, the first least and the last greatest.
            Some(best) => match machine.order(&item, best)? {
                Ordering::Equal => wanted == Ordering::Greater,
                order => order == wanted,
            },
        };
        if better {
            best = Some(item);
        }
    }
    Ok(best.unwrap_or_default())
}

fn sum<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    args.none()?;
    let mut iter = m.iterate(&value)?;
    let mut sum = Value::int(0);
    while let Some(item) = iter.next() {
        m.budget.items(1)?;
        match item.kind() {
            ValueKind::Undefined => {}
            ValueKind::Number => sum = ops::calculate(m, Op::Add, &sum, &item)?,
            kind => return Err(Error::invalid(format!("can only sum numbers, got {kind}"))),
        }
    }
    Ok(sum)
}

/// The count that `batch` and `slice` are given, and what they fill up with.
fn parts<'r>(args: Args<'r>) -> Result<(usize, Option<Value<'r>>), Error> {
    let mut args = args.reader();
    let count = args::count(&args.required()?)?;
    let filler = args.optional();
    args.finish()?;
    match count {
        0 => Err(Error::invalid("count cannot be 0")),
        count => Ok((count, filler)),
    }
}

fn batch<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let (count, filler) = parts(args)?;
    let mut iter = m.iterate(&value)?;
    let items = all(&mut iter, &m.budget)?;
    let mut batches = Vec::new();
    for chunk in items.chunks(count) {
        let fill =
            filler.iter().flat_map(|filler| std::iter::repeat_n(filler, count - chunk.len()));
        let room = if filler.is_some() { count } else { chunk.len() };
        let batch = value::collect(chunk.iter().chain(fill).cloned(), room, &m.budget)?;
        value::push(&mut batches, Value::list(batch, &m.budget)?, &m.budget)?;
    }
    Value::list(batches, &m.budget)
}

fn slice<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let (count, filler) = parts(args)?;
    let mut iter = m.iterate(&value)?;
    let items = all(&mut iter, &m.budget)?;
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut rest = &items[..];
    let mut slices = Vec::new();
    for i in 0..count {
        let (taken, after) = rest.split_at(each + usize::from(i < longer));
        rest = after;
        let fill = filler.iter().filter(|_| i >= longer);
        let slice = value::collect(taken.iter().chain(fill).cloned(), each + 1, &m.budget)?;
        value::push(&mut slices, Value::list(slice, &m.budget)?, &m.budget)?;
    }
    Value::list(slices, &m.budget)
}

fn map<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let mut mapped = Vec::new();
    if let Some(attribute) = args.named_optional("attribute") {
        let default = args.named("default").unwrap_or_default();
        args.finish()?;
        let mut iter = m.iterate(&value)?;
        while let Some(item) = iter.next() {
            let found = match attribute.as_text() {
                Some(names) if default.is_undefined() => path(m, &item, &names.read())?,
                Some(names) => path_or(m, &item, &names.read(), &default)?,
                None if item.is_undefined() => return Err(ErrorKind::Undefined.into()),
                None => match m.item(&item, &attribute)? {
                    Some(found) => found,
                    None => default.clone(),
                },
            };
            value::push(&mut mapped, found, &m.budget)?;
        }
        return Value::list(mapped, &m.budget);
    }
    let name = args.next().ok_or_else(|| Error::invalid("filter name is required"))?;
    let Some(name) = name.as_text() else {
        return Err(Error::invalid("filter name must be a string"));
    };
    let filter = filters::by_name(&name.read()).ok_or(ErrorKind::UnknownFilter)?;
    let rest = args.rest();
    args.finish()?;
    let mut iter = m.iterate(&value)?;
    while let Some(item) = iter.next() {
        m.budget.down()?;
        let rest = value::collect(rest.iter().cloned(), rest.len(), &m.budget)?;
        let found = filter(m, item, Args { positional: rest, named: None })?;
        m.budget.up();
        value::push(&mut mapped, found, &m.budget)?;
    }
    Value::list(mapped, &m.budget)
}

fn choose<'r>(
    m: &mut Machine<'r>,
    value: &Value<'r>,
    args: Args<'r>,
    by_attribute: bool,
    wanted: bool,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let attribute = if by_attribute { Some(args::text(m, &args.required()?)?) } else { None };
    let test: Option<Check> = match args.optional() {
        Some(name) => {
            let name = args::text(m, &name)?;
            Some(checks::by_name(&name.read()).ok_or(ErrorKind::UnknownTest)?)
        }
        None => None,
    };
    let rest = args.rest();
    args.finish()?;
    let mut iter = m.iterate(value)?;
    let mut chosen = Vec::new();
    while let Some(item) = iter.next() {
        let tested = match &attribute {
            Some(names) => path(m, &item, &names.read())?,
            None => item.clone(),
        };
        m.budget.down()?;
        let passes = match test {
            Some(test) => {
                let rest = value::collect(rest.iter().cloned(), rest.len(), &m.budget)?;
                test(m, &tested, Args { positional: rest, named: None })?
            }
            None => m.truth(&tested),
        };
        m.budget.up();
        if passes == wanted {
            value::push(&mut chosen, item, &m.budget)?;
        }
    }
    Value::list(chosen, &m.budget)
}

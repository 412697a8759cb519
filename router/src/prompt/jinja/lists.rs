//! Filters that take or make lists.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::RandomState;

use super::args::{self, Args};
use super::checks::{self, Check};
use super::error::{Error, Kind};
use super::filters::{self, Filter};
use super::functions::{flag_named, path, path_or};
use super::ops;
use super::print;
use super::run::all;
use super::scope::Machine;
use super::text::Writer;
use super::tree::Op;
use super::value::{self, Value, ValueKind, hash_of};

/// The filter of that name.
pub(super) fn by_name(name: &str) -> Option<Filter> {
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
fn items_of<'r>(machine: &Machine<'r>, value: &Value<'r>) -> Result<Vec<Value<'r>>, Error> {
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
        m.budget.chars(text.len())?;
        let reversed = || text.read().chars().rev().collect();
        return Value::string_of(2 * text.len(), reversed, &m.budget);
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

impl<'r> Machine<'r> {
    /// A stable merge sort, whose comparisons may fail and need not be consistent.
    pub(super) fn sort<T: Clone>(
        &self,
        items: &mut [T],
        compare: impl Fn(&Self, &T, &T) -> Result<Ordering, Error>,
    ) -> Result<(), Error> {
        self.budget.room(items.len(), size_of::<T>())?;
        let mut merged: Vec<T> = Vec::with_capacity(items.len());
        let mut width = 1;
        while width < items.len() {
            self.budget.items(items.len())?;
            merged.clear();
            for run in items.chunks(2 * width) {
                let (left, right) = run.split_at(width.min(run.len()));
                let (mut i, mut j) = (0, 0);
                while i < left.len() && j < right.len() {
                    if compare(self, &left[i], &right[j])?.is_le() {
                        merged.push(left[i].clone());
                        i += 1;
                    } else {
                        merged.push(right[j].clone());
                        j += 1;
                    }
                }
                merged.extend_from_slice(&left[i..]);
                merged.extend_from_slice(&right[j..]);
            }
            items.clone_from_slice(&merged);
            width *= 2;
        }
        Ok(())
    }

    /// How filters compare: without regard to ASCII case, unless told otherwise.
    fn by_case(&self, a: &Value<'r>, b: &Value<'r>, exact: bool) -> Result<Ordering, Error> {
        match (a.as_text(), b.as_text()) {
            (Some(a), Some(b)) if !exact => {
                self.budget.chars(a.len().min(b.len()))?;
                let (a, b) = (a.read(), b.read());
                let lower = |byte: u8| byte.to_ascii_lowercase();
                Ok(a.bytes().map(lower).cmp(b.bytes().map(lower)))
            }
            _ => self.order(a, b),
        }
    }
}

/// Sorts values by keys that were looked up once.
fn sort_by_keys<'r>(
    m: &Machine<'r>,
    items: Vec<(Vec<Value<'r>>, Value<'r>)>,
    exact: bool,
    reverse: bool,
) -> Result<Vec<(Vec<Value<'r>>, Value<'r>)>, Error> {
    let mut items = items;
    m.sort(&mut items, |m, (a, _), (b, _)| {
        let mut order = Ordering::Equal;
        for (a, b) in a.iter().zip(b) {
            // Several keys are compared as lists are: exactly.
            order = order.then(m.by_case(a, b, exact)?);
        }
        Ok(if reverse { order.reverse() } else { order })
    })?;
    Ok(items)
}

/// The values without their keys.
fn values<'r>(
    m: &Machine<'r>,
    sorted: Vec<(Vec<Value<'r>>, Value<'r>)>,
) -> Result<Value<'r>, Error> {
    let room = sorted.len();
    let items = sorted.into_iter().map(|(_, item)| item);
    Value::list(value::collect(items, room, &m.budget)?, &m.budget)
}

fn sort<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let items = items_of(m, &value)?;
    let mut args = args.reader();
    let exact = flag_named(&mut args, "case_sensitive")?;
    let reverse = flag_named(&mut args, "reverse")?;
    let attribute = args.named_optional("attribute");
    args.finish()?;
    let mut names = Vec::new();
    if let Some(attribute) = &attribute {
        let attribute = args::string(attribute)?.read();
        m.budget.room(attribute.len(), 25)?;
        names = attribute.split(',').map(|name| name.trim().to_owned()).collect();
    }
    let exact = exact || names.len() > 1;
    let mut keyed = Vec::new();
    for item in items {
        m.budget.memory(64 + names.len().max(1) * 32)?;
        let mut keys = Vec::new();
        for name in &names {
            keys.push(path_or(m, &item, name, &Value::Undefined)?);
        }
        if names.is_empty() {
            keys.push(item.clone());
        }
        keyed.push((keys, item));
    }
    let sorted = sort_by_keys(m, keyed, exact, reverse)?;
    values(m, sorted)
}

fn dictsort<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let Some(map) = m.as_map(&value)? else {
        return Err(Error::invalid("cannot convert value into pair list"));
    };
    let mut args = args.reader();
    let by = args.named_optional("by");
    let by_value = by.as_ref().and_then(Value::as_text).is_some_and(|by| *by.read() == *"value");
    let exact = flag_named(&mut args, "case_sensitive")?;
    let reverse = flag_named(&mut args, "reverse")?;
    args.finish()?;
    let mut keyed = Vec::new();
    for (key, value) in map.iter() {
        m.budget.memory(128)?;
        let pair = value::collect([key.clone(), value.clone()].into_iter(), 2, &m.budget)?;
        let sort_key = if by_value { value.clone() } else { key.clone() };
        keyed.push((vec![sort_key], Value::list(pair, &m.budget)?));
    }
    let sorted = sort_by_keys(m, keyed, exact, reverse)?;
    values(m, sorted)
}

fn unique<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let attribute = args.named_optional("attribute");
    let exact = flag_named(&mut args, "case_sensitive")?;
    args.finish()?;
    let mut iter = m.iterate(&value)?;
    let state = RandomState::new();
    let mut seen: HashMap<u64, Vec<Value<'r>>> = HashMap::new();
    let mut kept = Vec::new();
    while let Some(item) = iter.next() {
        let mut key = match &attribute {
            Some(name) => path_or(m, &item, &args::string(name)?.read(), &Value::Undefined)?,
            None => item.clone(),
        };
        if let (false, Some(text)) = (exact, key.as_text()) {
            key = filters::lower_text(m, text)?;
        }
        let bytes = key.as_text().map_or(0, |text| text.len());
        m.budget.bytes(bytes)?;
        m.budget.memory(160)?;
        let alike = seen.entry(hash_of(&key, &state)).or_default();
        let mut known = false;
        for other in alike.iter() {
            known = known || m.order(other, &key)?.is_eq();
        }
        if !known {
            value::push(alike, key, &m.budget)?;
            value::push(&mut kept, item, &m.budget)?;
        }
    }
    Value::list(kept, &m.budget)
}

/// Pairs of a key and the items that have it. Unlike minijinja's, a pair has no `grouper` and `list`.
fn groupby<'r>(m: &mut Machine<'r>, value: Value<'r>, args: Args<'r>) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let name = args.optional_or_named("attribute").ok_or(Kind::MissingArgument)?;
    let default = args.named_optional("default").unwrap_or_default();
    let exact = flag_named(&mut args, "case_sensitive")?;
    args.finish()?;
    let mut keyed = Vec::new();
    let mut iter = m.iterate(&value)?;
    while let Some(item) = iter.next() {
        m.budget.memory(128)?;
        let key = path_or(m, &item, &args::string(&name)?.read(), &default)?;
        keyed.push((vec![key], item));
    }
    let mut groups = Vec::new();
    let mut group: Option<(Value<'r>, Vec<Value<'r>>)> = None;
    let close = |groups: &mut Vec<Value<'r>>, group: Option<(Value<'r>, Vec<Value<'r>>)>| {
        let Some((key, items)) = group else { return Ok(()) };
        let items = Value::lazy(items, &m.budget)?;
        let pair = value::collect([key, items].into_iter(), 2, &m.budget)?;
        value::push(groups, Value::list(pair, &m.budget)?, &m.budget)
    };
    for (keys, item) in sort_by_keys(m, keyed, exact, false)? {
        let key = keys.into_iter().next().unwrap_or_default();
        match &mut group {
            Some((last, items)) if m.by_case(last, &key, exact)?.is_eq() => {
                *last = key;
                value::push(items, item, &m.budget)?;
            }
            _ => {
                close(&mut groups, group.take())?;
                group = Some((key, vec![item]));
            }
        }
    }
    close(&mut groups, group)?;
    Value::list(groups, &m.budget)
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
        let fill = filler.iter().flat_map(|filler| std::iter::repeat_n(filler, count - chunk.len()));
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
                None if item.is_undefined() => return Err(Kind::Undefined.into()),
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
    let filter = filters::by_name(&name.read()).ok_or(Kind::UnknownFilter)?;
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
            Some(checks::by_name(&name.read()).ok_or(Kind::UnknownTest)?)
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

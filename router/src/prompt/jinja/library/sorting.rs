//! Sorting, and the filters that sort or group.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::RandomState;

use super::args::{self, Args};
use super::filters;
use super::functions::{flag_named, path_or};
use super::lists::items_of;
use crate::prompt::jinja::error::{Error, ErrorKind};
use crate::prompt::jinja::scope::Machine;
use crate::prompt::jinja::value::text::Text;
use crate::prompt::jinja::value::{self, Value, hash_of};

impl<'r> Machine<'r> {
    /// A stable merge sort, whose comparisons may fail and need not be consistent.
    ///
    /// It sorts the numbers below `count` by what they stand for.
    pub(crate) fn sorted(
        &self,
        count: usize,
        compare: impl Fn(usize, usize) -> Result<Ordering, Error>,
    ) -> Result<Vec<usize>, Error> {
        self.budget.room(count, 2 * size_of::<usize>())?;
        let mut items: Vec<usize> = (0..count).collect();
        let mut merged = Vec::with_capacity(count);
        let mut width = 1;
        while width < items.len() {
            self.budget.items(items.len())?;
            merged.clear();
            for run in items.chunks(2 * width) {
                let (left, right) = run.split_at(width.min(run.len()));
                let (mut i, mut j) = (0, 0);
                while i < left.len() && j < right.len() {
                    if compare(left[i], right[j])?.is_le() {
                        merged.push(left[i]);
                        i += 1;
                    } else {
                        merged.push(right[j]);
                        j += 1;
                    }
                }
                merged.extend_from_slice(&left[i..]);
                merged.extend_from_slice(&right[j..]);
            }
            std::mem::swap(&mut items, &mut merged);
            width *= 2;
        }
        Ok(items)
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

/// What a value with its keys takes in a list that doubles.
const KEYED_BYTES: usize = 256;

/// Sorts values by keys that were looked up once.
fn sort_by_keys<'r>(
    m: &Machine<'r>,
    items: Vec<(Vec<Value<'r>>, Value<'r>)>,
    exact: bool,
    reverse: bool,
) -> Result<Vec<(Vec<Value<'r>>, Value<'r>)>, Error> {
    let places = m.sorted(items.len(), |a, b| {
        let mut order = Ordering::Equal;
        for (a, b) in items[a].0.iter().zip(&items[b].0) {
            // Several keys are compared as lists are: exactly.
            order = order.then(m.by_case(a, b, exact)?);
        }
        Ok(if reverse { order.reverse() } else { order })
    })?;
    m.budget.room(items.len(), size_of::<(Vec<Value<'_>>, Value<'_>)>())?;
    let mut items = items;
    Ok(places.into_iter().map(|place| std::mem::take(&mut items[place])).collect())
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

pub(crate) fn sort<'r>(
    m: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
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
        m.budget.memory(KEYED_BYTES + names.len() * 48)?;
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

pub(crate) fn dictsort<'r>(
    m: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
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
        m.budget.memory(KEYED_BYTES)?;
        let pair = value::collect([key.clone(), value.clone()].into_iter(), 2, &m.budget)?;
        let sort_key = if by_value { value.clone() } else { key.clone() };
        keyed.push((vec![sort_key], Value::list(pair, &m.budget)?));
    }
    let sorted = sort_by_keys(m, keyed, exact, reverse)?;
    values(m, sorted)
}

pub(crate) fn unique<'r>(
    m: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
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
        let bytes = key.as_text().map_or(0, Text::len);
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
pub(crate) fn groupby<'r>(
    m: &mut Machine<'r>,
    value: Value<'r>,
    args: Args<'r>,
) -> Result<Value<'r>, Error> {
    let mut args = args.reader();
    let name = args.optional_or_named("attribute").ok_or(ErrorKind::MissingArgument)?;
    let default = args.named_optional("default").unwrap_or_default();
    let exact = flag_named(&mut args, "case_sensitive")?;
    args.finish()?;
    let mut keyed = Vec::new();
    let mut iter = m.iterate(&value)?;
    while let Some(item) = iter.next() {
        m.budget.memory(KEYED_BYTES)?;
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

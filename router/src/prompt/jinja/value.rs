//! Values of a template. Nothing is lazy, nothing is nested deeper than [`NESTED`], and nothing can hold itself.

use std::cell::{Cell, Ref, RefCell};
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::rc::Rc;

use indexmap::IndexMap;
use serde_json::Value as Json;

use super::budget::{Bound, Budget, NESTED};
use super::compare;
use super::error::{Error, Kind};
use super::functions::Function;
use super::text::Text;
use super::tree::MacroDecl;

/// A value. What can change or refer to itself (namespaces, loops, what macros captured) is a number that stands for a
/// place in the [`Machine`](super::Machine), so that dropping values ends.
#[derive(Debug, Clone, Default)]
pub(crate) enum Value<'r> {
    #[default]
    Undefined,
    None,
    Bool(bool),
    Int(Wide),
    Float(f64),
    Text(Text<'r>),
    List(List<'r>),
    /// A list that minijinja makes lazily: the same, but no `sequence`, and printed in Rust's notation.
    Lazy(List<'r>),
    Map(Rc<Map<'r>>),
    Namespace(usize),
    Loop(usize),
    /// A macro, and where what it captured is kept.
    Macro(&'r MacroDecl, Option<usize>),
    Function(Function),
}

/// An integer of 128 bits that needs no alignment, so that a value is three words.
#[derive(Debug, Clone, Copy)]
#[repr(packed)]
pub(crate) struct Wide(i128);

impl Wide {
    pub(crate) fn get(self) -> i128 {
        self.0
    }
}

/// What a value is to error messages, and the order of values of different kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ValueKind {
    Undefined,
    None,
    Bool,
    Number,
    String,
    Seq,
    Map,
    Iterable,
    Plain,
}

impl std::fmt::Display for ValueKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Undefined => "undefined",
            Self::None => "none",
            Self::Bool => "bool",
            Self::Number => "number",
            Self::String => "string",
            Self::Seq => "sequence",
            Self::Map => "map",
            Self::Iterable => "iterator",
            Self::Plain => "plain object",
        })
    }
}

/// A view of a list that only grows, as [`Text`] is one of a string.
#[derive(Debug, Clone)]
pub(crate) struct List<'r> {
    items: Rc<Items<'r>>,
    start: u32,
    end: u32,
}

#[derive(Debug)]
struct Items<'r> {
    values: RefCell<Vec<Value<'r>>>,
    depth: Cell<u16>,
}

/// What an item of a list and an entry of a map take, hash table included.
const ITEM_BYTES: usize = size_of::<Value<'_>>();
const ENTRY_BYTES: usize = 2 * ITEM_BYTES + 32;
/// What an empty list or map takes.
const HEAD_BYTES: usize = 96;

impl<'r> List<'r> {
    /// A list of values that were charged as they came.
    pub(crate) fn new(values: Vec<Value<'r>>, budget: &Budget) -> Result<Self, Error> {
        budget.memory(HEAD_BYTES)?;
        budget.items(values.len())?;
        let depth = above(values.iter().map(Value::depth).max().unwrap_or(0))?;
        let end = values.len() as u32;
        let items = Items { values: RefCell::new(values), depth: Cell::new(depth) };
        Ok(Self { items: Rc::new(items), start: 0, end })
    }

    pub(crate) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    pub(crate) fn get(&self, index: usize) -> Option<Value<'r>> {
        match index < self.len() {
            true => self.items.values.borrow().get(self.start as usize + index).cloned(),
            false => None,
        }
    }

    pub(crate) fn read(&self) -> Ref<'_, [Value<'r>]> {
        let (start, end) = (self.start as usize, self.end as usize);
        Ref::map(self.items.values.borrow(), |values| &values[start..end])
    }

    /// Items `start..end`, cut to what there is.
    pub(crate) fn part(&self, start: usize, end: usize) -> Self {
        let end = end.min(self.len());
        let start = start.min(end);
        let items = Rc::clone(&self.items);
        Self { items, start: self.start + start as u32, end: self.start + end as u32 }
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.items, &other.items)
            && (self.start, self.end) == (other.start, other.end)
    }

    /// This list and another one behind it.
    pub(crate) fn append(&self, more: &Self, budget: &Budget) -> Result<Self, Error> {
        budget.items(more.len())?;
        let more: Vec<Value<'r>> = collect(more.read().iter().cloned(), more.len(), budget)?;
        let depth = above(more.iter().map(Value::depth).max().unwrap_or(0))?;
        if let Ok(mut values) = self.items.values.try_borrow_mut()
            && values.len() == self.end as usize
        {
            let needed = values.len() + more.len();
            if needed > values.capacity() {
                let capacity = needed.max(values.capacity() * 2);
                budget.room(capacity, ITEM_BYTES)?;
                let extra = capacity - values.len();
                values.reserve_exact(extra);
            }
            values.extend(more);
            self.items.depth.set(self.items.depth.get().max(depth));
            let end = values.len() as u32;
            return Ok(Self { items: Rc::clone(&self.items), start: self.start, end });
        }
        budget.items(self.len())?;
        let mut all = collect(self.read().iter().cloned(), self.len() + more.len(), budget)?;
        all.extend(more);
        Self::new(all, budget)
    }
}

/// Collects values into a vector with room for `room`, charged.
pub(crate) fn collect<'r>(
    values: impl Iterator<Item = Value<'r>>,
    room: usize,
    budget: &Budget,
) -> Result<Vec<Value<'r>>, Error> {
    budget.room(room, ITEM_BYTES)?;
    budget.items(room)?;
    let mut all = Vec::with_capacity(room);
    all.extend(values);
    Ok(all)
}

/// Adds one value to a vector under construction, charged.
pub(crate) fn push<'r>(
    values: &mut Vec<Value<'r>>,
    value: Value<'r>,
    budget: &Budget,
) -> Result<(), Error> {
    budget.items(1)?;
    if values.len() == values.capacity() {
        let capacity = (values.capacity() * 2).max(4);
        budget.room(capacity, ITEM_BYTES)?;
        values.reserve_exact(capacity - values.len());
    }
    values.push(value);
    Ok(())
}

fn above(depth: u16) -> Result<u16, Error> {
    match depth < NESTED {
        true => Ok(depth + 1),
        false => Err(Kind::Spent(Bound::Nested).into()),
    }
}

/// A map in the order in which its keys came.
#[derive(Debug, Default, Clone)]
pub(crate) struct Map<'r> {
    entries: IndexMap<Key<'r>, Value<'r>, RandomState>,
    depth: u16,
}

/// A value that can be a key: no list and no map, as in Python.
#[derive(Debug, Clone)]
pub(crate) struct Key<'r>(Value<'r>);

impl<'r> Map<'r> {
    pub(crate) fn with_room(entries: usize, budget: &Budget) -> Result<Self, Error> {
        budget.memory(HEAD_BYTES + entries.saturating_mul(ENTRY_BYTES))?;
        Ok(Self { entries: IndexMap::with_capacity_and_hasher(entries, RandomState::new()), depth: 1 })
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn insert(
        &mut self,
        key: Value<'r>,
        value: Value<'r>,
        budget: &Budget,
    ) -> Result<(), Error> {
        let Some(key) = Key::new(key) else {
            return Err(Error::invalid("lists and maps cannot be keys of a map"));
        };
        budget.items(4)?;
        budget.bytes(key.len())?;
        if self.entries.len() == self.entries.capacity() {
            budget.room(self.entries.capacity().max(4) * 2, ENTRY_BYTES)?;
        }
        self.depth = self.depth.max(above(value.depth())?);
        self.entries.insert(key, value);
        Ok(())
    }

    pub(crate) fn get(&self, key: &Value<'r>, budget: &Budget) -> Result<Option<Value<'r>>, Error> {
        let Some(key) = Key::new(key.clone()) else { return Ok(None) };
        budget.bytes(key.len())?;
        Ok(self.entries.get(&key).cloned())
    }

    pub(crate) fn get_str(&self, name: &str) -> Option<&Value<'r>> {
        self.entries.get(&Name(name))
    }

    pub(crate) fn remove(&mut self, name: &str) -> Option<Value<'r>> {
        self.entries.shift_remove(&Name(name))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Value<'r>, &Value<'r>)> {
        self.entries.iter().map(|(key, value)| (&key.0, value))
    }

    pub(crate) fn entry(&self, index: usize) -> Option<(&Value<'r>, &Value<'r>)> {
        self.entries.get_index(index).map(|(key, value)| (&key.0, value))
    }
}

impl<'r> Key<'r> {
    fn new(value: Value<'r>) -> Option<Self> {
        matches!(
            value,
            Value::Undefined
                | Value::None
                | Value::Bool(_)
                | Value::Int(_)
                | Value::Float(_)
                | Value::Text(_)
        )
        .then_some(Self(value))
    }

    fn len(&self) -> usize {
        if let Value::Text(text) = &self.0 { text.len() } else { 0 }
    }
}

impl PartialEq for Key<'_> {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Value::Text(a), Value::Text(b)) => *a.read() == *b.read(),
            (a, b) => compare::scalars_equal(a, b),
        }
    }
}

impl Eq for Key<'_> {}

impl Hash for Key<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match &self.0 {
            Value::Text(text) => text.read().hash(state),
            Value::Bool(x) => x.hash(state),
            Value::Int(x) => match i64::try_from(x.get()) {
                Ok(x) => x.hash(state),
                Err(_) => (x.get() as f64).to_bits().hash(state),
            },
            Value::Float(x) if *x as i64 as f64 == *x => (*x as i64).hash(state),
            Value::Float(x) => x.to_bits().hash(state),
            _ => 0_u8.hash(state),
        }
    }
}

/// A key by its name.
struct Name<'a>(&'a str);

impl Hash for Name<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl indexmap::Equivalent<Key<'_>> for Name<'_> {
    fn equivalent(&self, key: &Key<'_>) -> bool {
        matches!(&key.0, Value::Text(text) if *text.read() == *self.0)
    }
}

/// The hash of a text key, for sets of seen values.
pub(crate) fn hash_of(value: &Value<'_>, state: &RandomState) -> u64 {
    match Key::new(value.clone()) {
        Some(key) => state.hash_one(key),
        None => 0,
    }
}

impl<'r> Value<'r> {
    pub(crate) fn int(x: impl Into<i128>) -> Self {
        Self::Int(Wide(x.into()))
    }

    pub(crate) fn count(x: usize) -> Self {
        Self::int(x as u64)
    }

    pub(crate) fn text(text: &'r str) -> Self {
        Self::Text(Text::Lent(text))
    }

    pub(crate) fn string(text: String, budget: &Budget) -> Result<Self, Error> {
        budget.memory(text.len())?;
        Ok(Self::Text(Text::built(text, budget)?))
    }

    /// A string of so many bytes, charged before it is made.
    pub(crate) fn string_of(
        bytes: usize,
        make: impl FnOnce() -> String,
        budget: &Budget,
    ) -> Result<Self, Error> {
        budget.memory(bytes)?;
        Ok(Self::Text(Text::built(make(), budget)?))
    }

    pub(crate) fn list(values: Vec<Self>, budget: &Budget) -> Result<Self, Error> {
        Ok(Self::List(List::new(values, budget)?))
    }

    pub(crate) fn lazy(values: Vec<Self>, budget: &Budget) -> Result<Self, Error> {
        Ok(Self::Lazy(List::new(values, budget)?))
    }

    pub(crate) fn map(map: Map<'r>) -> Self {
        Self::Map(Rc::new(map))
    }

    /// What a client sent; its strings stay where they are.
    pub(crate) fn from_json(json: &'r Json, budget: &Budget) -> Result<Self, Error> {
        Self::from_json_below(json, NESTED, budget)
    }

    /// A list of what a client sent.
    pub(crate) fn from_jsons(items: &'r [Json], budget: &Budget) -> Result<Self, Error> {
        Self::from_items(items, NESTED - 1, budget)
    }

    fn from_items(items: &'r [Json], below: u16, budget: &Budget) -> Result<Self, Error> {
        let mut values = collect(std::iter::empty(), items.len(), budget)?;
        for item in items {
            values.push(Self::from_json_below(item, below, budget)?);
        }
        Self::list(values, budget)
    }

    fn from_json_below(json: &'r Json, room: u16, budget: &Budget) -> Result<Self, Error> {
        let Some(below) = room.checked_sub(1) else {
            return Err(Kind::Spent(Bound::Nested).into());
        };
        budget.items(1)?;
        Ok(match json {
            Json::Null => Self::None,
            Json::Bool(x) => Self::Bool(*x),
            Json::String(text) => Self::text(text),
            Json::Number(x) => match (x.as_i64(), x.as_u64(), x.as_f64()) {
                (Some(x), _, _) => Self::int(x),
                (None, Some(x), _) => Self::int(x),
                (None, None, x) => Self::Float(x.unwrap_or(f64::NAN)),
            },
            Json::Array(items) => Self::from_items(items, below, budget)?,
            Json::Object(fields) => {
                let mut map = Map::with_room(fields.len(), budget)?;
                for (name, value) in fields {
                    let value = Self::from_json_below(value, below, budget)?;
                    map.insert(Self::text(name), value, budget)?;
                }
                Self::map(map)
            }
        })
    }

    fn depth(&self) -> u16 {
        match self {
            Self::List(list) | Self::Lazy(list) => list.items.depth.get(),
            Self::Map(map) => map.depth,
            Self::Undefined
            | Self::None
            | Self::Bool(_)
            | Self::Int(_)
            | Self::Float(_)
            | Self::Text(_)
            | Self::Namespace(_)
            | Self::Loop(_)
            | Self::Macro(..)
            | Self::Function(_) => 0,
        }
    }

    pub(crate) fn kind(&self) -> ValueKind {
        match self {
            Self::Undefined => ValueKind::Undefined,
            Self::None => ValueKind::None,
            Self::Bool(_) => ValueKind::Bool,
            Self::Int(_) | Self::Float(_) => ValueKind::Number,
            Self::Text(_) => ValueKind::String,
            Self::List(_) => ValueKind::Seq,
            Self::Lazy(_) => ValueKind::Iterable,
            Self::Map(_) | Self::Namespace(_) | Self::Loop(_) | Self::Macro(..) => ValueKind::Map,
            Self::Function(_) => ValueKind::Plain,
        }
    }

    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined)
    }

    /// Undefined or none.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Undefined | Self::None)
    }

    pub(crate) fn as_text(&self) -> Option<&Text<'r>> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub(crate) fn as_list(&self) -> Option<&List<'r>> {
        if let Self::List(list) | Self::Lazy(list) = self { Some(list) } else { None }
    }

    /// As minijinja converts to integers: booleans and whole floats count.
    pub(crate) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Bool(x) => Some(i128::from(*x)),
            Self::Int(x) => Some(x.get()),
            Self::Float(x) if *x as i64 as f64 == *x => Some(i128::from(*x as i64)),
            _ => None,
        }
    }

    pub(crate) fn as_i64(&self) -> Option<i64> {
        self.as_int().and_then(|x| x.try_into().ok())
    }

    pub(crate) fn as_usize(&self) -> Option<usize> {
        self.as_int().and_then(|x| x.try_into().ok())
    }
}

//! Maps with scalar keys, in the order in which the keys came.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};

use indexmap::{Equivalent, IndexMap};

use super::compare;
use super::{HEAD_BYTES, Value, above};
use crate::prompt::jinja::budget::Budget;
use crate::prompt::jinja::error::Error;

/// What an entry takes, its place in the hash table included.
const ENTRY_BYTES: usize = 2 * size_of::<Value<'_>>() + 32;

/// Entries among which looking at all names is faster than hashing one.
const FEW: usize = 8;

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
        Ok(Self {
            entries: IndexMap::with_capacity_and_hasher(entries, RandomState::new()),
            depth: 1,
        })
    }

    pub(crate) fn depth(&self) -> u16 {
        self.depth
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
        if let Value::Text(name) = &key.0 {
            return Ok(self.get_str(&name.read()).cloned());
        }
        Ok(self.entries.get(&key).cloned())
    }

    pub(crate) fn get_str(&self, name: &str) -> Option<&Value<'r>> {
        if self.entries.len() <= FEW {
            let mut entries = self.entries.iter();
            return entries.find(|(key, _)| Name(name).equivalent(key)).map(|(_, value)| value);
        }
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

impl Equivalent<Key<'_>> for Name<'_> {
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

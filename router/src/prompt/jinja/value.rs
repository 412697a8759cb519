//! Values of a template. Nothing is lazy, nothing is nested deeper than [`NESTED`], and nothing can hold itself.

pub(crate) mod compare;
mod list;
mod map;
pub(crate) mod pieces;
pub(crate) mod print;
pub(crate) mod python;
pub(crate) mod text;

use std::rc::Rc;

use serde_json::Value as Json;

use super::budget::{Bound, Budget, NESTED};
use super::error::{Error, ErrorKind};
use super::library::functions::Function;
use super::tree::MacroDecl;
use text::Text;

pub(crate) use list::{List, collect, push};
pub(crate) use map::{Map, hash_of};

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
#[repr(Rust, packed)]
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

/// What an empty list or map takes.
const HEAD_BYTES: usize = 96;

/// The depth of what holds something so deep.
fn above(depth: u16) -> Result<u16, Error> {
    match depth < NESTED {
        true => Ok(depth + 1),
        false => Err(ErrorKind::Spent(Bound::Nested).into()),
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
            return Err(ErrorKind::Spent(Bound::Nested).into());
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
            Self::List(list) | Self::Lazy(list) => list.depth(),
            Self::Map(map) => map.depth(),
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

//! JSON that can mean one thing only: UTF-8, bounded depth, finite numbers, whole characters, no key twice.
//!
//! Two parsers that keep different ones of two equal keys are how a request passes a check and is then served as
//! something else, so equal keys are an error wherever they stand, and the error says where.
//!
//! What is made of a body can be a hundred times as large as the body. So every value, key and list is charged to the
//! request's share before it is made. Token ids become integers without becoming values first (`token_ids`).

use std::cell::{Cell, RefCell};
use std::fmt::{self, Write as _};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::RouteError;
use crate::http::parse::fields::{bad, bad_body, clip};
use crate::http::parse::token_ids::{Ids, IdsField};
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare, Refused};

/// Lists and objects inside one another. What templates read is eight deep, and schemas of tools are seldom thirty;
/// printing, copying and dropping take stack for each level.
pub(in crate::http) const MAX_DEPTH: usize = 64;

/// A body as values, and the field of token ids apart from them.
#[derive(Debug)]
pub(in crate::http) struct Document {
    pub(in crate::http) value: Value,
    /// What stood at the top in the field that may hold token ids; `None` where there was none, or `null`.
    pub(in crate::http) ids: Option<Ids>,
}

/// Reads `body` as one JSON value, charging `memory` for all that is made of it. At the top of an object, the field `ids`
/// is read as token ids.
///
/// # Errors
/// `BadRequest` with line and column, or with the path of a key that is there twice or of what is too deep.
/// `BodyTooComplex` or `Overloaded` where memory for more was refused; what was charged so far stays charged.
pub(in crate::http) fn parse(
    body: &[u8],
    ids: Option<IdsField>,
    memory: &mut MemoryShare,
) -> Result<Document, RouteError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        bad_body(format!("the body is not UTF-8: byte {} is invalid", error.valid_up_to()))
    })?;
    if text.trim_ascii().is_empty() {
        return Err(bad_body("the body is empty; it must be a JSON object"));
    }
    let reading = JsonReading::new(memory, ids, Twice::IsAnError);
    let value = reading.value(text, PathStep::Root(""));
    let ids = reading.found.take();
    match value {
        Ok(value) => Ok(Document { value, ids }),
        Err(error) => Err(match reading.trouble.into_inner() {
            Some(Trouble::Twice(path)) => {
                let message =
                    format!("the key `{path}` is there twice; which one counts is undefined");
                bad(path, message)
            }
            Some(Trouble::Deep(path)) => {
                let message =
                    format!("the body is nested deeper than {MAX_DEPTH} levels at `{path}`");
                bad(path, message)
            }
            Some(Trouble::Refused(refused, path)) => refused.body(Some(path)),
            None => bad_body(format!("the body is not valid JSON: {error}")),
        }),
    }
}

/// Reads a text inside the body, at `path`, as a JSON object. `None` if it is none: whoever wrote it may have been a
/// model. Of two equal keys the last one counts, as for everybody who reads such texts.
///
/// # Errors
/// `BodyTooComplex` or `Overloaded` where memory was refused.
pub(in crate::http) fn parse_inner(
    text: &str,
    path: &str,
    memory: &mut MemoryShare,
) -> Result<Option<Map<String, Value>>, RouteError> {
    let before = memory.used();
    let reading = JsonReading::new(memory, None, Twice::LastCounts);
    match reading.value(text, PathStep::Root(path)) {
        Ok(Value::Object(object)) => Ok(Some(object)),
        other => {
            if let (Err(_), Some(Trouble::Refused(refused, path))) =
                (&other, reading.trouble.into_inner())
            {
                return Err(refused.body(Some(path)));
            }
            drop(other);
            memory.give_back(memory.used() - before);
            Ok(None)
        }
    }
}

/// What two equal keys in one object are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Twice {
    IsAnError,
    LastCounts,
}

/// Why reading was broken off, other than for broken JSON; with the path.
enum Trouble {
    Twice(String),
    Deep(String),
    Refused(Refused, String),
}

/// One document while it is read.
pub(in crate::http) struct JsonReading<'m> {
    memory: RefCell<&'m mut MemoryShare>,
    trouble: RefCell<Option<Trouble>>,
    ids: Option<IdsField>,
    found: RefCell<Option<Ids>>,
    twice: Twice,
    /// Charged for the buffer in which serde_json puts strings with escapes together, until all is read.
    escapes: Cell<usize>,
}

impl<'m> JsonReading<'m> {
    fn new(memory: &'m mut MemoryShare, ids: Option<IdsField>, twice: Twice) -> Self {
        Self {
            memory: RefCell::new(memory),
            trouble: RefCell::default(),
            ids,
            found: RefCell::default(),
            twice,
            escapes: Cell::default(),
        }
    }

    fn value(&self, text: &str, at: PathStep<'_>) -> serde_json::Result<Value> {
        let value = self.whole(text, at);
        self.memory.borrow_mut().give_back(self.escapes.replace(0));
        value
    }

    fn whole(&self, text: &str, at: PathStep<'_>) -> serde_json::Result<Value> {
        let mut reader = serde_json::Deserializer::from_str(text);
        let root = JsonPath { parent: None, step: at, depth: 0, reading: self };
        let value = root.deserialize(&mut reader)?;
        reader.end().map(|()| value)
    }
}

/// Where in the document the reader stands; a list that lives on the stack, so that the good case costs nothing.
#[derive(Clone, Copy)]
pub(in crate::http) struct JsonPath<'a, 'm> {
    parent: Option<&'a Self>,
    step: PathStep<'a>,
    /// Lists and objects around it.
    depth: usize,
    reading: &'a JsonReading<'m>,
}

#[derive(Clone, Copy)]
pub(in crate::http) enum PathStep<'a> {
    /// Of the body, or what stands for it in a text inside the body.
    Root(&'a str),
    Key(&'a str),
    Index(usize),
}

/// Longest path in an error, in bytes: 64 levels of keys could be longer than the rest of it.
const MAX_PATH: usize = 100;

impl<'m> JsonPath<'_, 'm> {
    pub(in crate::http) fn below<'a>(&'a self, step: PathStep<'a>) -> JsonPath<'a, 'm> {
        JsonPath { parent: Some(self), step, depth: self.depth, reading: self.reading }
    }

    /// This place, one level further in.
    pub(in crate::http) fn inside<E: serde::de::Error>(self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(self.breaks_off(Trouble::Deep(self.path())));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }

    /// Charges for an allocation that holds this much.
    pub(in crate::http) fn charge<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        let charged = self.reading.memory.borrow_mut().charge(bytes + ALLOCATION_BYTES);
        charged.map_err(|refused| self.refused(refused))
    }

    /// Makes room for one more item.
    pub(in crate::http) fn room<T, E: serde::de::Error>(
        &self,
        items: &mut Vec<T>,
    ) -> Result<(), E> {
        let grown = self.reading.memory.borrow_mut().room_for_one(items);
        grown.map_err(|refused| self.refused(refused))
    }

    /// Charges for the string, and for the buffer that it came in if that had to grow.
    pub(in crate::http) fn charge_str<E: serde::de::Error>(
        &self,
        text: &str,
        escaped: bool,
    ) -> Result<(), E> {
        let buffer = 2 * text.len(); // it doubles
        let more = buffer.saturating_sub(self.reading.escapes.get());
        if escaped && more > 0 {
            self.charge(more)?;
            self.reading.escapes.set(buffer + ALLOCATION_BYTES);
        }
        if text.is_empty() { Ok(()) } else { self.charge(text.len()) }
    }

    /// Charges for an object that grows to `entries`.
    fn charge_entry<E: serde::de::Error>(&self, entries: usize) -> Result<(), E> {
        let (old, new) = (object_bytes(entries - 1), object_bytes(entries));
        if new > old {
            self.charge(new)?; // while the entries move there may be both
            self.reading.memory.borrow_mut().give_back(old);
        }
        Ok(())
    }

    fn refused<E: serde::de::Error>(&self, refused: Refused) -> E {
        self.breaks_off(Trouble::Refused(refused, self.path()))
    }

    fn breaks_off<E: serde::de::Error>(&self, trouble: Trouble) -> E {
        *self.reading.trouble.borrow_mut() = Some(trouble);
        E::custom("broken off")
    }

    fn path(&self) -> String {
        let mut path = String::new();
        self.write_path(&mut path);
        if path.len() > MAX_PATH {
            let end = (0..=MAX_PATH).rev().find(|end| path.is_char_boundary(*end)).unwrap_or(0);
            path.truncate(end);
            path.push_str("...");
        }
        path
    }

    fn write_path(&self, path: &mut String) {
        if let Some(parent) = self.parent {
            parent.write_path(path);
        }
        match self.step {
            PathStep::Root(name) => path.push_str(name),
            PathStep::Key(key) => {
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(&clip(key));
            }
            PathStep::Index(index) => {
                write!(path, "[{index}]").expect("writing to a String cannot fail");
            }
        }
    }
}

/// What the lists of an object with so many entries take: serde_json's is a list of entries in order, and a table of
/// their numbers that doubles when it is seven eighths full (all of it but one, when small).
fn object_bytes(entries: usize) -> usize {
    const ENTRY: usize = size_of::<(usize, String, Value)>();
    const NUMBER: usize = size_of::<usize>() + 1; // with its byte of the hash
    const END: usize = 32; // of the table: a group of those bytes more, and alignment
    let slots = match entries {
        0 => return 0,
        1..=3 => 4,
        4..=7 => 8,
        8..=14 => 16,
        more => (more * 8 / 7).next_power_of_two(),
    };
    let room = if slots <= 8 { slots - 1 } else { slots / 8 * 7 };
    room * ENTRY + slots * NUMBER + END + 2 * ALLOCATION_BYTES
}

/// The key of an entry.
struct Key<'a, 'm>(JsonPath<'a, 'm>);

impl<'de> DeserializeSeed<'de> for Key<'_, '_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<String, D::Error> {
        reader.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key<'_, '_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<String, E> {
        self.0.charge_str(key, true)?;
        Ok(key.to_owned())
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, key: &'de str) -> Result<String, E> {
        self.0.charge_str(key, false)?;
        Ok(key.to_owned())
    }
}

impl<'de> DeserializeSeed<'de> for JsonPath<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonPath<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        self.charge_str(value, true)?;
        Ok(value.into())
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, value: &'de str) -> Result<Value, E> {
        self.charge_str(value, false)?;
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let list = self.inside()?;
        let mut out = Vec::new();
        while let Some(item) = items.next_element_seed(list.below(PathStep::Index(out.len())))? {
            list.room(&mut out)?;
            out.push(item);
        }
        Ok(Value::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let object = self.inside()?;
        let mut out = Map::new();
        let mut ids_seen = false;
        while let Some(key) = entries.next_key_seed(Key(object))? {
            let place = object.below(PathStep::Key(&key));
            let ids = self.reading.ids.filter(|ids| object.depth == 1 && ids.name == key);
            if out.contains_key(&key) || ids.is_some() && ids_seen {
                match self.reading.twice {
                    Twice::IsAnError => {
                        return Err(place.breaks_off(Trouble::Twice(place.path())));
                    }
                    Twice::LastCounts => {}
                }
            }
            if let Some(ids) = ids {
                ids_seen = true;
                *self.reading.found.borrow_mut() = entries.next_value_seed(ids.at(place))?;
                continue;
            }
            let value = entries.next_value_seed(place)?;
            object.charge_entry(out.len() + 1)?;
            out.insert(key, value);
        }
        Ok(Value::Object(out))
    }
}

#[cfg(test)]
mod tests;

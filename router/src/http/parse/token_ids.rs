//! Token ids straight from the body: an array of numbers becomes integers of four bytes, never values of seventy-two.
//!
//! The model, and so the range of its ids, is known only after the body was read. What is no id at all is kept, once, for
//! the error that names it; after it nothing more is kept.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::RouteError;
use crate::http::parse::fields::{bad, integer};
use crate::http::parse::json::{JsonPath, PathStep};

/// The field of a body that may hold token ids.
#[derive(Debug, Clone, Copy)]
pub(in crate::http) struct IdsField {
    pub(in crate::http) name: &'static str,
    /// It may also be a text, several texts, or several lists of ids, at most so many; 0: only one list of ids.
    pub(in crate::http) most: usize,
}

/// What stood there.
#[derive(Debug)]
pub(in crate::http) enum Ids {
    Text(String),
    /// An array that is empty or begins with a number; where the field is no prompt, any array.
    List(IdList),
    /// An array that begins with a string.
    Texts(Several<String>),
    /// An array that begins with an array.
    Lists(Several<IdList>),
    /// An array of so many items that begins with something else.
    Odd {
        first: Value,
        len: usize,
    },
    /// Something else, without its contents.
    Other(Value),
}

/// Several prompts of one kind.
#[derive(Debug)]
pub(in crate::http) struct Several<T> {
    /// At most [`IdsField::most`].
    pub(in crate::http) items: Vec<T>,
    /// The first one of another kind, without its contents. None after it is in `items`.
    pub(in crate::http) odd: Option<(usize, Value)>,
    /// How many there were.
    pub(in crate::http) len: usize,
}

/// Numbers that may be token ids.
#[derive(Debug, Default)]
pub(in crate::http) struct IdList {
    ids: Vec<u32>,
    /// The first item that is no `u32`, without its contents. None after it is in `ids`.
    odd: Option<Box<Value>>,
}

impl IdList {
    pub(in crate::http) fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.odd.is_none()
    }

    /// So many ids at least.
    pub(in crate::http) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The ids, all below `vocab`.
    ///
    /// # Errors
    /// `BadRequest` whose `param` is the first wrong one, such as `prompt[3]`.
    pub(in crate::http) fn check(self, param: &str, vocab: u32) -> Result<Vec<u32>, RouteError> {
        let high = self.ids.iter().position(|id| *id >= vocab);
        let wrong = match (high, self.odd) {
            (None, None) => return Ok(self.ids),
            (Some(at), _) => (at, Value::from(self.ids[at])),
            (None, Some(odd)) => (self.ids.len(), *odd),
        };
        let (at, value) = wrong;
        let param = format!("{param}[{at}]");
        let range = 0..=i64::from(vocab) - 1;
        Err(match integer(&value, param.clone(), &range) {
            Err(error) => error,
            Ok(_) => bad(param, "this is no token id"),
        })
    }
}

impl IdsField {
    /// Reads the field at this place; `None` if it is `null`.
    pub(in crate::http) fn at<'a, 'm>(self, place: JsonPath<'a, 'm>) -> FieldSeed<'a, 'm> {
        FieldSeed { place, most: self.most }
    }
}

/// Reads the field.
pub(in crate::http) struct FieldSeed<'a, 'm> {
    place: JsonPath<'a, 'm>,
    most: usize,
}

impl<'de> DeserializeSeed<'de> for FieldSeed<'_, '_> {
    type Value = Option<Ids>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        let Self { place, most } = self;
        let keep = if most > 0 { Keep::Items } else { Keep::Ids };
        let item = ItemSeed { place, keep, most }.deserialize(reader)?;
        Ok(match item {
            Item::Odd(Value::Null) => None,
            Item::Odd(other) => Some(Ids::Other(other)),
            Item::Id(id) => Some(Ids::Other(id.into())),
            Item::Text(text) => Some(Ids::Text(text)),
            Item::List(ids) => Some(Ids::List(ids)),
            Item::Many(ids) => Some(*ids),
        })
    }
}

/// What is kept of an item.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    /// Only a number.
    Number,
    /// A number or a list of numbers.
    Ids,
    /// A text, too.
    Items,
}

/// One value of the field: itself, an item of it, or an item of an item.
enum Item {
    Id(u32),
    Text(String),
    List(IdList),
    Many(Box<Ids>),
    /// What was not to be kept, without its contents.
    Odd(Value),
}

impl Item {
    fn into_odd(self) -> Value {
        match self {
            Self::Id(id) => id.into(),
            Self::Text(_) => Value::String(String::new()),
            Self::List(_) | Self::Many(_) => Value::Array(Vec::new()),
            Self::Odd(value) => value,
        }
    }
}

#[derive(Clone, Copy)]
struct ItemSeed<'a, 'm> {
    place: JsonPath<'a, 'm>,
    keep: Keep,
    /// A list may hold so many prompts; 0: it is one.
    most: usize,
}

impl<'de> DeserializeSeed<'de> for ItemSeed<'_, '_> {
    type Value = Item;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Item, D::Error> {
        reader.deserialize_any(self)
    }
}

impl ItemSeed<'_, '_> {
    fn text<E: Error>(self, text: &str, escaped: bool) -> Result<Item, E> {
        if self.keep != Keep::Items {
            return Ok(Item::Odd(Value::String(String::new())));
        }
        self.place.charge_str(text, escaped)?;
        Ok(Item::Text(text.to_owned()))
    }
}

impl<'de> Visitor<'de> for ItemSeed<'_, '_> {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Item, E> {
        Ok(Item::Odd(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Item, E> {
        Ok(Item::Odd(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Item, E> {
        Ok(u32::try_from(value).map_or_else(|_| Item::Odd(value.into()), Item::Id))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Item, E> {
        Ok(u32::try_from(value).map_or_else(|_| Item::Odd(value.into()), Item::Id))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Item, E> {
        if value.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&value) {
            #[expect(clippy::cast_possible_truncation, reason = "whole, and in range")]
            #[expect(clippy::cast_sign_loss, reason = "in range")]
            return Ok(Item::Id(value as u32));
        }
        Ok(Item::Odd(value.into()))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
        self.text(text, true)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Item, E> {
        self.text(text, false)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
        if self.keep == Keep::Number {
            skip(&mut items)?;
            return Ok(Item::Odd(Value::Array(Vec::new())));
        }
        let place = self.place.inside()?;
        if self.most > 0 {
            return several(place, items, self.most).map(|ids| Item::Many(Box::new(ids)));
        }
        id_list(place, items, IdList::default()).map(Item::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Item, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Item::Odd(Value::Object(Map::new())))
    }
}

/// The rest of a list after `ids`.
fn id_list<'de, A: SeqAccess<'de>>(
    place: JsonPath<'_, '_>,
    mut items: A,
    mut ids: IdList,
) -> Result<IdList, A::Error> {
    loop {
        let at = place.below(PathStep::Index(ids.ids.len()));
        let seed = ItemSeed { place: at, keep: Keep::Number, most: 0 };
        match items.next_element_seed(seed)? {
            None => return Ok(ids),
            Some(Item::Id(id)) => {
                at.room(&mut ids.ids)?;
                ids.ids.push(id);
            }
            Some(other) => {
                ids.odd = Some(Box::new(other.into_odd()));
                skip(&mut items)?;
                return Ok(ids);
            }
        }
    }
}

/// A prompt that is an array: its first item says what it is.
fn several<'de, A: SeqAccess<'de>>(
    place: JsonPath<'_, '_>,
    mut items: A,
    most: usize,
) -> Result<Ids, A::Error> {
    let first = place.below(PathStep::Index(0));
    let seed = ItemSeed { place: first, keep: Keep::Items, most: 0 };
    match items.next_element_seed(seed)? {
        None => Ok(Ids::List(IdList::default())),
        Some(Item::Id(id)) => {
            let mut ids = IdList::default();
            first.room(&mut ids.ids)?;
            ids.ids.push(id);
            id_list(place, items, ids).map(Ids::List)
        }
        Some(Item::Odd(number @ Value::Number(_))) => {
            skip(&mut items)?;
            Ok(Ids::List(IdList { ids: Vec::new(), odd: Some(Box::new(number)) }))
        }
        Some(Item::Text(text)) => {
            let text_of = |item| if let Item::Text(text) = item { Ok(text) } else { Err(item) };
            alike(place, items, text, most, text_of).map(Ids::Texts)
        }
        Some(Item::List(ids)) => {
            let list_of = |item| if let Item::List(ids) = item { Ok(ids) } else { Err(item) };
            alike(place, items, ids, most, list_of).map(Ids::Lists)
        }
        Some(other @ (Item::Odd(_) | Item::Many(_))) => {
            Ok(Ids::Odd { first: other.into_odd(), len: 1 + skip(&mut items)? })
        }
    }
}

/// Further items like the first one.
fn alike<'de, A: SeqAccess<'de>, T>(
    place: JsonPath<'_, '_>,
    mut items: A,
    first: T,
    most: usize,
    like: impl Fn(Item) -> Result<T, Item>,
) -> Result<Several<T>, A::Error> {
    let mut out = Vec::new();
    place.room(&mut out)?;
    out.push(first);
    let mut odd = None;
    while odd.is_none() && out.len() < most {
        let at = place.below(PathStep::Index(out.len()));
        let seed = ItemSeed { place: at, keep: Keep::Items, most: 0 };
        let Some(item) = items.next_element_seed(seed)? else { break };
        match like(item) {
            Ok(item) => {
                at.room(&mut out)?;
                out.push(item);
            }
            Err(item) => odd = Some((out.len(), item.into_odd())),
        }
    }
    let len = out.len() + usize::from(odd.is_some()) + skip(&mut items)?;
    Ok(Several { items: out, odd, len })
}

/// Reads to the end without keeping anything, and counts.
fn skip<'de, A: SeqAccess<'de>>(items: &mut A) -> Result<usize, A::Error> {
    let mut skipped = 0;
    while items.next_element::<IgnoredAny>()?.is_some() {
        skipped += 1;
    }
    Ok(skipped)
}

#[cfg(test)]
mod tests;

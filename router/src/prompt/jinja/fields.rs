//! What values have: truth, attributes, items and entries.

use std::rc::Rc;

use super::error::Error;
use super::scope::Machine;
use super::tree::MacroDecl;
use super::value::{self, Map, Value};

impl<'r> Machine<'r> {
    /// False for what is missing, zero or empty.
    pub(crate) fn truth(&self, value: &Value<'r>) -> bool {
        match value {
            Value::Undefined | Value::None => false,
            Value::Bool(x) => *x,
            Value::Int(x) => x.get() != 0,
            Value::Float(x) => *x != 0.0,
            Value::Text(text) => !text.is_empty(),
            Value::List(list) | Value::Lazy(list) => list.len() != 0,
            Value::Map(map) => map.len() != 0,
            Value::Namespace(id) => !self.namespaces[*id].is_empty(),
            Value::Loop(_) | Value::Macro(..) | Value::Function(_) => true,
        }
    }

    /// The value of `base.name`.
    pub(crate) fn attr(&self, base: &Value<'r>, name: &str) -> Result<Option<Value<'r>>, Error> {
        self.budget.bytes(name.len())?;
        Ok(match base {
            Value::Map(map) => map.get_str(name).cloned(),
            Value::Namespace(id) => self.namespaces[*id].get(name).cloned(),
            Value::Loop(id) => self.loop_field(*id, name),
            Value::Macro(decl, _) => self.macro_field(decl, name)?,
            _ => None,
        })
    }

    /// The value of `base[key]`.
    pub(crate) fn item(
        &self,
        base: &Value<'r>,
        key: &Value<'r>,
    ) -> Result<Option<Value<'r>>, Error> {
        let index = |len: usize| match key.as_i64() {
            Some(i) if i < 0 => len.checked_sub(usize::try_from(i.unsigned_abs()).ok()?),
            Some(i) => usize::try_from(i).ok(),
            None => None,
        };
        Ok(match base {
            Value::Map(map) => map.get(key, &self.budget)?,
            Value::List(list) | Value::Lazy(list) => index(list.len()).and_then(|i| list.get(i)),
            Value::Text(text) => {
                self.budget.bytes(text.len())?;
                let read = text.read();
                let len =
                    if key.as_i64().is_some_and(|i| i < 0) { read.chars().count() } else { 0 };
                index(len).and_then(|i| {
                    let (start, c) = read.char_indices().nth(i)?;
                    Some(Value::Text(text.part(start, start + c.len_utf8())))
                })
            }
            other => match key.as_text() {
                Some(name) => self.attr(other, &name.read())?,
                None => None,
            },
        })
    }

    /// The entries of a map, or of what reads like one.
    pub(crate) fn as_map(&self, value: &Value<'r>) -> Result<Option<Rc<Map<'r>>>, Error> {
        let mut map;
        match value {
            Value::Map(map) => return Ok(Some(Rc::clone(map))),
            Value::Namespace(id) => {
                let fields = &self.namespaces[*id];
                map = Map::with_room(fields.len(), &self.budget)?;
                for (name, value) in fields {
                    let name = Value::string(name.to_string(), &self.budget)?;
                    map.insert(name, value.clone(), &self.budget)?;
                }
            }
            Value::Loop(id) => {
                map = Map::with_room(LOOP_FIELDS.len(), &self.budget)?;
                for name in LOOP_FIELDS {
                    let value = self.loop_field(*id, name).unwrap_or_default();
                    map.insert(Value::text(name), value, &self.budget)?;
                }
            }
            Value::Macro(decl, _) => {
                map = Map::with_room(3, &self.budget)?;
                for name in ["name", "arguments", "caller"] {
                    let value = self.macro_field(decl, name)?.unwrap_or_default();
                    map.insert(Value::text(name), value, &self.budget)?;
                }
            }
            _ => return Ok(None),
        }
        Ok(Some(Rc::new(map)))
    }

    pub(crate) fn set_field(
        &mut self,
        namespace: usize,
        name: &str,
        value: Value<'r>,
    ) -> Result<(), Error> {
        self.budget.bytes(name.len())?;
        let fields = &mut self.namespaces[namespace];
        match fields.get_mut(name) {
            Some(old) => *old = value,
            None => {
                // The first one takes a node of the tree, with room for eleven.
                let node = if fields.is_empty() { 512 } else { 96 };
                self.budget.memory(node + 16 + name.len())?;
                fields.insert(name.into(), value);
            }
        }
        Ok(())
    }

    fn macro_field(&self, decl: &'r MacroDecl, name: &str) -> Result<Option<Value<'r>>, Error> {
        let names = &self.program.names;
        Ok(Some(match name {
            "name" => Value::text(&names[decl.name]),
            "arguments" => {
                let args = decl.args.iter().map(|name| Value::text(&names[*name]));
                let args = value::collect(args, decl.args.len(), &self.budget)?;
                Value::list(args, &self.budget)?
            }
            "caller" => Value::Bool(decl.reads_caller),
            _ => return Ok(None),
        }))
    }
}

const LOOP_FIELDS: [&str; 11] = [
    "index0",
    "index",
    "length",
    "revindex",
    "revindex0",
    "first",
    "last",
    "depth",
    "depth0",
    "previtem",
    "nextitem",
];

impl<'r> Machine<'r> {
    fn loop_field(&self, id: usize, name: &str) -> Option<Value<'r>> {
        let state = &self.loops[id];
        let index = state.index?;
        let counted = |x: Option<usize>| x.map_or(Value::Undefined, Value::count);
        Some(match name {
            "index0" => Value::count(index),
            "index" => Value::count(index + 1),
            "length" => counted(state.length),
            "revindex" => counted(state.length.map(|len| len.saturating_sub(index))),
            "revindex0" => counted(state.length.map(|len| len.saturating_sub(index + 1))),
            "first" => Value::Bool(index == 0),
            "last" => Value::Bool(state.length.is_some_and(|len| len == 0 || index == len - 1)),
            "depth" => Value::count(state.depth + 1),
            "depth0" => Value::count(state.depth),
            "previtem" => state.previous.clone().unwrap_or_default(),
            "nextitem" => state.peek(),
            _ => return None,
        })
    }
}

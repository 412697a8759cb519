//! The fields of requests, as the document shows them: names, types, ranges, and what they do.
//!
//! The code that reads a body knows the same names, types and ranges; a test runs it and compares both. A new field of a body
//! is a new row here.

use crate::http::ops::openapi::json::json;
mod chat;
mod generation;
mod messages;
mod responses;
mod texts;
mod vectors;

use serde_json::{Map, Value};

pub(super) use chat::CHAT;
pub(super) use messages::{COUNT, MESSAGES};
pub(super) use responses::RESPONSES;
pub(super) use texts::{COMPLETION, DETOKENIZE, DRAIN, TOKENIZE};
pub(super) use vectors::{EMBEDDINGS, RERANK, SCORE};

/// One field of an object that clients send.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: FieldKind,
    pub(super) required: bool,
    about: &'static str,
}

/// What a field may be; `null` counts as absent unless it is required.
#[derive(Debug)]
pub(super) enum FieldKind {
    Boolean,
    Text,
    /// One of these texts.
    Words(&'static [&'static str]),
    Integer(i64, i64),
    Number(f64, f64),
    /// More than the first number, up to the second one.
    Above(f64, f64),
    /// An object with known fields.
    Object(&'static ObjectShape),
    /// An array of such objects.
    Objects(&'static ObjectShape),
    /// An array of at least one of them.
    SomeObjects(&'static ObjectShape),
    /// A text, or an array of such objects.
    TextOr(&'static ObjectShape),
    /// One of these texts, or such an object.
    WordsOr(&'static [&'static str], &'static ObjectShape),
    /// An array of what this schema describes.
    Array(fn() -> Value),
    /// An object with any fields.
    Open,
    /// What this schema describes.
    Other(fn() -> Value),
}

/// An object with known fields: a schema of the document.
#[derive(Debug)]
pub(super) struct ObjectShape {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) fields: &'static [&'static [Field]],
    /// Names of further fields, which are those of a chat.
    pub(super) as_chat: &'static [&'static str],
    /// Of these fields one has to be there.
    pub(super) one_of: &'static [&'static str],
}

impl ObjectShape {
    /// An object whose fields are all its own.
    const fn new(
        name: &'static str,
        about: &'static str,
        fields: &'static [&'static [Field]],
    ) -> Self {
        Self { name, about, fields, as_chat: &[], one_of: &[] }
    }

    /// Fields that are its own.
    pub(super) fn own_fields(&self) -> impl Iterator<Item = &'static Field> {
        self.fields.iter().copied().flatten()
    }

    /// All fields.
    fn fields(&self) -> impl Iterator<Item = &'static Field> {
        let names = self.as_chat;
        let of_chat = CHAT.fields.iter().copied().flatten();
        self.own_fields().chain(of_chat.filter(|field| names.contains(&field.name)))
    }

    /// Shapes that its fields use, itself first.
    pub(super) fn with_inner(&'static self, found: &mut Vec<&'static Self>) {
        if found.iter().any(|known| known.name == self.name) {
            return;
        }
        found.push(self);
        for field in self.fields() {
            if let Some(inner) = field.kind.inner() {
                inner.with_inner(found);
            }
        }
    }

    pub(super) fn schema(&self) -> Value {
        let properties: Map<String, Value> =
            self.fields().map(|field| (field.name.to_owned(), field.schema())).collect();
        let required: Vec<_> =
            self.fields().filter(|field| field.required).map(|field| field.name).collect();
        let mut schema = json!({
            "type": "object",
            "description": self.about,
            "properties": properties,
            // names that nobody knows are refused, unless they say nothing
            "additionalProperties": {"type": "null"},
        });
        if !required.is_empty() {
            schema["required"] = required.into();
        }
        if !self.one_of.is_empty() {
            let one = |name: &&str| json!({"required": [name]});
            schema["anyOf"] = self.one_of.iter().map(one).collect();
        }
        schema
    }
}

/// A reference to a schema of the document.
pub(super) fn named(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

impl Field {
    fn schema(&self) -> Value {
        let mut schema = self.kind.schema();
        if !self.required {
            schema = or_null(schema);
        }
        schema["description"] = self.about.into();
        schema
    }
}

fn or_null(schema: Value) -> Value {
    match schema.get("type").and_then(Value::as_str) {
        Some(kind) if schema.get("enum").is_none() => {
            let kinds = json!([kind, "null"]);
            let Value::Object(mut fields) = schema else { return schema };
            fields.insert("type".into(), kinds);
            fields.into()
        }
        Some(_) | None => json!({"anyOf": [schema, {"type": "null"}]}),
    }
}

impl FieldKind {
    fn inner(&self) -> Option<&'static ObjectShape> {
        match *self {
            Self::Object(inner)
            | Self::Objects(inner)
            | Self::SomeObjects(inner)
            | Self::TextOr(inner)
            | Self::WordsOr(_, inner) => Some(inner),
            Self::Boolean
            | Self::Text
            | Self::Words(_)
            | Self::Integer(..)
            | Self::Number(..)
            | Self::Above(..)
            | Self::Array(_)
            | Self::Open
            | Self::Other(_) => None,
        }
    }

    fn schema(&self) -> Value {
        match *self {
            Self::Boolean => json!({"type": "boolean"}),
            Self::Text => json!({"type": "string"}),
            Self::Words(words) => json!({"type": "string", "enum": words}),
            Self::Integer(from, to) => json!({"type": "integer", "minimum": from, "maximum": to}),
            Self::Number(from, to) => json!({"type": "number", "minimum": from, "maximum": to}),
            Self::Above(from, to) => {
                json!({"type": "number", "exclusiveMinimum": from, "maximum": to})
            }
            Self::Object(shape) => named(shape.name),
            Self::Objects(shape) => json!({"type": "array", "items": named(shape.name)}),
            Self::SomeObjects(shape) => {
                json!({"type": "array", "items": named(shape.name), "minItems": 1})
            }
            Self::TextOr(shape) => {
                let objects = json!({"type": "array", "items": named(shape.name), "minItems": 1});
                json!({"anyOf": [text(), objects]})
            }
            Self::WordsOr(words, shape) => json!({"anyOf": [{"enum": words}, named(shape.name)]}),
            Self::Array(items) => json!({"type": "array", "items": items()}),
            Self::Open => json!({"type": "object"}),
            Self::Other(schema) => schema(),
        }
    }
}

const fn field(name: &'static str, kind: FieldKind, about: &'static str) -> Field {
    Field { name, kind, required: false, about }
}

const fn must(name: &'static str, kind: FieldKind, about: &'static str) -> Field {
    Field { name, kind, required: true, about }
}

const U32: i64 = u32::MAX as i64;

fn text() -> Value {
    json!({"type": "string"})
}

fn token_id() -> Value {
    json!({"type": "integer", "minimum": 0})
}

/// A schema, or its text.
fn json_schema() -> Value {
    json!({"type": ["object", "boolean", "string"]})
}

/// Texts by name, within OpenAI's bounds.
fn metadata() -> Value {
    json!({
        "type": "object", "maxProperties": 16, "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    })
}

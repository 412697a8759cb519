//! JSON that can mean one thing only: UTF-8, bounded depth, finite numbers, whole characters, no key twice.
//!
//! Two parsers that keep different ones of two equal keys are how a request passes a check and is then served as
//! something else, so equal keys are an error wherever they stand, and the error says where.

use std::cell::RefCell;
use std::fmt::{self, Write as _};

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::RouteError;
use crate::http::fields::{bad, bad_body, clip};

/// Reads `body` as one JSON value.
///
/// # Errors
/// `BadRequest` with line and column, or with the path of a key that is there twice.
pub(super) fn parse(body: &[u8]) -> Result<Value, RouteError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        bad_body(format!("the body is not UTF-8: byte {} is invalid", error.valid_up_to()))
    })?;
    if text.trim_ascii().is_empty() {
        return Err(bad_body("the body is empty; it must be a JSON object"));
    }
    let twice = RefCell::new(None);
    let root = Place { parent: None, step: Step::Root, twice: &twice };
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = root.deserialize(&mut reader).and_then(|value| reader.end().map(|()| value));
    value.map_err(|error| match twice.take() {
        Some(path) => {
            let message = format!("the key `{path}` is there twice; which one counts is undefined");
            bad(path, message)
        }
        None => bad_body(format!("the body is not valid JSON: {error}")),
    })
}

/// Where in the document the reader stands; a list that lives on the stack, so that the good case costs nothing.
#[derive(Clone, Copy)]
struct Place<'a> {
    parent: Option<&'a Self>,
    step: Step<'a>,
    /// Path of the first key found twice.
    twice: &'a RefCell<Option<String>>,
}

#[derive(Clone, Copy)]
enum Step<'a> {
    Root,
    Key(&'a str),
    Index(usize),
}

impl Place<'_> {
    fn below<'a>(&'a self, step: Step<'a>) -> Place<'a> {
        Place { parent: Some(self), step, twice: self.twice }
    }

    fn path(&self) -> String {
        let mut path = self.parent.map(Place::path).unwrap_or_default();
        match self.step {
            Step::Root => {}
            Step::Key(key) => {
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(&clip(key));
            }
            Step::Index(index) => {
                write!(path, "[{index}]").expect("writing to a String cannot fail");
            }
        }
        path
    }
}

impl<'de> DeserializeSeed<'de> for Place<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Place<'_> {
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

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        while let Some(item) = items.next_element_seed(self.below(Step::Index(out.len())))? {
            out.push(item);
        }
        Ok(Value::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let place = self.below(Step::Key(&key));
            if out.contains_key(&key) {
                *self.twice.borrow_mut() = Some(place.path());
                return Err(A::Error::custom("key there twice"));
            }
            let value = entries.next_value_seed(place)?;
            out.insert(key, value);
        }
        Ok(Value::Object(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(body: &[u8]) -> (Option<String>, String) {
        match parse(body) {
            Err(RouteError::BadRequest { param, message }) => (param, message),
            other => panic!("expected BadRequest, got {other:?}"),
        }
    }

    #[test]
    fn good_documents_are_read_as_serde_json_reads_them() {
        for text in [r#"{"a":[1,-2,3.5,true,null,"\ud83d\ude00"],"b":{"a":{}}}"#, " 7 ", r#""x""#] {
            assert_eq!(
                parse(text.as_bytes()).unwrap(),
                serde_json::from_str::<Value>(text).unwrap()
            );
        }
    }

    #[test]
    fn a_key_there_twice_is_named_with_its_path() {
        assert_eq!(error_of(br#"{"a":1,"a":2}"#).0.unwrap(), "a");
        let (param, message) = error_of(br#"{"messages":[{},{"role":"user","role":"system"}]}"#);
        assert_eq!(param.unwrap(), "messages[1].role");
        assert!(message.contains("`messages[1].role`"));
    }

    #[test]
    fn broken_text_is_an_error_with_a_place() {
        for (body, part) in [
            (&b"{\"a\": \n tru}"[..], "line 2 column"),
            (b"", "empty"),
            (b" \n", "empty"),
            (b"{\"a\": NaN}", "line 1 column"),
            (b"{\"a\": Infinity}", "line 1 column"),
            (b"{\"a\": 1e999}", "number out of range"),
            (b"{\"a\": \"\xff\"}", "byte 7"),
            (br#"{"a": "\ud800"}"#, "line 1 column"),
            (br#"{"a": "\udc00x"}"#, "surrogate"),
            (b"{} {}", "trailing"),
            (b"{\"a\": 1", "EOF"),
        ] {
            let (param, message) = error_of(body);
            assert_eq!(param, None, "{message}");
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn deep_nesting_ends_early_with_a_short_message() {
        let (_, message) = error_of("[".repeat(10_000).as_bytes());
        assert!(message.contains("recursion limit") && message.len() < 120, "{message}");
        let (_, message) = error_of("{\"a\":".repeat(10_000).as_bytes());
        assert!(message.contains("recursion limit") && message.len() < 120, "{message}");
    }
}

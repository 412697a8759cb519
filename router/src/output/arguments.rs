//! The arguments that a function's schema names, one by one: what forms need that do not write them as one JSON object.

use serde_json::{Map, Value};

/// An argument of a function.
#[derive(Debug, Clone, Copy)]
pub struct Argument<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it may be.
    pub schema: &'a Value,
    /// It cannot be left out.
    pub required: bool,
}

/// A schema without a word.
const ANY: &Value = &Value::Null;

/// Those among the properties, in their order, and then those that are only required. One that has no value is left out.
#[must_use]
pub fn arguments(parameters: &Value) -> Vec<Argument<'_>> {
    let required: Vec<&str> =
        parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let properties = parameters["properties"].as_object();
    let mut all: Vec<Argument<'_>> = Vec::new();
    for (name, schema) in properties.into_iter().flatten() {
        let required = required.contains(&name.as_str());
        if required || schema != &Value::Bool(false) {
            all.push(Argument { name, schema, required });
        }
    }
    let schema = parameters.get("additionalProperties").unwrap_or(ANY);
    for name in required {
        if !all.iter().any(|argument| argument.name == name) {
            all.push(Argument { name, schema, required: true });
        }
    }
    all
}

/// The schema of arguments with what a `$ref` of its own names; `None` where that leads nowhere.
///
/// Its definitions stay, so that other references mean what they meant.
#[must_use]
pub fn resolved(parameters: &Value) -> Option<Value> {
    let mut at = parameters;
    let mut fields: Map<String, Value> = parameters.as_object().cloned().unwrap_or_default();
    // each of them names another place, or they go round
    for _ in 0..=MAX_REFERENCES {
        fields.remove("$ref");
        let Some(place) = at.get("$ref") else { return Some(Value::Object(fields)) };
        at = parameters.pointer(&decoded(place.as_str()?.strip_prefix('#')?)?)?;
        for (key, value) in at.as_object()? {
            fields.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    None
}

/// References one after the other. A guess.
const MAX_REFERENCES: usize = 16;

/// A place as a URI has it, without its escapes.
fn decoded(place: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(place.len());
    let mut rest = place.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
        } else {
            byte
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn required_arguments_need_no_property() {
        let schema = json!({"properties": {"a": {"type": "string"}, "b": {}}, "required": ["c", "b"],
            "additionalProperties": {"type": "integer"}});
        let all = arguments(&schema);
        let short: Vec<_> = all.iter().map(|one| (one.name, one.required)).collect();
        assert_eq!(short, [("a", false), ("b", true), ("c", true)]);
        assert_eq!(all[2].schema, &json!({"type": "integer"}));
        assert!(arguments(&json!({"properties": {"a": false}})).is_empty());
    }

    #[test]
    fn a_reference_is_followed_and_a_circle_is_none() {
        let defs =
            json!({"x y": {"$ref": "#/$defs/z"}, "z": {"type": "object", "required": ["a"]}});
        let schema = json!({"$ref": "#/$defs/x%20y", "title": "t", "$defs": defs});
        let want = json!({"type": "object", "required": ["a"], "title": "t", "$defs": defs});
        assert_eq!(resolved(&schema), Some(want));
        for none in [
            json!({"$ref": "#"}),
            json!({"$ref": "#/$defs/a"}),
            json!({"$ref": "other.json"}),
            json!({"$ref": 3}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": true}}),
        ] {
            assert_eq!(resolved(&none), None, "{none}");
        }
        assert_eq!(resolved(&json!({"a": 1})), Some(json!({"a": 1})));
    }
}

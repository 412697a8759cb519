//! What is wrong in a JSON schema, and where: keywords that would not be enforced are refused by name.

use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::compile::{GrammarError, compile_schema};
use super::endless::endless;
use super::vocabulary::GrammarTokens;

/// Keywords that are enforced.
const ENFORCED: [&str; 27] = [
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "const",
    "enum",
    "type",
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// Keywords that say nothing about which values are valid.
const ANNOTATIONS: [&str; 20] = [
    "$anchor",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "id",
    "$comment",
    "title",
    "description",
    "default",
    "readOnly",
    "writeOnly",
    "examples",
    "example",
    "deprecated",
    "contentMediaType",
    "contentEncoding",
    "markdownDescription",
    "enumDescriptions",
    // OpenAPI's, and pydantic's: which case a value is of, which the cases say themselves
    "discriminator",
];

/// Longest path that is named.
const MAX_PATH_CHARS: usize = 256;

/// The search for the place of a failure ends after this: then a schema around it is named.
const SEARCH: Duration = Duration::from_millis(200);

/// Schemas that the search tries whatever the time: of a small one the same place is named on a slow machine. Bounds of
/// grammars keep each to some 20 ms.
const SURELY_TRIED: usize = 8;

/// Why a schema is refused that `endless` names a place of.
const ENDLESS: &str =
    "each value that fits holds another one that has to fit, so that none has an end";

/// A schema that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaError {
    /// Below the schema, such as `.properties.age.not`; empty for all of it.
    pub path: String,
    /// The reason, for people.
    pub message: String,
}

/// Whether answers can be held to `schema`.
///
/// # Errors
/// Where the first keyword stands that is not enforced, or the innermost schema that cannot be compiled.
pub fn check_schema(schema: &Value) -> Result<(), SchemaError> {
    check_keywords(schema, &mut String::new())?;
    if let Some(path) = endless(schema) {
        return Err(SchemaError { path, message: ENDLESS.to_owned() });
    }
    match compile_schema(GrammarTokens::of_bytes(), schema.clone()) {
        Ok(_) => Ok(()),
        Err(error) => Err(place_of(error, schema, Instant::now() + SEARCH)),
    }
}

/// Where `schema` fails, which does with this error.
fn place_of(error: GrammarError, schema: &Value, until: Instant) -> SchemaError {
    let mut found = (String::new(), error);
    let mut tried = 0;
    narrow(schema, schema, &mut found, &mut || {
        tried += 1;
        tried <= SURELY_TRIED || Instant::now() < until
    });
    let (path, GrammarError(message)) = found;
    SchemaError { path, message }
}

fn check_keywords(schema: &Value, path: &mut String) -> Result<(), SchemaError> {
    let fields = match schema {
        Value::Object(fields) => fields,
        Value::Bool(_) => return Ok(()),
        Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            let message = "a schema is an object or a boolean".to_owned();
            return Err(SchemaError { path: path.clone(), message });
        }
    };
    for key in fields.keys() {
        let harmless = key.starts_with("x-") && key != "x-guidance";
        if !harmless && !ENFORCED.contains(&&**key) && !ANNOTATIONS.contains(&&**key) {
            push(path, key);
            let message = "this keyword is not supported, and would not be enforced".to_owned();
            return Err(SchemaError { path: path.clone(), message });
        }
    }
    below(fields, path, &mut |schema, path| check_keywords(schema, path))
}

/// Calls `each` for the schemas right below, with their paths.
fn below(
    fields: &Map<String, Value>,
    path: &mut String,
    each: &mut dyn FnMut(&Value, &mut String) -> Result<(), SchemaError>,
) -> Result<(), SchemaError> {
    for (key, value) in fields {
        let len = path.len();
        match (key.as_str(), value) {
            (
                "properties" | "patternProperties" | "$defs" | "definitions",
                Value::Object(named),
            ) => {
                push(path, key);
                for (name, schema) in named {
                    let len = path.len();
                    push(path, name);
                    each(schema, path)?;
                    path.truncate(len);
                }
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(listed)) => {
                push(path, key);
                for (place, schema) in listed.iter().enumerate() {
                    let len = path.len();
                    path.push_str(&format!("[{place}]"));
                    each(schema, path)?;
                    path.truncate(len);
                }
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => {
                push(path, key);
                each(schema, path)?;
            }
            _ => {}
        }
        path.truncate(len);
    }
    Ok(())
}

/// The innermost schema that fails by itself, with the definitions of the whole. `may_try` is asked before each.
fn narrow(
    root: &Value,
    schema: &Value,
    found: &mut (String, GrammarError),
    may_try: &mut dyn FnMut() -> bool,
) {
    let Value::Object(fields) = schema else { return };
    let mut path = found.0.clone();
    let mut inner: Option<Value> = None;
    // an error ends the walk: it is found
    let _ = below(fields, &mut path, &mut |schema, path| {
        if !may_try() {
            return Ok(());
        }
        match compile_schema(GrammarTokens::of_bytes(), with_definitions(root, schema)) {
            Ok(_) => Ok(()),
            Err(error) => {
                *found = (path.clone(), error);
                inner = Some(schema.clone());
                Err(SchemaError { path: String::new(), message: String::new() })
            }
        }
    });
    if let Some(inner) = inner {
        narrow(root, &inner, found, may_try);
    }
}

fn with_definitions(root: &Value, schema: &Value) -> Value {
    let Value::Object(fields) = schema else { return schema.clone() };
    let mut fields = fields.clone();
    for name in ["$schema", "$defs", "definitions"] {
        if let Some(value) = root.get(name) {
            fields.insert(name.to_owned(), value.clone());
        }
    }
    Value::Object(fields)
}

fn push(path: &mut String, name: &str) {
    path.push('.');
    path.extend(name.chars().take(64));
    if let Some((end, _)) = path.char_indices().nth(MAX_PATH_CHARS) {
        path.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What is named of a schema that cannot be compiled, where no time is left to search.
    fn named_at_once(schema: &Value) -> String {
        let tokens = GrammarTokens::of_bytes();
        let error = compile_schema(tokens, schema.clone()).expect_err("it is wrong");
        place_of(error, schema, Instant::now()).path
    }

    #[test]
    fn the_place_in_a_small_schema_is_named_however_slow_the_machine() {
        let wrong = json!({"type": "string", "pattern": "("});
        let schema = json!({"anyOf": [{"type": "null"}, {"properties": {"a": {"items": wrong}}}]});
        assert_eq!(named_at_once(&schema), ".anyOf[1].properties.a.items");
    }

    #[test]
    fn cases_that_exclude_each_other_may_have_a_discriminator_and_others_are_told_why_not() {
        let case = |kind: &str| {
            json!({"type": "object", "properties": {"kind": {"const": kind}, "discriminator": {"type": "null"}},
                "required": ["kind"], "additionalProperties": false})
        };
        let schema = json!({"oneOf": [case("a"), case("b")],
            "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/a"}}});
        assert_eq!(check_schema(&schema), Ok(()));
        let mut plain = schema.clone();
        super::super::spell_out(&mut plain);
        assert_eq!(plain["oneOf"], schema["oneOf"], "properties of this name stay");
        let open = json!({"properties": {"a": {"oneOf": [{"minimum": 1}, {"minimum": 2}]}}});
        let error = check_schema(&open).expect_err("2 is valid under both");
        assert_eq!(error.path, ".properties.a");
        assert!(
            error.message.contains("`anyOf`") && !error.message.contains("coerce"),
            "{error:?}"
        );
    }

    #[test]
    fn the_search_in_a_large_schema_ends_with_its_time() {
        let mut properties = Map::new();
        for number in 0..40 {
            properties.insert(format!("p{number:02}"), json!({"type": "null"}));
        }
        properties.insert("wrong".to_owned(), json!({"pattern": "("}));
        let schema = json!({"properties": properties});
        assert_eq!(named_at_once(&schema), "");
        let error = check_schema(&schema).expect_err("it is wrong");
        assert!(["", ".properties.wrong"].contains(&&*error.path), "{}", error.path);
    }
}

//! What of a schema is written otherwise before it is compiled. Formats of strings that name a moment: dates that exist, and no
//! leap second, which is valid at few moments only. And `discriminator`, which the compiler does not know, is left out.

use serde_json::{Map, Value, json};

macro_rules! date {
    () => {
        concat!(
            // any year but 0000
            "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:",
            "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|",
            "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|",
            "02-(?:0[1-9]|1[0-9]|2[0-8]))|",
            // leap years
            "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
        )
    };
}

macro_rules! time {
    () => {
        concat!(
            "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?",
            "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        )
    };
}

fn pattern_of(format: &str) -> Option<&'static str> {
    match format {
        "date" => Some(concat!("^", date!(), "$")),
        "time" => Some(concat!("^", time!(), "$")),
        "date-time" => Some(concat!("^", date!(), "T", time!(), "$")),
        _ => None,
    }
}

/// Puts patterns in the place of formats of moments, in this schema and those below, and takes out what says nothing.
/// `llguidance` lets a time have a second 60 and any February 29 days.
pub fn spell_out(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    for (key, value) in fields.iter_mut() {
        match (key.as_str(), value) {
            (
                "properties" | "patternProperties" | "$defs" | "definitions",
                Value::Object(named),
            ) => named.values_mut().for_each(spell_out),
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(listed)) => {
                listed.iter_mut().for_each(spell_out);
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => spell_out(schema),
            _ => {}
        }
    }
    fields.remove("discriminator");
    let format = fields.get("format").and_then(Value::as_str);
    if let Some(pattern) = format.and_then(pattern_of) {
        fields.remove("format");
        require(fields, pattern);
    }
}

/// Beside a pattern that is there already.
fn require(fields: &mut Map<String, Value>, pattern: &str) {
    let Some(own) = fields.get("pattern") else {
        fields.insert("pattern".to_owned(), Value::from(pattern));
        return;
    };
    let both = [json!({ "pattern": own }), json!({ "pattern": pattern })];
    match fields.get_mut("allOf") {
        Some(Value::Array(all)) => all.extend(both),
        Some(_) => return, // no schema, which is said where it is compiled
        None => {
            fields.insert("allOf".to_owned(), Value::from(both.to_vec()));
        }
    }
    fields.remove("pattern");
}

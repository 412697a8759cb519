//! Parameters that other servers have and this one does not: none is ignored where it would change the answer.

use serde_json::{Map, Value};

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, unsupported, wrong_type};

/// A parameter that this server does not have, though some server does: its name, and what to say about it. It passes
/// only where its value would do nothing.
pub(in crate::http) struct Missing {
    pub(in crate::http) name: &'static str,
    pub(in crate::http) does_nothing: fn(&Value) -> bool,
    pub(in crate::http) why: &'static str,
}

impl Missing {
    /// No value of it does nothing.
    pub(in crate::http) const fn always(name: &'static str, why: &'static str) -> Self {
        Self { name, does_nothing: |_| false, why }
    }
}

fn empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

fn is_false(value: &Value) -> bool {
    *value == Value::Bool(false)
}

/// Missing from both endpoints.
pub(in crate::http) const EVERYWHERE: &[Missing] = &[
    Missing {
        name: "guided_decoding_backend",
        does_nothing: |value| value == "auto" || value == "guidance",
        why: "there is one way to constrain answers, that of `guidance`",
    },
    Missing::always("guided_whitespace_pattern", "use `guided_grammar`"),
    Missing { name: "logits_processors", does_nothing: empty, why: "use `logit_bias`" },
    Missing { name: "use_beam_search", does_nothing: is_false, why: "there is no beam search" },
    Missing {
        name: "length_penalty",
        does_nothing: |value| value.as_f64() == Some(1.0),
        why: "there is no beam search",
    },
    Missing { name: "early_stopping", does_nothing: is_false, why: "there is no beam search" },
    Missing {
        name: "spaces_between_special_tokens",
        does_nothing: |value| *value == Value::Bool(true),
        why: "special tokens are written as they are",
    },
    Missing {
        name: "return_tokens_as_token_ids",
        does_nothing: is_false,
        why: "log-probabilities carry the bytes of each token, and `return_token_ids` has the ids",
    },
    Missing::always("kv_transfer_params", "the router places requests itself"),
];

/// Refuses parameters of `missing` whose value would do something.
///
/// # Errors
/// `BadRequest` naming it.
pub(in crate::http) fn refuse(fields: &mut Fields, missing: &[Missing]) -> Result<(), RouteError> {
    for one in missing {
        if let Some(value) = fields.take_missing(one.name)
            && !(one.does_nothing)(&value)
        {
            return Err(unsupported(one.name, one.why));
        }
    }
    Ok(())
}

/// Parameters that are known, change nothing here and are therefore accepted.
///
/// # Errors
/// `BadRequest` if one has the wrong type.
pub(in crate::http) fn take_harmless(fields: &mut Fields) -> Result<(), RouteError> {
    metadata(fields)?;
    fields.string("safety_identifier")?;
    fields.boolean("parallel_tool_calls")?;
    fields.string("prompt_cache_retention")?;
    fields.object("prompt_cache_options")?;
    match fields.string("service_tier")?.as_deref() {
        None | Some("auto" | "default") => Ok(()),
        Some(_) => Err(unsupported("service_tier", "there is one tier, \"default\"")),
    }
}

/// OpenAI's own bounds: of keys, and in characters of one and of its value.
const MAX_METADATA: usize = 16;
const MAX_METADATA_KEY: usize = 64;
const MAX_METADATA_VALUE: usize = 512;

/// Takes `metadata`: texts by name, which change nothing.
///
/// # Errors
/// `BadRequest` if it is something else, or too much.
pub(in crate::http) fn metadata(fields: &mut Fields) -> Result<Map<String, Value>, RouteError> {
    let Some(metadata) = fields.object("metadata")? else { return Ok(Map::new()) };
    let metadata = metadata.into_rest();
    if metadata.len() > MAX_METADATA {
        let message =
            format!("`metadata` has {} keys, the limit is {MAX_METADATA}", metadata.len());
        return Err(bad("metadata", message));
    }
    for (key, value) in &metadata {
        if key.chars().count() > MAX_METADATA_KEY {
            let message = format!(
                "`metadata` has the key \"{}\", which is longer than {MAX_METADATA_KEY} characters",
                clip(key)
            );
            return Err(bad("metadata", message));
        }
        let at = format!("metadata.{key}");
        let Value::String(text) = value else { return Err(wrong_type(at, "a string", value)) };
        if text.chars().count() > MAX_METADATA_VALUE {
            let message = format!("`{at}` is longer than {MAX_METADATA_VALUE} characters");
            return Err(bad(at, message));
        }
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn missing_parameters_pass_only_where_they_do_nothing() {
        let check = |body: Value| refuse(&mut Fields::of_body(body).unwrap(), EVERYWHERE);
        for good in [
            json!({"guided_decoding_backend": "auto"}),
            json!({"use_beam_search": false, "logits_processors": [], "length_penalty": 1, "suffix": null}),
        ] {
            check(good).unwrap();
        }
        for (name, value) in [
            ("guided_decoding_backend", json!("xgrammar")),
            ("logits_processors", json!(["x"])),
            ("use_beam_search", json!(true)),
        ] {
            match check(json!({ name: value })) {
                Err(RouteError::BadRequest { param, .. }) => assert_eq!(param.unwrap(), name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn metadata_is_openais() {
        let many =
            |count: usize| -> Value { (0..count).map(|i| (i.to_string(), json!("x"))).collect() };
        let take =
            |value: Value| metadata(&mut Fields::of_body(json!({ "metadata": value })).unwrap());
        for good in [json!(null), json!({}), json!({"a": "é".repeat(512)}), many(16)] {
            take(good).unwrap();
        }
        assert_eq!(take(json!({"é".repeat(64): "b"})).unwrap().len(), 1);
        for (wrong, want) in [
            (json!("x"), "metadata"),
            (json!({"a": 1}), "metadata.a"),
            (json!({"a": null}), "metadata.a"),
            (json!({"a": {"b": "c"}}), "metadata.a"),
            (json!({"a": "x".repeat(513)}), "metadata.a"),
            (json!({"k".repeat(65): "x"}), "metadata"),
            (many(17), "metadata"),
        ] {
            match take(wrong) {
                Err(RouteError::BadRequest { param, message }) => {
                    assert_eq!(param.as_deref(), Some(want));
                    assert!(message.contains(want) && message.len() < 200, "{message}");
                }
                other => panic!("{want}: {other:?}"),
            }
        }
    }
}

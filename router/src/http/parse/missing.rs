//! Parameters that other servers have and this one does not: none is ignored where it would change the answer.

use serde_json::Value;

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, unsupported};

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
    fields.object("metadata")?;
    fields.string("safety_identifier")?;
    fields.boolean("parallel_tool_calls")?;
    fields.string("prompt_cache_retention")?;
    fields.object("prompt_cache_options")?;
    match fields.string("service_tier")?.as_deref() {
        None | Some("auto" | "default") => Ok(()),
        Some(_) => Err(unsupported("service_tier", "there is one tier, \"default\"")),
    }
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
}

//! Parameters of chat completions that other servers have.

use serde_json::{Value, json};

use crate::http::parse::missing::Missing;

/// Refused unless they would do nothing.
pub(super) const LACKING: &[Missing] = &[
    Missing {
        name: "modalities",
        does_nothing: |value| *value == json!(["text"]),
        why: "this server reads and writes text only",
    },
    Missing::always("audio", "this server reads and writes text only"),
    Missing::always("prediction", "there are no predicted outputs"),
    Missing::always("web_search_options", "this server does not search"),
    Missing::always("moderation", "this server does not moderate"),
    Missing {
        name: "store",
        does_nothing: |value| *value == Value::Bool(false),
        why: "this server keeps no chats, and does keep what /v1/responses makes",
    },
    Missing {
        name: "functions",
        does_nothing: |value| value.as_array().is_some_and(Vec::is_empty),
        why: "it gave way to `tools`",
    },
    Missing {
        name: "function_call",
        does_nothing: |value| value == "none",
        why: "it gave way to `tool_choice`",
    },
    Missing::always("mm_processor_kwargs", "this server reads text only"),
    Missing {
        name: "echo",
        does_nothing: |value| *value == Value::Bool(false),
        why: "/v1/completions has it",
    },
];

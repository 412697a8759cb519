//! Whatever a client sends, the checks answer with a job or with `BadRequest`, and do not panic.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::error::RouteError;
use crate::http::generate::PROMPT;
use crate::http::parse::fields::Fields;
use crate::http::parse::json as reader;
use crate::http::parse::params::ModelFacts;
use crate::http::{chat, completions};
use crate::limits::memory::{MemoryPool, MemoryShare};

/// Every name that some check looks for, so that random objects get past the first one.
const NAMES: &[&str] = &[
    "messages",
    "prompt",
    "role",
    "content",
    "type",
    "text",
    "name",
    "tool_calls",
    "function",
    "arguments",
    "id",
    "tool_call_id",
    "refusal",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "best_of",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "include_usage",
    "continuous_usage_stats",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "echo",
    "suffix",
    "tools",
    "tool_choice",
    "user",
    "metadata",
    "response_format",
    "priority",
    "cache_salt",
    "stop_token_ids",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "service_tier",
    "prompt_logprobs",
];

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        prop_oneof![Just(-1), Just(0), Just(1), Just(99), Just(100), any::<i64>()].prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        prop::sample::select(&["user", "system", "assistant", "tool", "function", "text", "auto", "none", "m", ""][..])
            .prop_map(Value::from),
    ]
}

fn object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Value> {
    let name = prop_oneof![
        8 => prop::sample::select(NAMES).prop_map(str::to_owned),
        1 => "[0-9]{1,3}",
        1 => any::<String>(),
    ];
    prop::collection::vec((name, value), 0..8)
        .prop_map(|entries| Value::Object(entries.into_iter().collect::<Map<_, _>>()))
}

fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(5, 64, 8, |inner| {
        prop_oneof![prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from), object(inner)]
    })
}

fn is_answer<T>(result: Result<T, RouteError>) -> Result<(), TestCaseError> {
    match result {
        Ok(_) => Ok(()),
        Err(RouteError::BadRequest { message, param }) => {
            prop_assert!(message.len() < 1000, "{message}");
            prop_assert!(param.is_none_or(|param| param.len() < 1000));
            Ok(())
        }
        Err(other) => Err(TestCaseError::fail(format!("{other:?}"))),
    }
}

fn facts() -> ModelFacts {
    ModelFacts { vocab_size: 100, ..ModelFacts::default() }
}

fn memory() -> MemoryShare {
    MemoryPool::private(1 << 30).share()
}

fn check_chat(fields: Fields) -> Result<chat::ChatRequest, RouteError> {
    chat::check(fields, &facts(), &mut memory())
}

fn check_completion(body: &Value) -> Result<completions::CompletionRequest, RouteError> {
    let document = reader::parse(body.to_string().as_bytes(), Some(PROMPT), &mut memory())?;
    let fields = Fields::of_body(document.value)?;
    completions::check(fields, document.ids, &facts())
}

fn with(mut body: Value, base: &Value) -> Value {
    let fields = body.as_object_mut().expect("made as an object");
    for (name, value) in base.as_object().expect("made as an object") {
        fields.entry(name).or_insert_with(|| value.clone());
    }
    body
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes(body in prop::collection::vec(any::<u8>(), 0..200)) {
        is_answer(reader::parse(&body, Some(PROMPT), &mut memory()))?;
    }

    #[test]
    fn any_text_of_json_letters(body in "[\\[\\]{}:,\"0-9eE.+\\-a-fnrtu\\\\ ]{0,200}") {
        is_answer(reader::parse(body.as_bytes(), Some(PROMPT), &mut memory()))?;
    }

    #[test]
    fn what_is_written_is_read_again(value in value()) {
        let text = value.to_string();
        let read = reader::parse(text.as_bytes(), None, &mut memory()).expect("valid").value;
        prop_assert_eq!(read, serde_json::from_str::<Value>(&text).expect("valid"));
    }

    #[test]
    fn any_chat(body in object(value())) {
        is_answer(check_chat(Fields::of_body(body).expect("an object")))?;
    }

    #[test]
    fn any_completion(body in object(value())) {
        is_answer(check_completion(&body))?;
    }

    #[test]
    fn a_good_chat_with_any_further_field(body in object(value())) {
        let base = json!({"messages": [{"role": "user", "content": "hi"}]});
        is_answer(check_chat(Fields::of_body(with(body, &base)).expect("an object")))?;
    }

    #[test]
    fn a_good_completion_with_any_further_field(body in object(value())) {
        is_answer(check_completion(&with(body, &json!({"prompt": "hi"}))))?;
    }

    #[test]
    fn a_chat_of_any_messages(messages in prop::collection::vec(object(value()), 1..4)) {
        let body = json!({ "messages": messages });
        is_answer(check_chat(Fields::of_body(body).expect("an object")))?;
    }
}

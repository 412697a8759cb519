//! The document against the code: routes, fields with their types and ranges, codes of errors, references.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::fields::{FieldKind, ObjectShape};
use super::{answers, fields, operations, whole};
use crate::error::RouteError;
use crate::http::anthropic::request as message_request;
use crate::http::parse::fields::Fields;
use crate::http::parse::fields::record::{self, AskedAs};
use crate::http::parse::json::parse;
use crate::http::parse::params::{self, ModelFacts};
use crate::http::pooling::request as vectors;
use crate::http::responses::request as response_request;
use crate::http::{chat, completions, drain, generate, tokenize};
use crate::limits::memory::{MemoryPool, MemoryShare};

/// Bodies that a parser accepts, and which together make it ask for all that it knows.
type Reader = fn(Fields, &mut MemoryShare, Value) -> Result<(), RouteError>;

fn message_bodies() -> Vec<Value> {
    let call = json!({"id": "1", "function": {"name": "f", "arguments": "{}"}});
    vec![json!({"model": "m", "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
        {"role": "assistant", "tool_calls": [call], "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
        {"role": "function", "content": "c", "name": "f"},
    ]})]
}

/// Bodies with objects inside, beside what `base` has.
fn generation_bodies(base: &Value) -> Vec<Value> {
    let with = |more: Value| {
        let mut body = base.clone();
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    vec![
        base.clone(),
        with(json!({"stream": true, "stream_options": {"include_usage": true}})),
        with(json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}})),
        with(json!({"structured_outputs": {"regex": "a"}})),
        with(json!({"nvext": {"agent_hints": {}, "session_control": {"session_id": "s"}}})),
    ]
}

fn readers() -> Vec<(&'static ObjectShape, Reader, Vec<Value>)> {
    let chats = message_bodies();
    let mut chat_bodies = generation_bodies(&chats[0]);
    chat_bodies
        .push(json!({"model": "m", "messages": chats[0]["messages"], "chat_template_kwargs": {}}));
    vec![
        (
            &fields::CHAT,
            |mut fields, memory, _| {
                params::model_name(&mut fields)?;
                chat::check(fields, &facts(), memory).map(drop)
            },
            chat_bodies,
        ),
        (
            &fields::COMPLETION,
            |mut fields, memory, body| {
                params::model_name(&mut fields)?;
                let ids = parse(body.to_string().as_bytes(), Some(generate::PROMPT), memory)?.ids;
                completions::check(fields, ids, &facts()).map(drop)
            },
            generation_bodies(&json!({"model": "m", "prompt": "a"})),
        ),
        (
            &fields::TOKENIZE,
            |mut fields, memory, _| {
                params::model_name(&mut fields)?;
                tokenize::is_checked(fields, memory)
            },
            [message_bodies(), vec![json!({"model": "m", "prompt": "a"})]].concat(),
        ),
        (
            &fields::DETOKENIZE,
            |mut fields, _, _| params::model_name(&mut fields).map(drop),
            vec![json!({"model": "m"})],
        ),
        (
            &fields::RESPONSES,
            |fields, memory, _| response_request::is_checked(fields, memory),
            response_bodies(),
        ),
        (
            &fields::MESSAGES,
            |fields, memory, _| message_request::to_chat(fields, false, memory).map(drop),
            conversations(),
        ),
        (
            &fields::COUNT,
            |fields, memory, _| message_request::to_chat(fields, true, memory).map(drop),
            conversations(),
        ),
        (
            &fields::EMBEDDINGS,
            |mut fields, memory, body| {
                params::model_name(&mut fields)?;
                let ids = parse(body.to_string().as_bytes(), Some(vectors::INPUT), memory)?.ids;
                vectors::embeddings(fields, ids, 100).map(drop)
            },
            vec![json!({"model": "m", "input": "a"})],
        ),
        (
            &fields::RERANK,
            |mut fields, _, _| {
                params::model_name(&mut fields)?;
                vectors::rerank(fields).map(drop)
            },
            vec![json!({"model": "m", "query": "q", "documents": ["a"]})],
        ),
        (
            &fields::SCORE,
            |mut fields, _, _| {
                params::model_name(&mut fields)?;
                vectors::score(fields).map(drop)
            },
            vec![json!({"model": "m", "text_1": "a", "text_2": "b"})],
        ),
        (&fields::DRAIN, |fields, _, _| drain::order(fields).map(drop), vec![json!({})]),
    ]
}

fn response_bodies() -> Vec<Value> {
    let with = |more: Value| {
        let mut body = json!({"model": "m", "input": "a"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"});
    let tool = json!({"type": "function", "name": "f"});
    let text =
        [json!({"type": "input_text", "text": "a"}), json!({"type": "refusal", "refusal": "b"})];
    vec![
        with(json!({"input": [
            {"role": "user", "content": text},
            call,
            {"type": "function_call_output", "call_id": "1", "output": text},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
        ]})),
        with(json!({"tools": [tool], "tool_choice": tool, "stream": true, "stream_options": {}})),
        with(json!({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tool]}})),
        with(json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}})),
        with(json!({"reasoning": {}})),
    ]
}

fn conversations() -> Vec<Value> {
    let text = json!({"type": "text", "text": "a"});
    let base = json!({
        "model": "m", "max_tokens": 10, "system": [text], "metadata": {}, "cache_control": {},
        "messages": [
            {"role": "assistant", "content": [
                text,
                {"type": "thinking", "thinking": "b"},
                {"type": "redacted_thinking", "data": "c"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [text]}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
    });
    let mut older = base.clone();
    older["output_format"] = json!({"type": "json_schema", "schema": {}});
    older["output_config"] = Value::Null;
    vec![base, older]
}

fn facts() -> ModelFacts {
    ModelFacts { vocab_size: 100, ..ModelFacts::default() }
}

/// What the parser of an endpoint asks for, by path; places in arrays are all the same.
fn asked(reader: Reader, bodies: &[Value], shape: &ObjectShape) -> BTreeMap<String, Vec<AskedAs>> {
    record::take();
    for body in bodies {
        let mut memory = MemoryPool::private(1 << 20).share();
        let mut own = body.clone();
        if shape.name == fields::COMPLETION.name {
            own.as_object_mut().unwrap().remove("prompt"); // it is read apart
        }
        if shape.name == fields::EMBEDDINGS.name {
            own.as_object_mut().unwrap().remove("input");
        }
        let read = reader(Fields::of_body(own).unwrap(), &mut memory, body.clone());
        read.unwrap_or_else(|error| panic!("{}: {body} is refused: {error}", shape.name));
    }
    let mut found: BTreeMap<String, Vec<AskedAs>> = BTreeMap::new();
    for (path, asked) in record::take() {
        let parts = path.split('.').map(|part| match part.split_once('[') {
            Some((name, _)) => format!("{name}[]"),
            None => part.to_owned(),
        });
        found.entry(parts.collect::<Vec<_>>().join(".")).or_default().push(asked);
    }
    // read apart from the other fields
    match shape.name {
        "CompletionRequest" => found.insert(generate::PROMPT.name.into(), vec![AskedAs::Any]),
        "EmbeddingRequest" => found.insert(vectors::INPUT.name.into(), vec![AskedAs::Any]),
        "DetokenizeRequest" => found.insert(tokenize::TOKENS.name.into(), vec![AskedAs::Array]),
        _ => None,
    };
    found
}

/// What `docs/api.md` says that the other APIs take of the parameters of a chat.
#[test]
fn other_apis_take_what_a_chat_takes_but_what_the_documents_name() {
    let chat = fields::CHAT.own_fields().map(|field| field.name);
    let all: BTreeSet<&str> = chat.filter(|name| !OF_CHATS_ALONE.contains(name)).collect();
    for (shape, but) in [
        (&fields::RESPONSES, &["n", "prompt_logprobs", "response_format", "return_token_ids"][..]),
        (
            &fields::MESSAGES,
            &[
                "n",
                "parallel_tool_calls",
                "prompt_cache_options",
                "prompt_cache_retention",
                "prompt_logprobs",
                "response_format",
                "return_token_ids",
                "safety_identifier",
                "stop",
                "stream_options",
                "user",
            ],
        ),
    ] {
        let own = shape.own_fields().map(|field| field.name);
        let taken: BTreeSet<&str> = own.chain(shape.as_chat.iter().copied()).collect();
        let missing: Vec<&str> = all.difference(&taken).copied().collect();
        assert_eq!(missing, but, "{}", shape.name);
    }
}

/// Stated apart in the documents, under other names there, or not taken elsewhere.
const OF_CHATS_ALONE: [&str; 13] = [
    "messages",
    "max_completion_tokens",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "verbosity",
    "chat_template",
];

const AS_CHAT: FieldKind = FieldKind::Open;

/// The rows of a shape and of the objects inside, by path.
fn documented(
    shape: &'static ObjectShape,
    at: &str,
    found: &mut BTreeMap<String, &'static FieldKind>,
) {
    for name in shape.as_chat {
        found.insert((*name).to_owned(), &AS_CHAT); // compared as fields of a chat
    }
    for field in shape.own_fields() {
        let path =
            if at.is_empty() { field.name.to_owned() } else { format!("{at}.{}", field.name) };
        match field.kind {
            FieldKind::Object(inner) | FieldKind::WordsOr(_, inner) => {
                documented(inner, &path, found);
            }
            FieldKind::Objects(inner)
            | FieldKind::SomeObjects(inner)
            | FieldKind::TextOr(inner) => {
                documented(inner, &format!("{path}[]"), found);
            }
            FieldKind::Boolean
            | FieldKind::Text
            | FieldKind::Words(_)
            | FieldKind::Integer(..)
            | FieldKind::Number(..)
            | FieldKind::Above(..)
            | FieldKind::Array(_)
            | FieldKind::Open
            | FieldKind::Other(_) => {}
        }
        assert!(
            found.insert(path, &field.kind).is_none(),
            "{}.{} comes twice",
            shape.name,
            field.name
        );
    }
}

fn agrees(kind: &FieldKind, asked: AskedAs) -> bool {
    match (kind, asked) {
        // one that is only moved, or whose types stand in the row
        (_, AskedAs::Any)
        | (FieldKind::Other(_), _)
        | (FieldKind::Boolean, AskedAs::Boolean)
        | (FieldKind::Text | FieldKind::Words(_), AskedAs::Text)
        | (FieldKind::Object(_) | FieldKind::Open, AskedAs::Object)
        | (
            FieldKind::Objects(_)
            | FieldKind::SomeObjects(_)
            | FieldKind::TextOr(_)
            | FieldKind::Array(_),
            AskedAs::Array,
        ) => true,
        (FieldKind::Integer(from, to), AskedAs::Integer(least, most)) => {
            (*from, *to) == (least, most)
        }
        (
            FieldKind::Number(from, to) | FieldKind::Above(from, to),
            AskedAs::Number(least, most),
        ) => (*from, *to) == (least, most),
        _ => false,
    }
}

#[test]
fn the_document_has_the_fields_that_the_parsers_read_and_no_others() {
    let readers = readers();
    for operation in operations::OPERATIONS {
        let Some(shape) = operation.body else { continue };
        let found = readers.iter().find(|(read, _, _)| read.name == shape.name);
        let (_, reader, bodies) =
            found.unwrap_or_else(|| panic!("add a reader of {} to this test", operation.path));
        let asked = asked(*reader, bodies, shape);
        let mut rows = BTreeMap::new();
        documented(shape, "", &mut rows);
        let mut wrong = Vec::new();
        for (path, asked) in &asked {
            let Some(kind) = rows.get(path) else {
                wrong.push(format!("reads `{path}` as {:?}: add a row", asked[0]));
                continue;
            };
            let other = asked.iter().find(|asked| !agrees(kind, **asked));
            wrong.extend(other.map(|other| format!("reads `{path}` as {other:?}, not {kind:?}")));
        }
        assert!(wrong.is_empty(), "{}, openapi/fields.rs: {wrong:#?}", operation.path);
        let read: BTreeSet<_> = asked.keys().collect();
        let idle: Vec<_> = rows.keys().filter(|path| !read.contains(path)).collect();
        assert!(idle.is_empty(), "{} reads no {idle:?}", operation.path);
    }
}

#[test]
fn the_document_has_the_routes_and_no_others() {
    let source = include_str!("../../../http.rs");
    let mut routes = BTreeSet::new();
    for route in source.split(".route(").skip(1) {
        let route = &route[..route.find(".route").unwrap_or(route.len()).min(300)];
        let path = route.split('"').nth(1).unwrap().replace("{*", "{");
        let handlers = &route[route.find("\",").unwrap()..];
        for method in ["get", "post", "put", "delete", "patch"] {
            if handlers.contains(&format!(" {method}("))
                || handlers.contains(&format!(".{method}("))
            {
                routes.insert((path.clone(), method));
            }
        }
    }
    let documented =
        operations::OPERATIONS.iter().map(|one| (one.path.to_owned(), one.method)).collect();
    assert_eq!(routes, documented, "routes of http.rs beside rows of openapi/operations/table.rs");
}

#[test]
fn the_document_has_the_codes_of_errors_and_no_others() {
    let source = include_str!("../../reply/reject.rs");
    let source = &source[..source.find("mod tests").unwrap_or(source.len())];
    let verdicts =
        &source[source.find("fn verdict").unwrap()..source.find("struct ErrorCode").unwrap()];
    let named = verdicts.split('"').skip(1).step_by(2);
    let kinds = ["invalid_request_error", "server_error", "rate_limit_error", "model"];
    let is_code = |text: &&str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let mut codes: BTreeSet<_> =
        named.filter(is_code).filter(|text| text.len() > 4 && !kinds.contains(text)).collect();
    codes.remove("client_gone"); // nobody is there to read it
    codes.insert("bad_sampling"); // a worker's word
    let documented: BTreeSet<_> =
        answers::ERRORS.iter().flat_map(|(_, _, codes)| codes.iter().copied()).collect();
    assert_eq!(codes, documented, "codes of reject.rs beside openapi/answers.rs");
}

#[test]
fn every_reference_leads_somewhere() {
    let document = whole();
    let mut references = Vec::new();
    collect(&document, &mut references);
    assert!(references.len() > 50, "{}", references.len());
    for reference in references {
        let place = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(place).is_some(), "{reference}");
    }
}

/// A link of an answer leads to an operation, and fills what stands in its path.
#[test]
fn every_link_leads_to_an_operation() {
    let document = whole();
    let mut found = 0;
    let paths = document["paths"].as_object().unwrap();
    let operations: BTreeMap<&str, &str> = paths
        .iter()
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().values();
            methods.map(move |one| (one["operationId"].as_str().unwrap(), path.as_str()))
        })
        .collect();
    for operation in paths.values().flat_map(|methods| methods.as_object().unwrap().values()) {
        let answers = operation["responses"].as_object().unwrap().values();
        for link in answers.filter_map(|answer| answer["links"].as_object()).flatten() {
            let (_, link) = link;
            let path = operations[link["operationId"].as_str().unwrap()];
            let filled: Vec<_> = link["parameters"].as_object().unwrap().keys().collect();
            let [name] = filled[..] else { panic!("{link}") };
            assert!(path.contains(&format!("{{{name}}}")), "{path}: {link}");
            assert!(!path.ends_with("/drain") || link["operationId"] == "drain_state", "{link}");
            found += 1;
        }
    }
    assert_eq!(found, 12);
}

fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
            fields.values().for_each(|value| collect(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| collect(value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn the_page_is_small_and_asks_nobody_else() {
    let files = [include_str!("page.html"), include_str!("page.js"), include_str!("page.css")];
    assert!(files.iter().map(|file| file.len()).sum::<usize>() <= 60 << 10);
    for file in files {
        for foreign in ["http:", "https:", "//cdn", "@import", "innerHTML", "eval("] {
            assert!(!file.contains(foreign), "{foreign}");
        }
    }
}

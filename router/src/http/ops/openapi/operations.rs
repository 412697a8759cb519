//! Paths and methods, each with who may ask, what it reads and what it answers. A test compares them with the routes.

use serde_json::{Map, Value, json};

use super::answers::error_name;
use super::fields::{self, ObjectShape, named};

/// Who may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Callers {
    Everybody,
    Clients,
    Operators,
    /// The tenant whose request it was, and operators.
    Owners,
}

/// What a request may be answered with if nothing goes wrong.
#[derive(Debug, Clone, Copy)]
pub(super) enum SuccessBody {
    Json(&'static str),
    /// A whole answer, or with `stream` events of the second kind.
    JsonOrEvents(&'static str, &'static str),
    /// Of this media type.
    Text(&'static str),
}

/// One method of one path.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    /// Its name for programs, and its group on the page.
    id: &'static str,
    tag: &'static str,
    about: &'static str,
    callers: Callers,
    pub(super) body: Option<&'static ObjectShape>,
    /// Who describes a body whose fields this document does not.
    described_by: Option<&'static str>,
    status: u16,
    answer: SuccessBody,
    /// Statuses of errors beside those of all operations of its kind.
    errors: &'static [u16],
}

/// Bodies that are read may be wrong in these ways.
const BODY_ERRORS: [u16; 4] = [400, 408, 413, 415];

const fn get(
    path: &'static str,
    id: &'static str,
    about: &'static str,
    answer: SuccessBody,
) -> Operation {
    Operation {
        path,
        method: "get",
        id,
        tag: "server",
        about,
        callers: Callers::Everybody,
        body: None,
        described_by: None,
        status: 200,
        answer,
        errors: &[],
    }
}

const fn post(
    path: &'static str,
    id: &'static str,
    about: &'static str,
    body: &'static ObjectShape,
    answer: SuccessBody,
) -> Operation {
    let operation = get(path, id, about, answer);
    Operation {
        method: "post",
        body: Some(body),
        callers: Callers::Clients,
        errors: &[404, 429, 500, 503, 504],
        ..operation
    }
}

/// Of an API that others describe: this document names its paths.
const fn post_as(
    path: &'static str,
    id: &'static str,
    about: &'static str,
    described_by: &'static str,
    answer: SuccessBody,
) -> Operation {
    let operation = post(path, id, about, &fields::DRAIN, answer);
    Operation { tag: "generation", body: None, described_by: Some(described_by), ..operation }
}

/// About one response, by its id.
const fn of_response(
    path: &'static str,
    method: &'static str,
    id: &'static str,
    about: &'static str,
    answer: SuccessBody,
) -> Operation {
    let operation = get(path, id, about, answer);
    Operation { method, tag: "generation", callers: Callers::Clients, errors: &[404], ..operation }
}

const OPENAI: &str = "The fields of OpenAI's API; docs/api.md says which of them are refused.";
const ANTHROPIC: &str =
    "The fields of Anthropic's API; docs/api.md says which of them are refused.";

pub(super) const OPERATIONS: &[Operation] = &[
    post_as(
        "/v1/responses",
        "respond",
        "Makes a response, whole or with `stream` as OpenAI's events, and stores it.",
        OPENAI,
        SuccessBody::Json("Response"),
    ),
    of_response(
        "/v1/responses/{response}",
        "get",
        "response",
        "A stored response, or one that runs.",
        SuccessBody::Json("Response"),
    ),
    of_response(
        "/v1/responses/{response}",
        "delete",
        "delete_response",
        "Forgets a response.",
        SuccessBody::Json("Deleted"),
    ),
    of_response(
        "/v1/responses/{response}/cancel",
        "post",
        "cancel_response",
        "Ends a response that is streamed.",
        SuccessBody::Json("Response"),
    ),
    of_response(
        "/v1/responses/{response}/input_items",
        "get",
        "response_input",
        "The items of its request: `after`, `limit`, `order`.",
        SuccessBody::Json("ItemList"),
    ),
    post_as(
        "/v1/messages",
        "message",
        "Answers a conversation, whole or with `stream` as Anthropic's events. Errors have Anthropic's form, too, and \
         statuses: 529 in the place of 503.",
        ANTHROPIC,
        SuccessBody::Json("Message"),
    ),
    post_as(
        "/v1/messages/count_tokens",
        "count_message",
        "Counts the tokens of the prompt of a conversation.",
        ANTHROPIC,
        SuccessBody::Json("MessageTokens"),
    ),
    Operation {
        tag: "generation",
        ..post(
            "/v1/chat/completions",
            "chat",
            "Answers a chat, whole or streamed.",
            &fields::CHAT,
            SuccessBody::JsonOrEvents("ChatCompletion", "ChatCompletionChunk"),
        )
    },
    Operation {
        tag: "generation",
        ..post(
            "/v1/completions",
            "complete",
            "Continues texts or lists of token ids, whole or streamed.",
            &fields::COMPLETION,
            SuccessBody::JsonOrEvents("Completion", "CompletionChunk"),
        )
    },
    Operation {
        tag: "models",
        callers: Callers::Clients,
        ..get("/v1/models", "models", "The models that are served.", SuccessBody::Json("ModelList"))
    },
    Operation {
        tag: "models",
        callers: Callers::Clients,
        errors: &[404],
        ..get(
            "/v1/models/{name}",
            "model",
            "One model; its name may hold slashes.",
            SuccessBody::Json("Model"),
        )
    },
    Operation {
        tag: "tokens",
        ..post(
            "/tokenize",
            "tokenize",
            "A text or a chat as token ids.",
            &fields::TOKENIZE,
            SuccessBody::Json("Tokens"),
        )
    },
    Operation {
        tag: "tokens",
        ..post(
            "/detokenize",
            "detokenize",
            "Token ids as text, special tokens included.",
            &fields::DETOKENIZE,
            SuccessBody::Json("Text"),
        )
    },
    Operation {
        tag: "tokens",
        ..post(
            "/v1/tokenize",
            "tokenize_v1",
            "As /tokenize.",
            &fields::TOKENIZE,
            SuccessBody::Json("Tokens"),
        )
    },
    Operation {
        tag: "tokens",
        ..post(
            "/v1/detokenize",
            "detokenize_v1",
            "As /detokenize.",
            &fields::DETOKENIZE,
            SuccessBody::Json("Text"),
        )
    },
    Operation {
        tag: "tokens",
        callers: Callers::Clients,
        errors: &[404],
        ..get(
            "/tokenizer_info",
            "tokenizer_info",
            "The tokenizer and the chat template of the only model.",
            SuccessBody::Json("TokenizerInfo"),
        )
    },
    Operation {
        tag: "tokens",
        callers: Callers::Clients,
        errors: &[404],
        ..get(
            "/tokenizer_info/{name}",
            "tokenizer_info_of",
            "The same of one model; its name may hold slashes.",
            SuccessBody::Json("TokenizerInfo"),
        )
    },
    get("/health", "health", "The process answers.", SuccessBody::Json("Status")),
    Operation {
        errors: &[503],
        ..get("/ready", "ready", "A worker takes work.", SuccessBody::Json("Status"))
    },
    get(
        "/metrics",
        "metrics",
        "Prometheus metrics; OpenMetrics for scrapers that accept it.",
        SuccessBody::Text("text/plain"),
    ),
    get("/version", "version", "The version of the server.", SuccessBody::Json("Version")),
    get("/openapi.json", "openapi", "This document.", SuccessBody::Json("Document")),
    get("/docs", "docs", "A page that shows this document.", SuccessBody::Text("text/html")),
    get(
        "/docs/page.js",
        "docs_script",
        "The script of the page.",
        SuccessBody::Text("text/javascript"),
    ),
    get("/docs/page.css", "docs_style", "The style of the page.", SuccessBody::Text("text/css")),
    Operation {
        tag: "operators",
        callers: Callers::Operators,
        ..get(
            "/workers",
            "workers",
            "Every worker and every group of ranks.",
            SuccessBody::Json("Workers"),
        )
    },
    Operation {
        tag: "operators",
        callers: Callers::Operators,
        errors: &[404],
        ..get(
            "/workers/{worker}/drain",
            "drain_state",
            "How a drain goes.",
            SuccessBody::Json("Drain"),
        )
    },
    Operation {
        tag: "operators",
        callers: Callers::Operators,
        status: 202,
        errors: &[404, 409, 429],
        ..post(
            "/workers/{worker}/drain",
            "drain",
            "Asks a worker to leave.",
            &fields::DRAIN,
            SuccessBody::Json("Drain"),
        )
    },
    Operation {
        tag: "operators",
        callers: Callers::Owners,
        errors: &[404],
        ..get(
            "/decisions/{request}",
            "decisions",
            "Why a request went where it went.",
            SuccessBody::Json("Decisions"),
        )
    },
];

/// `paths` of the document.
pub(super) fn paths() -> Map<String, Value> {
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = operation.value();
    }
    paths
}

impl Operation {
    fn value(&self) -> Value {
        let mut value = json!({
            "operationId": self.id,
            "tags": [self.tag],
            "summary": self.about,
            "security": self.security(),
            "responses": self.responses(),
        });
        if let Some(parameter) =
            self.path.split_once('{').and_then(|(_, rest)| rest.split_once('}'))
        {
            value["parameters"] = json!([{
                "name": parameter.0, "in": "path", "required": true, "schema": {"type": "string"},
            }]);
        }
        if let Some(body) = self.body {
            value["requestBody"] = json!({
                "required": true,
                "content": {"application/json": {"schema": named(body.name)}},
            });
        }
        if let Some(described_by) = self.described_by {
            let schema = json!({"type": "object", "description": described_by});
            value["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": schema}}});
        }
        if matches!(self.answer, SuccessBody::JsonOrEvents(..)) {
            value["parameters"] = HEADERS
                .map(|(name, about)| {
                    json!({"name": name, "in": "header", "description": about, "schema": {"type": "string"}})
                })
                .to_vec()
                .into();
        }
        value
    }

    /// No key is asked for where the server has none.
    fn security(&self) -> Value {
        match self.callers {
            Callers::Everybody => json!([]),
            Callers::Clients => json!([{"client": []}, {}]),
            Callers::Operators => json!([{"operator": []}, {}]),
            Callers::Owners => json!([{"client": []}, {"operator": []}, {}]),
        }
    }

    fn responses(&self) -> Value {
        let content = match self.answer {
            SuccessBody::Json(schema) => json!({"application/json": {"schema": named(schema)}}),
            SuccessBody::JsonOrEvents(whole, event) => json!({
                "application/json": {"schema": named(whole)},
                "text/event-stream": {
                    "schema": {
                        "type": "string",
                        "description": format!("With `stream`: lines `data: {event}`, then `data: [DONE]`. What fails after \
                            the first event is an event with an Error, and no [DONE] follows."),
                    },
                    "x-event": named(event),
                },
            }),
            SuccessBody::Text(media) => json!({media: {"schema": {"type": "string"}}}),
        };
        let mut responses = Map::new();
        responses.insert(
            self.status.to_string(),
            json!({"description": self.about, "content": content}),
        );
        let mut errors = vec![400, 421];
        errors.extend(self.errors);
        let has_body = self.body.is_some() || self.described_by.is_some();
        if has_body {
            errors.extend(BODY_ERRORS);
        }
        if self.callers != Callers::Everybody {
            errors.push(401);
        }
        if self.callers == Callers::Operators || has_body {
            errors.push(403);
        }
        errors.sort_unstable();
        errors.dedup();
        for status in errors {
            let response = format!("#/components/responses/{}", error_name(status));
            responses.insert(status.to_string(), json!({"$ref": response}));
        }
        responses.into()
    }
}

/// Headers of generations that change something.
const HEADERS: [(&str, &str); 5] = [
    ("X-Request-ID", "Name of the request, 1 to 128 printable ASCII characters."),
    ("X-Session-ID", "The session that it belongs to, for placement."),
    (
        "X-Headrace-Tenant",
        "Whose share of the service it takes, 1 to 128 bytes, where no key says it.",
    ),
    ("X-Headrace-TTFT-Deadline-Ms", "Milliseconds to the first token, 0 to 86,400,000."),
    ("X-Headrace-Explain", "1: the answer's headers say why it went where it went."),
];

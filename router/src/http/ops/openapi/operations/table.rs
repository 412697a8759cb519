//! The rows: each path and method of the server.

use super::super::answers::ErrorForm;
use super::super::fields::{self, ObjectShape};
use super::{Callers, Operation, SuccessBody};
use crate::http::ops::openapi::json::json;

const CHUNKS: &str = "With `stream`: lines `data:` with such an object, then `data: [DONE]`. What fails after the first event is \
    an event with an Error, and no [DONE] follows.";
const RESPONSE_EVENTS: &str = "With `stream`: `event:` with its type and `data:` with such an object. The last one is \
    `response.completed` or `response.incomplete`; where something fails, `error` and `response.failed`.";
const MESSAGE_EVENTS: &str = "With `stream`: `event:` with its type and `data:` with such an object. The last one is `message_stop`; \
    where something fails, `error` with a MessageError.";

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
        query: &[],
        status: 200,
        answer,
        errors: &[],
        error_form: ErrorForm::OpenAi,
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

/// Of Anthropic's API.
const fn anthropic(
    path: &'static str,
    id: &'static str,
    about: &'static str,
    body: &'static ObjectShape,
    answer: SuccessBody,
) -> Operation {
    let operation = post(path, id, about, body, answer);
    Operation { tag: "generation", error_form: ErrorForm::Anthropic, ..operation }
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

pub(in super::super) const OPERATIONS: &[Operation] = &[
    Operation {
        tag: "generation",
        ..post(
            "/v1/responses",
            "respond",
            "Makes a response, whole or streamed, and stores it.",
            &fields::RESPONSES,
            SuccessBody::JsonOrEvents("Response", "ResponseEvent", RESPONSE_EVENTS),
        )
    },
    Operation {
        query: &[("stream", || json!({"const": "false"}), "A response is streamed once.")],
        ..of_response(
            "/v1/responses/{response}",
            "get",
            "response",
            "A stored response, or one that runs.",
            SuccessBody::Json("Response"),
        )
    },
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
    Operation {
        query: &[
            ("after", || json!({"type": "string"}), "The id of the item before the first one."),
            (
                "limit",
                || json!({"type": "integer", "minimum": 1, "maximum": 100}),
                "Most items; 20 where left out.",
            ),
            ("order", || json!({"enum": ["asc", "desc"]}), "The last one first where left out."),
        ],
        ..of_response(
            "/v1/responses/{response}/input_items",
            "get",
            "response_input",
            "The items of its request, page by page.",
            SuccessBody::Json("ItemList"),
        )
    },
    anthropic(
        "/v1/messages",
        "message",
        "Answers a conversation, whole or streamed.",
        &fields::MESSAGES,
        SuccessBody::JsonOrEvents("Message", "MessageEvent", MESSAGE_EVENTS),
    ),
    anthropic(
        "/v1/messages/count_tokens",
        "count_message",
        "Counts the tokens of the prompt of a conversation.",
        &fields::COUNT,
        SuccessBody::Json("MessageTokens"),
    ),
    Operation {
        tag: "generation",
        ..post(
            "/v1/chat/completions",
            "chat",
            "Answers a chat, whole or streamed.",
            &fields::CHAT,
            SuccessBody::JsonOrEvents("ChatCompletion", "ChatCompletionChunk", CHUNKS),
        )
    },
    Operation {
        tag: "generation",
        ..post(
            "/v1/completions",
            "complete",
            "Continues texts or lists of token ids, whole or streamed.",
            &fields::COMPLETION,
            SuccessBody::JsonOrEvents("Completion", "CompletionChunk", CHUNKS),
        )
    },
    Operation {
        tag: "vectors",
        ..post(
            "/v1/embeddings",
            "embed",
            "Texts as vectors.",
            &fields::EMBEDDINGS,
            SuccessBody::Json("Embeddings"),
        )
    },
    Operation {
        tag: "vectors",
        ..post(
            "/v1/rerank",
            "rerank",
            "Documents by how alike they are to a query: the cosine of their vectors.",
            &fields::RERANK,
            SuccessBody::Json("Ranking"),
        )
    },
    Operation {
        tag: "vectors",
        ..post(
            "/v2/rerank",
            "rerank_v2",
            "As /v1/rerank.",
            &fields::RERANK,
            SuccessBody::Json("Ranking"),
        )
    },
    Operation {
        tag: "vectors",
        ..post(
            "/rerank",
            "rerank_short",
            "As /v1/rerank.",
            &fields::RERANK,
            SuccessBody::Json("Ranking"),
        )
    },
    Operation {
        tag: "vectors",
        ..post(
            "/v1/score",
            "score",
            "How alike texts are: the cosine of their vectors.",
            &fields::SCORE,
            SuccessBody::Json("Scores"),
        )
    },
    Operation {
        tag: "vectors",
        ..post(
            "/score",
            "score_short",
            "As /v1/score.",
            &fields::SCORE,
            SuccessBody::Json("Scores"),
        )
    },
    Operation {
        tag: "models",
        callers: Callers::Clients,
        ..get(
            "/v1/models",
            "models",
            "The models that are served; with the header `anthropic-version`, as Anthropic lists them.",
            SuccessBody::Json("ModelList"),
        )
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
    get("/healthz", "healthz", "As `/health`.", SuccessBody::Json("Status")),
    get("/livez", "livez", "As `/health`.", SuccessBody::Json("Status")),
    get("/ping", "ping", "As `/health`.", SuccessBody::Json("Status")),
    Operation {
        errors: &[503],
        ..get("/ready", "ready", "A worker takes work.", SuccessBody::Json("Status"))
    },
    Operation {
        errors: &[503],
        ..get("/readyz", "readyz", "As `/ready`.", SuccessBody::Json("Status"))
    },
    Operation {
        errors: &[401, 403],
        ..get(
            "/metrics",
            "metrics",
            "Prometheus metrics; OpenMetrics for scrapers that accept it. For processes of the router's machine and for keys \
             of operators, unless the server shows them to everybody.",
            SuccessBody::Text("text/plain"),
        )
    },
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
        ..get(
            "/scale",
            "scale",
            "How many workers each model needs for what is asked of it, by role, and what speaks against one less.",
            SuccessBody::Json("Scale"),
        )
    },
    Operation {
        errors: &[404],
        ..get(
            "/",
            "dashboard",
            "A page that shows the fleet to operators: at their addresses, and where they may type a key. Nobody else is told of it.",
            SuccessBody::Text("text/html"),
        )
    },
    Operation {
        errors: &[404],
        ..get(
            "/dashboard/{file}",
            "dashboard_file",
            "Scripts and styles of that page.",
            SuccessBody::Text("text/javascript"),
        )
    },
    Operation {
        tag: "operators",
        callers: Callers::Operators,
        errors: &[429, 503],
        query: &[("once", || json!({"type": "boolean"}), "true: one event, and the end.")],
        ..get(
            "/dashboard/events",
            "dashboard_events",
            "What that page shows: an event with a JSON document each second, for 100 s; then ask again.",
            SuccessBody::Text("text/event-stream"),
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

//! Paths and methods, each with who may ask, what it reads and what it answers. A test compares them with the routes.

mod links;
mod table;

use serde_json::{Map, Value};

use super::answers::{self, ErrorForm};
use super::fields::{ObjectShape, named};
use crate::http::ops::openapi::json::json;

pub(super) use table::OPERATIONS;

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
    /// A whole answer, or with `stream` events of the second kind, and what is said of them.
    JsonOrEvents(&'static str, &'static str, &'static str),
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
    /// What may stand after the `?`.
    query: &'static [NamedValue],
    status: u16,
    answer: SuccessBody,
    /// Statuses of errors beside those of all operations of its kind.
    errors: &'static [u16],
    error_form: ErrorForm,
}

/// A name after the `?` or of a header, the schema of its value, and what it means.
type NamedValue = (&'static str, fn() -> Value, &'static str);

/// Bodies that are read may be wrong in these ways.
const BODY_ERRORS: [u16; 4] = [400, 408, 413, 415];

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
        let mut parameters = Vec::new();
        let in_path = self.path.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        parameters.extend(in_path.map(|(name, _)| {
            json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})
        }));
        parameters.extend(self.query.iter().map(|(name, schema, about)| {
            json!({"name": name, "in": "query", "description": about, "schema": schema()})
        }));
        if matches!(self.answer, SuccessBody::JsonOrEvents(..)) {
            parameters.extend(HEADERS.map(|(name, schema, about)| {
                json!({"name": name, "in": "header", "description": about, "schema": schema()})
            }));
        }
        if !parameters.is_empty() {
            value["parameters"] = parameters.into();
        }
        if let Some(body) = self.body {
            value["requestBody"] = json!({
                "required": true,
                "content": {"application/json": {"schema": named(body.name)}},
            });
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
            SuccessBody::JsonOrEvents(whole, event, about) => json!({
                "application/json": {"schema": named(whole)},
                "text/event-stream": {
                    "schema": {"type": "string", "description": about},
                    "x-event": named(event),
                },
            }),
            SuccessBody::Text(media) => json!({media: {"schema": {"type": "string"}}}),
        };
        let mut headers = answers::headers();
        if matches!(self.answer, SuccessBody::JsonOrEvents(..)) {
            headers.extend(answers::headers_of_generations());
        }
        let mut success =
            json!({"description": self.about, "content": content, "headers": headers});
        if let Some(links) = links::of(self.id) {
            success["links"] = links;
        }
        let mut responses = Map::new();
        responses.insert(self.status.to_string(), success);
        let mut errors = vec![400, 421];
        errors.extend(self.errors);
        if self.body.is_some() {
            errors.extend(BODY_ERRORS);
        }
        if self.callers != Callers::Everybody {
            errors.push(401);
        }
        if self.callers == Callers::Operators || self.body.is_some() {
            errors.push(403);
        }
        errors.sort_unstable();
        errors.dedup();
        for status in errors {
            let (status, name) = self.error_form.response(status);
            let response = format!("#/components/responses/{name}");
            responses.insert(status.to_string(), json!({"$ref": response}));
        }
        responses.into()
    }
}

/// Headers of generations that change something, each with the schema of its value.
const HEADERS: [NamedValue; 5] = [
    (
        "X-Request-ID",
        || json!({"type": "string"}),
        "Name of the request, 1 to 128 printable ASCII characters; another one gets a new name.",
    ),
    (
        "X-Session-ID",
        || json!({"type": "string"}),
        "The session that it belongs to, for placement.",
    ),
    (
        "X-Headrace-Tenant",
        || json!({"type": "string", "minLength": 1, "maxLength": 128}),
        "Whose share of the service it takes, 1 to 128 bytes, where no key says it.",
    ),
    (
        "X-Headrace-TTFT-Deadline-Ms",
        || json!({"type": "integer", "minimum": 0, "maximum": 86_400_000}),
        "Milliseconds to the first token; 0: no deadline.",
    ),
    (
        "X-Headrace-Explain",
        || json!({"enum": ["0", "1", "false", "true"]}),
        "1: the answer's headers say why it went where it went.",
    ),
];

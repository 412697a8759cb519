//! `/openapi.json`: what this server understands, as an OpenAPI 3.1 document; `/docs`: a page that shows it.
//!
//! The document is the same for all servers of a version. Rows of tables make it (`fields`, `operations`, `answers`), and
//! tests run the parsers and read the routes to prove that neither knows more or less than the tables. The page needs
//! nothing from elsewhere, and may load nothing from there.

mod answers;
mod fields;
mod json;
mod operations;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use axum::http::header;
use axum::response::IntoResponse;
use bytes::Bytes;
use serde_json::{Map, Value};

use self::fields::ObjectShape;
use self::json::json;
use super::pages;

/// The document.
pub(in crate::http) async fn document() -> impl IntoResponse {
    static DOCUMENT: OnceLock<Bytes> = OnceLock::new();
    let document = DOCUMENT.get_or_init(|| Bytes::from(whole().to_string()));
    ([(header::CONTENT_TYPE, "application/json")], document.clone())
}

/// The page.
pub(in crate::http) async fn page() -> impl IntoResponse {
    pages::page(include_str!("openapi/page.html"))
}

/// The script of the page.
pub(in crate::http) async fn script() -> impl IntoResponse {
    pages::file(pages::SCRIPT, include_str!("openapi/page.js"))
}

/// The style of the page.
pub(in crate::http) async fn style() -> impl IntoResponse {
    pages::file(pages::STYLE, include_str!("openapi/page.css"))
}

fn whole() -> Value {
    let key = |about: &str| json!({"type": "http", "scheme": "bearer", "description": about});
    json!({
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": "Headrace",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "OpenAI's API, with vLLM's names for what OpenAI does not have, and Anthropic's messages. A parameter that would change the \
                answer and is not supported is a 400 that names it; unknown names are a 400, too, unless they are null.",
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "generation", "description": "Answers of models."},
            {"name": "vectors", "description": "Texts as vectors, and how alike they are."},
            {"name": "models", "description": "What is served."},
            {"name": "tokens", "description": "Texts as models see them."},
            {"name": "server", "description": "For everybody: probes, metrics, this document."},
            {"name": "operators", "description": "For who runs the server."},
        ],
        "paths": operations::paths(),
        "components": {
            "securitySchemes": {
                "client": key("A key of --api-key-file, where the server has keys."),
                "operator": key("A key of --admin-key-file. Addresses of --admin-listen and, without any keys, processes of \
                    the server's machine need none."),
            },
            "responses": answers::responses(),
            "schemas": schemas(),
        },
    })
}

fn schemas() -> Map<String, Value> {
    let mut shapes: Vec<&ObjectShape> = Vec::new();
    for operation in operations::OPERATIONS {
        if let Some(body) = operation.body {
            body.with_inner(&mut shapes);
        }
    }
    let mut schemas: Map<String, Value> =
        shapes.into_iter().map(|shape| (shape.name.to_owned(), shape.schema())).collect();
    schemas.extend(answers::schemas());
    schemas.insert(
        "Document".into(),
        json!({"type": "object", "description": "An OpenAPI document."}),
    );
    schemas
}

//! `/openapi.json`: what this server understands, as an OpenAPI 3.1 document; `/docs`: a page that shows it.
//!
//! The document is the same for all servers of a version. Rows of tables make it (`fields`, `operations`, `answers`), and
//! tests run the parsers and read the routes to prove that neither knows more or less than the tables. The page needs
//! nothing from elsewhere, and may load nothing from there.

mod answers;
mod fields;
mod operations;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use axum::http::{HeaderName, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use serde_json::{Map, Value, json};

use self::fields::ObjectShape;

/// What the page may do: run its own script, use its own style, and ask this server.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The document.
pub(in crate::http) async fn document() -> impl IntoResponse {
    static DOCUMENT: OnceLock<Bytes> = OnceLock::new();
    let document = DOCUMENT.get_or_init(|| Bytes::from(whole().to_string()));
    ([(header::CONTENT_TYPE, "application/json")], document.clone())
}

/// The page.
pub(in crate::http) async fn page() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 3] = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, include_str!("openapi/page.html"))
}

/// The script of the page.
pub(in crate::http) async fn script() -> impl IntoResponse {
    asset("text/javascript; charset=utf-8", include_str!("openapi/page.js"))
}

/// The style of the page.
pub(in crate::http) async fn style() -> impl IntoResponse {
    asset("text/css; charset=utf-8", include_str!("openapi/page.css"))
}

fn asset(media: &'static str, text: &'static str) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, media), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")], text)
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

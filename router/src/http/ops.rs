//! What operators and clients ask about the server itself.

pub(super) mod openapi;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::RouteError;
use crate::fleet::ModelInfo;
use crate::http::generate::facts;
use crate::http::parse::fields::clip;
use crate::http::reply::reject::Reject;
use crate::metrics::Exposition;
use crate::prompt::{ReasoningParser, ToolParser};

/// The process runs and answers; says nothing about workers.
pub(super) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Able to answer: a worker takes work, and the router does not drain.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, Reject> {
    if app.fleet.ready() {
        return Ok(Json(json!({"status": "ready"})));
    }
    Err(RouteError::NoWorker { retry_after: Duration::from_secs(1) }.into())
}

pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

pub(super) async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> impl IntoResponse {
    let format = Exposition::accepted(&headers);
    ([(header::CONTENT_TYPE, format.content_type())], app.metrics_page(format))
}

pub(super) async fn workers(State(app): State<Arc<App>>) -> Json<Value> {
    Json(app.fleet.workers())
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let models = app.fleet.models();
    let mut listed: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    let mut data: Vec<Value> =
        models.iter().map(|model| model_body(&app, model, &model.name)).collect();
    for (model, alias) in
        models.iter().flat_map(|model| model.aliases.iter().map(move |a| (model, a)))
    {
        // of two models with this name it is the first that is found by it
        if !listed.contains(&alias.as_str()) {
            listed.push(alias);
            data.push(model_body(&app, model, alias));
        }
    }
    Json(json!({"object": "list", "data": data}))
}

pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, Reject> {
    let models = app.fleet.models();
    let by_alias = || models.iter().find(|model| model.aliases.contains(&name));
    if let Some(model) = models.iter().find(|model| model.name == name).or_else(by_alias) {
        return Ok(Json(model_body(&app, model, &name)));
    }
    let served: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    let served = if served.is_empty() { "none yet".to_owned() } else { served.join(", ") };
    Err(RouteError::UnknownModel { model: clip(&name), served }.into())
}

/// OpenAI's `model` under one of its names, vLLM's `root` and `max_model_len`, the types of the weights that its workers
/// compute in, and how its answers are told apart.
fn model_body(app: &App, model: &ModelInfo, id: &str) -> Value {
    let found = facts::conventions(model.conventions, &app.config.parsers);
    json!({
        "id": id,
        "object": "model",
        "created": model.created,
        "owned_by": "headrace",
        "root": model.name,
        "max_model_len": model.context_tokens,
        "dtypes": model.dtypes,
        "reasoning_parser": found.reasoning.map(ReasoningParser::as_str),
        "tool_parser": found.call_parser().map(ToolParser::as_str),
        "template_knows_tools": found.knows_tools,
    })
}

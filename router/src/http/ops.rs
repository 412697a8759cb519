//! What operators and clients ask about the server itself.

pub(super) mod dashboard;
pub(super) mod openapi;
mod pages;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::RouteError;
use crate::fleet::ModelInfo;
use crate::http::access::AllowedModels;
use crate::http::generate::facts;
use crate::http::reply::reject::Reject;
use crate::metrics::Exposition;
use crate::prompt::{ReasoningParser, ToolParser};

/// The process runs and answers; says nothing about workers. Whoever restarts what does not live asks this.
pub(super) async fn live() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Able to answer: a worker takes work, and the router does not drain. Whoever chooses where to send requests asks this.
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

/// How many workers each model needs, for an autoscaler.
pub(super) async fn scale(State(app): State<Arc<App>>) -> Json<Value> {
    Json(app.fleet.scale())
}

/// Every name of every model, as OpenAI lists them, or as Anthropic does where its client asks.
pub(super) async fn models(State(app): State<Arc<App>>, request: Request) -> Json<Value> {
    let (models, headers) = (AllowedModels::of(&request).list(&app), request.headers());
    let mut listed: Vec<(&ModelInfo, &str)> =
        models.iter().map(|model| (model, model.name.as_str())).collect();
    for (model, alias) in
        models.iter().flat_map(|model| model.aliases.iter().map(move |a| (model, a)))
    {
        // of two models with this name it is the first that is found by it
        if !listed.iter().any(|(_, name)| name == alias) {
            listed.push((model, alias));
        }
    }
    if headers.contains_key(ANTHROPIC) {
        let data: Vec<Value> =
            listed.iter().map(|(model, name)| anthropic_model(model, name)).collect();
        let id = |listed: Option<&(&ModelInfo, &str)>| listed.map(|(_, name)| (*name).to_owned());
        let (first, last) = (id(listed.first()), id(listed.last()));
        return Json(json!({"data": data, "has_more": false, "first_id": first, "last_id": last}));
    }
    let data: Vec<Value> =
        listed.iter().map(|(model, name)| model_body(&app, model, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

/// Clients of Anthropic's API send it, and read models in another form.
const ANTHROPIC: &str = "anthropic-version";

fn anthropic_model(model: &ModelInfo, id: &str) -> Value {
    let created = i64::try_from(model.created).unwrap_or(i64::MAX);
    let created = jiff::Timestamp::from_second(created).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    json!({"type": "model", "id": id, "display_name": id, "created_at": created.to_string(),
        "max_input_tokens": model.context_tokens, "max_tokens": model.context_tokens})
}

pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    request: Request,
) -> Result<Json<Value>, Reject> {
    let allowed = AllowedModels::of(&request);
    let (models, headers) = (allowed.list(&app), request.headers());
    let by_alias = || models.iter().find(|model| model.aliases.contains(&name));
    if let Some(model) = models.iter().find(|model| model.name == name).or_else(by_alias) {
        let anthropic = headers.contains_key(ANTHROPIC);
        let body =
            if anthropic { anthropic_model(model, &name) } else { model_body(&app, model, &name) };
        return Ok(Json(body));
    }
    Err(allowed.unknown(&app, &name).into())
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

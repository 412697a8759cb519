//! `/v1/chat/completions` and `/v1/completions` from the first byte to the answer: read, parse, check, send.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};

use crate::app::App;
use crate::error::RouteError;
use crate::http::Surface;
use crate::http::body::{self, BodyLimits, Share};
use crate::http::call::Call;
use crate::http::chat_reply::ChatReply;
use crate::http::completion_reply::CompletionReply;
use crate::http::fields::Fields;
use crate::http::params::{self, ModelFacts};
use crate::http::reject::Reject;
use crate::http::reply::{self, Head};
use crate::http::{chat, completions, json};
use crate::prompt::PromptEngine;
use crate::request::Prompt;

/// Bodies from this size on are parsed away from the threads that serve the sockets; a guess, about 1 ms of parsing.
const LARGE_BODY_BYTES: usize = 256 << 10;

/// Answers a chat.
pub(super) async fn chat(State(surface): State<Surface>, request: Request) -> Response {
    match Call::of(&surface.app, &request) {
        Ok(call) => call.finish(answer_chat(&surface, request, &call).await),
        Err(error) => Reject::from(error).into_response(),
    }
}

async fn answer_chat(surface: &Surface, request: Request, call: &Call) -> Result<Response, Reject> {
    let (mut fields, _memory) = fields(surface, request).await?;
    let model = params::model_name(&mut fields)?;
    let engine = engine(&surface.app, &model)?;
    let mut request = chat::check(fields, model, &facts(&engine))?;
    call.apply(&mut request.job, 0);
    let shape = ChatReply::new(Head::of(&request.job), request.job.n, request.logprobs);
    reply::send(&surface.app, call, vec![request.job], shape, request.delivery).await
}

/// Continues one or several texts.
pub(super) async fn completions(State(surface): State<Surface>, request: Request) -> Response {
    match Call::of(&surface.app, &request) {
        Ok(call) => call.finish(answer_completions(&surface, request, &call).await),
        Err(error) => Reject::from(error).into_response(),
    }
}

async fn answer_completions(
    surface: &Surface,
    request: Request,
    call: &Call,
) -> Result<Response, Reject> {
    let (mut fields, _memory) = fields(surface, request).await?;
    let model = params::model_name(&mut fields)?;
    let engine = engine(&surface.app, &model)?;
    let mut request = completions::check(fields, &model, &facts(&engine))?;
    let mut first_choice = 0;
    for job in &mut request.jobs {
        call.apply(job, first_choice);
        first_choice += job.n;
    }
    let echo = request
        .echo
        .then(|| request.jobs.iter().map(|job| echo_text(&engine, &job.prompt)).collect());
    let first = request.jobs.first().expect("a request has at least one prompt");
    let shape = CompletionReply::new(
        Head::of(first),
        request.jobs.len(),
        first.n,
        request.logprobs.is_some(),
        echo,
    );
    reply::send(&surface.app, call, request.jobs, shape, request.delivery).await
}

fn echo_text(engine: &PromptEngine, prompt: &Prompt) -> String {
    match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(ids) => engine.decode(ids, false),
        Prompt::Chat(_) => String::new(), // completions have none
    }
}

/// The body of `request` as the fields of a JSON object, and the memory that it takes.
pub(super) async fn fields(surface: &Surface, request: Request) -> Result<(Fields, Share), Reject> {
    let config = &surface.app.config.http;
    let limits = BodyLimits { bytes: config.max_body_bytes, time: config.body_timeout };
    let (bytes, share) = body::read(request, limits, &surface.bodies).await?;
    let is_large = bytes.len() >= LARGE_BODY_BYTES;
    let parse = move || Ok((json::parse(&bytes).and_then(Fields::of_body)?, share));
    if !is_large {
        return parse();
    }
    let parsed = tokio::task::spawn_blocking(parse).await;
    parsed.map_err(|error| RouteError::Internal(error.to_string()))?
}

/// The tokenizer and template of `model`.
///
/// # Errors
/// `UnknownModel`, or `NoWorker` where one may still come.
pub(super) fn engine(app: &App, model: &str) -> Result<Arc<PromptEngine>, RouteError> {
    app.fleet.registry.find(model).map(|model| model.engine)
}

fn facts(engine: &PromptEngine) -> ModelFacts {
    let doc = engine.doc();
    ModelFacts {
        vocab_size: doc.vocab_size,
        temperature: doc.generation.temperature,
        top_p: doc.generation.top_p,
        top_k: doc.generation.top_k,
        repetition_penalty: doc.generation.repetition_penalty,
    }
}

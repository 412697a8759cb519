//! `/v1/chat/completions` from the first byte to the answer: read, parse, check, send. `/v1/completions` does the same in `continuing`.

mod continuing;
pub(in crate::http) mod facts;

use std::future::ready;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::future::Either;
use serde_json::Value;

pub(super) use self::continuing::completions;
use self::facts::{facts, read_by};
use crate::app::App;
use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::http::Surface;
use crate::http::access::AllowedModels;
use crate::http::call::Call;
use crate::http::chat::ChatRequest;
use crate::http::parse::body::{self, BodyLimits, Raw};
use crate::http::parse::fields::Fields;
use crate::http::parse::json;
use crate::http::parse::params::{self, MAX_CHOICES};
use crate::http::parse::template_fields;
use crate::http::parse::token_ids::{Ids, IdsField};
use crate::http::reply::chat::ChatReply;
use crate::http::reply::logprobs::Vocabulary;
use crate::http::reply::reject::Reject;
use crate::http::reply::{self, AnswerHead, PreparedAnswer};
use crate::http::{bad_words, chat, grammar};
use crate::limits::memory::{MemoryShare, Refused};
use crate::limits::shares::Holder;
use crate::process::background;
use crate::prompt::Prompt;
use crate::prompt::{PromptEngine, StopStrings};

/// Bodies from this size on are parsed away from the threads that serve the sockets; a guess, at most 1 ms of parsing.
const LARGE_BODY_BYTES: usize = 64 << 10;

/// And from this size on at a low priority, on a thread of their own: tens of milliseconds.
const LONG_BODY_BYTES: usize = 1 << 20;

/// Answers a chat. An `async fn` would keep its request, twice, as long as the answer is waited for.
pub(super) fn chat(
    State(surface): State<Surface>,
    request: Request,
) -> impl Future<Output = Response> + Send {
    let call = match Call::of(&surface.app, &request) {
        Ok(call) => call,
        Err(error) => return Either::Right(ready(Reject::from(error).into_response())),
    };
    let request = Box::new(request);
    Either::Left(async move {
        // in a box of its own, which is gone while the answer is waited for
        let answer = match Box::pin(prepare_chat(&surface, request, &call)).await {
            Ok(prepared) => reply::send(&surface.app, &call, prepared).await,
            Err(reject) => Err(reject),
        };
        call.finish(answer)
    })
}

async fn prepare_chat(
    surface: &Surface,
    request: Box<Request>,
    call: &Call,
) -> Result<Box<PreparedAnswer<ChatReply>>, Reject> {
    let (app, ignored) = (Arc::clone(&surface.app), call.ignored.clone());
    let checked = read(surface, *request, None, move |mut body| {
        body.fields = body.fields.noting(&ignored);
        chat_of(&app, body)
    });
    let mut chat = checked.await?;
    check_grammar(surface, call.holder(), &mut chat).await?;
    let ReadyChat { model, mut request } = chat;
    call.apply(&mut request.job, 0);
    let logprobs = request.logprobs.then(|| vocabulary(&model));
    let shape = ChatReply::new(AnswerHead::of(&model, &request.job), request.job.n, logprobs)
        .reading(request.format, request.shows_reasoning, surface.app.memory.answers.share())
        .scoring_prompt(request.job.scores_prompt.then(|| vocabulary(&model)));
    let (jobs, delivery) = (vec![request.job], request.delivery);
    Ok(Box::new(PreparedAnswer { model, jobs, shape, delivery }))
}

/// A chat that was checked but for what its answer is to follow, and who answers it.
pub(super) struct ReadyChat {
    pub(super) model: Arc<ServedModel>,
    pub(super) request: ChatRequest,
}

/// The chat that a body asks for.
///
/// # Errors
/// `BadRequest` about the first wrong field, or that there is no such model.
pub(super) fn chat_of(app: &App, body: ReadBody) -> Result<ReadyChat, RouteError> {
    chat_within(app, body, None)
}

/// The same, with a limit of its reasoning where the model can be held to one.
///
/// # Errors
/// As those of [`chat_of`].
pub(super) fn chat_within(
    app: &App,
    body: ReadBody,
    most_reasoning: Option<u32>,
) -> Result<ReadyChat, RouteError> {
    let ReadBody { mut fields, mut memory, models, .. } = body;
    let model = models.find(app, &params::model_name(&mut fields)?)?;
    let template = fields.look("chat_template").and_then(Value::as_str);
    let template = template.filter(|_| app.config.http.request_templates);
    let facts = facts(&model.engine, &app.config.parsers, template);
    if let Some(most) =
        most_reasoning.filter(|_| facts.reasoning.is_some() || facts.channels.is_some())
    {
        fields.put("max_reasoning_tokens", most.into());
    }
    let mut request = chat::check(fields, &facts, &mut memory)?;
    let (job, engine) = (&mut request.job, &model.engine);
    request.format = request.format.map(|format| read_by(format, job, engine));
    request.job.memory = Some(Arc::new(memory));
    if let Prompt::Chat(chat) = &request.job.prompt {
        template_fields::allowed(chat, &app.config.http)?;
    }
    request.job.stop = stop_strings(app, &request.stop)?.including(request.stop_included);
    Ok(ReadyChat { model, request })
}

/// Whether the answer can follow what was asked for.
///
/// # Errors
/// `BadRequest` about its place in the request.
pub(super) async fn check_grammar(
    surface: &Surface,
    holder: Holder,
    chat: &mut ReadyChat,
) -> Result<(), RouteError> {
    let ReadyChat { model, request } = chat;
    grammar::check(surface, holder, request.grammar.take()).await?;
    if let Some(held) = &mut request.held {
        request.job.sampling.grammar = Some(held.checked(surface, holder, &model.engine).await?);
    }
    let words = std::mem::take(&mut request.bad_words);
    let limits = bad_words::limits(&model.engine, words, &request.job.sampling).await?;
    request.job.sampling.limits = limits;
    Ok(())
}

/// Stop strings, made ready once for all prompts and choices. They stay as long as the answer, so it pays for them.
fn stop_strings(app: &App, stop: &[String]) -> Result<StopStrings, RouteError> {
    StopStrings::charged(stop, app.memory.answers.share()).map_err(Refused::answer)
}

/// Where `/v1/completions` may have token ids.
pub(super) const PROMPT: IdsField = IdsField { name: "prompt", most: MAX_CHOICES };

/// A body, read and charged for.
pub(super) struct ReadBody {
    pub(super) fields: Fields,
    /// The field of token ids, apart from the others.
    pub(super) ids: Option<Ids>,
    /// Those that its caller may use.
    pub(super) models: AllowedModels,
    /// What all of it takes. Whoever keeps anything that was made of the body keeps this.
    pub(super) memory: MemoryShare,
}

/// What `check` makes of the body of `request`, a JSON object whose field `ids` may hold token ids. A large body is parsed,
/// checked and, if it is wrong, dropped away from the threads that serve the sockets.
pub(super) async fn read<T: Send + 'static>(
    surface: &Surface,
    request: Request,
    ids: Option<IdsField>,
    check: impl FnOnce(ReadBody) -> Result<T, RouteError> + Send + 'static,
) -> Result<T, Reject> {
    let config = &surface.app.config.http;
    let limits = BodyLimits { bytes: config.max_body_bytes, time: config.body_timeout };
    let models = AllowedModels::of(&request);
    let (raw, memory) = body::read(request, limits, &surface.app.memory.bodies).await?;
    let len = raw.len();
    let parsed = move || parse(raw, ids, memory).map(|body| ReadBody { models, ..body });
    Ok(away(surface, len, move || parsed().and_then(check)).await?)
}

/// Does `work` on this many bytes of JSON: at once where they are few, else away from the threads that serve the sockets.
///
/// # Errors
/// Those of the work.
pub(super) async fn away<T: Send + 'static>(
    surface: &Surface,
    len: usize,
    work: impl FnOnce() -> Result<T, RouteError> + Send + 'static,
) -> Result<T, RouteError> {
    if len < LARGE_BODY_BYTES {
        return work();
    }
    let turn = Arc::clone(&surface.app.memory.parsers).acquire_owned().await;
    let turn = turn.map_err(|error| RouteError::internal("no turn to parse a body", error))?;
    // a client that hangs up does not stop the parser: until it is done it keeps its turn and its memory
    let work = move || {
        let checked = work();
        drop(turn);
        checked
    };
    if len < LONG_BODY_BYTES {
        let checked = tokio::task::spawn_blocking(work).await;
        return checked.map_err(|error| RouteError::internal("parsing a body", error))?;
    }
    background::run("parse", work).await?
}

fn parse(raw: Raw, ids: Option<IdsField>, mut memory: MemoryShare) -> Result<ReadBody, RouteError> {
    let bytes = raw.joined(&mut memory)?;
    let held = memory.used();
    let json::Document { value, ids } = json::parse(&bytes, ids, &mut memory)?;
    drop(bytes);
    memory.give_back(held);
    Ok(ReadBody { fields: Fields::of_body(value)?, ids, models: AllowedModels::default(), memory })
}

/// Where the texts of tokens are looked up.
pub(super) fn vocabulary(model: &ServedModel) -> Arc<dyn Vocabulary> {
    Arc::<PromptEngine>::clone(&model.engine)
}

#[cfg(test)]
mod tests;

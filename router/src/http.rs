//! The HTTP surface: OpenAI's API, and beside it Anthropic's messages.
//!
//! `access` decides who may ask for what. Then read in this order: `generate` is a request from its first byte to its
//! answer; `call` is what its headers ask and what those of the answer say, with `explain` for how it was placed; `body`,
//! `json` and `token_ids` read the body; `fields`, `params`, `missing`, `messages`, `chat` and `completions` check it and
//! make it a `Job` (`anthropic` and `responses` make their requests one of a chat first), `grammar` what the answer is to follow; `answers` runs the jobs; `reply`, `chat_reply`, `completion_reply`, `logprobs` and `events` write what
//! comes back, where it is whole by `token_log`, `whole` and `pieces`; `reject` writes what goes wrong. Everything between
//! `json` and `Job` is pure, but for what it charges.

pub(crate) mod access;
mod anthropic;
mod bad_words;
mod call;
mod chat;
mod completions;
mod drain;
mod explain;
mod generate;
mod grammar;
mod ops;
mod parse;
mod pooling;
mod reply;
mod responses;
mod tokenize;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRef, Request};
use axum::response::IntoResponse;
use axum::routing::{get, post};

use crate::app::App;
use crate::error::RouteError;
use crate::http::access::{Access, Around, Cors, require_key, require_operator, require_scraper};
use crate::http::parse::fields::clip;
use crate::http::parse::headers::observe;
use crate::http::reply::reject::Reject;
use crate::limits::turns::{TenantTurns, TurnLimits};
use crate::request::grammar::KnownGrammars;

/// What is served at the port of the clients. Where API keys are configured they guard everything but the probes and what is for
/// operators, who have keys, or addresses of their own, and those alone with `--admin-listen-only`.
pub fn app(state: Arc<App>) -> Router {
    let surface = Surface::of(&state);
    let for_clients = Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/embeddings", post(pooling::embeddings))
        .route("/v1/rerank", post(pooling::rerank))
        .route("/v2/rerank", post(pooling::rerank))
        .route("/rerank", post(pooling::rerank))
        .route("/v1/score", post(pooling::score))
        .route("/score", post(pooling::score))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{response}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{response}/cancel", post(responses::cancel))
        .route("/v1/responses/{response}/input_items", get(responses::input_items))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/models", get(ops::models))
        .route("/v1/models/{*name}", get(ops::model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/v1/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(tokenize::info))
        .route("/tokenizer_info/{*name}", get(tokenize::info))
        .route_layer(Around(require_key));
    let routes = for_anybody().merge(for_clients);
    let access = &state.config.http.access;
    let among_operators = !access.admin_listen_only;
    let routes = match (among_operators, access.public_metrics) {
        (true, _) => routes.merge(for_operators(&state)),
        (false, true) => routes.merge(metrics(&state)),
        (false, false) => routes,
    };
    let cors = Cors(Arc::clone(&state));
    finish(routes, state, surface, among_operators).layer(cors)
}

/// What operators are served where clients are not.
pub(crate) fn operators(state: Arc<App>) -> Router {
    let surface = Surface::of(&state);
    finish(for_anybody().merge(for_operators(&state)), state, surface, true)
}

fn metrics(app: &Arc<App>) -> Router<Surface> {
    let app = Arc::clone(app);
    Router::new()
        .route("/metrics", get(ops::metrics))
        .route_layer(Around(move |request: &mut Request| require_scraper(&app, request)))
}

/// What shows or changes the fleet.
fn for_operators(app: &Arc<App>) -> Router<Surface> {
    Router::new()
        .route("/workers", get(ops::workers))
        .route("/scale", get(ops::scale))
        .route("/workers/{worker}/drain", get(drain::state).post(drain::begin))
        .route("/dashboard/events", get(ops::dashboard::events))
        .route_layer(Around(require_operator))
        .route("/", get(ops::dashboard::page))
        .route("/dashboard/{file}", get(ops::dashboard::file))
        .merge(metrics(app))
}

/// What says itself to whom it answers.
fn for_anybody() -> Router<Surface> {
    Router::new()
        .route("/decisions/{*request}", get(explain::decisions))
        .route("/health", get(ops::live))
        .route("/healthz", get(ops::live))
        .route("/livez", get(ops::live))
        .route("/ping", get(ops::live))
        .route("/ready", get(ops::ready))
        .route("/readyz", get(ops::ready))
        .route("/version", get(ops::version))
        .route("/openapi.json", get(ops::openapi::document))
        .route("/docs", get(ops::openapi::page))
        .route("/docs/page.js", get(ops::openapi::script))
        .route("/docs/page.css", get(ops::openapi::style))
}

/// `among_operators`: see [`Access::of`].
fn finish(
    routes: Router<Surface>,
    state: Arc<App>,
    surface: Surface,
    among_operators: bool,
) -> Router {
    let access = Access::of(&state, among_operators);
    routes
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(Around(move |request: &mut Request| observe(&state, &access, request)))
        .with_state(surface)
}

pub(crate) use reply::events::{EventStream, Outlet, PIECE_HEAD};

/// In the place of an answer, where too many wait already for clients that do not read.
pub(crate) fn too_much_unread() -> impl IntoResponse {
    let retry_after = Duration::from_secs(1);
    Reject::from(RouteError::Overloaded { what: "answers that nobody reads", retry_after })
}

/// Reads a body as requests are read, by itself, with so much memory; for the tests of memory. Gives its values and the
/// most bytes that were charged at once.
///
/// # Errors
/// As a request with this body.
#[doc(hidden)]
pub fn read_body(body: &[u8], bytes: usize) -> Result<(serde_json::Value, usize), RouteError> {
    let mut memory = crate::limits::memory::MemoryPool::private(bytes).share();
    let document = parse::json::parse(body, None, &mut memory)?;
    Ok((document.value, memory.peak()))
}

/// What the handlers share.
#[derive(Debug, Clone)]
struct Surface {
    app: Arc<App>,
    /// Grammars that answers can follow.
    grammars: Arc<KnownGrammars<()>>,
    /// Turns to check one.
    turns: Arc<TenantTurns>,
}

/// Grammars that need not be checked again, 64 KiB at most each. A guess.
const KNOWN_GRAMMARS: usize = 256;

/// Grammars that wait to be checked, of all and of one tenant: some seconds of work, and a second. Guesses.
const WAITING_GRAMMARS: usize = 1024;
const WAITING_GRAMMARS_OF_TENANT: usize = 64;

impl Surface {
    fn of(app: &Arc<App>) -> Self {
        let grammars = Arc::new(KnownGrammars::new(KNOWN_GRAMMARS));
        // half of the cores, as for large bodies
        let at_once = std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2));
        let turns = TenantTurns::new(TurnLimits {
            at_once,
            waiting: WAITING_GRAMMARS,
            waiting_of_tenant: WAITING_GRAMMARS_OF_TENANT,
            what: "grammars that wait to be checked",
        });
        Self { app: Arc::clone(app), grammars, turns }
    }
}

impl FromRef<Surface> for Arc<App> {
    fn from_ref(surface: &Surface) -> Self {
        Self::clone(&surface.app)
    }
}

async fn no_such_path(request: Request) -> Reject {
    Reject::NoSuchPath { path: clip(request.uri().path()) }
}

async fn wrong_method(request: Request) -> Reject {
    Reject::MethodNotAllowed { method: clip(request.method().as_str()) }
}

//! `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients ask them. A request becomes one of
//! `/v1/chat/completions` (`request`, `content`), which has the one check; the answer is written as Anthropic has it (`events`,
//! `reply`).

mod content;
mod events;
mod reply;
pub(super) mod request;

use std::future::ready;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::future::Either;
use serde_json::json;

use crate::http::Surface;
use crate::http::access::caller;
use crate::http::anthropic::events::MessageEvents;
use crate::http::anthropic::reply::{MessageEnd, MessageHead, WholeMessage};
use crate::http::call::Call;
use crate::http::generate::{self, ReadyChat};
use crate::http::parse::headers::request_id;
use crate::http::parse::ids;
use crate::http::reply::answers::Answers;
use crate::http::reply::events::response as events_of;
use crate::http::reply::first_delta;
use crate::http::reply::parts::{GatheredBlocks, PartReader, gather_blocks};
use crate::http::reply::pieces::json_response;
use crate::http::reply::reject::Reject;

const PATH: &str = "/v1/messages";

/// True for paths whose errors are written as Anthropic's.
pub(super) fn is_path(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Answers a conversation.
pub(super) fn messages(
    State(surface): State<Surface>,
    request: Request,
) -> impl Future<Output = Response> + Send {
    let call = match Call::of(&surface.app, &request) {
        Ok(call) => call,
        Err(error) => return Either::Right(ready(Reject::from(error).into_response())),
    };
    let request = Box::new(request);
    Either::Left(async move { call.finish(answer(&surface, request, &call).await) })
}

async fn answer(surface: &Surface, request: Box<Request>, call: &Call) -> Result<Response, Reject> {
    let (app, ignored) = (Arc::clone(&surface.app), call.ignored.clone());
    let request_id = request_id(&request);
    // in a box of its own, with the request's, which are gone while the answer is waited for
    let body = Box::pin(async move {
        let checked = generate::read(surface, *request, None, move |mut body| {
            let fields = body.fields.noting(&ignored);
            let conversation = request::to_chat(fields, false, &mut body.memory)?;
            body.fields = conversation.fields.noting(&ignored);
            generate::chat_within(&app, body, conversation.most_thinking)
                .map_err(|error| request::NAMES.of_client(error))
        });
        checked.await
    });
    let mut ready = body.await?;
    let checked = generate::check_grammar(surface, call.holder(), &mut ready).await;
    checked.map_err(|error| request::NAMES.of_client(error))?;
    let ReadyChat { model, request: mut chat } = ready;
    call.apply(&mut chat.job, 0);
    chat.job.name = ids::name("msg_");
    let head = MessageHead { id: chat.job.name.clone(), model: model.name.clone() };
    call.leaves_out(chat.delivery.annotations);
    let streams = chat.delivery.stream;
    let mut reader = PartReader::of(&mut chat, surface.app.memory.answers.share());
    let mut answers = Answers::place(&surface.app, &model, vec![chat.job]).await?;
    reader.after_prompt(&answers, &model);
    if streams {
        let first = first_delta(&mut answers).await?;
        let events = MessageEvents::new(head, request_id, reader);
        return Ok(events_of(first, answers, events, call.ending(1)));
    }
    let memory = surface.app.memory.answers.share();
    let GatheredBlocks { kept, last, end: ended } =
        gather_blocks(&mut answers, &mut reader, memory).await?;
    let mut end = MessageEnd::default();
    end.note(&last, ended);
    let usage = reader.with_reasoning(answers.usage());
    call.answered(usage, 1);
    drop(answers); // what is left to do is the client's
    Ok(json_response(WholeMessage { head, kept, end, usage, next: None }))
}

/// How many tokens the prompt of a conversation has.
pub(super) async fn count_tokens(
    State(surface): State<Surface>,
    request: Request,
) -> Result<Response, Reject> {
    let app = Arc::clone(&surface.app);
    let salt = caller(&request).cache_of(&app).map(|tenant| tenant.salt(b"")).unwrap_or_default();
    let body = generate::read(&surface, request, None, move |mut body| {
        body.fields = request::to_chat(body.fields, true, &mut body.memory)?.fields;
        generate::chat_of(&app, body).map_err(|error| request::NAMES.of_client(error))
    });
    let ReadyChat { model, request: chat } = body.await?;
    let (engine, job) = (&model.engine, chat.job);
    let ids = engine.encode_charged(job.prompt, engine.whole_context(), salt, job.memory).await?;
    Ok(Json(json!({"input_tokens": ids.len()})).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_anthropic_are_known() {
        assert!(is_path("/v1/messages") && is_path("/v1/messages/count_tokens"));
        assert!(!is_path("/v1/messages2") && !is_path("/v1/models"));
    }
}

//! `/v1/responses`: a request becomes one of `/v1/chat/completions` (`request`, `items`), which has the one check; the response
//! is written as OpenAI has it (`object`, `events`) and stored for who asks again (`keep`, `store`).

mod events;
mod ids;
mod items;
mod keep;
mod object;
pub(super) mod request;

use std::future::ready;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::future::Either;
use futures_util::stream;
use serde_json::{Value, json};

use crate::error::RouteError;
use crate::http::Surface;
use crate::http::call::{Call, owner_of};
use crate::http::generate::{self, ReadBody, ReadyChat};
use crate::http::parse::fields::{Fields, bad, clip, unsupported};
use crate::http::parse::json::parse;
use crate::http::reply::answers::Answers;
use crate::http::reply::blocks::KeptBlocks;
use crate::http::reply::parts::{GatheredBlocks, PartReader, gather_blocks};
use crate::http::reply::reject::Reject;
use crate::http::reply::{events as streams, first_delta};
use crate::http::responses::events::ResponseEvents;
use crate::http::responses::ids::ResponseIds;
use crate::http::responses::keep::Keeper;
use crate::http::responses::object::{ItemExtras, ResponseHead, ResponseStatus};
use crate::http::responses::request::{Known, Wishes};
use crate::limits::memory::MemoryShare;
use crate::response_store::{OwnerId, ResponseStore, StoredResponse};

/// Most responses that one continues. A guess: each is a turn of a conversation.
const LONGEST_CHAIN: usize = 4_096;

/// Makes a response.
pub(super) fn create(
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
    let app = &surface.app;
    let owner = call.owner();
    let ids = ResponseIds::new();
    // in a box of its own, which is gone while the answer is waited for
    let (mut ready, wishes, memory) = Box::pin(read(surface, request, call, &ids)).await?;
    let checked = generate::check_grammar(surface, call.holder(), &mut ready).await;
    checked.map_err(|error| request::NAMES.of_client(error))?;
    let ReadyChat { model, request: mut chat } = ready;
    call.apply(&mut chat.job, 0);

    let id = ids.response();
    chat.job.name.clone_from(&id);
    let Wishes { echo, store, previous, seals, input, origins } = wishes;
    drop(origins);
    let vocabulary = chat.logprobs.then(|| generate::vocabulary(&model));
    let extras = ItemExtras { seals, vocabulary };
    let head = ResponseHead {
        id: &id,
        model: &model.name,
        temperature: chat.job.sampling.temperature,
        top_p: chat.job.sampling.top_p,
        echo: &echo,
    };
    let head = head.write();
    drop(echo);
    let store = store.then(|| (app.responses.clone(), owner));
    let mut keeper = Keeper { ids, head, input: Bytes::from(input), previous, extras, store };
    call.leaves_out(chat.delivery.annotations);
    let streams = chat.delivery.stream;
    let mut reader = PartReader::of(&mut chat, app.memory.answers.share());
    let placed = Answers::place(app, &model, vec![chat.job]).await;
    let mut answers = placed.map_err(|error| request::NAMES.of_client(error))?;
    reader.after_prompt(&answers, &model);
    if streams {
        let first = first_delta(&mut answers).await?;
        let begin =
            |(store, owner): &(ResponseStore, _)| store.begin(*owner, &id, keeper.head.clone());
        let running = keeper.store.as_ref().map(begin);
        let events = ResponseEvents::new(keeper, KeptBlocks::new(memory), reader, running);
        return Ok(streams::response(first, answers, events, call.ending(1)));
    }
    let gathered = gather_blocks(&mut answers, &mut reader, memory).await?;
    let GatheredBlocks { kept, end, .. } = gathered;
    let usage = reader.with_reasoning(answers.usage());
    call.answered(usage, 1);
    drop(answers); // what is left to do is the client's
    let response = keeper.finish(&kept.blocks, ResponseStatus::of(end.finish), usage);
    Ok(sent(&response))
}

/// The chat that a request for a response stands for, what else it says, and what is charged for that.
async fn read(
    surface: &Surface,
    request: Box<Request>,
    call: &Call,
    ids: &ResponseIds,
) -> Result<(ReadyChat, Wishes, MemoryShare), Reject> {
    let app = &surface.app;
    let body = generate::read(surface, *request, None, Ok).await?;
    let known = known(&app.responses, call.owner(), &body.fields).await?;
    let stores = app.responses.is_on();
    let (used, mut memory) = (body.memory.used(), app.memory.answers.share());
    let (app, ids, ignored) = (Arc::clone(app), ids.clone(), call.ignored.clone());
    let ready = generate::away(surface, used, move || {
        let ReadBody { fields, memory: mut body, ids: token_ids, models } = body;
        let fields = fields.noting(&ignored);
        let (fields, wishes) =
            request::to_chat(fields, &known, &ids, stores, (&mut body, &mut memory))?;
        let fields = fields.noting(&ignored);
        let body = ReadBody { fields, memory: body, ids: token_ids, models };
        let ready = generate::chat_of(&app, body);
        let ready =
            ready.map_err(|error| request::NAMES.of_client(wishes.origins.of_client(error)))?;
        Ok((ready, wishes, memory))
    });
    Ok(ready.await?)
}

/// The responses that a request continues or takes items of.
async fn known(store: &ResponseStore, owner: OwnerId, fields: &Fields) -> Result<Known, Reject> {
    let mut known = Known::default();
    let mut next = fields.look("previous_response_id").and_then(Value::as_str).map(str::to_owned);
    while let Some(id) = next {
        let found = store.get(owner, &id).await?.filter(|_| known.chain.len() < LONGEST_CHAIN);
        let found = found.ok_or_else(|| Reject::NoPreviousResponse { response: clip(&id) })?;
        next = found.previous.clone();
        known.chain.push(found);
    }
    known.chain.reverse();
    let items = fields.look("input").and_then(Value::as_array);
    for item in items.into_iter().flatten() {
        let response = request::reference(item).and_then(ResponseIds::response_of);
        if let Some(response) = response.filter(|response| !known.named.contains_key(response))
            && let Some(found) = store.get(owner, &response).await?
        {
            known.named.insert(response, found);
        }
    }
    Ok(known)
}

fn sent(response: &StoredResponse) -> Response {
    pieces([response.head.clone(), response.output.clone(), response.tail.clone()])
}

/// JSON in pieces that nobody copies.
fn pieces(pieces: [Bytes; 3]) -> Response {
    let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    let body = stream::iter(pieces.into_iter().map(Ok::<_, std::convert::Infallible>));
    (json, Body::from_stream(body)).into_response()
}

/// What an id may be asked for.
struct Asked {
    surface: Surface,
    owner: OwnerId,
    id: String,
}

impl Asked {
    fn of(surface: Surface, id: String, request: &Request) -> Result<Self, Reject> {
        let owner = owner_of(request)?;
        Ok(Self { surface, owner, id })
    }

    async fn stored(&self) -> Result<Arc<StoredResponse>, Reject> {
        let found = self.surface.app.responses.get(self.owner, &self.id).await?;
        found.ok_or_else(|| self.unknown())
    }

    /// What there is of a response that runs.
    fn running(&self) -> Option<Response> {
        let head = self.surface.app.responses.running(self.owner, &self.id)?;
        let tail = object::tail(ResponseStatus::InProgress, None, None);
        Some(pieces([head, Bytes::from_static(b"[]"), tail]))
    }

    fn unknown(&self) -> Reject {
        Reject::NoResponse { response: clip(&self.id) }
    }
}

/// A response again, or what there is of one that runs.
pub(super) async fn retrieve(
    State(surface): State<Surface>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Reject> {
    is_whole(query(&request))?;
    let asked = Asked::of(surface, id, &request)?;
    match asked.running() {
        Some(running) => Ok(running),
        None => Ok(sent(&*asked.stored().await?)),
    }
}

/// # Errors
/// A stream is asked for, or something that is not known.
fn is_whole<'a>(query: impl Iterator<Item = (&'a str, &'a str)>) -> Result<(), RouteError> {
    let mut said = false;
    for (name, value) in query {
        let wrong = |problem: &str| bad(clip(name), format!("`{}` {problem}", clip(name)));
        match name {
            "stream" if value == "false" && !said => said = true,
            "stream" if value == "true" => {
                return Err(unsupported(name, "a response is streamed once, to who made it"));
            }
            "stream" => return Err(wrong("must be false, once")),
            name if name.starts_with("include") => {} // of what responses have here anyway
            _ => return Err(wrong("is not known here")),
        }
    }
    Ok(())
}

/// Forgets a response.
pub(super) async fn delete(
    State(surface): State<Surface>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Reject> {
    let asked = Asked::of(surface, id, &request)?;
    if !asked.surface.app.responses.delete(asked.owner, &asked.id).await? {
        return Err(asked.unknown());
    }
    let body = json!({"id": asked.id, "object": "response", "deleted": true});
    Ok(Json(body).into_response())
}

/// Ends a response that is streamed. What came of it is stored.
pub(super) async fn cancel(
    State(surface): State<Surface>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Reject> {
    let asked = Asked::of(surface, id, &request)?;
    let ran = asked.surface.app.responses.cancel(asked.owner, &asked.id).await;
    if let Some(running) = asked.running() {
        return Ok(running); // its client does not read, so its end waits
    }
    let stored = asked.stored().await?;
    if !ran {
        let message = "this response has ended already and cannot be cancelled".to_owned();
        return Err(RouteError::BadRequest { param: None, message }.into());
    }
    Ok(sent(&stored))
}

/// Most items of one page.
const MAX_PAGE: usize = 100;
const PAGE: usize = 20;

/// The items of a request, page by page, the last one first unless `order` is `asc`.
pub(super) async fn input_items(
    State(surface): State<Surface>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Reject> {
    let asked = Asked::of(surface, id, &request)?;
    let stored = asked.stored().await?;
    let page = Page::of(query(&request))?;
    let mut memory = asked.surface.app.memory.bodies.share();
    let Value::Array(mut items) = parse(&stored.input, None, &mut memory)?.value else {
        return Err(RouteError::mistake("stored input is no list").into());
    };
    if !page.ascending {
        items.reverse();
    }
    let first = match &page.after {
        None => 0,
        Some(after) => {
            let place = items.iter().position(|item| item["id"] == after.as_str());
            place.map_or(items.len(), |place| place + 1)
        }
    };
    let has_more = items.len() > first + page.limit;
    let data: Vec<Value> = items.into_iter().skip(first).take(page.limit).collect();
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id(data.first()), id(data.last()));
    let body = json!({"object": "list", "data": data, "first_id": first, "last_id": last,
        "has_more": has_more});
    Ok(Json(body).into_response())
}

/// Names and values after the `?`. Ids of this server have no characters that would be escaped there.
fn query(request: &Request) -> impl Iterator<Item = (&str, &str)> {
    let pairs = request.uri().query().unwrap_or_default().split('&');
    pairs.filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

/// Which items are asked for.
struct Page {
    after: Option<String>,
    limit: usize,
    ascending: bool,
}

impl Page {
    fn of<'a>(query: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Self, RouteError> {
        let mut page = Self { after: None, limit: PAGE, ascending: false };
        for (name, value) in query {
            let wrong = |problem: &str| bad(clip(name), format!("`{}` {problem}", clip(name)));
            match name {
                "after" => page.after = Some(value.to_owned()),
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
                    page.limit = limit.ok_or_else(|| wrong("must be 1 to 100"))?;
                }
                "order" => match value {
                    "asc" => page.ascending = true,
                    "desc" => page.ascending = false,
                    _ => return Err(wrong("must be asc or desc")),
                },
                name if name.starts_with("include") => {} // of what items never have here
                _ => return Err(wrong("is not known here")),
            }
        }
        Ok(page)
    }
}

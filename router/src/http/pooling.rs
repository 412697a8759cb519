//! `/v1/embeddings`, `/v1/rerank` and `/v1/score`: prompts as vectors, and how alike they are.
//!
//! No model that is served here has a head for ranking. A score is the cosine of the angle between two texts' vectors, each
//! of which the model read by itself.

mod reply;
pub(in crate::http) mod request;
mod vectors;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};

use self::reply::{ListHead, ListReply, RankedDocument};
use self::vectors::{Vectors, cosine, normalise, vectors};
use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::http::Surface;
use crate::http::call::Call;
use crate::http::generate::{ReadBody, read};
use crate::http::parse::fields::{Fields, bad};
use crate::http::parse::params;
use crate::http::parse::token_ids::{Ids, IdsField};
use crate::http::reply::pieces::json_response;
use crate::http::reply::reject::Reject;
use crate::limits::memory::MemoryShare;

/// Texts as vectors.
pub(super) async fn embeddings(State(surface): State<Surface>, request: Request) -> Response {
    match Call::of(&surface.app, &request) {
        Ok(call) => call.finish(answer_embeddings(&surface, request, &call).await),
        Err(error) => Reject::from(error).into_response(),
    }
}

/// Documents by how alike they are to a query.
pub(super) async fn rerank(State(surface): State<Surface>, request: Request) -> Response {
    match Call::of(&surface.app, &request) {
        Ok(call) => call.finish(answer_rerank(&surface, request, &call).await),
        Err(error) => Reject::from(error).into_response(),
    }
}

/// How alike texts are.
pub(super) async fn score(State(surface): State<Surface>, request: Request) -> Response {
    match Call::of(&surface.app, &request) {
        Ok(call) => call.finish(answer_score(&surface, request, &call).await),
        Err(error) => Reject::from(error).into_response(),
    }
}

/// A request as its parser has it, whose model it is for, and what its body takes.
struct Checked<T> {
    model: Arc<ServedModel>,
    request: T,
    memory: MemoryShare,
}

async fn checked<T: Send + 'static>(
    surface: &Surface,
    request: Request,
    call: &Call,
    ids: Option<IdsField>,
    check: fn(Fields, Option<Ids>, u32) -> Result<T, RouteError>,
) -> Result<Checked<T>, Reject> {
    let (app, ignored) = (Arc::clone(&surface.app), call.ignored.clone());
    let checked = read(surface, request, ids, move |read| {
        let ReadBody { fields, ids, models, memory } = read;
        let mut fields = fields.noting(&ignored);
        let model = models.find(&app, &params::model_name(&mut fields)?)?;
        let request = check(fields, ids, model.engine.doc().vocab_size)?;
        Ok(Checked { model, request, memory })
    });
    checked.await
}

async fn answer_embeddings(
    surface: &Surface,
    request: Request,
    call: &Call,
) -> Result<Response, Reject> {
    let ids = Some(request::INPUT);
    let Checked { model, request, memory } =
        checked(surface, request, call, ids, request::embeddings).await?;
    let width = model.pooled_width;
    if let Some(asked) = request.dimensions.filter(|asked| *asked > width && width > 0) {
        let message = format!("`dimensions` is {asked}, the vectors of this model have {width}");
        return Err(bad("dimensions", message).into());
    }
    let how = &request.how;
    let mut found = vectors(&surface.app, call, &model, request.inputs, how, memory).await?;
    for vector in &mut found.list {
        if let Some(dimensions) = request.dimensions {
            vector.truncate(dimensions as usize);
        }
        if request.normalize {
            normalise(vector);
        }
    }
    let reply = reply::embeddings(model.name.clone(), found, request.base64);
    Ok(json_response(reply))
}

async fn answer_rerank(
    surface: &Surface,
    request: Request,
    call: &Call,
) -> Result<Response, Reject> {
    let check = |fields, _, _| request::rerank(fields);
    let Checked { model, request, memory } = checked(surface, request, call, None, check).await?;
    let how = &request.how;
    let mut texts: Vec<_> = vec![how.text(request.query)];
    let mut kept = surface.app.memory.answers.share();
    if request.returns_documents {
        let bytes = request.documents.iter().map(String::len).sum();
        kept.charge(bytes).map_err(|refused| Reject::from(refused.answer()))?;
    }
    let documents = if request.returns_documents { request.documents.clone() } else { Vec::new() };
    texts.extend(request.documents.into_iter().map(|document| how.text(document)));
    let found = vectors(&surface.app, call, &model, texts, how, memory).await?;
    let Vectors { list, usage, memory } = found;
    drop(memory); // of the vectors only the scores are left
    let mut documents = documents.into_iter().map(Some).chain(std::iter::repeat(None));
    let mut ranked: Vec<_> = list[1..]
        .iter()
        .enumerate()
        .map(|(index, vector)| RankedDocument {
            index,
            text: documents.next().flatten(),
            score: cosine(&list[0], vector),
        })
        .collect();
    ranked.sort_by(|a, b| b.score.total_cmp(&a.score)); // those that are equally alike stay in order
    ranked.truncate(request.top_n);
    let head = ListHead { prefix: "rerank-", list: "results", model: model.name.clone(), usage };
    Ok(json_response(ListReply::new(head, ranked, reply::ranked, kept)))
}

async fn answer_score(
    surface: &Surface,
    request: Request,
    call: &Call,
) -> Result<Response, Reject> {
    let check = |fields, _, _| request::score(fields);
    let Checked { model, request, memory } = checked(surface, request, call, None, check).await?;
    let (how, firsts) = (&request.how, request.first.len());
    let texts = request.first.into_iter().chain(request.second).map(|text| how.text(text));
    let found = vectors(&surface.app, call, &model, texts.collect(), how, memory).await?;
    let Vectors { list, usage, memory } = found;
    let (first, second) = list.split_at(firsts);
    let pairs = first.iter().cycle().zip(second);
    let scores: Vec<f64> = pairs.map(|(a, b)| cosine(a, b)).collect();
    let head = ListHead { prefix: "score-", list: "data", model: model.name.clone(), usage };
    Ok(json_response(ListReply::new(head, scores, reply::scored, memory)))
}

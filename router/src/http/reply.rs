//! What both kinds of answer have in common: who it is, how it is collected, how it is sent.

pub(super) mod answers;
pub(super) mod blocks;
pub(super) mod chat;
pub(super) mod completion;
pub(super) mod events;
pub(super) mod logprobs;
pub(super) mod message;
pub(super) mod parts;
pub(super) mod pieces;
pub(super) mod readers;
pub(super) mod reject;
pub(super) mod token_ids;
pub(super) mod token_log;
mod usage;
pub(super) mod whole;

use std::sync::Arc;

use axum::response::Response;

use crate::app::App;
use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::http::call::Call;
use crate::http::parse::ids;
use crate::http::parse::params::Delivery;
use crate::http::reply::answers::Answers;
use crate::http::reply::events::{AnnotatedRequest, ChoiceChunks, Events, Opening};
use crate::http::reply::message::Message;
use crate::http::reply::pieces::json_response;
use crate::http::reply::readers::ChoiceReaders;
use crate::http::reply::reject::Reject;
use crate::http::reply::token_log::TokenLog;
use crate::http::reply::whole::{Shape, WholeAnswer};
use crate::limits::memory::{MemoryShare, Refused};
use crate::request::{Delta, FinishReason, Job};

pub(super) use usage::UsageBody;

/// OpenAI's `system_fingerprint`: it changes when the software that serves does.
pub(super) const FINGERPRINT: &str = concat!("headrace-", env!("CARGO_PKG_VERSION"));

/// What stands in every body of one answer.
#[derive(Debug, Clone)]
pub(super) struct AnswerHead {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
}

impl AnswerHead {
    pub(super) fn of(model: &ServedModel, job: &Job) -> Self {
        Self { id: job.name.clone(), created: ids::unix_seconds(), model: model.name.clone() }
    }
}

/// A choice as far as it has come.
#[derive(Debug, Default)]
pub(super) struct ReplyChoice {
    pub(super) text: String,
    /// The text's parts, in the place of `text` where answers are read.
    pub(super) message: Message,
    /// The prompt's tokens first, where they were asked for.
    pub(super) tokens: TokenLog,
    /// Of the answer and of the prompt, where they were asked for.
    pub(super) ids: Option<Vec<u32>>,
    pub(super) prompt_ids: Option<Arc<Vec<u32>>>,
    /// The prompt's tokens with their log-probabilities, where those stand apart.
    pub(super) prompt: Option<TokenLog>,
    pub(super) finish: Option<&'static str>,
}

/// A request that was read and checked: who answers it, what, and how its answer looks.
pub(super) struct PreparedAnswer<S> {
    pub(super) model: Arc<ServedModel>,
    pub(super) jobs: Vec<Job>,
    pub(super) shape: S,
    pub(super) delivery: Delivery,
}

/// Places the jobs and sends the answer. Until its first delta is there no status is sent either, so everything that
/// goes wrong before is an error with a status of its own, streamed or not.
///
/// # Errors
/// Why there is no answer.
pub(super) async fn send<S: Shape + Events>(
    app: &Arc<App>,
    call: &Call,
    mut prepared: Box<PreparedAnswer<S>>,
) -> Result<Response, Reject> {
    let PreparedAnswer { model, jobs, shape, delivery } = &mut *prepared;
    let (jobs, delivery) = (std::mem::take(jobs), *delivery);
    let num_choices = jobs.iter().map(|job| job.n as usize).sum();
    let scores_prompt = jobs.iter().any(|job| job.scores_prompt);
    let mut memory = app.memory.answers.share();
    if !delivery.stream {
        call.leaves_out(delivery.annotations);
        check_size(&jobs, app.memory.answers.limit())?;
    }
    let mut answers = Answers::place(app, model, jobs).await?;
    if let Some(readers) = shape.readers() {
        readers.after_prompt(answers.prompt_ids(), |ids| model.engine.decode(ids, false));
    }
    if delivery.stream {
        let first = first_delta(&mut answers).await?;
        let request =
            AnnotatedRequest { prompt: answers.prompt_ids(), request_id: call.request_id() };
        let text = |ids: &[u32]| model.engine.decode(ids, false);
        let opening = Opening::of(delivery.annotations, &request, text, memory)?;
        let writer = ChoiceChunks::new(prepared.shape, delivery).after(opening);
        return Ok(events::response(first, answers, writer, call.ending(num_choices)));
    }
    let mut choices: Vec<ReplyChoice> = Vec::new();
    choices.resize_with(num_choices, || ReplyChoice {
        prompt: scores_prompt.then(TokenLog::default),
        ..ReplyChoice::default()
    });
    while let Some(delta) = answers.next().await {
        if let Some(ended) = gather(&mut choices, delta?, shape.readers(), &mut memory)? {
            answers.end(ended);
        }
    }
    if choices.iter().any(|choice| choice.finish.is_none()) {
        return Err(nothing().into());
    }
    let usage = shape.count_reasoning(answers.usage());
    call.answered(usage, num_choices);
    drop(answers); // what is left to do is the client's
    Ok(json_response(WholeAnswer::new(prepared.shape, choices, usage, memory)))
}

/// Refuses an answer with log-probabilities that could not be kept if it were as long as it may be. Where the client
/// names no length it may well be shorter: that one fails if it is not.
fn check_size(jobs: &[Job], limit: usize) -> Result<(), RouteError> {
    let bytes = jobs.iter().map(|job| {
        let Some(top) = job.sampling.logprobs else { return 0 };
        let tokens = (job.max_tokens.unwrap_or(0) as usize).saturating_mul(job.n as usize);
        tokens.saturating_mul(token_log::token_bytes(top as usize))
    });
    if bytes.fold(0, usize::saturating_add) > limit {
        return Err(RouteError::AnswerTooLarge { limit });
    }
    Ok(())
}

/// What a stream begins with: its status is 200 from here on.
///
/// # Errors
/// Why there is no answer.
pub(super) async fn first_delta(answers: &mut Answers) -> Result<Delta, RouteError> {
    answers.next().await.ok_or_else(nothing)?
}

pub(super) fn nothing() -> RouteError {
    RouteError::mistake("an answer ended without its end")
}

/// Adds a delta to its choice; gives the choice if it is over before its worker is.
pub(super) fn gather(
    choices: &mut [ReplyChoice],
    delta: Delta,
    readers: Option<&mut ChoiceReaders>,
    memory: &mut MemoryShare,
) -> Result<Option<u32>, RouteError> {
    let choice = choices.get_mut(delta.choice as usize);
    let choice = choice.ok_or_else(|| RouteError::mistake("a delta of no choice"))?;
    let finish = if let Some(readers) = readers {
        let mut parts = Vec::new();
        let finish = readers.read(&delta, &mut parts)?;
        for part in parts {
            choice.message.push(part, memory).map_err(Refused::answer)?;
        }
        finish
    } else {
        // a string doubles
        memory.charge(2 * delta.text.len()).map_err(Refused::answer)?;
        choice.text.push_str(&delta.text);
        delta.finish.map(FinishReason::as_str)
    };
    let mut prompt = delta.prompt_tokens;
    if let Some(log) = choice.prompt.as_mut() {
        let first = prompt.take().filter(|_| log.is_empty());
        for token in first.into_iter().flatten() {
            log.push(&token, memory).map_err(Refused::answer)?;
        }
    }
    let prompt = prompt.filter(|_| choice.tokens.is_empty());
    for token in prompt.into_iter().flatten().chain(delta.tokens) {
        choice.tokens.push(&token, memory).map_err(Refused::answer)?;
    }
    if let Some(ids) = delta.ids {
        memory.charge(2 * size_of_val(&ids[..])).map_err(Refused::answer)?; // a list doubles
        choice.ids.get_or_insert_default().extend(ids);
    }
    if let Some(ids) = delta.prompt_ids {
        memory.charge(size_of_val(&ids[..])).map_err(Refused::answer)?;
        choice.prompt_ids.get_or_insert(ids);
    }
    choice.finish = choice.finish.or(finish);
    Ok((finish.is_some() && delta.finish.is_none()).then_some(delta.choice))
}

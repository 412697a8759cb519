//! `/v1/completions`: several prompts in one request, and answers that begin with their prompts.

use std::future::ready;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::future::Either;

use super::facts::facts;
use super::{PROMPT, ReadBody, read, stop_strings, vocabulary};
use crate::http::Surface;
use crate::http::call::Call;
use crate::http::parse::params;
use crate::http::reply::completion::{CompletionReply, Echo};
use crate::http::reply::reject::Reject;
use crate::http::reply::{self, AnswerHead, PreparedAnswer};
use crate::http::{bad_words, completions, grammar};

/// Continues one or several texts.
pub(in crate::http) fn completions(
    State(surface): State<Surface>,
    request: Request,
) -> impl Future<Output = Response> + Send {
    let call = match Call::of(&surface.app, &request) {
        Ok(call) => call,
        Err(error) => return Either::Right(ready(Reject::from(error).into_response())),
    };
    let request = Box::new(request);
    Either::Left(async move {
        let answer = match Box::pin(prepare_completions(&surface, request, &call)).await {
            Ok(prepared) => reply::send(&surface.app, &call, prepared).await,
            Err(reject) => Err(reject),
        };
        call.finish(answer)
    })
}

async fn prepare_completions(
    surface: &Surface,
    request: Box<Request>,
    call: &Call,
) -> Result<Box<PreparedAnswer<CompletionReply>>, Reject> {
    let (app, ignored) = (Arc::clone(&surface.app), call.ignored.clone());
    let checked = read(surface, *request, Some(PROMPT), move |read| {
        let ReadBody { fields, ids, models, mut memory } = read;
        let mut fields = fields.noting(&ignored);
        let model = models.find(&app, &params::model_name(&mut fields)?)?;
        let engine = &model.engine;
        let facts = facts(engine, &app.config.parsers, None);
        let request = completions::check(fields, ids, &facts)?;
        let echo = request.echo.then(|| {
            let texts = request
                .jobs
                .iter()
                .map(|job| completions::echo_text(engine, &job.prompt, &mut memory));
            texts.collect::<Result<Vec<_>, _>>()
        });
        let stop = stop_strings(&app, &request.stop)?.including(request.stop_included);
        let echo = echo.transpose()?;
        Ok((model, request, echo, stop, Arc::new(memory)))
    });
    let (model, mut request, echo, stop, memory) = checked.await?;
    grammar::check(surface, call.holder(), request.grammar.take()).await?;
    let words = std::mem::take(&mut request.bad_words);
    let first = request.jobs.first().expect("a request has at least one prompt");
    let limits = bad_words::limits(&model.engine, words, &first.sampling).await?;
    let mut first_choice = 0;
    for job in &mut request.jobs {
        job.sampling.limits.clone_from(&limits);
        call.apply(job, first_choice);
        first_choice += job.n;
        job.memory = Some(Arc::clone(&memory));
        job.stop = stop.clone();
    }
    let echo = echo.map(|texts| Echo::new(texts, Arc::clone(&memory)));
    drop(memory); // from here on it lasts as long as what it was charged for
    let first = request.jobs.first().expect("a request has at least one prompt");
    let shape = CompletionReply::new(
        AnswerHead::of(&model, first),
        request.jobs.len(),
        first.n,
        request.logprobs.map(|_| vocabulary(&model)),
        echo,
    )
    .scoring_prompt(first.scores_prompt.then(|| vocabulary(&model)));
    let (jobs, delivery) = (request.jobs, request.delivery);
    Ok(Box::new(PreparedAnswer { model, jobs, shape, delivery }))
}

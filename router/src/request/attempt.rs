//! One attempt at a choice: a place for it, and its submission there, with what earlier attempts have generated.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Job;
use super::choice::Common;
use super::spans;
use crate::core::blocks::tokens_le;
use crate::core::candidate::WorkerId;
use crate::core::frame::{Pooling, RequestId, Resume, Sampling, Submit};
use crate::core::scheduler::PlacementRequest;
use crate::decisions::actual::Recorder;
use crate::error::RouteError;
use crate::fleet::booking::LegParent;
use crate::fleet::stream::TokenStream;

/// A choice on its worker.
#[derive(Debug)]
pub(super) struct PlacedChoice {
    /// For whoever asks whether it went to the right place. Drops before the stream, so before the worker hears of it.
    pub(super) recorder: Recorder,
    pub(super) stream: TokenStream,
    pub(super) submitted: Instant,
}

/// What the attempts before left behind; the default is the first attempt.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    /// Tokens of the answer that exist already.
    pub(super) generated: Vec<u32>,
    /// Workers to stay away from.
    pub(super) excluded: Vec<WorkerId>,
    /// Why the one before ended.
    pub(super) before: Option<RouteError>,
}

impl Attempt {
    /// Gives the choice to a worker. An error comes with the worker that it is about, where there is one. Many wait for a place,
    /// each with all that this future has room for.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
    pub(super) fn run(
        self,
        common: Arc<Common>,
        index: u32,
    ) -> impl Future<Output = Result<PlacedChoice, (RouteError, Option<WorkerId>)>> + Send {
        async move {
            let (job, fleet) = (&common.job, &common.app.fleet);
            let hashing = Instant::now();
            let wanted = self.wanted(&common, index);
            let hash_time = common.prompt.hash_time + hashing.elapsed();
            let (choice, asked) = (common.choice(index), Instant::now());
            let priority = on_the_worker(wanted.yields, wanted.priority);
            let queue = job.request_trace.part("queue", asked).map(Box::new);
            let place = match fleet.place(&common.model, wanted, common.deadline()).await {
                Ok(place) => place,
                Err(error) => {
                    job.request_trace.waited(choice, asked.elapsed());
                    queue.inspect(|queue| spans::failed(queue, &error));
                    // where no other worker is left, the error of the one before says more
                    let nowhere = matches!(error, RouteError::NoWorker { .. });
                    return Err((self.before.filter(|_| nowhere).unwrap_or(error), None));
                }
            };
            if let Some(queue) = queue {
                queue.end_at(asked + place.waited());
            }
            let route = hash_time + asked.elapsed().saturating_sub(place.waited());
            spans::route(&job.request_trace, choice, &place, route);
            job.request_trace.waited(choice, place.waited());
            job.request_trace.placed(choice, &place, route);
            let recorder = Recorder::begin(place.waited());
            common.app.decisions.note(&job.account, place.decision(), recorder.actual());
            let worker = place.worker();
            let submit = Box::new(self.submit(&common, index, priority)); // moved from hand to hand
            tracing::debug!(
                request = job.name,
                worker = place.worker_name(),
                prefill = place.prefill_name(),
                resumed = self.generated.len(),
                "submit"
            );
            let memory = common.app.memory.answers.share();
            let request = job.request_trace.span().map(|span| LegParent {
                span: Arc::clone(span),
                choice,
                is_retry: self.before.is_some(),
            });
            // in a box, which those who wait for a place do not have yet
            let submitted =
                Box::pin(place.submit(submit, common.model.pooled_width, memory, request));
            let submitted = submitted.await;
            let stream = submitted.map_err(|error| {
                recorder.failed(Instant::now(), &error);
                (error, Some(worker))
            })?;
            Ok(PlacedChoice { recorder, stream, submitted: Instant::now() })
        }
    }

    /// What it asks of the fleet.
    fn wanted(&self, common: &Common, index: u32) -> PlacementRequest {
        let (job, prompt, fleet) = (&common.job, &common.prompt, &common.app.fleet);
        let begun = !self.generated.is_empty();
        let keys = if begun {
            // here and now, long or not: an answer that has begun does not fail for want of a thread
            let ids: Vec<u32> = prompt.ids.iter().chain(&self.generated).copied().collect();
            fleet.block_keys_now(common.model.block_tokens, &ids, &job.salt)
        } else {
            Arc::clone(&prompt.keys)
        };
        let generated = u32::try_from(self.generated.len()).unwrap_or(u32::MAX);
        let prompt_tokens = u32::try_from(prompt.ids.len()).unwrap_or(u32::MAX);
        let (request, prefill_request) = fleet.new_legs();
        // on its way already: late is better than not at all, and it counts as late
        let first_token_by = job.request_trace.first_token_by().filter(|_| self.before.is_none());
        PlacementRequest {
            request,
            prefill_request,
            name: Arc::clone(job.request_trace.request_id()),
            prompt_tokens: prompt_tokens.saturating_add(generated),
            keys,
            reuses: !computes_all(job) || begun,
            max_tokens: common.max_tokens.saturating_sub(generated),
            session: job.session.clone(),
            tenant: job.holder.tenant,
            // whoever reads an answer already goes before those who wait for theirs
            priority: if begun { i8::MAX } else { job.priority },
            yields: common.permit.yields(index) && !begun,
            deadline_ms: first_token_by.map(|by| fleet.at_ms(by)),
            excluded: self.excluded.clone(),
            resumes: begun,
            explains: job.request_trace.explains(),
        }
    }

    /// The frame of the whole request, still without a name.
    fn submit(&self, common: &Common, index: u32, priority: i8) -> Submit {
        let sampling = &common.job.sampling;
        let seed = sampling.seed.wrapping_add(index.into());
        // to a worker it means all of `stop_ids`, of which only the client's own are left
        let ignore_eos = sampling.ignore_eos && common.stop_ids.is_empty();
        let left = common.deadline().saturating_duration_since(Instant::now());
        let resume = (!self.generated.is_empty()).then(|| Resume {
            generated: tokens_le(&self.generated),
            rng_counter: self.generated.len() as u64,
        });
        Submit {
            request: RequestId(0),
            tokens: tokens_le(&common.prompt.ids),
            sampling: Sampling { seed, ignore_eos, ..sampling.clone() },
            stop_ids: common.stop_ids.clone(),
            max_tokens: common.max_tokens,
            deadline_ms: Some(millis(left)),
            priority,
            salt: common.job.salt.clone(),
            kv_from: None,
            resume,
            kv_transfer: None,
            pooling: common.job.pooling,
            request_id: Arc::clone(common.job.request_trace.request_id()),
            trace: None,
        }
    }
}

/// It wants something of each token of its prompt, so nothing cached is of use to it.
fn computes_all(job: &Job) -> bool {
    job.sampling.prompt_logprobs.is_some() || job.pooling == Some(Pooling::Mean)
}

/// Its priority there, where a sequence of low priority gives its row to one that is not: the many answers of one tenant
/// do not hold up the few of another.
fn on_the_worker(yields: bool, priority: i8) -> i8 {
    if yields { priority.min(0).saturating_sub(1) } else { priority }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

//! One choice of an answer: placed, submitted, its tokens turned into deltas; tried again elsewhere as long as the client
//! has seen nothing of it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::{Delta, FinishReason, Job, TokenText};
use crate::app::App;
use crate::core::candidate::WorkerId;
use crate::core::frame::{Finish, Ranked, Sampling, Submit, TokenLogprob};
use crate::error::RouteError;
use crate::fleet::booking::Wanted;
use crate::prompt::{Decoder, PromptEngine, StopStrings};
use crate::stream::{Chunk, TokenStream};

/// What all choices of a job share.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) app: Arc<App>,
    pub(super) engine: Arc<PromptEngine>,
    pub(super) job: Job,
    pub(super) prompt: EncodedPrompt,
    pub(super) max_tokens: u32,
    pub(super) begin: Instant,
    pub(super) deadline: Instant,
    /// The job's, and the model's own unless they are to be ignored.
    stop_ids: Vec<u32>,
    stop: StopStrings,
}

/// The prompt as workers see it.
#[derive(Debug)]
pub(super) struct EncodedPrompt {
    /// Its tokens.
    pub(super) ids: Arc<[u32]>,
    /// Keys of its full blocks.
    pub(super) keys: Arc<[u64]>,
    /// What hashing them took.
    pub(super) hash_time: Duration,
    /// The answer goes on the text of the prompt, rather than being a message of its own.
    pub(super) goes_on: bool,
}

impl Common {
    pub(super) fn new(
        app: Arc<App>,
        engine: Arc<PromptEngine>,
        job: Job,
        prompt: EncodedPrompt,
        max_tokens: u32,
        begin: Instant,
    ) -> Self {
        let deadline = begin + app.config.deadlines.request;
        let mut stop_ids = job.stop_ids.clone();
        if !job.sampling.ignore_eos {
            stop_ids.extend(&engine.doc().eos_token_ids);
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        let stop = StopStrings::new(&job.stop);
        Self { app, engine, job, prompt, max_tokens, begin, deadline, stop_ids, stop }
    }

    /// Number of a choice among all of the HTTP request.
    fn choice(&self, index: u32) -> u32 {
        self.job.first_choice + index
    }

    fn token(&self, id: u32, logprob: Option<f64>, top: &[Ranked]) -> TokenText {
        let (text, bytes) = self.engine.token_text(id);
        let top = top.iter().map(|Ranked(id, logprob)| self.token(*id, Some(*logprob), &[]));
        TokenText { id, text, bytes, logprob, top: top.collect() }
    }
}

/// One choice.
#[derive(Debug)]
pub(super) struct Choice {
    common: Arc<Common>,
    index: u32,
    decoder: Decoder,
    state: State,
    /// Workers that lost or failed it.
    excluded: Vec<WorkerId>,
    /// The client has a part of it.
    delivered: bool,
    /// From its worker of now.
    first_token: Option<Instant>,
    completion_tokens: u32,
    cached_tokens: u32,
}

type Placing = Pin<Box<dyn Future<Output = Result<Leg, (RouteError, Option<WorkerId>)>> + Send>>;

enum State {
    Placing(Placing),
    Running(Leg),
    /// Nothing is to be generated and nothing to be computed.
    Empty,
    Ended,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Placing(_) => "Placing",
            Self::Running(_) => "Running",
            Self::Empty => "Empty",
            Self::Ended => "Ended",
        })
    }
}

/// A choice on its worker.
struct Leg {
    stream: TokenStream,
    worker: WorkerId,
    submitted: Instant,
}

impl Choice {
    pub(super) fn new(common: &Arc<Common>, index: u32) -> Self {
        let nothing = common.max_tokens == 0 && common.job.sampling.prompt_logprobs.is_none();
        let state = if nothing { State::Empty } else { place(common, index, Vec::new()) };
        Self {
            common: Arc::clone(common),
            index,
            decoder: decoder(common),
            state,
            excluded: Vec::new(),
            delivered: false,
            first_token: None,
            completion_tokens: 0,
            cached_tokens: 0,
        }
    }

    pub(super) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }

    pub(super) fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    pub(super) fn has_begun(&self) -> bool {
        self.completion_tokens > 0
    }

    pub(super) fn ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// Cancels it if it still runs.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
    }

    /// When the next token is overdue.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let State::Running(leg) = &self.state else { return None };
        let deadlines = &self.common.app.config.deadlines;
        Some(match leg.stream.last_arrival() {
            Some(last) => last + deadlines.token,
            None => leg.submitted + deadlines.first_token,
        })
    }

    /// A deadline has passed.
    pub(super) fn overdue(&self, now: Instant) -> Option<RouteError> {
        if now >= self.common.deadline && !self.ended() {
            let state = "for its last token";
            return Some(RouteError::DeadlineExceeded { state, waited: now - self.common.begin });
        }
        let State::Running(leg) = &self.state else { return None };
        if now < self.deadline()? {
            return None;
        }
        // the worker holds the request and is silent about it
        self.common.app.fleet.registry.stuck(leg.worker);
        Some(match leg.stream.last_arrival() {
            Some(last) => {
                RouteError::DeadlineExceeded { state: "for the next token", waited: now - last }
            }
            None => RouteError::DeadlineExceeded {
                state: "for the first token",
                waited: now - leg.submitted,
            },
        })
    }

    /// Done when it is with a worker.
    pub(super) fn poll_placed(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), RouteError>> {
        while let State::Placing(placing) = &mut self.state {
            match std::task::ready!(placing.as_mut().poll(context)) {
                Ok(leg) => self.state = State::Running(leg),
                Err((error, worker)) => self.again(error, worker)?,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// The next delta; `None` once it ended.
    pub(super) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delta, RouteError>>> {
        loop {
            if let Err(error) = std::task::ready!(self.poll_placed(context)) {
                return Poll::Ready(Some(Err(error)));
            }
            let leg = match &self.state {
                State::Running(leg) => leg,
                State::Empty => {
                    self.state = State::Ended;
                    let finish = Some(FinishReason::Length);
                    return Poll::Ready(Some(Ok(Delta {
                        choice: self.index,
                        finish,
                        ..Delta::default()
                    })));
                }
                State::Placing(_) | State::Ended => return Poll::Ready(None),
            };
            let (worker, submitted) = (leg.worker, leg.submitted);
            let delta = match std::task::ready!(leg.stream.poll_next(context)) {
                Ok(chunk) => self.delta(chunk),
                Err(error) => match self.again(error, Some(worker)) {
                    Ok(()) => continue,
                    Err(error) => return Poll::Ready(Some(Err(error))),
                },
            };
            match delta {
                Ok(Some(delta)) => {
                    self.note_progress(submitted, delta.finish.is_some());
                    if delta.finish.is_some() {
                        self.state = State::Ended; // after a stop string this cancels the worker
                    }
                    return Poll::Ready(Some(Ok(delta)));
                }
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    /// Places it anew, unless the client has a part of it, or `error` would only come again.
    fn again(&mut self, error: RouteError, worker: Option<WorkerId>) -> Result<(), RouteError> {
        let tries = self.excluded.len();
        let retries = self.common.app.config.bounds.retries as usize;
        let Some(worker) =
            worker.filter(|_| error.retryable() && !self.delivered && tries < retries)
        else {
            return Err(error);
        };
        tracing::info!(request = self.common.job.name, %error, "trying another worker");
        self.common.app.metrics.retries.inc();
        self.excluded.push(worker);
        self.decoder = decoder(&self.common);
        self.completion_tokens = 0;
        self.cached_tokens = 0;
        self.first_token = None;
        self.state = place_again(&self.common, self.index, self.excluded.clone(), error);
        Ok(())
    }

    /// The client is about to get a part of it.
    fn note_progress(&mut self, submitted: Instant, is_last: bool) {
        let (journey, choice) = (&self.common.job.journey, self.common.choice(self.index));
        if let Some(first) = self.first_token.filter(|_| !self.delivered) {
            journey.first_token(choice, first, first.saturating_duration_since(submitted));
        }
        self.delivered = true;
        if let State::Running(leg) = &self.state
            && let Some(last) = leg.stream.last_arrival().filter(|_| is_last)
        {
            journey.last_token(last);
        }
    }

    /// What a chunk is to the client; `None` if nothing is certain yet.
    fn delta(&mut self, chunk: Chunk) -> Result<Option<Delta>, RouteError> {
        let Chunk { mut ids, logprobs, prompt_logprobs, cached_tokens, finish } = chunk;
        self.cached_tokens = cached_tokens.unwrap_or(self.cached_tokens);
        let generated = ids.len();
        if generated > 0 {
            self.first_token.get_or_insert_with(Instant::now);
        }
        if finish == Some(Finish::Stop)
            && ids.last().is_some_and(|last| self.common.stop_ids.contains(last))
        {
            ids.pop(); // the stop token is no part of the text
        }
        let decoded = self.decoder.push(&ids);
        let mut delta = Delta { choice: self.index, text: decoded.text, ..Delta::default() };
        let mut stopped = decoded.stopped;
        if let Some(finish) = finish {
            delta.text.push_str(&self.decoder.finish());
            stopped = self.decoder.stopped();
            delta.finish = Some(match finish {
                Finish::Stop => FinishReason::Stop,
                Finish::Length => FinishReason::Length,
                Finish::Cancelled if stopped => FinishReason::Stop,
                Finish::Cancelled => {
                    return Err(RouteError::DeadlineExceeded {
                        state: "for its last token",
                        waited: self.common.begin.elapsed(),
                    });
                }
            });
        }
        // after a stop string nothing of the rest was asked for
        let used = if decoded.stopped { decoded.consumed } else { generated };
        if stopped {
            delta.finish = Some(FinishReason::Stop);
            ids.truncate(decoded.consumed);
        }
        self.completion_tokens += u32::try_from(used).unwrap_or(u32::MAX);
        let with_logprobs = ids.iter().zip(&logprobs);
        delta.tokens = with_logprobs
            .map(|(id, at)| self.common.token(*id, Some(at.logprob), &at.top))
            .collect();
        delta.prompt_tokens = prompt_logprobs.map(|logprobs| self.prompt_tokens(&logprobs));
        let empty = delta.text.is_empty()
            && delta.tokens.is_empty()
            && delta.prompt_tokens.is_none()
            && delta.finish.is_none();
        Ok((!empty).then_some(delta))
    }

    fn prompt_tokens(&self, logprobs: &[TokenLogprob]) -> Vec<TokenText> {
        let Some((first, rest)) = self.common.prompt.ids.split_first() else { return Vec::new() };
        let rest = rest.iter().zip(logprobs);
        let rest = rest.map(|(id, at)| self.common.token(*id, Some(at.logprob), &at.top));
        [self.common.token(*first, None, &[])].into_iter().chain(rest).collect()
    }
}

fn decoder(common: &Common) -> Decoder {
    let decoder = common.engine.decoder_with(&common.stop, common.job.skip_special_tokens);
    if common.prompt.goes_on { decoder.going_on() } else { decoder }
}

fn place(common: &Arc<Common>, index: u32, excluded: Vec<WorkerId>) -> State {
    State::Placing(Box::pin(place_and_submit(Arc::clone(common), index, excluded)))
}

/// Like [`place`], but where no other worker is left, the error of the one before says more.
fn place_again(
    common: &Arc<Common>,
    index: u32,
    excluded: Vec<WorkerId>,
    before: RouteError,
) -> State {
    let placing = place_and_submit(Arc::clone(common), index, excluded);
    State::Placing(Box::pin(async move {
        placing.await.map_err(|(error, worker)| {
            let nowhere = matches!(error, RouteError::NoWorker { .. });
            if nowhere { (before, None) } else { (error, worker) }
        })
    }))
}

async fn place_and_submit(
    common: Arc<Common>,
    index: u32,
    excluded: Vec<WorkerId>,
) -> Result<Leg, (RouteError, Option<WorkerId>)> {
    let (job, registry) = (&common.job, &common.app.fleet.registry);
    let wanted = Wanted {
        name: job.journey.request_id().to_owned(),
        model: job.model.clone(),
        engine: Arc::clone(&common.engine),
        prompt_tokens: u32::try_from(common.prompt.ids.len()).unwrap_or(u32::MAX),
        keys: Arc::clone(&common.prompt.keys),
        reuses: job.sampling.prompt_logprobs.is_none(),
        max_tokens: common.max_tokens,
        session: job.session.clone(),
        tenant: job.tenant,
        priority: job.priority,
        first_token_by: job.journey.first_token_by(),
        excluded,
    };
    let (choice, asked) = (common.choice(index), Instant::now());
    let place = match registry.place(&wanted, common.deadline).await {
        Ok(place) => place,
        Err(error) => {
            job.journey.waited(choice, asked.elapsed());
            return Err((error, None));
        }
    };
    let route = common.prompt.hash_time + asked.elapsed().saturating_sub(place.waited());
    job.journey.waited(choice, place.waited());
    job.journey.placed(choice, place.worker_name(), route, place.decision());
    common.app.decisions.note(place.decision());
    let worker = place.worker();
    let sampling = &job.sampling;
    let seed = sampling.seed.wrapping_add(index.into());
    // to a worker it means all of `stop_ids`, of which only the client's own are left
    let ignore_eos = sampling.ignore_eos && common.stop_ids.is_empty();
    let left = common.deadline.saturating_duration_since(Instant::now());
    let submit = Submit {
        request: place.request(),
        tokens: little_endian(&common.prompt.ids),
        sampling: Sampling { seed, ignore_eos, ..sampling.clone() },
        stop_ids: common.stop_ids.clone(),
        max_tokens: common.max_tokens,
        deadline_ms: Some(millis(left)),
        priority: job.priority,
        salt: job.salt.clone(),
        kv_from: None,
        resume: None,
    };
    tracing::debug!(
        request = job.name,
        leg = place.request().0,
        worker = place.worker_name(),
        "submit"
    );
    let stream = place.submit(submit).await.map_err(|error| (error, Some(worker)))?;
    Ok(Leg { stream, worker, submitted: Instant::now() })
}

fn little_endian(ids: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 * ids.len());
    for id in ids {
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

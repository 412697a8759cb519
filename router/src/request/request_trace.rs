//! What is known of the way of one HTTP request so far: its stages fill it in; headers, explanations, goodput and the log's
//! line about it are made of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::{Usage, spans};
use crate::core::decision::Decision;
use crate::core::frame::FailureKind;
use crate::error::{Causes, RouteError};
use crate::fleet::booking::Reservation;
use crate::log::requests::{RequestEnd, RequestLog};
use crate::log::traces::Span;
use crate::metrics::{Metrics, ModelMetrics, UNKNOWN};

/// The way of one HTTP request, which may have several choices.
#[derive(Debug)]
pub struct RequestTrace {
    request_id: Arc<str>,
    arrived: Instant,
    slo: Option<Slo>,
    explains: bool,
    /// Told when all of it is over.
    ends: Option<Ends>,
    known: Mutex<Known>,
}

/// Who is told of the end of requests.
#[derive(Debug, Clone)]
pub(crate) struct Ends {
    pub(crate) log: Arc<RequestLog>,
    pub(crate) metrics: Arc<Metrics>,
    /// Where requests are traced.
    pub(crate) span: Option<Arc<Span>>,
}

/// What a request with a deadline for its first token is measured by.
#[derive(Debug)]
pub struct Slo {
    /// From the arrival on.
    pub first_token: Duration,
    /// For each further token.
    pub tpot_ms: Option<f64>,
    /// Where the result is counted.
    pub metrics: Arc<Metrics>,
}

/// How long the stages of choice 0 took, as far as it has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stages {
    /// Chat template and tokenisation.
    pub tokenise: Option<Duration>,
    /// Waiting for a worker with room.
    pub queue: Option<Duration>,
    /// Hashing the prompt and choosing the worker.
    pub route: Option<Duration>,
    /// Submitted to first token.
    pub prefill: Option<Duration>,
    /// Arrival of the request to the first token of any choice.
    pub first_token: Option<Duration>,
}

#[derive(Debug, Default)]
struct Known {
    stages: Stages,
    /// Of choice 0.
    worker: Option<String>,
    /// Of choice 0, where its prompt is computed elsewhere.
    prefill_worker: Option<String>,
    /// The latest of each choice, where they are to be explained or nobody else is told of them: thousands of streams would hold
    /// some kilobytes each for nobody.
    decisions: BTreeMap<u32, Arc<Decision>>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// The slo was counted, or does not count.
    over: bool,
    told: Told,
}

/// What only the log's line and the counters of the model need.
#[derive(Debug, Default)]
struct Told {
    model: Option<Box<str>>,
    /// Where it counts.
    counted: Option<Arc<ModelMetrics>>,
    /// Of choice 0 on its worker.
    leg: Option<u64>,
    prompt: Option<String>,
    /// Of all answers that ended or were dropped.
    usage: Option<Usage>,
    tpot: Option<Duration>,
    status: Option<u16>,
    /// One word and a sentence.
    error: Option<(&'static str, String)>,
    /// When it was answered or failed.
    ended: Option<Instant>,
    /// Why choices ended, where its span is kept.
    finish: Vec<&'static str>,
}

/// What became of a request with a slo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Met,
    LateFirstToken,
    SlowTokens,
    /// Told to come back later.
    Rejected,
    Failed,
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::LateFirstToken => "late_first_token",
            Self::SlowTokens => "slow_tokens",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
        }
    }

    /// `None` if it says nothing about the service: the request was wrong, or nobody waited for its answer.
    fn of(error: &RouteError) -> Option<Self> {
        match error {
            RouteError::NoWorker { .. }
            | RouteError::Overloaded { .. }
            | RouteError::KeyLimit { .. }
            | RouteError::TooLate { .. }
            | RouteError::ShuttingDown => Some(Self::Rejected),
            RouteError::WorkerFailed {
                kind: FailureKind::BadSampling | FailureKind::Grammar,
                ..
            } => None,
            RouteError::DeadlineExceeded { .. }
            | RouteError::WorkerLost { .. }
            | RouteError::WorkerFailed { .. }
            | RouteError::WrongOutput { .. }
            | RouteError::Internal { .. } => Some(Self::Failed),
            RouteError::BadRequest { .. }
            | RouteError::BodyTooComplex { .. }
            | RouteError::AnswerTooLarge { .. }
            | RouteError::ContextLength { .. }
            | RouteError::ContextLengthAtLeast { .. }
            | RouteError::TextWithoutBreaks { .. }
            | RouteError::UnknownModel { .. }
            | RouteError::ClientGone => None,
        }
    }
}

impl Default for RequestTrace {
    /// One without a name or a slo, that begins now.
    fn default() -> Self {
        let known = Mutex::default();
        let (request_id, arrived) = (Arc::default(), Instant::now());
        Self { request_id, arrived, slo: None, explains: false, ends: None, known }
    }
}

impl RequestTrace {
    /// It begins now. `request_id` is the `X-Request-ID` of its answer.
    #[must_use]
    pub fn new(request_id: &str, slo: Option<Slo>) -> Arc<Self> {
        let (arrived, known) = (Instant::now(), Mutex::default());
        let request_id = request_id.into();
        Arc::new(Self { request_id, arrived, slo, explains: false, ends: None, known })
    }

    /// The same of a request that is counted and told to the log, with decisions that are to be explained if `explains`.
    #[must_use]
    pub(crate) fn logged(
        request_id: Arc<str>,
        slo: Option<Slo>,
        explains: bool,
        ends: Ends,
    ) -> Arc<Self> {
        let (arrived, known) = (Instant::now(), Mutex::default());
        Arc::new(Self { request_id, arrived, slo, explains, ends: Some(ends), known })
    }

    /// Its decisions are to be explained, with all that they were made among.
    #[must_use]
    pub fn explains(&self) -> bool {
        self.explains
    }

    /// `X-Request-ID` of its answer.
    #[must_use]
    pub fn request_id(&self) -> &Arc<str> {
        &self.request_id
    }

    /// When the first token is too late.
    #[must_use]
    pub fn first_token_by(&self) -> Option<Instant> {
        Some(self.arrived + self.slo.as_ref()?.first_token)
    }

    /// The stages of choice 0.
    #[must_use]
    pub fn stages(&self) -> Stages {
        self.known().stages
    }

    /// The worker of choice 0.
    #[must_use]
    pub fn worker(&self) -> Option<String> {
        self.known().worker.clone()
    }

    /// The worker that computes the prompt of choice 0, where that is another one.
    #[must_use]
    pub fn prefill_worker(&self) -> Option<String> {
        self.known().prefill_worker.clone()
    }

    /// The latest decision about each choice, in their order; none where a request that is [`Self::logged`] has none to explain.
    #[must_use]
    pub fn decisions(&self) -> Vec<Arc<Decision>> {
        self.known().decisions.values().map(Arc::clone).collect()
    }

    /// Its span, where requests are traced.
    pub(crate) fn span(&self) -> Option<&Arc<Span>> {
        self.ends.as_ref()?.span.as_ref()
    }

    /// A part of that, which began then.
    pub(super) fn part(&self, name: &'static str, began: Instant) -> Option<Span> {
        self.span().map(|span| span.child_since(name, began))
    }

    /// The model that is asked.
    pub(super) fn asks(&self, model: &str, counted: &Arc<ModelMetrics>) {
        if self.ends.is_some() {
            let mut known = self.known();
            known.told.model.get_or_insert_with(|| model.into());
            known.told.counted.get_or_insert_with(|| Arc::clone(counted));
        }
    }

    /// Takes the end of the prompt for the log, where that may tell it. Of several prompts it is the first.
    pub(super) fn note_prompt(&self, end: impl FnOnce() -> String) {
        if self.ends.as_ref().is_some_and(|ends| ends.log.tells_prompts()) {
            let end = end();
            self.known().told.prompt.get_or_insert(end);
        }
    }

    /// An answer is over, whatever ended it.
    pub(super) fn used(&self, usage: Usage) {
        if self.ends.is_some() {
            let mut known = self.known();
            let sum = known.told.usage.get_or_insert_default();
            sum.prompt_tokens = sum.prompt_tokens.saturating_add(usage.prompt_tokens);
            sum.cached_tokens = sum.cached_tokens.saturating_add(usage.cached_tokens);
            sum.completion_tokens = sum.completion_tokens.saturating_add(usage.completion_tokens);
        }
    }

    /// The prompt of a choice was tokenised.
    pub(super) fn tokenised(&self, choice: u32, took: Duration) {
        if choice == 0 {
            self.known().stages.tokenise = Some(took);
        }
    }

    /// A choice waited for a worker, in vain or not. It may have to wait again.
    pub(super) fn waited(&self, choice: u32, queue: Duration) {
        if choice == 0 {
            let mut known = self.known();
            known.stages.queue = Some(known.stages.queue.unwrap_or_default() + queue);
        }
    }

    /// A choice got its place, after so long a search.
    pub(super) fn placed(&self, choice: u32, place: &Reservation, route: Duration) {
        let mut known = self.known();
        if self.explains || self.ends.is_none() {
            known.decisions.insert(choice, Arc::clone(place.decision()));
        }
        if choice == 0 {
            known.stages.route = Some(known.stages.route.unwrap_or_default() + route);
            known.told.leg = Some(place.leg());
            known.worker = Some(place.worker_name().to_owned());
            known.prefill_worker = place.prefill_name().map(str::to_owned);
        }
    }

    /// A choice got its first token, so long after it was submitted.
    pub(super) fn first_token(&self, choice: u32, at: Instant, prefill: Duration) {
        let mut known = self.known();
        if let (None, Some(span)) = (known.first_token, self.span()) {
            span.event("first_token", at);
        }
        let first = known.first_token.map_or(at, |first| first.min(at));
        known.first_token = Some(first);
        known.stages.first_token = Some(first.saturating_duration_since(self.arrived));
        if choice == 0 {
            known.stages.prefill = Some(prefill);
        }
    }

    /// A choice got its last token.
    pub(super) fn last_token(&self, at: Instant) {
        let mut known = self.known();
        known.last_token = known.last_token.max(Some(at));
    }

    /// A choice ended, for this reason.
    pub(super) fn finished(&self, reason: &'static str) {
        if self.span().is_some_and(|span| span.is_kept()) {
            self.known().told.finish.push(reason);
        }
    }

    /// All choices came to their end. Returns the mean time for each token after the first, where there are such tokens.
    pub(crate) fn answered(&self, usage: Usage, choices: usize) -> Option<Duration> {
        let mut known = self.known();
        let tpot = known.tpot(usage, choices);
        known.told.tpot = tpot;
        if let (Some(tpot), Some(counted)) = (tpot, &known.told.counted) {
            counted.tpot_seconds.observe(tpot);
        }
        known.told.ended = Some(Instant::now());
        let Some(slo) = &self.slo else { return tpot };
        let first = known.first_token.unwrap_or_else(Instant::now); // an answer may have no token
        let is_slow = |limit_ms| tpot.is_some_and(|tpot| tpot.as_secs_f64() * 1e3 > limit_ms);
        let outcome = if first > self.arrived + slo.first_token {
            Outcome::LateFirstToken
        } else if slo.tpot_ms.is_some_and(is_slow) {
            Outcome::SlowTokens
        } else {
            Outcome::Met
        };
        known.count(slo, Some(outcome));
        tpot
    }

    /// It ended with an error. Nobody is turned away who got a token before.
    pub(crate) fn failed(&self, error: &RouteError) {
        let mut known = self.known();
        known.told.fail(error.kind(), || Causes(error).to_string());
        let Some(slo) = &self.slo else { return };
        let outcome = match Outcome::of(error) {
            Some(Outcome::Rejected) if known.first_token.is_some() => Some(Outcome::Failed),
            outcome => outcome,
        };
        known.count(slo, outcome);
    }

    /// It was turned away by the HTTP surface: the request was wrong.
    pub(crate) fn refused(&self, error: &'static str, why: String) {
        let mut known = self.known();
        known.over = true;
        known.told.fail(error, || why);
    }

    /// The status of its answer was sent.
    pub(crate) fn replied(&self, status: u16) {
        self.known().told.status = Some(status);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().expect("no holder panics")
    }
}

impl Known {
    /// How long a token after the first took, on average over all choices.
    fn tpot(&self, usage: Usage, choices: usize) -> Option<Duration> {
        let choices = f64::from(u32::try_from(choices).unwrap_or(u32::MAX).max(1));
        let further = f64::from(usage.completion_tokens) / choices - 1.0;
        let took = self.last_token?.saturating_duration_since(self.first_token?);
        (further > 0.0)
            .then(|| Duration::try_from_secs_f64(took.as_secs_f64() / further).ok())
            .flatten()
    }

    /// The word for what went wrong, and why. Whoever is told nothing of its end left before.
    fn error(&self) -> Option<(&'static str, &str)> {
        let Told { error, ended, .. } = &self.told;
        let left = ("client_gone", "the client closed the connection");
        match error {
            Some((word, why)) => Some((*word, why.as_str())),
            None => ended.is_none().then_some(left),
        }
    }

    /// Counts what became of it.
    fn count_end(&self, metrics: &Metrics) {
        let counted = self.told.counted.clone().unwrap_or_else(|| metrics.models.of(UNKNOWN));
        let error = self.error();
        counted.requests.inc(error.map_or("finished", |(word, _)| word));
        if let (None, Some(usage)) = (error, self.told.usage) {
            counted.prompt_sizes.add(usage.prompt_tokens.into());
            counted.output_sizes.add(usage.completion_tokens.into());
        }
    }

    /// Tells the log what became of it.
    fn tell(&self, log: &RequestLog, request_id: &str, arrived: Instant) {
        let Told { model, leg, prompt, usage, tpot, status, ended, .. } = &self.told;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let error = self.error();
        log.ended(&RequestEnd {
            id: request_id,
            route: None,
            model: model.as_deref(),
            status: status.unwrap_or(if error.is_some() { CLIENT_LEFT } else { 200 }),
            error: error.map(|(word, _)| word),
            why: error.map(|(_, why)| why),
            prompt_tokens: usage.map(|usage| usage.prompt_tokens),
            cached_tokens: usage.map(|usage| usage.cached_tokens),
            output_tokens: usage.map(|usage| usage.completion_tokens),
            queue_ms: self.stages.queue.map(ms),
            ttft_ms: self.stages.first_token.map(ms),
            tpot_ms: tpot.map(ms),
            total_ms: Some(ms(ended
                .unwrap_or_else(Instant::now)
                .saturating_duration_since(arrived))),
            worker: self.worker.as_deref(),
            prefill_worker: self.prefill_worker.as_deref(),
            leg: *leg,
            prompt: prompt.as_deref(),
        });
    }

    /// Tells the span. What was refused for the client's own fault is no error of this service.
    fn tell_span(&mut self, span: &Span) {
        let finish = std::mem::take(&mut self.told.finish);
        spans::ended(span, self.told.usage, finish);
        let Some((word, why)) = self.error() else { return };
        let status = self.told.status.unwrap_or(CLIENT_LEFT);
        if word == "client_gone" || (400..500).contains(&status) {
            span.set("error.type", word);
        } else {
            span.fail(word, why);
        }
    }

    fn count(&mut self, slo: &Slo, outcome: Option<Outcome>) {
        if !std::mem::replace(&mut self.over, true)
            && let Some(outcome) = outcome
        {
            slo.metrics.requests.slo.inc(outcome.as_str());
        }
    }
}

impl Told {
    /// The first error is the one that counts.
    fn fail(&mut self, error: &'static str, why: impl FnOnce() -> String) {
        self.error.get_or_insert_with(|| (error, why()));
        self.ended.get_or_insert_with(Instant::now);
    }
}

/// What logs have for a client that left before its answer began; nobody is sent it.
const CLIENT_LEFT: u16 = 499;

impl Drop for RequestTrace {
    /// All of it is over. A client that hung up is a miss if the first token was late by then; otherwise nobody can say.
    fn drop(&mut self) {
        let known = self.known.get_mut().expect("no holder panics");
        if let Some(Ends { log, metrics, span }) = &self.ends {
            known.count_end(metrics);
            known.tell(log, &self.request_id, self.arrived);
            if let Some(span) = span {
                known.tell_span(span);
            }
        }
        let Some(slo) = &self.slo else { return };
        let first = known.first_token.unwrap_or_else(Instant::now);
        let is_late = first > self.arrived + slo.first_token;
        known.count(slo, is_late.then_some(Outcome::LateFirstToken));
    }
}

#[cfg(test)]
mod tests;

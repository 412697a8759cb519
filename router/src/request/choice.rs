//! One choice of an answer: placed, submitted, its tokens turned into deltas. Where its worker is lost it goes on with
//! another one, from all the tokens that came so far; text, stop strings and log-probabilities go on where they were, since
//! they live here and not in the worker.

mod elsewhere;
mod one_by_one;

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::attempt::{Attempt, PlacedChoice};
use super::{Delta, FinishReason, Job, ScoredToken};
use crate::app::App;
use crate::core::candidate::WorkerId;
use crate::core::frame::{Finish, TokenLogprob};
use crate::decisions::actual::Recorder;
use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::fleet::stream::{Chunk, DirectReader};
use crate::limits::shares::StreamPermit;
use crate::prompt::Decoder;
use one_by_one::OneByOne;

/// What all choices of a job share.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) app: Arc<App>,
    pub(super) model: Arc<ServedModel>,
    pub(super) job: Job,
    pub(super) prompt: EncodedPrompt,
    pub(super) max_tokens: u32,
    pub(super) begin: Instant,
    /// Its places among all answers.
    pub(super) permit: StreamPermit,
    /// The job's, and the model's own unless they are to be ignored.
    pub(super) stop_ids: Vec<u32>,
}

/// The prompt as workers see it.
#[derive(Debug)]
pub(super) struct EncodedPrompt {
    pub(super) ids: Arc<Vec<u32>>,
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
        model: Arc<ServedModel>,
        job: Job,
        prompt: EncodedPrompt,
        max_tokens: u32,
        (begin, permit): (Instant, StreamPermit),
    ) -> Self {
        let mut stop_ids = job.stop_ids.clone();
        if !job.sampling.ignore_eos {
            stop_ids.extend(&model.engine.doc().eos_token_ids);
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Self { app, model, job, prompt, max_tokens, begin, permit, stop_ids }
    }

    /// When it has to be over.
    pub(super) fn deadline(&self) -> Instant {
        self.begin + self.app.config.deadlines.request
    }

    /// Number of a choice among all of the HTTP request.
    pub(super) fn choice(&self, index: u32) -> u32 {
        self.job.first_choice + index
    }
}

/// A choice on its way from its placement to its last token.
#[derive(Debug)]
pub(super) struct Choice {
    common: Arc<Common>,
    index: u32,
    decoder: Decoder,
    state: State,
    /// All tokens that came, whoever made them: what the next worker goes on from.
    generated: Vec<u32>,
    /// Workers that lost or failed it since its last token.
    excluded: Vec<WorkerId>,
    /// Since when it has been without a worker that gives it tokens, after it had one.
    lost: Option<Instant>,
    /// The client has a part of it.
    delivered: bool,
    /// The client has the ids of the prompt, if it wants them.
    told_prompt: bool,
    first_token: Option<Instant>,
    completion_tokens: u32,
    /// Drafts of its workers that are part of `completion_tokens`.
    accepted_drafts: u32,
    /// Drafts that came to nothing.
    rejected_drafts: u32,
    /// As its first worker said.
    cached_tokens: Option<u32>,
    /// Tokens whose ends were in no delta yet.
    untold: u32,
    /// Tokens that came, but are to be handed on one at a time.
    waiting: Option<Box<OneByOne>>,
    /// Whom its links call, where that is not the task that polls it.
    reader: Option<Weak<dyn DirectReader>>,
}

type Placing =
    Pin<Box<dyn Future<Output = Result<PlacedChoice, (RouteError, Option<WorkerId>)>> + Send>>;

enum State {
    Placing(Placing),
    Running(PlacedChoice),
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

impl Choice {
    pub(super) fn new(common: &Arc<Common>, index: u32) -> Self {
        let job = &common.job;
        let computes = job.sampling.prompt_logprobs.is_some() || job.pooling.is_some();
        let nothing = common.max_tokens == 0 && !computes;
        let first = Attempt::default();
        let state = if nothing { State::Empty } else { place(common, index, first) };
        Self {
            common: Arc::clone(common),
            index,
            decoder: decoder(common),
            state,
            generated: Vec::new(),
            excluded: Vec::new(),
            lost: None,
            delivered: false,
            told_prompt: false,
            first_token: None,
            completion_tokens: 0,
            accepted_drafts: 0,
            rejected_drafts: 0,
            cached_tokens: None,
            untold: 0,
            waiting: None,
            reader: None,
        }
    }

    pub(super) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }

    pub(super) fn accepted_drafts(&self) -> u32 {
        self.accepted_drafts
    }

    pub(super) fn rejected_drafts(&self) -> u32 {
        self.rejected_drafts
    }

    pub(super) fn cached_tokens(&self) -> u32 {
        self.cached_tokens.unwrap_or(0)
    }

    pub(super) fn has_begun(&self) -> bool {
        self.completion_tokens > 0
    }

    pub(super) fn ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// From now on links call this reader when they bring tokens.
    pub(super) fn read_directly(&mut self, reader: Weak<dyn DirectReader>) {
        if let State::Running(leg) = &self.state {
            leg.stream.read_directly(Weak::clone(&reader));
        }
        self.reader = Some(reader);
    }

    /// The client is gone.
    pub(super) fn hung_up(&self) {
        if let State::Running(leg) = &self.state {
            leg.stream.hung_up();
        }
    }

    /// Cancels it if it still runs.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
    }

    /// It has said all: its worker is cancelled, as after a stop string.
    pub(super) fn stop(&mut self) {
        if !self.ended() {
            self.finished(FinishReason::Stop);
        }
    }

    /// Nothing of what its worker may still send is part of it, nor is what came behind its last token.
    fn finished(&mut self, reason: FinishReason) {
        self.record(|recorder, now| recorder.finished(now, reason.as_str()));
        self.common.job.request_trace.finished(reason.as_str());
        self.common.model.metrics.finish_reasons.inc(reason.as_str());
        self.state = State::Ended;
        if let Some(unread) = self.waiting.take() {
            self.note_drafts(unread.drafted(), 0);
        }
    }

    /// The next delta is made of tokens that are there already.
    pub(super) fn holds_tokens(&self) -> bool {
        self.waiting.is_some()
    }

    /// Done when it is with a worker.
    pub(super) fn poll_placed(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), RouteError>> {
        while let State::Placing(placing) = &mut self.state {
            match std::task::ready!(placing.as_mut().poll(context)) {
                Ok(leg) => {
                    if let Some(reader) = &self.reader {
                        leg.stream.read_directly(Weak::clone(reader));
                    }
                    self.state = State::Running(leg);
                }
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
                        ids: self.common.job.returns_ids.then(Vec::new),
                        prompt_ids: self.prompt_ids(),
                        ..Delta::default()
                    })));
                }
                State::Placing(_) | State::Ended => return Poll::Ready(None),
            };
            let submitted = leg.submitted;
            let chunk = match self.waiting.as_mut().and_then(|waiting| waiting.next()) {
                Some(token) => token,
                None => {
                    self.waiting = None;
                    match std::task::ready!(leg.stream.poll_next(context)) {
                        Ok(chunk) => self.arrived(chunk),
                        Err((error, worker)) => match self.again(error, Some(worker)) {
                            Ok(()) => continue,
                            Err(error) => return Poll::Ready(Some(Err(error))),
                        },
                    }
                }
            };
            match self.delta(chunk) {
                Ok(Some(delta)) => {
                    self.note_progress(submitted, delta.finish.is_some());
                    if let Some(reason) = delta.finish {
                        self.finished(reason); // after a stop string this cancels the worker
                    }
                    return Poll::Ready(Some(Ok(delta)));
                }
                Ok(None) => {}
                Err(error) => {
                    self.record(|recorder, now| recorder.failed(now, &error));
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    /// Notes down what happens to the present placement, where there is one.
    fn record(&self, note: impl FnOnce(&Recorder, Instant)) {
        if let State::Running(leg) = &self.state {
            note(&leg.recorder, Instant::now());
        }
    }

    /// Tokens came: whoever failed it before may have it again.
    fn note_tokens(&mut self, ids: &[u32]) {
        if ids.is_empty() {
            return;
        }
        self.generated.extend_from_slice(ids);
        self.excluded.clear();
        self.first_token.get_or_insert_with(Instant::now);
        if let Some(lost) = self.lost.take() {
            self.common.app.metrics.requests.resume_seconds.observe(lost.elapsed());
        }
    }

    fn note_drafts(&mut self, drafted: u32, accepted: u32) {
        if drafted == 0 {
            return; // most workers draft nothing, and the counters are everybody's
        }
        self.accepted_drafts = self.accepted_drafts.saturating_add(accepted);
        self.rejected_drafts = self.rejected_drafts.saturating_add(drafted - accepted);
        let metrics = &self.common.app.metrics;
        metrics.requests.drafted_tokens.inc_by(drafted.into());
        metrics.requests.accepted_tokens.inc_by(accepted.into());
    }

    /// The client is about to get a part of it.
    fn note_progress(&mut self, submitted: Instant, is_last: bool) {
        let (request_trace, choice) =
            (&self.common.job.request_trace, self.common.choice(self.index));
        if let Some(first) = self.first_token.filter(|_| !self.delivered) {
            request_trace.first_token(choice, first, first.saturating_duration_since(submitted));
        }
        self.delivered = true;
        if is_last
            && let State::Running(leg) = &self.state
            && let Some(last) = leg.stream.last_arrival()
        {
            request_trace.last_token(last);
        }
    }

    /// Notes that tokens came. Gives those that the next delta is made of.
    fn arrived(&mut self, chunk: Chunk) -> Chunk {
        let (generated, cached_tokens) = (chunk.ids.len(), chunk.cached_tokens);
        self.cached_tokens = self.cached_tokens.or(cached_tokens);
        self.record(|recorder, now| recorder.tokens(now, generated, cached_tokens));
        self.note_tokens(&chunk.ids);
        if !self.common.job.reading.one_by_one {
            return chunk;
        }
        let (first, waiting) = OneByOne::of(chunk);
        self.waiting = waiting;
        first
    }

    /// What a chunk is to the client; `None` if nothing is certain yet.
    fn delta(&mut self, chunk: Chunk) -> Result<Option<Delta>, RouteError> {
        let Chunk { mut ids, logprobs, prompt_logprobs, finish, .. } = chunk;
        let Chunk { drafted, accepted, pooled, .. } = chunk;
        let generated = ids.len();
        let mut all = self.common.job.returns_ids.then(|| ids.clone());
        if finish == Some(Finish::Stop)
            && !self.common.job.stop.included()
            && ids.last().is_some_and(|last| self.common.stop_ids.contains(last))
        {
            ids.pop(); // the stop token is no part of the text
        }
        let decoded = self.decoder.push(&ids);
        let mut delta = Delta { choice: self.index, text: decoded.text, ..Delta::default() };
        delta.token_ends = self.token_ends(decoded.ends);
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
            delta.stop_string = self.decoder.stop_string().map(Into::into);
            ids.truncate(decoded.consumed);
        }
        if let Some(all) = &mut all {
            all.truncate(used);
        }
        let used = u32::try_from(used).unwrap_or(u32::MAX);
        self.completion_tokens += used;
        self.note_drafts(drafted, accepted.min(used));
        if self.common.job.sampling.logprobs.is_some() {
            // a token of which its worker said nothing is there all the same, and so in the places of all others
            let known = logprobs.into_iter().chain(std::iter::repeat_with(|| None));
            delta.tokens = scored(&ids, known).collect();
        }
        delta.prompt_tokens = prompt_logprobs.map(|logprobs| self.prompt_tokens(logprobs));
        delta.ids = all;
        delta.pooled = pooled;
        let empty = delta.text.is_empty()
            && delta.ids.as_ref().is_none_or(Vec::is_empty)
            && delta.tokens.is_empty()
            && delta.prompt_tokens.is_none()
            && delta.finish.is_none();
        if empty {
            self.untold = u32::try_from(delta.token_ends.len()).unwrap_or(u32::MAX);
            return Ok(None);
        }
        delta.prompt_ids = self.prompt_ids();
        Ok(Some(delta))
    }

    /// The ids of the prompt, once, where they were asked for.
    fn prompt_ids(&mut self) -> Option<Arc<Vec<u32>>> {
        let told = std::mem::replace(&mut self.told_prompt, true);
        (self.common.job.returns_ids && !told).then(|| Arc::clone(&self.common.prompt.ids))
    }

    /// Those of tokens without any text come with the next text.
    fn token_ends(&mut self, mut ends: Vec<usize>) -> Vec<usize> {
        let untold = std::mem::take(&mut self.untold);
        if untold > 0 {
            ends.splice(..0, std::iter::repeat_n(0, untold as usize));
        }
        ends
    }

    fn prompt_tokens(&self, logprobs: Vec<TokenLogprob>) -> Vec<ScoredToken> {
        let Some((first, rest)) = self.common.prompt.ids.split_first() else { return Vec::new() };
        let first = ScoredToken { id: *first, logprob: None, top: Vec::new() };
        [first].into_iter().chain(scored(rest, logprobs.into_iter().map(Some))).collect()
    }
}

fn scored(
    ids: &[u32],
    logprobs: impl Iterator<Item = Option<TokenLogprob>>,
) -> impl Iterator<Item = ScoredToken> {
    ids.iter().zip(logprobs).map(|(&id, at)| {
        let (logprob, top) = at.map_or((None, Vec::new()), |at| (Some(at.logprob), at.top));
        ScoredToken { id, logprob, top }
    })
}

fn decoder(common: &Common) -> Decoder {
    let engine = &common.model.engine;
    let decoder = engine.decoder_with(&common.job.stop, common.job.skip_special_tokens);
    let reading = &common.job.reading;
    let decoder = decoder.keeping(&reading.markers);
    let decoder = if reading.token_ends { decoder.noting_ends() } else { decoder };
    if common.prompt.goes_on { decoder.going_on() } else { decoder }
}

fn place(common: &Arc<Common>, index: u32, attempt: Attempt) -> State {
    State::Placing(Box::pin(attempt.run(Arc::clone(common), index)))
}

//! From a job to its deltas: encode, check, place and submit every choice, then merge what comes back.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::choice::{Choice, Common, EncodedPrompt};
use super::{Delta, Job, Truncation, Usage, spans};
use crate::app::App;
use crate::core::frame::Sampling;
use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::fleet::stream::DirectReader;
use crate::prompt::{Prompt, PromptEngine, Room};

/// The answer to a job, while it is made. Dropping it cancels what still runs.
#[derive(Debug)]
pub struct Answer {
    common: Arc<Common>,
    choices: Vec<Choice>,
    /// Whose turn it is to be looked at first.
    turn: usize,
    /// Wakes for the nearest deadline. Set later only when it fires: tokens move deadlines all the time.
    timer: Pin<Box<Sleep>>,
    cached_tokens: u32,
    first_token_seen: bool,
    over: bool,
}

/// Encodes the prompt as `model` has it, checks it against the context, and sends all choices to workers.
///
/// # Errors
/// Nothing runs then.
///
/// # Cancel safety
/// A dropped call leaves nothing behind: what it had placed is cancelled.
pub fn answer(
    app: &Arc<App>,
    model: Arc<ServedModel>,
    job: Job,
) -> impl Future<Output = Result<Answer, RouteError>> + Send {
    // in a box of its own, four kilobytes that nobody holds who waits for a worker
    let begun = Box::pin(begun(Arc::clone(app), model, job));
    async move {
        let mut answer = begun.await?;
        std::future::poll_fn(|context| answer.poll_submitted(context)).await?;
        answer.common.permit.served();
        Ok(answer)
    }
}

/// Up to where all choices look for their workers.
async fn begun(app: Arc<App>, model: Arc<ServedModel>, mut job: Job) -> Result<Answer, RouteError> {
    let begin = Instant::now();
    job.request_trace.asks(&model.name, &model.metrics);
    job.request_trace.span().inspect(|span| spans::asked(span, &job, &model.name));
    if job.n == 0 {
        let message = "n must be at least 1".into();
        return Err(RouteError::BadRequest { param: Some("n".into()), message });
    }
    let deadline = begin + app.config.deadlines.request;
    let n = usize::try_from(job.n).unwrap_or(usize::MAX);
    app.fleet.takes_requests()?;
    let of_key = if job.pooling.is_some() { 0 } else { n }; // a vector is no answer that goes on
    let key = job.key.take().map(|key| key.begin(of_key)).transpose()?;
    let permit = app.shares.begin(job.holder, n)?.of_key(key);

    let goes_on = match &job.prompt {
        Prompt::Chat(chat) => chat.continue_final_message,
        Prompt::Text(_) | Prompt::Bare(_) | Prompt::Tokens(_) => true,
    };
    let prompt = std::mem::replace(&mut job.prompt, Prompt::Tokens(Vec::new())); // once is enough
    let room = Room {
        context: model.context_tokens as usize,
        answer: job.max_tokens.map_or(1, |n| n as usize), // without a wish at least one token must fit
    };
    let (kept, room) = truncated(job.truncation, room);
    let encoding = model.engine.encode_charged(prompt, room, job.salt.clone(), job.memory.take());
    let encoding = timeout_at(deadline, encoding);
    let span = job.request_trace.part("tokenise", begin);
    let encoded = encoding.await.map_err(|_| RouteError::DeadlineExceeded {
        state: "for its prompt to be tokenised",
        waited: app.config.deadlines.request,
    });
    app.metrics.requests.encode_seconds.observe(begin.elapsed());
    job.request_trace.tokenised(job.first_choice, begin.elapsed());
    let encoded = encoded.flatten();
    spans::end(span, &encoded);
    let mut ids = encoded?;
    ids.drain(..ids.len().saturating_sub(kept));
    ids.shrink_to_fit(); // it stays as long as the answer
    settle_reasoning(&model.engine, &mut job.sampling, &ids);
    job.request_trace.note_prompt(|| {
        model.engine.decode(&ids[ids.len().saturating_sub(LOGGED_PROMPT)..], false)
    });
    let ids = Arc::new(ids);

    let max_tokens = check_context(ids.len(), job.max_tokens, model.context_tokens)?;
    permit.take_prompt(ids.len())?;
    model.metrics.prompt_tokens.inc_by(ids.len() as u64);
    let hashing = Instant::now();
    let keys = app.fleet.block_keys(model.block_tokens, &ids, &job.salt).await?;
    let prompt = EncodedPrompt { ids, keys, hash_time: hashing.elapsed(), goes_on };
    let common = Common::new(app, model, job, prompt, max_tokens, (begin, permit));
    let common = Arc::new(common);
    let choices = (0..common.job.n).map(|index| Choice::new(&common, index)).collect();
    Ok(Answer {
        common,
        choices,
        turn: 0,
        timer: Box::pin(sleep_until(deadline)),
        cached_tokens: 0,
        first_token_seen: false,
        over: false,
    })
}

/// Of a prompt that may be told to the log, its last tokens: more text than a line has room for.
const LOGGED_PROMPT: usize = 512;

/// The last tokens of a prompt in which its last marker of reasoning stands, with white space behind it. A guess.
const PROMPT_END: usize = 16;

/// The prompt may have opened the reasoning, or ended it already.
fn settle_reasoning(engine: &PromptEngine, sampling: &mut Sampling, prompt: &[u32]) {
    let Some(reasoning) = &mut sampling.reasoning else { return };
    let last = engine.decode(&prompt[prompt.len().saturating_sub(PROMPT_END)..], false);
    let ends_with = |marker: &[u32]| last.trim_end().ends_with(&engine.decode(marker, false));
    if ends_with(&reasoning.end) {
        sampling.reasoning = None;
        return;
    } else if ends_with(&reasoning.begin) {
        reasoning.begin.clear();
    } else if ends_with(&reasoning.end[..reasoning.begun as usize]) {
        return; // nothing of it, or the head of a message with which an answer in channels goes on
    }
    reasoning.begun = 0;
}

/// A prompt that is cut may be so many times as long as the context: it is tokenised as a whole before. A guess.
const CUT_CONTEXTS: usize = 8;

/// How many of its last tokens a prompt keeps, and how long it may be before.
fn truncated(truncation: Option<Truncation>, room: Room) -> (usize, Room) {
    let Some(truncation) = truncation else { return (usize::MAX, room) };
    let kept = match truncation {
        Truncation::To(tokens) => tokens as usize,
        Truncation::ToContext => room.context.saturating_sub(room.answer).max(1),
    };
    (kept, Room { context: room.context.saturating_mul(CUT_CONTEXTS), answer: 0 })
}

/// The longest answer that fits.
fn check_context(prompt: usize, max_tokens: Option<u32>, limit: u32) -> Result<u32, RouteError> {
    let limit = limit as usize;
    // without a wish at least one token must fit
    let answer = max_tokens.map_or(1, |n| n as usize);
    let got = prompt.saturating_add(answer);
    if got > limit {
        return Err(RouteError::ContextLength { got, prompt, answer, limit });
    }
    Ok(max_tokens.unwrap_or(u32::try_from(limit - prompt).unwrap_or(u32::MAX)))
}

impl Answer {
    /// What comes next, of any choice; `None` after the last choice ended. After an error the answer is over.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing.
    pub async fn next(&mut self) -> Option<Result<Delta, RouteError>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// From now on links call this reader when they bring tokens, rather than wake the task that polls the answer. The reader
    /// polls it then. Nothing changes where choices may come in any order: one poll looks at all of them.
    pub(crate) fn read_directly(&mut self, reader: Weak<dyn DirectReader>) {
        if let [choice] = &mut self.choices[..] {
            choice.read_directly(reader);
        }
    }

    /// Tokens so far; final after `next` gave `None`.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: u32::try_from(self.common.prompt.ids.len()).unwrap_or(u32::MAX),
            completion_tokens: self.choices.iter().map(Choice::completion_tokens).sum(),
            cached_tokens: self.cached_tokens,
            accepted_drafts: self.choices.iter().map(Choice::accepted_drafts).sum(),
            rejected_drafts: self.choices.iter().map(Choice::rejected_drafts).sum(),
            reasoning_tokens: 0, // known to whoever reads the text
        }
    }

    /// Some choice's next delta is made of tokens that are there already.
    pub(crate) fn holds_tokens(&self) -> bool {
        self.choices.iter().any(Choice::holds_tokens)
    }

    /// Nothing more of a choice is wanted: it is as if a stop string had ended it.
    pub fn end_choice(&mut self, choice: u32) {
        if let Some(choice) = self.choices.get_mut(choice as usize) {
            choice.stop();
        }
    }

    /// The prompt as the workers get it.
    #[must_use]
    pub fn prompt_ids(&self) -> &[u32] {
        &self.common.prompt.ids
    }

    /// Done when every choice is with a worker.
    fn poll_submitted(&mut self, context: &mut Context<'_>) -> Poll<Result<(), RouteError>> {
        let mut all = true;
        for choice in &mut self.choices {
            match choice.poll_placed(context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => all = false,
            }
        }
        if all { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// As [`Self::next`].
    pub(crate) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delta, RouteError>>> {
        if self.over {
            return Poll::Ready(None);
        }
        loop {
            for i in 0..self.choices.len() {
                let i = (self.turn + i) % self.choices.len();
                match self.choices[i].poll_next(context) {
                    Poll::Ready(Some(Ok(delta))) => {
                        self.turn = i + 1;
                        self.note_first_token();
                        return Poll::Ready(Some(Ok(delta)));
                    }
                    Poll::Ready(Some(Err(error))) => {
                        self.end();
                        return Poll::Ready(Some(Err(error)));
                    }
                    Poll::Ready(None) | Poll::Pending => {}
                }
            }
            self.note_first_token();
            if self.choices.iter().all(Choice::ended) {
                self.end();
                return Poll::Ready(None);
            }
            // nothing there: wait for the first of tokens and deadlines
            let now = Instant::now();
            match self.choices.iter_mut().try_fold(false, |moved, choice| {
                choice.check_deadline(now).map(|this_moved| moved || this_moved)
            }) {
                Ok(false) => {}
                Ok(true) => continue,
                Err(error) => {
                    self.end();
                    return Poll::Ready(Some(Err(error)));
                }
            }
            let nearest = self.choices.iter().filter_map(Choice::deadline).min();
            let nearest = nearest.unwrap_or(self.common.deadline()).min(self.common.deadline());
            if nearest < self.timer.deadline() || self.timer.is_elapsed() {
                self.timer.as_mut().reset(nearest);
            }
            if self.timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
    }

    fn note_first_token(&mut self) {
        if self.choices[0].cached_tokens() > self.cached_tokens {
            self.cached_tokens = self.choices[0].cached_tokens();
            self.common.model.metrics.cached_tokens.inc_by(self.cached_tokens.into());
        }
        if !self.first_token_seen && self.choices.iter().any(Choice::has_begun) {
            self.first_token_seen = true;
            let ttft = self.common.begin.elapsed();
            self.common.model.metrics.ttft_seconds.observe(ttft);
            self.common.app.metrics.recent.ttft.observe(Instant::now(), ttft);
        }
    }

    /// Cancels what still runs.
    fn end(&mut self) {
        if !self.over {
            self.over = true;
            self.choices.iter_mut().for_each(Choice::end);
            self.common.model.metrics.request_seconds.observe(self.common.begin.elapsed());
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.over {
            self.choices.iter().for_each(Choice::hung_up);
        }
        let usage = self.usage();
        self.common.job.request_trace.used(usage);
        self.common.permit.charge_answer(usage.completion_tokens);
    }
}

#[cfg(test)]
mod tests;

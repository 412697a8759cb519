//! A choice whose worker failed it, or is silent about it: it goes on with another one, or ends.

use tokio::time::Instant;

use super::{Choice, State, place};
use crate::core::candidate::WorkerId;
use crate::error::{Causes, RouteError};
use crate::request::attempt::Attempt;

impl Choice {
    /// When the next token is overdue.
    pub(in crate::request) fn deadline(&self) -> Option<Instant> {
        let State::Running(leg) = &self.state else { return None };
        let deadlines = &self.common.app.config.deadlines;
        Some(match leg.stream.last_arrival() {
            Some(last) => last + deadlines.token,
            None => leg.submitted + deadlines.first_token,
        })
    }

    /// Ends it if its time is over, and moves it elsewhere if its worker holds it and is silent about it. True if it moved.
    ///
    /// # Errors
    /// It is over.
    pub(in crate::request) fn check_deadline(&mut self, now: Instant) -> Result<bool, RouteError> {
        if now >= self.common.deadline() && !self.ended() {
            let state = "for its last token";
            let error = RouteError::DeadlineExceeded { state, waited: now - self.common.begin };
            self.record(|recorder, now| recorder.failed(now, &error));
            return Err(error);
        }
        let State::Running(leg) = &self.state else { return Ok(false) };
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return Ok(false);
        }
        let (state, since) = match leg.stream.last_arrival() {
            Some(last) => ("for the next token", last),
            None => ("for the first token", leg.submitted),
        };
        let worker = leg.stream.awaited();
        self.common.app.fleet.stuck(worker);
        let error = RouteError::DeadlineExceeded { state, waited: now - since };
        leg.recorder.failed(now, &error);
        self.go_elsewhere(error, worker)?;
        Ok(true)
    }

    /// Goes on elsewhere, unless `error` would only come again there.
    pub(super) fn again(
        &mut self,
        error: RouteError,
        worker: Option<WorkerId>,
    ) -> Result<(), RouteError> {
        self.record(|recorder, now| recorder.failed(now, &error));
        match worker {
            Some(worker) if error.retryable() => self.go_elsewhere(error, worker),
            Some(_) | None => Err(error),
        }
    }

    /// Places it anew, with all tokens that came so far. Gives up after `--retries` workers that gave no token.
    fn go_elsewhere(&mut self, error: RouteError, worker: WorkerId) -> Result<(), RouteError> {
        let retries = self.common.app.config.bounds.retries as usize;
        if self.excluded.len() >= retries {
            return Err(error);
        }
        let (request, tokens) = (&self.common.job.name, self.generated.len());
        tracing::info!(request, error = %Causes(&error), tokens, "going on with another worker");
        let metrics = &self.common.app.metrics;
        let begun = !self.generated.is_empty();
        (if begun { &metrics.requests.resumes } else { &metrics.requests.retries }).inc();
        self.lost.get_or_insert_with(Instant::now);
        self.excluded.push(worker);
        let attempt = Attempt {
            generated: self.generated.clone(),
            excluded: self.excluded.clone(),
            before: Some(error),
        };
        self.state = place(&self.common, self.index, attempt);
        Ok(())
    }
}

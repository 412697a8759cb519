//! Legs that wait for a worker with room: highest priority first, then first come, first served; bounded in legs and in
//! prompt tokens.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::booking::{Reservation, Wanted};
use super::registry::Registry;
use crate::config::Bounds;
use crate::error::RouteError;

type Answer = Result<Reservation, RouteError>;

/// The queue of one model.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    tokens: usize,
}

#[derive(Debug)]
struct Waiting {
    ticket: u64,
    wanted: Arc<Wanted>,
    since: Instant,
    reply: oneshot::Sender<Answer>,
}

/// A place in the queue; dropping it leaves the queue.
#[derive(Debug)]
pub(super) struct Ticket {
    registry: Arc<Registry>,
    number: u64,
    model: String,
    pub(super) since: Instant,
    answer: oneshot::Receiver<Answer>,
    answered: bool,
}

impl Ticket {
    pub(super) fn new(
        registry: Arc<Registry>,
        number: u64,
        model: String,
        answer: oneshot::Receiver<Answer>,
    ) -> Self {
        Self { registry, number, model, since: Instant::now(), answer, answered: false }
    }

    /// `None` if the queue was given up.
    pub(super) async fn wait(&mut self) -> Option<Answer> {
        let answer = (&mut self.answer).await.ok();
        self.answered = true;
        answer
    }

    /// Leaves the queue because the wait was too long.
    pub(super) fn expire(&mut self) {
        self.registry.leave_queue(&self.model, self.number);
        self.answered = true;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.answered {
            self.registry.leave_queue(&self.model, self.number);
            self.registry.metrics.cancelled("queue");
        }
    }
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    pub(super) fn oldest(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.since).min()
    }

    /// True if one of this priority would be the first.
    pub(super) fn nobody_before(&self, priority: i8) -> bool {
        self.waiting.front().is_none_or(|first| first.wanted.priority < priority)
    }

    pub(super) fn get(&self, i: usize) -> Option<&Arc<Wanted>> {
        self.waiting.get(i).map(|waiting| &waiting.wanted)
    }

    pub(super) fn join(
        &mut self,
        ticket: u64,
        wanted: &Wanted,
        bounds: &Bounds,
        now: Instant,
    ) -> Result<oneshot::Receiver<Answer>, RouteError> {
        let tokens = self.tokens.saturating_add(wanted.prompt_tokens);
        if self.waiting.len() >= bounds.queue_requests || tokens > bounds.queue_tokens {
            let retry_after = Duration::from_secs(1);
            return Err(RouteError::Overloaded { what: "the queue is full", retry_after });
        }
        self.tokens = tokens;
        let (reply, answer) = oneshot::channel();
        let place = self.waiting.partition_point(|other| other.wanted.priority >= wanted.priority);
        let wanted = Arc::new(wanted.clone());
        self.waiting.insert(place, Waiting { ticket, wanted, since: now, reply });
        Ok(answer)
    }

    /// Removes and answers the one at `i`; gives a reservation back that nobody takes any more.
    pub(super) fn answer(&mut self, i: usize, answer: Answer) -> Result<(), Reservation> {
        let Some(waiting) = self.remove(i) else { return answer.map_or(Ok(()), Err) };
        match waiting.reply.send(answer) {
            Err(Ok(reservation)) => Err(reservation),
            Ok(()) | Err(Err(_)) => Ok(()),
        }
    }

    pub(super) fn leave(&mut self, ticket: u64) {
        if let Some(i) = self.waiting.iter().position(|waiting| waiting.ticket == ticket) {
            self.remove(i);
        }
    }

    fn remove(&mut self, i: usize) -> Option<Waiting> {
        let waiting = self.waiting.remove(i)?;
        self.tokens -= waiting.wanted.prompt_tokens;
        Some(waiting)
    }
}

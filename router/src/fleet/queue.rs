//! Waiting for a worker with room: the asynchronous side of `core::admission`.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::booking::Reservation;
use super::registry::{Registry, ServedModel};
use crate::core::frame::RequestId;
use crate::error::RouteError;

pub(super) type QueueAnswer = Result<Reservation, RouteError>;

/// One who waits.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Its tokens are those of this model's engine.
    pub(super) model: Arc<ServedModel>,
    reply: oneshot::Sender<QueueAnswer>,
}

impl Waiting {
    pub(super) fn new(model: Arc<ServedModel>) -> (Self, oneshot::Receiver<QueueAnswer>) {
        let (reply, answer) = oneshot::channel();
        (Self { model, reply }, answer)
    }

    /// Gives the answer back if nobody waits for it any more.
    pub(super) fn answer(self, answer: QueueAnswer) -> Result<(), QueueAnswer> {
        self.reply.send(answer)
    }
}

/// A place in the queue; dropping it leaves the queue.
#[derive(Debug)]
pub(super) struct QueueTicket {
    registry: Arc<Registry>,
    request: RequestId,
    model: Arc<ServedModel>,
    pub(super) since: Instant,
    /// It gathers with others until then.
    pub(super) gathers_until: Option<Instant>,
    answer: oneshot::Receiver<QueueAnswer>,
    answered: bool,
}

impl QueueTicket {
    pub(super) fn new(
        registry: Arc<Registry>,
        request: RequestId,
        model: Arc<ServedModel>,
        answer: oneshot::Receiver<QueueAnswer>,
    ) -> Self {
        let since = Instant::now();
        Self { registry, request, model, since, gathers_until: None, answer, answered: false }
    }

    /// `None` if the queue was given up.
    pub(super) async fn wait(&mut self) -> Option<QueueAnswer> {
        let answer = (&mut self.answer).await.ok();
        self.answered = true;
        answer
    }

    /// Leaves the queue because the wait was too long.
    pub(super) fn expire(&mut self) {
        self.registry.leave_queue(&self.model.name, self.request);
        self.answered = true;
    }
}

impl Drop for QueueTicket {
    fn drop(&mut self) {
        if !self.answered {
            self.registry.leave_queue(&self.model.name, self.request);
            self.registry.metrics.legs.cancelled.inc("queue");
        }
    }
}

//! A request in the hands of its handler. Hyper sends an answer that is there at once. One that has to be waited for, as
//! for tokens, is waited for without hyper: its buffers, and the state of its parser, are three times what such a request
//! holds otherwise.

use std::convert::Infallible;
use std::future::{poll_fn, ready};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::response::Response;
use tokio::sync::oneshot;

use super::super::Clients;
use super::super::guarded::Guarded;
use super::super::socket::{Answering, Socket};
use super::answer::{self, Sent, charge, is_event_stream};
use super::events::{self, StreamedAnswer};
use crate::http::EventStream;

type Handler = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// See the head of this file.
pub(super) struct Handling {
    answer: Answer,
    answering: Arc<Answering>,
    /// Its answer can be written here, and not only by hyper, which can be had again for the next request.
    may_leave: bool,
    /// The client asks for nothing after this.
    is_last: bool,
    to_hyper: oneshot::Sender<Response<Sent>>,
}

enum Answer {
    Awaited(Handler),
    Came(Response),
}

/// What is to be done next about a request while hyper serves its connection.
pub(super) enum AnswerStep {
    Waits,
    /// Hyper has no further part in it.
    Leaves,
    /// Hyper gets the answer.
    Answered,
}

impl Handling {
    /// Its answer comes from `handler`, and by the other end of the pair it comes to hyper.
    pub(super) fn begin(
        handler: impl Future<Output = Result<Response, Infallible>> + Send + 'static,
        answering: Arc<Answering>,
        may_leave: bool,
        is_last: bool,
    ) -> (Self, oneshot::Receiver<Response<Sent>>) {
        let (to_hyper, by_hyper) = oneshot::channel();
        let answer = Answer::Awaited(Box::pin(handler));
        (Self { answer, answering, may_leave, is_last, to_hyper }, by_hyper)
    }

    /// `is_flushed`: hyper has nothing to write.
    pub(super) fn poll(&mut self, is_flushed: bool, context: &mut Context<'_>) -> AnswerStep {
        if let Answer::Awaited(handler) = &mut self.answer
            && let Poll::Ready(Ok(answer)) = handler.as_mut().poll(context)
        {
            self.answer = Answer::Came(answer);
        }
        let may_leave = self.may_leave();
        if let Answer::Came(answer) = &self.answer
            && !(may_leave && is_direct(answer))
        {
            return AnswerStep::Answered;
        }
        if may_leave && is_flushed { AnswerStep::Leaves } else { AnswerStep::Waits }
    }

    /// Hyper has nothing more to read of it. What it would read next would be taken for the next request.
    pub(super) fn may_leave(&self) -> bool {
        self.may_leave && self.answering.is_read()
    }

    /// For an answer that came.
    pub(super) fn give_to_hyper(self, socket: &Arc<Socket>, clients: &Arc<Clients>) {
        if let Answer::Came(answer) = self.answer {
            self.answering.answered(is_event_stream(&answer));
            // hyper takes it, unless the connection ends now
            let _ = self.to_hyper.send(charge(answer, socket, clients, self.answering));
        }
    }

    /// Waits for the answer, without hyper, and sends it. False: the connection is over.
    pub(super) async fn finish(
        self: Box<Self>,
        io: &mut Guarded,
        socket: &Arc<Socket>,
        clients: &Arc<Clients>,
    ) -> bool {
        match self.reply(io, socket, clients).await {
            None => false,
            Some(Reply::Events(answer, io)) => events::send(answer, io, socket, clients).await,
            Some(Reply::Whole(sending)) => sending.await,
        }
    }

    /// What is to be sent, once that is known. Apart from sending it, which has no room for the whole of it.
    async fn reply<'a>(
        self: Box<Self>,
        io: &'a mut Guarded,
        socket: &'a Arc<Socket>,
        clients: &'a Arc<Clients>,
    ) -> Option<Reply<'a>> {
        let (handler, answering, is_last) = (*self).parts(); // out of the box, which goes now
        let answer = answer_of(handler, io, socket).await?;
        Some(Reply::of(answer, answering, is_last, io, socket, clients))
    }

    /// What is left of it without hyper.
    fn parts(self) -> (Handler, Arc<Answering>, bool) {
        let Self { answer, answering, is_last, .. } = self;
        let handler = match answer {
            Answer::Came(answer) => Box::pin(ready(Ok(answer))),
            Answer::Awaited(handler) => handler,
        };
        (handler, answering, is_last)
    }
}

/// An answer that is sent here. Streams, of which there are many at a time, have no room for a whole one.
enum Reply<'a> {
    Events(StreamedAnswer, &'a mut Guarded),
    Whole(Pin<Box<dyn Future<Output = bool> + Send + 'a>>),
}

impl<'a> Reply<'a> {
    fn of(
        mut answer: Response,
        answering: Arc<Answering>,
        is_last: bool,
        io: &'a mut Guarded,
        socket: &'a Arc<Socket>,
        clients: &'a Arc<Clients>,
    ) -> Self {
        answering.answered(is_event_stream(&answer));
        match answer.extensions_mut().remove::<EventStream>() {
            Some(events) => {
                let (head, _) = answer.into_parts();
                let answer =
                    StreamedAnswer::begin(&head, events, answering, is_last, socket, clients);
                Self::Events(answer, io)
            }
            None => {
                let answer = charge(answer, socket, clients, answering);
                Self::Whole(Box::pin(answer::send(answer, is_last, io, socket, clients)))
            }
        }
    }
}

/// `None`: its client left.
async fn answer_of(mut handler: Handler, io: &mut Guarded, socket: &Socket) -> Option<Response> {
    let mut gone = pin!(socket.gone());
    tokio::select! {
        biased;
        Ok(answer) = handler.as_mut() => Some(answer),
        _ = poll_fn(|context| io.poll_broken(context)) => None,
        () = gone.as_mut() => None,
        () = socket.evicted() => None,
    }
}

/// It is sent event by event, to its socket.
fn is_direct(answer: &Response) -> bool {
    answer.extensions().get::<EventStream>().is_some()
}

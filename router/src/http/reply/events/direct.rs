//! Who asks a stream for its events. A connection of HTTP/2, and whoever else takes a response as it is, reads its body. A
//! connection of HTTP/1.1 has the events sent to its socket: by its own task, and, as long as the socket takes all, by the
//! links that bring the tokens. These render and write an event where they are, and no task is woken for it.
//!
//! Whoever asks holds the stream's lock until its events are in the socket or in line for it, so that they are in order.
//! What the socket does not take, the end of an answer and all trouble are left to the connection's own task.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};

use axum::body::{Bytes, HttpBody};
use bytes::BytesMut;
use hyper::body::Frame;

use super::EventWriter;
use super::stream::Stream;
use crate::fleet::stream::DirectReader;

/// What a body has room for at first. A guess: several events.
const BODY_BYTES: usize = 4096;

/// Bytes before the events of a piece, for its length.
pub(crate) const PIECE_HEAD: usize = 10;

/// Where events go.
pub(crate) trait Outlet: Send + Sync {
    /// All that was sent has been taken.
    fn is_free(&self) -> bool;

    /// Takes events, after [`PIECE_HEAD`] bytes that may be written over. Whether or not it is free it takes all of them.
    fn send(&self, piece: &mut BytesMut, is_last: bool);
}

/// The events of a response, for a connection that has them sent past its body. A cheap handle; the answer is cancelled when
/// the last one drops, and the response's body with it.
#[derive(Clone)]
pub(crate) struct EventStream(Arc<dyn Source>);

impl EventStream {
    /// From now on events go to `outlet`.
    pub(crate) fn send_to(&self, outlet: Arc<dyn Outlet>) {
        Arc::clone(&self.0).send_to(outlet);
    }

    /// Sends what there is as long as the outlet is free. Done when all is sent. Pending, it has to be called again when the
    /// outlet is free.
    ///
    /// # Errors
    /// The connection is to be cut.
    pub(crate) fn poll_sent(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_sent(context)
    }
}

/// [`EventStream`], whatever its events look like.
trait Source: Send + Sync {
    fn send_to(self: Arc<Self>, outlet: Arc<dyn Outlet>);
    fn poll_sent(&self, context: &Context<'_>) -> Poll<io::Result<()>>;
}

/// A stream as a body, and for connections that have its events sent.
pub(super) fn shared<W: EventWriter>(
    stream: Stream<W>,
) -> (impl HttpBody<Data = Bytes, Error = io::Error> + Send, EventStream) {
    let state = State { stream, task: None, outlet: None, body: BytesMut::new() };
    let shared = Arc::new(Shared(Mutex::new(state)));
    (EventBody(Arc::clone(&shared)), EventStream(shared))
}

/// A panic while it is locked leaves it poisoned, which ends this stream and no other one.
struct Shared<W>(Mutex<State<W>>);

struct State<W> {
    stream: Stream<W>,
    /// The connection's, once it has waited.
    task: Option<Waker>,
    outlet: Option<Arc<dyn Outlet>>,
    /// Room for the events of a body.
    body: BytesMut,
}

impl<W> Shared<W> {
    fn lock(&self) -> io::Result<MutexGuard<'_, State<W>>> {
        self.0.lock().map_err(|_| io::Error::other("a panic broke this answer off"))
    }
}

impl<W: EventWriter> Source for Shared<W> {
    fn send_to(self: Arc<Self>, outlet: Arc<dyn Outlet>) {
        let reader: Weak<dyn DirectReader> = Arc::<Self>::downgrade(&self);
        let Ok(mut state) = self.lock() else { return };
        state.outlet = Some(outlet);
        if let Some(answers) = &mut state.stream.answers {
            answers.read_directly(reader);
        }
    }

    fn poll_sent(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.lock()?;
        let State { stream, task, outlet, .. } = &mut *state;
        let task: &Waker = match task {
            Some(task) => {
                task.clone_from(context.waker());
                task
            }
            None => task.insert(context.waker().clone()),
        };
        let Some(outlet) = outlet else { return Poll::Pending };
        let mut piece = BytesMut::new();
        while outlet.is_free() {
            match ready!(send(stream, &**outlet, task, &mut piece)) {
                Some(sent) => sent?,
                None => return Poll::Ready(Ok(())),
            }
        }
        Poll::Pending
    }
}

/// Sends the next events.
fn send<W: EventWriter>(
    stream: &mut Stream<W>,
    outlet: &dyn Outlet,
    task: &Waker,
    piece: &mut BytesMut,
) -> Poll<Option<io::Result<()>>> {
    piece.clear();
    piece.extend_from_slice(&[0; PIECE_HEAD]);
    let sent = ready!(stream.poll_events(&mut Context::from_waker(task), piece));
    if let Some(Ok(())) = sent {
        outlet.send(piece, stream.is_whole());
    }
    Poll::Ready(sent)
}

impl<W: EventWriter> DirectReader for Shared<W> {
    fn read(&self, out: &mut BytesMut) {
        let Ok(mut state) = self.lock() else { return };
        let State { stream, task, outlet, .. } = &mut *state;
        // a task that has not waited yet is about to look
        let (Some(task), Some(outlet)) = (task, outlet) else { return };
        let can_go_on = |stream: &Stream<W>| outlet.is_free() && stream.awaits_token();
        if can_go_on(stream)
            && (send(stream, &**outlet, task, out).is_pending() || can_go_on(stream))
        {
            return;
        }
        let task = task.clone();
        drop(state);
        task.wake();
    }

    fn wake(&self) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner); // its task sees to that
        if let Some(task) = &state.task {
            task.wake_by_ref();
        }
    }
}

/// A stream as the body of a response.
struct EventBody<W>(Arc<Shared<W>>);

impl<W: EventWriter> HttpBody for EventBody<W> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let mut state = self.0.lock()?;
        let State { stream, body, .. } = &mut *state;
        if body.capacity() == 0 {
            body.reserve(BODY_BYTES);
        }
        let events = ready!(stream.poll_events(context, body));
        Poll::Ready(events.map(|events| events.map(|()| Frame::data(body.split().freeze()))))
    }
}

//! HTTP/1: one request after the other.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use axum::body::Body as AnswerBody;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1::{self, Parts};
use hyper::service::{Service as _, service_fn};
use hyper::{Request, Version};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;

use super::Clients;
use super::events::{self, COMMENT, StreamedAnswer, asks_to_close};
use super::guarded::Guarded;
use super::last_words::HEADERS_TOO_SLOW;
use super::socket::{Answering, Socket};
use super::unread::UnreadCharge;
use crate::http::access::Entrance;
use crate::http::{EventStream, too_much_unread};

/// Longest head of a request, in bytes; also what hyper keeps of a request or an answer at most.
const BUFFER: usize = 128 << 10;

/// Of an answer, what is given to hyper at once: many events, and most whole answers.
const PIECE: usize = 64 << 10;

pub(super) async fn serve(mut io: Guarded, socket: &Arc<Socket>, clients: &Arc<Clients>) {
    loop {
        // on the heap, so that a stream, which needs none of hyper, does not hold the room for it
        match Box::pin(talk(io, socket, clients)).await {
            End::Closed => return,
            End::Late => break,
            End::Streams(back, answer) => {
                io = back;
                if !events::send(*answer, &mut io, socket, clients).await {
                    return;
                }
            }
        }
    }
    if socket.has_asked() {
        clients.app.metrics.http.request("unknown", 408, "headers_too_slow");
        HEADERS_TOO_SLOW.say(socket).await;
    }
}

/// How it ends that hyper serves a connection.
enum End {
    Closed,
    /// The client is too late with its request.
    Late,
    /// Hyper read all of a request whose answer is a stream of events, and has nothing to write.
    Streams(Guarded, Box<StreamedAnswer>),
}

/// Serves as hyper does, up to the next stream of events.
async fn talk(io: Guarded, socket: &Arc<Socket>, clients: &Arc<Clients>) -> End {
    let streamed: Mutex<Option<Box<StreamedAnswer>>> = Mutex::new(None);
    let is_plain = socket.wire().stream.plain().is_some();
    let routes = TowerToHyperService::new(clients.routes.clone());
    let service = service_fn(|mut request: Request<Incoming>| {
        let receiving = !request.body().is_end_stream();
        let version = request.version();
        let is_last = asks_to_close(request.headers());
        let answering = Arc::new(Answering::begin(socket, version, receiving));
        request.extensions_mut().insert(socket.peer);
        request.extensions_mut().insert(Entrance::of(socket.peer.address));
        let held = receiving.then(|| Arc::clone(&answering));
        let answer = routes.call(request.map(|body| Received { body, answering: held }));
        let streamed = &streamed;
        async move {
            let mut answer = answer.await?;
            let is_events = is_event_stream(&answer);
            answering.answered(is_events);
            let takes_chunks = version == Version::HTTP_11 && is_plain;
            if takes_chunks
                && answering.is_read()
                && let Some(events) = answer.extensions_mut().remove::<EventStream>()
            {
                let (head, _) = answer.into_parts();
                let answer = StreamedAnswer { head, events, answering, is_last };
                *streamed.lock().expect("no holder panics") = Some(Box::new(answer));
                return std::future::pending().await; // hyper has no further part in it
            }
            Ok::<_, Infallible>(charge(answer, is_events, socket, clients, answering))
        }
    });
    let mut http = http1::Builder::new();
    http.header_read_timeout(None); // hyper's also runs while a connection rests
    http.max_buf_size(BUFFER);
    let mut connection = http.serve_connection(TokioIo::new(io), service);
    let mut late = pin!(socket.late(clients.app.config.http.header_timeout));
    let mut gone = pin!(socket.gone());
    let mut draining = false;
    let answer = loop {
        let turn = poll_fn(|context| {
            if Pin::new(&mut connection).poll(context).is_ready() {
                return Poll::Ready(None);
            }
            // hyper has flushed all of what came before, unless the socket is full
            let is_flushed = !socket.unflushed.load(Relaxed);
            let answer = streamed.lock().expect("no holder panics").take_if(|_| is_flushed);
            answer.map_or(Poll::Pending, |answer| Poll::Ready(Some(answer)))
        });
        tokio::select! {
            biased; // what has come is read first: a router that has much to do may be later than the client
            turn = turn => match turn {
                Some(answer) => break answer,
                None => return End::Closed,
            },
            () = late.as_mut() => return End::Late,
            () = gone.as_mut() => return End::Closed,
            () = socket.evicted() => return End::Closed,
            () = clients.stopper.draining(), if !draining => {
                draining = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let Parts { io, read_buf, .. } = connection.into_parts();
    let mut io = io.into_inner();
    io.read_again(&read_buf);
    End::Streams(io, answer)
}

pub(super) fn is_event_stream(answer: &Response) -> bool {
    let kind = answer.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// Counts the answer against what may wait for clients, or puts a short one in its place.
fn charge(
    answer: Response,
    events: bool,
    socket: &Arc<Socket>,
    clients: &Arc<Clients>,
    answering: Arc<Answering>,
) -> Response<Sent> {
    let (answer, charge) = match clients.charge(socket, answer.body()) {
        Some(charge) => (answer, Some(charge)),
        None => (too_much_unread().into_response(), None),
    };
    answer.map(|body| Sent { body, rest: Bytes::new(), events, answering, _charge: charge })
}

/// The body of a request.
struct Received {
    body: Incoming,
    /// Until it is over.
    answering: Option<Arc<Answering>>,
}

impl Received {
    fn over(&mut self, is_whole: bool) {
        if let Some(answering) = self.answering.take() {
            answering.received(is_whole);
        }
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.over(false);
    }
}

impl Body for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        let failed = matches!(frame, Poll::Ready(Some(Err(_))));
        let is_whole = matches!(frame, Poll::Ready(None)) || self.body.is_end_stream();
        if failed || is_whole {
            self.over(is_whole && !failed);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer: it is not over before it is sent.
struct Sent {
    body: AnswerBody,
    /// Of the frame that came last. Hyper takes whatever it is given; piece by piece it takes what the client reads.
    rest: Bytes,
    events: bool,
    answering: Arc<Answering>,
    _charge: Option<UnreadCharge>,
}

impl Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if !self.rest.is_empty() {
            let len = self.rest.len().min(PIECE);
            return Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(len)))));
        }
        let mut frame = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &mut frame
            && let Some(data) = frame.data_mut()
            && data.len() > PIECE
        {
            self.rest = data.split_off(PIECE);
        }
        if self.events && frame.is_pending() && self.answering.takes_comment() {
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::super::socket::pair;
    use super::*;

    fn sent(socket: &Arc<Socket>, body: impl Into<AnswerBody>, events: bool) -> Sent {
        let answering = Arc::new(Answering::begin(socket, Version::HTTP_11, false));
        Sent { body: body.into(), rest: Bytes::new(), events, answering, _charge: None }
    }

    #[tokio::test]
    async fn a_long_answer_is_given_on_piece_by_piece_and_is_whole() {
        let (socket, _client) = pair().await;
        let mut sent = sent(&socket, vec![b'x'; 3 * PIECE + 5], false);
        let mut sizes = Vec::new();
        while !sent.is_end_stream() {
            let frame = sent.frame().await.unwrap().unwrap();
            sizes.push(frame.into_data().unwrap().len());
        }
        assert_eq!(sizes, [PIECE, PIECE, PIECE, 5]);
    }

    #[tokio::test]
    async fn a_comment_comes_between_events_and_nowhere_else() {
        let (socket, _client) = pair().await;
        let nothing = || {
            AnswerBody::from_stream(futures_util::stream::pending::<Result<Bytes, axum::Error>>())
        };
        for events in [false, true] {
            let mut sent = sent(&socket, nothing(), events);
            socket.comment.store(true, Relaxed);
            let frame = futures_util::FutureExt::now_or_never(sent.frame());
            let comment = frame.map(|frame| frame.unwrap().unwrap().into_data().unwrap());
            assert_eq!(comment.as_deref(), events.then_some(COMMENT));
        }
    }
}

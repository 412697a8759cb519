//! HTTP/1: one request after the other.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body as AnswerBody;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use hyper::Request;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;

use super::Clients;
use super::guarded::Guarded;
use super::last_words::HEADERS_TOO_SLOW;
use super::socket::{Answering, Socket};
use super::unread::UnreadCharge;
use crate::http::access::Entrance;
use crate::http::too_much_unread;

/// Longest head of a request, in bytes; also what hyper keeps of a request or an answer at most.
const BUFFER: usize = 128 << 10;

/// Of an answer, what is given to hyper at once: many events, and most whole answers.
const PIECE: usize = 64 << 10;
/// An event that says nothing: it shows whether the client is there.
const COMMENT: &[u8] = b":\n\n";

pub(super) async fn serve(io: Guarded, socket: &Arc<Socket>, clients: &Arc<Clients>) {
    let late = {
        let routes = TowerToHyperService::new(clients.routes.clone());
        let service = service_fn(|mut request: Request<Incoming>| {
            let receiving = !request.body().is_end_stream();
            let answering = Arc::new(Answering::begin(socket, request.version(), receiving));
            request.extensions_mut().insert(socket.peer);
            request.extensions_mut().insert(Entrance::of(socket.peer.address));
            let held = receiving.then(|| Arc::clone(&answering));
            let answer = routes.call(request.map(|body| Received { body, answering: held }));
            async move {
                let answer = answer.await?;
                let events = is_event_stream(&answer);
                answering.answered(events);
                Ok::<_, Infallible>(charge(answer, events, socket, clients, answering))
            }
        });
        let mut http = http1::Builder::new();
        http.header_read_timeout(None); // hyper's also runs while a connection rests
        http.max_buf_size(BUFFER);
        let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(io), service));
        let mut late = std::pin::pin!(socket.late(clients.app.config.http.header_timeout));
        let mut gone = std::pin::pin!(socket.gone());
        let mut draining = false;
        loop {
            tokio::select! {
                _ = connection.as_mut() => break false,
                () = late.as_mut() => break true,
                () = gone.as_mut() => break false,
                () = socket.evicted() => break false,
                () = clients.stopper.draining(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    };
    if late && socket.has_asked() {
        clients.app.metrics.http.request("unknown", 408, "headers_too_slow");
        HEADERS_TOO_SLOW.say(socket).await;
    }
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
    fn over(&mut self) {
        if let Some(answering) = self.answering.take() {
            answering.received();
        }
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.over();
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
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) || self.body.is_end_stream() {
            self.over();
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
        let answering = Arc::new(Answering::begin(socket, hyper::Version::HTTP_11, false));
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
            socket.comment.store(true, std::sync::atomic::Ordering::Relaxed);
            let frame = futures_util::FutureExt::now_or_never(sent.frame());
            let comment = frame.map(|frame| frame.unwrap().unwrap().into_data().unwrap());
            assert_eq!(comment.as_deref(), events.then_some(COMMENT));
        }
    }
}

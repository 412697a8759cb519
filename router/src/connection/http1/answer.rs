//! Whole answers over HTTP/1.1, and what of the bodies of all answers is counted until it is sent. Hyper sends those that
//! are there at once; an answer that had to be waited for is written here, as hyper was left meanwhile.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body as AnswerBody;
use axum::http::StatusCode;
use axum::http::header;
use axum::http::response::Parts;
use axum::response::{IntoResponse as _, Response};
use bytes::BytesMut;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use tokio::io::AsyncWriteExt as _;

use super::super::Clients;
use super::super::guarded::Guarded;
use super::super::socket::{Answering, Socket};
use super::super::unread::UnreadCharge;
use super::events::{COMMENT, LAST_CHUNK};
use super::head::{Framing, asks_to_close, head_bytes};
use crate::http::too_much_unread;

/// Of an answer, what is written at once: many events, and most whole answers.
const PIECE: usize = 64 << 10;

/// Sends an answer. False: the connection is over.
pub(super) async fn send(
    answer: Response<Sent>,
    is_last: bool,
    io: &mut Guarded,
    socket: &Arc<Socket>,
    clients: &Arc<Clients>,
) -> bool {
    let (head, body) = answer.into_parts();
    let mut closes = is_last || clients.stopper.is_draining() || asks_to_close(&head.headers);
    let framing = framing(&head, &body);
    let out = head_bytes(&head, framing, closes);
    drop(head);
    let sent = {
        let mut gone = pin!(socket.gone());
        let mut writing = pin!(write(out, body, framing == Framing::Chunks, io));
        loop {
            tokio::select! {
                sent = writing.as_mut() => break sent,
                () = gone.as_mut() => break Err(io::ErrorKind::BrokenPipe.into()),
                () = socket.evicted() => break Err(io::ErrorKind::BrokenPipe.into()),
                () = clients.stopper.draining(), if !closes => closes = true,
            }
        }
    };
    if sent.is_ok() && closes {
        let _ = io.shutdown().await; // it is over anyway
    }
    sent.is_ok() && !closes
}

/// How its end is told.
fn framing(head: &Parts, body: &Sent) -> Framing {
    match head.status {
        StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED => Framing::Nothing,
        _ if head.headers.contains_key(header::CONTENT_LENGTH) => Framing::Nothing,
        _ => body.size_hint().exact().map_or(Framing::Chunks, Framing::Length),
    }
}

/// Writes what is in `out` and the body, as it comes.
async fn write(
    mut out: BytesMut,
    mut body: Sent,
    in_chunks: bool,
    io: &mut Guarded,
) -> io::Result<()> {
    loop {
        let frame = poll_fn(|context| match Pin::new(&mut body).poll_frame(context) {
            Poll::Pending if out.is_empty() => io.poll_broken(context).map(Err),
            Poll::Pending => Poll::Ready(Ok(None)), // what there is goes first
            Poll::Ready(None) => Poll::Ready(Ok(Some(None))),
            Poll::Ready(Some(frame)) => {
                Poll::Ready(frame.map(|frame| Some(Some(frame))).map_err(io::Error::other))
            }
        });
        let is_over = match frame.await? {
            None => false,
            Some(None) => {
                out.extend_from_slice(if in_chunks { LAST_CHUNK } else { b"" });
                true
            }
            Some(Some(frame)) => {
                let data = frame.into_data().unwrap_or_default(); // trailers go to nobody
                if in_chunks && !data.is_empty() {
                    out.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
                    out.extend_from_slice(&data);
                    out.extend_from_slice(b"\r\n");
                } else {
                    out.extend_from_slice(&data);
                }
                false
            }
        };
        io.write_all(&out).await?;
        out.clear();
        if is_over {
            return io.flush().await;
        }
        if !body.is_end_stream() {
            io.flush().await?;
        }
    }
}

pub(in super::super) fn is_event_stream(answer: &Response) -> bool {
    let kind = answer.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// Counts the answer against what may wait for clients, or puts a short one in its place.
pub(super) fn charge(
    answer: Response,
    socket: &Arc<Socket>,
    clients: &Arc<Clients>,
    answering: Arc<Answering>,
) -> Response<Sent> {
    let events = is_event_stream(&answer);
    let (answer, charge) = match clients.charge(socket, answer.body()) {
        Some(charge) => (answer, Some(charge)),
        None => (too_much_unread().into_response(), None),
    };
    answer.map(|body| Sent { body, rest: Bytes::new(), events, answering, _charge: charge })
}

/// The body of an answer: it is not over before it is sent.
pub(super) struct Sent {
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

    use hyper::Version;
    use tokio::io::AsyncReadExt as _;

    use super::super::super::socket::pair;
    use super::super::super::tests::clients;
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
            socket.comment.store(true, std::sync::atomic::Ordering::Relaxed);
            let frame = futures_util::FutureExt::now_or_never(sent.frame());
            let comment = frame.map(|frame| frame.unwrap().unwrap().into_data().unwrap());
            assert_eq!(comment.as_deref(), events.then_some(COMMENT));
        }
    }

    /// What a client reads of an answer.
    async fn read(answer: Response<Sent>, is_last: bool) -> (String, bool) {
        let (clients, (socket, mut client)) = (clients().await, pair().await);
        let mut io = Guarded::new(&socket, &clients.app);
        let goes_on = send(answer, is_last, &mut io, &socket, &clients).await;
        drop((io, socket));
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        (text, goes_on)
    }

    async fn answer(status: u16, body: AnswerBody) -> Response<Sent> {
        let (socket, _client) = pair().await;
        let answer = Response::new(sent(&socket, body, false));
        let (mut head, body) = answer.into_parts();
        head.status = StatusCode::from_u16(status).unwrap();
        Response::from_parts(head, body)
    }

    fn body_of(text: &str) -> &str {
        text.split_once("\r\n\r\n").unwrap().1
    }

    #[tokio::test]
    async fn the_end_of_a_body_is_told_by_its_length_by_chunks_or_not_at_all() {
        let (text, goes_on) = read(answer(200, "whole".into()).await, false).await;
        assert!(text.starts_with("HTTP/1.1 200 OK\r\ncontent-length: 5\r\ndate: "), "{text}");
        assert_eq!((body_of(&text), goes_on), ("whole", true));

        let (text, _) = read(answer(204, AnswerBody::empty()).await, false).await;
        assert!(text.starts_with("HTTP/1.1 204 No Content\r\ndate: ") && body_of(&text).is_empty());

        let mut given = answer(200, "whole".into()).await;
        given.headers_mut().insert(header::CONTENT_LENGTH, "5".parse().unwrap());
        let (text, _) = read(given, false).await;
        assert_eq!(text.matches("content-length").count(), 1);

        let pieces = ["a", "", "bc"].map(|piece| Ok::<_, axum::Error>(Bytes::from(piece)));
        let stream = AnswerBody::from_stream(futures_util::stream::iter(pieces));
        let (text, _) = read(answer(200, stream).await, false).await;
        assert!(text.starts_with("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"), "{text}");
        assert_eq!(body_of(&text), "1\r\na\r\n2\r\nbc\r\n0\r\n\r\n");
    }

    #[tokio::test]
    async fn a_head_does_not_wait_for_its_body_and_a_broken_body_ends_the_connection() {
        let (clients, (socket, mut client)) = (clients().await, pair().await);
        let (pieces, body) = tokio::sync::mpsc::unbounded_channel();
        let body = futures_util::stream::unfold(body, |mut body| async move {
            body.recv().await.map(|piece: Result<Bytes, axum::Error>| (piece, body))
        });
        let answer = answer(200, AnswerBody::from_stream(body)).await;
        let sending = tokio::spawn(async move {
            let mut io = Guarded::new(&socket, &clients.app);
            send(answer, false, &mut io, &socket, &clients).await
        });
        let mut bytes = vec![0; 1 << 10];
        let read = client.read(&mut bytes).await.unwrap();
        assert!(bytes[..read].ends_with(b"\r\n\r\n"), "nothing of the body is there yet");
        pieces.send(Ok(Bytes::from("x"))).unwrap();
        let read = client.read(&mut bytes).await.unwrap();
        assert_eq!(&bytes[..read], b"1\r\nx\r\n");
        pieces.send(Err(axum::Error::new("broken"))).unwrap();
        assert!(!sending.await.unwrap(), "no end of it is told");
        assert_eq!(client.read(&mut bytes).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn the_connection_ends_where_the_client_or_the_answer_says_so() {
        let (text, goes_on) = read(answer(200, "a".into()).await, true).await;
        assert!(text.contains("connection: close\r\n") && !goes_on);
        let mut closing = answer(200, "a".into()).await;
        closing.headers_mut().insert(header::CONNECTION, "close".parse().unwrap());
        let (text, goes_on) = read(closing, false).await;
        assert!(text.matches("connection: close\r\n").count() == 1 && !goes_on);
    }
}

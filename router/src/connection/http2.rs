//! HTTP/2: requests side by side. Each answer is read by its client in pieces that its window allows, and no byte is given
//! to the connection before: an answer that nobody reads is given up piece by piece, whoever else reads.

pub(super) mod frames;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use axum::body::Body as AnswerBody;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Version, header};
use bytes::Bytes;
use futures_util::poll;
use h2::server::{Connection, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Clients;
use super::gate::InHand;
use super::guarded::Guarded;
use super::http1::is_event_stream;
use super::received::Received;
use super::socket::{Answering, Socket};
use crate::http::access::Entrance;

/// Requests of a connection at a time: what nginx allows, and more than the 100 that RFC 9113 asks for at least.
const STREAMS: u32 = 128;
/// Longest head of a request, decoded.
const HEADER_LIST: u32 = 16 << 10;
/// Of the bodies of requests: of one, and of all, before they are read.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Of an answer, this much is given to the connection at a time, and has to be taken within `--stall-timeout-ms`: one
/// frame.
const PIECE: usize = 16 << 10;
/// Clients open their windows after so many bytes or more: Go's half of it, for the stream and for the connection.
const CARRIED: usize = 2 << 10;
/// A client that takes less at a time is not thanked for the windows that it opens.
const LEAST_CARRIED: usize = 32;
/// After `GOAWAY`, for the client to say that it has seen it.
const GOODBYE: Duration = Duration::from_secs(1);
/// The same where somebody waits for its descriptor.
const EVICTED: Duration = Duration::from_millis(50);
/// RFC 9113, 8.2.2: they mean nothing here.
const OF_HTTP1: [HeaderName; 5] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

pub(super) async fn serve(io: Guarded, socket: &Arc<Socket>, clients: &Arc<Clients>) {
    let mut conversation = pin!(converse(io, socket, clients));
    poll_fn(|context| {
        socket.of_turn.store(0, Relaxed); // whatever wakes its task begins a turn
        conversation.as_mut().poll(context)
    })
    .await;
}

async fn converse(io: Guarded, socket: &Arc<Socket>, clients: &Arc<Clients>) {
    let mut http = h2::server::Builder::new();
    http.max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADER_LIST)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(PIECE);
    let Ok(mut connection) = http.handshake(io.reads_http2()).await else { return };
    let mut answers = JoinSet::new(); // dropped with the connection
    let mut late = std::pin::pin!(socket.late(clients.app.config.http.header_timeout));
    let mut draining = false;
    loop {
        tokio::select! {
            biased; // what has come is read first, as for HTTP/1
            request = connection.accept() => match request {
                Some(Ok((request, respond))) => take(&mut answers, request, respond, socket, clients),
                Some(Err(_)) | None => return,
            },
            Some(_) = answers.join_next() => {}
            () = late.as_mut() => return say_goodbye(connection, GOODBYE).await,
            () = socket.evicted() => return say_goodbye(connection, EVICTED).await,
            () = socket.floods.notified() => {
                clients.app.metrics.http.connections_flooding.inc();
                return break_off(connection).await;
            }
            () = clients.stopper.draining(), if !draining => {
                draining = true;
                connection.graceful_shutdown();
            }
        }
    }
}

/// Ends a connection on which nothing is answered.
async fn say_goodbye(mut connection: Connection<Guarded, Bytes>, time: Duration) {
    connection.graceful_shutdown();
    let _ = timeout(time, async {
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            respond.send_reset(Reason::REFUSED_STREAM); // it is safe to ask again elsewhere
        }
    })
    .await;
}

/// Ends a connection whose client floods, with all that is answered on it.
async fn break_off(mut connection: Connection<Guarded, Bytes>) {
    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
    let _ = timeout(EVICTED, poll_fn(|context| connection.poll_closed(context))).await;
}

fn take(
    answers: &mut JoinSet<()>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    socket: &Arc<Socket>,
    clients: &Arc<Clients>,
) {
    if clients.reads_too_little(socket) {
        respond.send_reset(Reason::ENHANCE_YOUR_CALM);
        return;
    }
    let (socket, clients) = (Arc::clone(socket), Arc::clone(clients));
    let receiving = !request.body().is_end_stream();
    let answering = Arc::new(Answering::begin(&socket, Version::HTTP_2, receiving));
    let body_of = receiving.then(|| Arc::clone(&answering));
    let request = request.map(|body| Received::new(Uploaded(body), body_of));
    answers.spawn(async move {
        if socket.is_pressing() {
            tokio::select! {
                () = clients.gates.slot(&socket) => {}
                _ = poll_fn(|context| respond.poll_reset(context)) => return,
            }
        }
        let in_hand = InHand::default();
        let _request = in_hand.request();
        let answer = answer(request, respond, &socket, &clients, &in_hand);
        let _ = clients.gates.pass(&in_hand, answer).await;
        drop(answering);
    });
}

/// Why an answer ended before its end.
enum Broken {
    /// The client took it back, or its connection is gone.
    Gone,
    Stalled,
}

impl From<h2::Error> for Broken {
    fn from(_: h2::Error) -> Self {
        Self::Gone
    }
}

async fn answer(
    mut request: Request<Received<Uploaded>>,
    mut respond: SendResponse<Bytes>,
    socket: &Arc<Socket>,
    clients: &Arc<Clients>,
    in_hand: &InHand,
) -> Result<(), Broken> {
    request.extensions_mut().insert(socket.peer);
    request.extensions_mut().insert(Entrance::of(socket.peer.address));
    let routes = TowerToHyperService::new(clients.routes.clone());
    let answer = routes.call(request);
    let mut answer = pin!(answer);
    let answer = match poll!(answer.as_mut()) {
        Poll::Ready(Ok(answer)) => {
            socket.presses();
            answer
        }
        Poll::Pending => tokio::select! {
            Ok(answer) = answer => answer,
            _ = poll_fn(|context| respond.poll_reset(context)) => return Err(Broken::Gone),
        },
    };
    let Some(_charge) = clients.charge(socket, answer.body()) else {
        respond.send_reset(Reason::ENHANCE_YOUR_CALM);
        return Err(Broken::Stalled);
    };
    // the task of the connection writes what this one gives it
    let _running = is_event_stream(&answer).then(|| (in_hand.stream(), socket.in_hand.stream()));
    let (mut head, body) = answer.into_parts();
    head.version = Version::HTTP_2;
    finish_headers(&mut head.headers, &body);
    let is_empty = body.is_end_stream();
    let mut to = respond.send_response(axum::http::Response::from_parts(head, ()), is_empty)?;
    if is_empty {
        return Ok(());
    }
    let sent = send(body, &mut to, socket, clients.app.config.deadlines.stall).await;
    if matches!(sent, Err(Broken::Stalled)) {
        clients.app.metrics.http.answers_stalled.inc();
        to.send_reset(Reason::CANCEL);
    }
    sent
}

fn finish_headers(headers: &mut HeaderMap, body: &AnswerBody) {
    for name in &OF_HTTP1 {
        headers.remove(name);
    }
    let date = || httpdate::fmt_http_date(SystemTime::now());
    headers
        .entry(header::DATE)
        .or_insert_with(|| HeaderValue::try_from(date()).expect("a date is plain text"));
    if let Some(length) = body.size_hint().exact().filter(|_| !body.is_end_stream()) {
        headers.entry(header::CONTENT_LENGTH).or_insert(HeaderValue::from(length));
    }
}

/// Sends a body as its client reads it.
async fn send(
    mut body: AnswerBody,
    to: &mut SendStream<Bytes>,
    socket: &Socket,
    stall: Duration,
) -> Result<(), Broken> {
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            _ = poll_fn(|context| to.poll_reset(context)) => return Err(Broken::Gone),
        };
        match frame {
            Some(Ok(frame)) => {
                let Ok(mut data) = frame.into_data() else { continue }; // no answer has trailers
                while !data.is_empty() {
                    let piece = data.split_to(data.len().min(PIECE));
                    let is_last = data.is_empty() && body.is_end_stream();
                    send_piece(piece, is_last, to, socket, stall).await?;
                    if is_last {
                        return Ok(());
                    }
                }
            }
            Some(Err(_)) => {
                to.send_reset(Reason::INTERNAL_ERROR);
                return Err(Broken::Gone);
            }
            None => return Ok(to.send_data(Bytes::new(), true)?),
        }
    }
}

/// Sends a piece, as far as the client lets it, until it is all sent.
async fn send_piece(
    mut piece: Bytes,
    is_last: bool,
    to: &mut SendStream<Bytes>,
    socket: &Socket,
    stall: Duration,
) -> Result<(), Broken> {
    let mut too_late = None; // the window is open as a rule, and then nobody needs a timer
    loop {
        to.reserve_capacity(piece.len());
        let granted = match to.capacity() {
            0 => {
                let too_late = too_late.get_or_insert_with(|| Box::pin(sleep(stall)));
                tokio::select! {
                    granted = poll_fn(|context| to.poll_capacity(context)) => {
                        granted.ok_or(Broken::Gone)??
                    }
                    () = too_late.as_mut() => return Err(Broken::Stalled),
                }
            }
            granted => granted,
        };
        let part = piece.split_to(granted.min(piece.len()));
        let is_all = piece.is_empty();
        if part.len() >= LEAST_CARRIED {
            socket.carried.fetch_add(1 + part.len() / CARRIED, Relaxed);
        }
        if is_all || !part.is_empty() {
            to.send_data(part, is_last && is_all)?;
        }
        if is_all {
            return Ok(());
        }
    }
}

/// The body of a request; what is read of it makes room for more.
struct Uploaded(RecvStream);

impl Body for Uploaded {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let data = match ready!(self.0.poll_data(context)) {
            Some(Ok(data)) => data,
            // the client wants no more of this than the answer: RFC 9113, 8.1
            Some(Err(error)) if error.reason() == Some(Reason::NO_ERROR) => {
                return Poll::Ready(None);
            }
            Some(Err(error)) => return Poll::Ready(Some(Err(error))),
            None => return Poll::Ready(None),
        };
        let _ = self.0.flow_control().release_capacity(data.len()); // fails only on a stream that is gone
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

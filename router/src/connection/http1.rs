//! HTTP/1: one request after the other.

mod answer;
mod events;
mod handling;
mod head;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};

use axum::http::Method;
use axum::http::header::TRANSFER_ENCODING;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1::{self, Parts};
use hyper::service::{Service as _, service_fn};
use hyper::{Request, Version};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::task::yield_now;

use super::Clients;
use super::guarded::Guarded;
use super::last_words::{BODY_TOO_SLOW, HEADERS_TOO_SLOW};
use super::received::Received;
use super::socket::{Answering, Socket};
use crate::http::access::Entrance;
pub(super) use answer::is_event_stream;
use handling::{AnswerStep, Handling};
use head::asks_to_close;

/// Longest head of a request, in bytes; also what hyper keeps of a request or an answer at most.
const BUFFER: usize = 128 << 10;

pub(super) async fn serve(mut io: Box<Guarded>, socket: &Arc<Socket>, clients: &Arc<Clients>) {
    loop {
        // on the heap, so that who waits or streams, which needs none of hyper, does not hold the room for it
        let (back, handling) = match Box::pin(talk(io, socket, clients)).await {
            End::Closed => return,
            End::Late => break,
            End::TooSlow => {
                clients.app.metrics.http.request("unknown", 408, "body_too_slow");
                return BODY_TOO_SLOW.say(socket).await;
            }
            End::Left(back, handling) => (back, handling),
        };
        io = back;
        if let Some(handling) = handling
            && !handling.finish(&mut io, socket, clients).await
        {
            return;
        }
        if !asks_again(&io, socket, clients).await {
            return;
        }
    }
    if socket.has_asked() {
        clients.app.metrics.http.request("unknown", 408, "headers_too_slow");
        HEADERS_TOO_SLOW.say(socket).await;
    }
}

/// Waits for the next request, without hyper, which takes room to read before there is anything to be read. False: the
/// connection is over.
async fn asks_again(io: &Guarded, socket: &Socket, clients: &Clients) -> bool {
    let has_asked = io.poll_heard(&mut Context::from_waker(Waker::noop())).is_ready();
    let heard = async {
        if has_asked {
            yield_now().await; // a turn for each request
            socket.presses();
            if socket.is_pressing() {
                // in a box, which connections that rest have no room for
                Box::pin(clients.gates.slot(socket)).await;
            }
        }
        poll_fn(|context| io.poll_heard(context)).await;
    };
    tokio::select! {
        biased; // what has come is answered, also where the drain came at the same time
        () = heard => true,
        () = socket.late(clients.app.config.http.header_timeout) => false,
        () = socket.evicted() => false,
        () = clients.stopper.draining(), if !has_asked => false,
    }
}

/// How it ends that hyper serves a connection.
enum End {
    Closed,
    /// The client is too late with its request.
    Late,
    /// Its body is on its way for so long that others, for whom there is no room, go before.
    TooSlow,
    /// Hyper read all of a request, has nothing to write, and would only wait: for the answer, or after it for the next
    /// request.
    Left(Box<Guarded>, Option<Box<Handling>>),
}

/// Serves as hyper does, up to the next request whose answer has to be waited for, or is a stream of events, or to where the
/// client has all answers.
async fn talk(io: Box<Guarded>, socket: &Arc<Socket>, clients: &Arc<Clients>) -> End {
    let handled: Mutex<Option<Handling>> = Mutex::new(None);
    let is_plain = socket.wire().stream.plain().is_some();
    let routes = TowerToHyperService::new(clients.routes.clone());
    let service = service_fn(|mut request: Request<Incoming>| {
        let receiving = !request.body().is_end_stream();
        let version = request.version();
        let is_last = asks_to_close(request.headers());
        // The answer to HEAD has no body, whatever it says of its length. After chunks hyper has to close the connection if
        // there was a length as well, which it tells nobody.
        let may_leave = is_plain
            && version == Version::HTTP_11
            && request.method() != Method::HEAD
            && !request.headers().contains_key(TRANSFER_ENCODING);
        let answering = Arc::new(Answering::begin(socket, version, receiving));
        request.extensions_mut().insert(socket.peer);
        request.extensions_mut().insert(Entrance::of(socket.peer.address));
        let held = receiving.then(|| Arc::clone(&answering));
        let answer = routes.call(request.map(|body| Received::new(body, held)));
        let (handling, by_hyper) = Handling::begin(answer, answering, may_leave, is_last);
        *handled.lock().expect("no holder panics") = Some(handling);
        async move {
            match by_hyper.await {
                Ok(answer) => Ok::<_, Infallible>(answer),
                Err(_) => std::future::pending().await, // hyper has no further part in it
            }
        }
    });
    let mut http = http1::Builder::new();
    http.header_read_timeout(None); // hyper's also runs while a connection rests
    http.max_buf_size(BUFFER);
    let mut connection = http.serve_connection(TokioIo::new(io), service);
    let mut late = pin!(socket.late(clients.app.config.http.header_timeout));
    let mut gone = pin!(socket.gone());
    let mut draining = false;
    let mut may_rest = false;
    let mut slot = None;
    let handling = loop {
        let turn = poll_fn(|context| {
            let mut quiet = Context::from_waker(Waker::noop());
            let mut has_answered = false;
            loop {
                // The handler takes the body out of hyper's hands in this same turn. Would that wake this task, it went to
                // the end of the queue and woke another thread for it.
                if Pin::new(&mut connection).poll(&mut quiet).is_ready() {
                    return Poll::Ready(None);
                }
                let mut in_hand = handled.lock().expect("no holder panics");
                let waits = in_hand.is_some();
                if has_answered && waits {
                    // as in `asks_again`
                    socket.presses();
                    slot = socket.is_pressing().then(|| Box::pin(clients.gates.slot(socket)));
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if let Some(pause) = &mut slot {
                    ready!(pause.as_mut().poll(context));
                    slot = None;
                }
                if let Some(handling) = &mut *in_hand {
                    // hyper has flushed all of what came before, unless the socket is full
                    let is_flushed = !socket.unflushed.load(Relaxed);
                    match handling.poll(is_flushed, context) {
                        AnswerStep::Waits => {}
                        AnswerStep::Leaves => {
                            return Poll::Ready(Some(in_hand.take().map(Box::new)));
                        }
                        AnswerStep::Answered => {
                            if let Some(handling) = in_hand.take() {
                                may_rest = handling.may_leave();
                                handling.give_to_hyper(socket, clients); // which sends it in its next turn
                                has_answered = true;
                            }
                            continue;
                        }
                    }
                }
                drop(in_hand);
                let was_full = socket.unflushed.load(Relaxed);
                // Now that hyper has done what it could, it is to be woken for the rest.
                if Pin::new(&mut connection).poll(context).is_ready() {
                    return Poll::Ready(None);
                }
                let in_hand = handled.lock().expect("no holder panics").is_some();
                if !in_hand && may_rest && socket.resting_since().is_some() {
                    return Poll::Ready(Some(None));
                }
                let came = in_hand && !waits;
                // whose answer waited for the socket
                let has_room = in_hand && was_full && !socket.unflushed.load(Relaxed);
                if !came && !has_room {
                    return Poll::Pending;
                }
            }
        });
        tokio::select! {
            biased; // what has come is read first: a router that has much to do may be later than the client
            turn = turn => match turn {
                Some(handling) => break handling,
                None => return End::Closed,
            },
            () = late.as_mut() => return End::Late,
            () = gone.as_mut() => return End::Closed,
            () = socket.evicted() => return if socket.receives() { End::TooSlow } else { End::Closed },
            () = clients.stopper.draining(), if !draining => {
                draining = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let Parts { io, read_buf, .. } = connection.into_parts();
    let mut io = io.into_inner();
    io.read_again(&read_buf);
    End::Left(io, handling)
}

//! A client that has stopped writing: it either waits for its answer, as `nc -N` does, or it is gone.
//!
//! Both look the same until something is sent: TCP answers a keepalive for a socket that was closed as for one that was
//! half closed, but data only with a reset. So HTTP/1 keeps the end of its input to itself while an answer is in flight,
//! and a client whose answer has not begun is sent `100 Continue`, which RFC 9110 lets a server send at any time; one that
//! reads a stream of events is sent a comment. Who is gone is noticed some 15 ms after the hang-up on a fast network.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Waker};
use std::time::Duration;

use hyper::Version;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, sleep};

use super::socket::{Socket, WriteTurn};

/// Until the first look; an answer that no worker is needed for is there by then. Doubled from look to look.
const FIRST_LOOK: Duration = Duration::from_millis(5);
/// The pause between looks grows up to this.
const LAST_LOOK: Duration = Duration::from_secs(5);
/// HTTP/1.0 knows no interim answers, so nothing tells whether its client is there: its answer has this long to begin.
/// A guess.
const BLIND: Duration = Duration::from_secs(5);

const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Of a client that stopped writing.
pub(super) struct Shut {
    since: Instant,
    /// Hyper is told.
    told: bool,
    reader: Option<Waker>,
}

impl WriteTurn {
    /// True while the end of the input is kept from the reader.
    fn holds_back(&mut self, context: &Context<'_>) -> bool {
        let shut = self.shut.get_or_insert_with(|| Shut {
            since: Instant::now(),
            told: false,
            reader: None,
        });
        shut.reader = Some(context.waker().clone());
        let told = shut.told;
        !told && self.answers_in_order()
    }

    pub(super) fn wake_reader(&mut self) {
        if let Some(reader) = self.shut.as_mut().and_then(|shut| shut.reader.take()) {
            reader.wake();
        }
    }

    fn tell(&mut self) {
        if let Some(shut) = &mut self.shut {
            shut.told = true;
        }
        self.wake_reader();
    }
}

impl Socket {
    /// The input is over. True while the reader should not know.
    pub(super) fn holds_back(&self, context: &Context<'_>) -> bool {
        let held = self.turn().holds_back(context);
        if held {
            self.shut.notify_one();
        }
        held
    }

    /// Returns when a client that stopped writing turns out to be gone.
    pub(super) async fn gone(&self) {
        loop {
            let shut: Notified<'_> = self.shut.notified();
            shut.await;
            let mut pause = FIRST_LOOK;
            loop {
                sleep(pause).await;
                match self.look() {
                    Look::Gone => return,
                    Look::Idle => break,
                    Look::There => pause = (2 * pause).min(LAST_LOOK),
                }
            }
        }
    }

    fn look(&self) -> Look {
        let mut turn = self.turn();
        let Some(since) = turn.shut.as_ref().map(|shut| shut.since) else { return Look::Idle };
        if !turn.answers_in_order() {
            return Look::Idle;
        }
        if turn.receiving > 0 {
            turn.tell(); // the body of the request will not come any more
            return Look::Idle;
        }
        let unanswered = turn.unanswered > 0;
        let version = turn.version;
        if !unanswered && turn.events {
            self.comment.store(true, Relaxed);
            turn.wake_reader();
        }
        drop(turn);
        let wire = self.wire();
        if !matches!(wire.stream.take_error(), Ok(None)) {
            return Look::Gone;
        }
        // what hyper has begun to write may not be broken into
        if !unanswered || self.unflushed.load(Relaxed) {
            return Look::There;
        }
        if version < Version::HTTP_11 {
            return if since.elapsed() > BLIND { Look::Gone } else { Look::There };
        }
        let Some(plain) = wire.stream.plain() else { return Look::Idle };
        match plain.try_write(PROBE) {
            Ok(written) if written == PROBE.len() => Look::There,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Look::There,
            Ok(_) | Err(_) => Look::Gone,
        }
    }
}

enum Look {
    Gone,
    There,
    /// There is nothing to be sent to it.
    Idle,
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::super::socket::{Answering, pair};
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// The input is over, and hyper reads.
    fn shut(socket: &Socket) -> bool {
        socket.holds_back(&Context::from_waker(Waker::noop()))
    }

    async fn is_gone_within_a_minute(socket: &Socket) -> bool {
        timeout(MINUTE, socket.gone()).await.is_ok()
    }

    fn heard(client: &TcpStream) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 16];
        let read = client.try_read(&mut bytes).unwrap_or(0);
        bytes.truncate(read);
        bytes
    }

    #[tokio::test(start_paused = true)]
    async fn looks_begin_at_once_and_become_few() {
        let (socket, client) = pair().await;
        let _answering = Answering::begin(&socket, Version::HTTP_11, false);
        std::future::poll_fn(|context| {
            socket.wire().stream.plain().unwrap().poll_write_ready(context)
        })
        .await
        .unwrap();
        assert!(shut(&socket) && !is_gone_within_a_minute(&socket).await);
        client.readable().await.unwrap();
        let heard = heard(&client);
        assert_eq!(heard, PROBE.repeat(heard.len() / PROBE.len()));
        // 5 ms, 10 ms, 20 ms and so on, and then every 5 s
        let looks = heard.len() / PROBE.len();
        assert!((15..25).contains(&looks), "{looks}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_ends_too_early_is_told_to_who_reads_it() {
        let (socket, client) = pair().await;
        let answering = Answering::begin(&socket, Version::HTTP_11, true);
        assert!(shut(&socket) && !is_gone_within_a_minute(&socket).await);
        assert!(!shut(&socket), "hyper learns of it");
        assert!(heard(&client).is_empty());
        answering.received(false);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_gets_into_what_hyper_writes_and_to_an_old_client_nothing_at_all() {
        let (socket, client) = pair().await;
        let answering = Answering::begin(&socket, Version::HTTP_11, false);
        socket.unflushed.store(true, Relaxed);
        assert!(shut(&socket) && !is_gone_within_a_minute(&socket).await);
        drop(answering);
        socket.unflushed.store(false, Relaxed);
        assert!(heard(&client).is_empty());

        let (socket, client) = pair().await;
        let _answering = Answering::begin(&socket, Version::HTTP_10, false);
        let begin = Instant::now();
        assert!(shut(&socket) && is_gone_within_a_minute(&socket).await);
        assert!((BLIND..BLIND + LAST_LOOK).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        assert!(heard(&client).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn comments_are_for_the_stream_that_is_in_flight() {
        let (socket, _client) = pair().await;
        let stream = Answering::begin(&socket, Version::HTTP_11, false);
        stream.answered(true);
        assert!(shut(&socket) && !is_gone_within_a_minute(&socket).await);
        assert!(stream.takes_comment() && !stream.takes_comment(), "once");
        drop(stream);
        let _next = Answering::begin(&socket, Version::HTTP_11, false);
        assert!(shut(&socket) && !is_gone_within_a_minute(&socket).await);
        assert!(!socket.comment.load(Relaxed), "its answer has not begun");
    }

    #[tokio::test]
    async fn a_reset_says_that_it_is_gone() {
        let (socket, client) = pair().await;
        let answering = Answering::begin(&socket, Version::HTTP_11, false);
        answering.answered(false);
        assert_eq!(socket.wire().stream.plain().unwrap().try_write(b"HTTP").unwrap(), 4);
        client.readable().await.unwrap();
        drop(client); // with bytes that it has not read
        assert!(shut(&socket) && is_gone_within_a_minute(&socket).await);
    }
}

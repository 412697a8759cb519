//! The body of a request, which takes note when it is over.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Buf as _;
use hyper::body::{Body, Bytes, Frame, SizeHint};

use super::socket::Answering;

/// Whoever sends as much in a second is not slow. A guess: a modem.
const PROGRESS: usize = 64 << 10;

/// The body of a request.
pub(super) struct Received<B> {
    body: B,
    /// Until it is over.
    answering: Option<Arc<Answering>>,
    /// Somebody waits for more of it.
    starves: bool,
    /// Came since the last progress.
    came: usize,
}

impl<B> Received<B> {
    /// `answering`: its request, if it was begun as one whose body is still to come.
    pub(super) fn new(body: B, answering: Option<Arc<Answering>>) -> Self {
        Self { body, answering, starves: false, came: 0 }
    }

    fn starve(&mut self, starves: bool) {
        if let Some(answering) = self.answering.as_ref().filter(|_| self.starves != starves) {
            self.starves = starves;
            answering.starves(starves);
        }
    }

    fn comes(&mut self, bytes: usize) {
        self.came += bytes;
        if let Some(answering) = self.answering.as_ref().filter(|_| self.came >= PROGRESS) {
            self.came = 0;
            answering.goes_on();
        }
    }

    fn over(&mut self, is_whole: bool) {
        self.starve(false);
        if let Some(answering) = self.answering.take() {
            answering.received(is_whole);
        }
    }
}

impl<B> Drop for Received<B> {
    fn drop(&mut self) {
        self.over(false);
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Received<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        self.starve(frame.is_pending());
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.comes(data.remaining());
        }
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::task::Waker;

    use http_body_util::StreamBody;
    use hyper::Version;
    use tokio::sync::mpsc;
    use tokio::time::{Duration, Instant, advance};

    use super::super::socket::pair;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_starves_while_somebody_waits_for_it_and_comes_by_64_kib() {
        let (socket, _client) = pair().await;
        let answering = Arc::new(Answering::begin(&socket, Version::HTTP_11, true));
        let (send, mut frames) = mpsc::unbounded_channel();
        let frames = futures_util::stream::poll_fn(move |context| frames.poll_recv(context));
        let mut body = Received::new(StreamBody::new(frames), Some(Arc::clone(&answering)));
        let mut read = || {
            let mut context = Context::from_waker(Waker::noop());
            Pin::new(&mut body).poll_frame(&mut context).is_pending()
        };
        let comes = |bytes: usize| {
            send.send(Ok::<_, Infallible>(Frame::data(Bytes::from(vec![0; bytes])))).unwrap();
        };
        let begin = Instant::now();
        assert_eq!(socket.receiving_since(), None, "nobody waits for it");
        assert!(read() && read());
        advance(Duration::from_secs(1)).await;
        assert_eq!(socket.receiving_since(), Some(begin));
        comes(PROGRESS - 1);
        assert!(!read());
        assert_eq!(socket.receiving_since(), None, "its handler has something to do");
        assert!(read());
        assert_eq!(socket.receiving_since(), Some(begin));
        comes(1);
        assert!(!read() && read());
        assert_eq!(socket.receiving_since(), Some(Instant::now()));
        comes(PROGRESS - 1);
        advance(Duration::from_secs(1)).await;
        assert!(!read() && read());
        assert_eq!(socket.receiving_since(), Some(Instant::now() - Duration::from_secs(1)));
        drop(send);
        assert!(!read() && answering.is_read());
        drop((body, answering));
        assert!(socket.resting_since().is_some());
    }

    #[tokio::test]
    async fn a_body_that_fails_or_is_left_is_not_whole() {
        for fails in [true, false] {
            let (socket, _client) = pair().await;
            let answering = Arc::new(Answering::begin(&socket, Version::HTTP_11, true));
            let frames = futures_util::stream::iter([Err::<Frame<Bytes>, _>("cut off")]);
            let mut body = Received::new(StreamBody::new(frames), Some(Arc::clone(&answering)));
            if fails {
                let mut context = Context::from_waker(Waker::noop());
                assert!(Pin::new(&mut body).poll_frame(&mut context).is_ready());
            }
            drop(body);
            assert!(!answering.is_read() && socket.receiving_since().is_none());
            assert!(!socket.receives());
        }
    }
}

//! The body of a request, which takes note when it is over.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Frame, SizeHint};

use super::socket::Answering;

/// The body of a request.
pub(super) struct Received<B> {
    body: B,
    /// Until it is over.
    answering: Option<Arc<Answering>>,
}

impl<B> Received<B> {
    /// `answering`: its request, if it was begun as one whose body is still to come.
    pub(super) fn new(body: B, answering: Option<Arc<Answering>>) -> Self {
        Self { body, answering }
    }

    fn over(&mut self, is_whole: bool) {
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

impl<B: Body + Unpin> Body for Received<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
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

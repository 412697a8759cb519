//! A layer that looks at a request on its way in, and at its answer on its way out. Between them it holds what the one for the
//! answer keeps, and no more: axum's `from_fn` has room for three requests as long as the answer takes.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use axum::extract::Request;
use axum::response::Response;
use futures_util::FutureExt as _;
use futures_util::future::{Either, Map};
use tower::{Layer, Service};

type Answer = Result<Response, Infallible>;

/// What is done with an answer. It is dropped without a call where the client leaves before.
type After = Box<dyn FnOnce(Answer) -> Answer + Send>;

/// What becomes of a request that came.
pub(in crate::http) enum Passage {
    Passes(After),
    Answered(Response),
}

impl Passage {
    /// It passes, and its answer leaves as it is.
    pub(in crate::http) fn passes() -> Self {
        Self::Passes(Box::new(std::convert::identity)) // of no size, so nothing is allocated
    }

    /// It passes, and its answer is changed.
    pub(in crate::http) fn changing(
        change: impl FnOnce(Response) -> Response + Send + 'static,
    ) -> Self {
        Self::Passes(Box::new(|answer| answer.map(change)))
    }
}

/// See the head of this file.
#[derive(Clone)]
pub(in crate::http) struct Around<F>(pub(in crate::http) F);

impl<S, F: Clone> Layer<S> for Around<F> {
    type Service = WithAround<S, F>;

    fn layer(&self, inner: S) -> WithAround<S, F> {
        WithAround { before: self.0.clone(), inner }
    }
}

/// A service behind [`Around`].
#[derive(Clone)]
pub(in crate::http) struct WithAround<S, F> {
    before: F,
    inner: S,
}

impl<S, F> Service<Request> for WithAround<S, F>
where
    S: Service<Request, Response = Response, Error = Infallible>,
    F: Fn(&mut Request) -> Passage,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Either<Map<S::Future, After>, Ready<Answer>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        match (self.before)(&mut request) {
            Passage::Passes(after) => Either::Left(self.inner.call(request).map(after)),
            Passage::Answered(response) => Either::Right(ready(Ok(response))),
        }
    }
}

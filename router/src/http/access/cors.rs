//! Pages of allowed origins: a browser asks beforehand whether they may send what they want to, and whether they may read the
//! answer. For other origins and without any nothing is said, which is a no.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderValue, Method};
use axum::response::Response;
use futures_util::future::Either;
use tower::{Layer, Service};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer, ExposeHeaders, ResponseFuture};

use crate::app::App;
use crate::config::Names;

/// How long a browser need not ask again. Chromium takes no more.
const MAX_AGE: Duration = Duration::from_secs(7_200);

/// Answers a browser that asks, and tells it what it may read. Origins may change while the router serves; where there are
/// none, a request passes without a box or a copy.
#[derive(Clone)]
pub(in crate::http) struct Cors(pub(in crate::http) Arc<App>);

impl<S> Layer<S> for Cors {
    type Service = WithCors<S>;

    fn layer(&self, inner: S) -> WithCors<S> {
        WithCors { app: Arc::clone(&self.0), inner }
    }
}

/// A service behind [`Cors`], always ready as the routes are.
#[derive(Clone)]
pub(in crate::http) struct WithCors<S> {
    app: Arc<App>,
    inner: S,
}

impl<S: Service<Request, Response = Response> + Clone> Service<Request> for WithCors<S> {
    type Response = Response;
    type Error = S::Error;
    type Future = Either<S::Future, ResponseFuture<S::Future>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        match layer(self.app.origins()) {
            None => Either::Left(self.inner.call(request)),
            Some(cors) => Either::Right(cors.layer(self.inner.clone()).call(request)),
        }
    }
}

/// `None` where no origin is allowed.
fn layer(origins: Arc<Names>) -> Option<CorsLayer> {
    let allowed = match &*origins {
        Names::Any => AllowOrigin::any(),
        Names::Only(names) if names.is_empty() => return None,
        Names::Only(_) => {
            let contains = move |origin: &HeaderValue| {
                origin.to_str().is_ok_and(|origin| origins.contain(origin))
            };
            AllowOrigin::predicate(move |origin, _| contains(origin))
        }
    };
    let cors = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request()) // `*` would leave `Authorization` out
        .expose_headers(ExposeHeaders::any())
        .max_age(MAX_AGE);
    Some(cors)
}

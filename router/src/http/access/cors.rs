//! Pages of allowed origins: a browser asks beforehand whether they may send what they want to, and whether they may read the
//! answer. For other origins and without any nothing is said, which is a no.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use tower::{Layer as _, ServiceExt as _};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer, ExposeHeaders};

use crate::app::App;
use crate::config::Names;

/// How long a browser need not ask again. Chromium takes no more.
const MAX_AGE: Duration = Duration::from_secs(7_200);

/// Answers a browser that asks, and tells it what it may read. Origins may change while the router serves.
pub(in crate::http) async fn cors(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response {
    match layer(app.origins()) {
        None => next.run(request).await,
        Some(layer) => match layer.layer(next).oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
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

//! `/`: a page that shows the fleet to operators, and the stream behind it. The page itself holds nothing of the fleet: all
//! that it shows comes from `/dashboard/events` and `/decisions`, which are guarded as `/workers` is.
//!
//! A stream has a JSON document each second ([`document`]), made once for all who look at it and not at all while nobody
//! does (`process/feed.rs`).

mod document;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

use self::document::Documents;
use super::pages;
use crate::app::App;
use crate::error::RouteError;
use crate::http::access::caller;
use crate::http::parse::fields::{bad, clip};
use crate::http::reply::reject::Reject;
use crate::net::Peer;
use crate::process::feed::Viewer;

/// A stream ends after this, and its page asks again: less than what a connection to an address of operators may last.
const LONGEST_STREAM: Duration = Duration::from_secs(100);
/// When who finds no place may come again: the page of somebody else may have been closed by then.
const COME_AGAIN: Duration = Duration::from_secs(5);

/// The page. At the clients' port it is there for who is an operator or may type the key of one, and for nobody else.
pub(in crate::http) async fn page(request: Request) -> Result<Response, Reject> {
    if is_at_clients_port(&request) && !caller(&request).may_open_dashboard(request.headers()) {
        return Err(Reject::NoSuchPath { path: clip(request.uri().path()) });
    }
    Ok(pages::page(include_str!("dashboard/page.html")).into_response())
}

/// A script or a style of the page.
pub(in crate::http) async fn file(Path(name): Path<String>) -> Result<Response, Reject> {
    let (media, text) = match name.as_str() {
        "page.css" => (pages::STYLE, include_str!("dashboard/page.css")),
        "page.js" => (pages::SCRIPT, include_str!("dashboard/page.js")),
        "chart.js" => (pages::SCRIPT, include_str!("dashboard/chart.js")),
        "chat.js" => (pages::SCRIPT, include_str!("dashboard/chat.js")),
        "dom.js" => (pages::SCRIPT, include_str!("dashboard/dom.js")),
        "events.js" => (pages::SCRIPT, include_str!("dashboard/events.js")),
        "fleet.js" => (pages::SCRIPT, include_str!("dashboard/fleet.js")),
        "placements.js" => (pages::SCRIPT, include_str!("dashboard/placements.js")),
        _ => return Err(Reject::NoSuchPath { path: format!("/dashboard/{}", clip(&name)) }),
    };
    Ok(pages::file(media, text).into_response())
}

/// The stream.
pub(in crate::http) async fn events(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, Reject> {
    let once = wants_one(request.uri().query())?;
    // a drain waits for the connections of clients, and not for those of operators, who may want to see it
    let ends_with_drain = is_at_clients_port(&request);
    if ends_with_drain {
        app.fleet.takes_requests()?;
    }
    let mut documents = Documents::of(&app);
    let viewer = app.feed.watch(move || documents.next());
    let viewer = viewer.ok_or(RouteError::Overloaded {
        what: "streams of the dashboard",
        retry_after: COME_AGAIN,
    })?;
    let view = View {
        viewer,
        ends: Box::pin(sleep(LONGEST_STREAM)),
        leaving: ends_with_drain.then(|| app.fleet.leaving().clone()),
        once,
        over: false,
    };
    let headers: [(HeaderName, &str); 4] = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        // nginx would otherwise collect the events before it passes them on
        (HeaderName::from_static("x-accel-buffering"), "no"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    let events = unfold(view, |mut view| async move {
        let event = view.next().await?;
        Some((Ok::<_, Infallible>(event), view))
    });
    Ok((headers, Body::from_stream(events)).into_response())
}

fn is_at_clients_port(request: &Request) -> bool {
    request.extensions().get::<Peer>().is_some()
}

/// Whether one event is all that is wanted.
///
/// # Errors
/// `BadRequest` about anything else than `once`.
fn wants_one(query: Option<&str>) -> Result<bool, RouteError> {
    match query.unwrap_or_default() {
        "" | "once=0" | "once=false" => Ok(false),
        "once" | "once=1" | "once=true" => Ok(true),
        _ => Err(bad("once", "after the `?` there may be `once=true` and nothing else")),
    }
}

/// One stream, as far as it has come.
struct View {
    viewer: Viewer,
    ends: Pin<Box<Sleep>>,
    /// Cancelled when the stream is to end.
    leaving: Option<CancellationToken>,
    once: bool,
    over: bool,
}

impl View {
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        self.over = self.once;
        let Self { viewer, ends, leaving, .. } = self;
        let left = async {
            match leaving {
                Some(leaving) => leaving.cancelled().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = left => None,
            () = ends.as_mut() => None,
            event = viewer.next() => event,
        }
    }
}

#[cfg(test)]
mod tests;

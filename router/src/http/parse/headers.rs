//! What is said in headers: the request's id, and the session it belongs to. `access` reads who sends it.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Version};
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::core::frame::MAX_REQUEST_ID_BYTES;
use crate::error::RouteError;
use crate::http::access::{Access, Passage};
use crate::http::anthropic;
use crate::http::call::EndTold;
use crate::http::parse::ids;
use crate::http::reply::reject::{self, ErrorCode, ErrorMessage, Reject};
use crate::log::requests::RequestEnd;
use crate::log::traces::Span;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Headers that name a session, best first. The fields `prompt_cache_key` and `user` come after them.
const SESSION: [&str; 3] = ["x-session-id", "x-session-affinity", "x-correlation-id"];

/// Admits requests, gives every answer its `X-Request-ID`, the client's own or a new one, and counts it.
pub(in crate::http) fn observe(app: &Arc<App>, access: &Access, request: &mut Request) -> Passage {
    let id = request.headers().get(&REQUEST_ID).filter(|id| is_request_id(id)).cloned();
    let id = id.unwrap_or_else(|| {
        HeaderValue::try_from(ids::name("req-")).expect("made of letters and digits")
    });
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut observed = ObservedRequest {
        app: Arc::clone(app),
        began: Instant::now(),
        matched: request.extensions().get::<MatchedPath>().cloned(),
        trace: request.headers().get("traceparent").cloned(),
        id,
        span: None,
        is_anthropic: anthropic::is_path(request.uri().path()),
        answered: false,
    };
    let route = observed.route();
    let span = app.traces.request(request.method(), route, request.headers());
    if let Some(span) = &span {
        begin_span(span, request, route, &observed.id);
    }
    observed.span = span;
    match access.admit(request) {
        Ok(()) => Passage::changing(|response| observed.answered(response)),
        Err(reject) => Passage::Answered(observed.answered(reject.into_response())),
    }
}

/// A request until its answer begins. Counts one that was dropped before: its client left, or its connection was cut.
struct ObservedRequest {
    app: Arc<App>,
    began: Instant,
    matched: Option<MatchedPath>,
    /// For the log only.
    trace: Option<HeaderValue>,
    id: HeaderValue,
    span: Option<Arc<Span>>,
    is_anthropic: bool,
    answered: bool,
}

impl ObservedRequest {
    fn route(&self) -> &str {
        self.matched.as_ref().map_or("unknown", MatchedPath::as_str)
    }

    fn answered(mut self, mut response: Response) -> Response {
        self.answered = true;
        let (route, id) = (self.route(), &self.id);
        let name = id.to_str().unwrap_or_default();
        if self.is_anthropic {
            response = reject::anthropic::rewritten(response, name);
            response.headers_mut().insert("request-id", id.clone());
        }
        let status = response.status().as_u16();
        let error = response.extensions().get::<ErrorCode>().map_or("", |code| code.0);
        self.app.metrics.http.request(route, status, error);
        if let Some(span) = &self.span {
            answer_span(span, &response, status, error);
        }
        let (trace, elapsed) = (&self.trace, self.began.elapsed());
        tracing::debug!(?id, route, status, error, ?trace, ?elapsed, "answered");
        tell_failure(&self.app, &response, name, route, self.began);
        response.headers_mut().insert(REQUEST_ID, id.clone());
        response
    }
}

impl Drop for ObservedRequest {
    fn drop(&mut self) {
        if !self.answered {
            let gone = Reject::from(RouteError::ClientGone);
            self.app.metrics.http.request(self.route(), gone.status(), "client_gone");
            self.span.as_deref().inspect(|span| span.set("error.type", "client_gone"));
        }
    }
}

/// Probes, which are asked every few seconds and may well be refused for as long as no worker is there.
const PROBES: [&str; 6] = ["/health", "/healthz", "/livez", "/ping", "/ready", "/readyz"];

/// Tells the log of a request that failed, unless that is told with more, or is the answer to a probe.
fn tell_failure(app: &App, response: &Response, id: &str, route: &str, began: Instant) {
    let extensions = response.extensions();
    let status = response.status().as_u16();
    if status < 400 || extensions.get::<EndTold>().is_some() || PROBES.contains(&route) {
        return;
    }
    app.request_log.ended(&RequestEnd {
        id,
        route: Some(route),
        status,
        error: Some(extensions.get::<ErrorCode>().map_or("unknown", |code| code.0)),
        why: extensions.get::<ErrorMessage>().map(ErrorMessage::as_str),
        total_ms: Some(began.elapsed().as_secs_f64() * 1e3),
        ..RequestEnd::default()
    });
}

/// The span of a request, left on it for its handler.
#[derive(Debug, Clone)]
struct RequestSpan(Arc<Span>);

/// The span of a request that [`observe`] has seen, where requests are traced.
pub(in crate::http) fn span_of(request: &Request) -> Option<Arc<Span>> {
    request.extensions().get::<RequestSpan>().map(|span| Arc::clone(&span.0))
}

fn begin_span(span: &Arc<Span>, request: &mut Request, route: &str, id: &HeaderValue) {
    span.set("http.request.method", request.method().to_string());
    if request.extensions().get::<MatchedPath>().is_some() {
        span.set("http.route", route.to_owned());
    }
    span.set("url.path", request.uri().path().to_owned());
    let version = if request.version() == Version::HTTP_2 { "2" } else { "1.1" };
    span.set("network.protocol.version", version);
    span.set("headrace.request_id", id.to_str().unwrap_or_default().to_owned());
    request.extensions_mut().insert(RequestSpan(Arc::clone(span)));
}

/// Its answer began, or was all of it. A request that is told of elsewhere has said its error there.
fn answer_span(span: &Span, response: &Response, status: u16, error: &'static str) {
    span.set("http.response.status_code", status);
    if response.extensions().get::<EndTold>().is_some() || status < 400 {
        return;
    }
    let error = if error.is_empty() { "unknown" } else { error };
    if status < 500 {
        span.set("error.type", error);
    } else {
        let why = response.extensions().get::<ErrorMessage>().map(ErrorMessage::as_str);
        span.fail(error, why.unwrap_or_default());
    }
}

/// Name of a request, left on it for its handler.
#[derive(Debug, Clone)]
struct RequestId(HeaderValue);

/// Name of a request that [`observe`] has seen.
pub(in crate::http) fn request_id(request: &Request) -> Arc<str> {
    let id = request.extensions().get::<RequestId>();
    let text = id.and_then(|id| id.0.to_str().ok());
    text.unwrap_or_default().into()
}

fn is_request_id(value: &HeaderValue) -> bool {
    (1..=MAX_REQUEST_ID_BYTES).contains(&value.len())
        && value.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// The value of a header that may come once.
///
/// # Errors
/// `BadRequest` where it comes more often, or is not text.
pub(in crate::http) fn single<'a>(
    headers: &'a HeaderMap,
    name: &'static str,
) -> Result<Option<&'a str>, RouteError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(bad_header(name, "came more than once; send it once"));
    }
    let text = value.to_str().map_err(|_| bad_header(name, "is not plain text"))?;
    Ok(Some(text.trim()))
}

/// `BadRequest` about a header.
pub(in crate::http) fn bad_header(name: &'static str, problem: &str) -> RouteError {
    RouteError::BadRequest {
        param: Some(name.to_owned()),
        message: format!("the header {name} {problem}"),
    }
}

/// The session that the headers name.
pub(in crate::http) fn session(headers: &HeaderMap) -> Option<String> {
    let mut named = SESSION.iter().filter_map(|name| headers.get(*name)?.to_str().ok());
    named.find(|value| !value.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_session_header_wins() {
        let mut headers = HeaderMap::new();
        assert_eq!(session(&headers), None);
        headers.insert("x-correlation-id", HeaderValue::from_static("c"));
        assert_eq!(session(&headers).as_deref(), Some("c"));
        headers.insert("x-session-id", HeaderValue::from_static("s"));
        assert_eq!(session(&headers).as_deref(), Some("s"));
    }

    #[test]
    fn a_header_that_counts_comes_once_and_without_its_spaces() {
        let mut headers = HeaderMap::new();
        assert_eq!(single(&headers, "x-a").unwrap(), None);
        headers.insert("x-a", HeaderValue::from_static(" a b\t"));
        assert_eq!(single(&headers, "x-a").unwrap(), Some("a b"));
        headers.append("x-a", HeaderValue::from_static("c"));
        assert!(single(&headers, "x-a").is_err());
    }

    #[test]
    fn request_ids_are_short_and_printable() {
        for (value, good) in [("abc-1", true), ("", false), ("a b", false)] {
            assert_eq!(is_request_id(&HeaderValue::from_static(value)), good, "{value:?}");
        }
        assert!(!is_request_id(&HeaderValue::try_from("x".repeat(129)).unwrap()));
    }
}

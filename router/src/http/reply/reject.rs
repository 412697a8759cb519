//! Errors as HTTP answers: the only place that knows which error has which status.

pub(in crate::http) mod anthropic;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::core::frame::{FailureKind, Word as _};
use crate::error::{Causes, RouteError};

/// Why a request was turned away: by the HTTP surface itself, or on its way further in.
#[derive(Debug, thiserror::Error)]
pub(in crate::http) enum Reject {
    /// A key was asked for.
    #[error("{0}; send `Authorization: Bearer KEY` or `X-Api-Key: KEY`")]
    Unauthorized(&'static str),
    /// It may mean one thing here and another thing to a proxy.
    #[error(
        "{0}; a request has one Host, one Transfer-Encoding, one Authorization and one X-Api-Key at most"
    )]
    Framing(&'static str),
    /// It is meant for somebody else, or a page made a name of its own point here.
    #[error("`{host}` is no name of this server; use an address, or name it in --allowed-hosts")]
    UnknownHost { host: String },
    /// A page of another origin sent it.
    #[error(
        "pages {origin} may not send requests here; name their origin in --allowed-origins if they may"
    )]
    ForeignOrigin { origin: String },
    /// Only operators get to see or to change this.
    #[error(
        "this is for operators: ask at an address of --admin-listen or with a key of --admin-key-file; without any keys, \
         processes of the router's machine may ask, unless a proxy sends it"
    )]
    NotOperator,
    /// Not everybody sees the metrics.
    #[error(
        "metrics are shown to processes of the router's machine, at an address of --admin-listen, and to a key of \
         --admin-key-file, which may be one with only=metrics; --public-metrics shows them to everybody"
    )]
    NotScraper,
    /// Nothing lives at this path.
    #[error("there is no {path} here")]
    NoSuchPath { path: String },
    /// Something lives here, for another method. The `Allow` header names it.
    #[error("{method} is not allowed here")]
    MethodNotAllowed { method: String },
    /// The body came too slowly.
    #[error("the body did not arrive within {within:?}")]
    BodyTooSlow { within: Duration },
    /// The body is too long.
    #[error("the body is longer than the limit of {limit} bytes")]
    BodyTooLong { limit: usize },
    /// The connection broke inside the body, or its chunks are malformed.
    #[error("the body broke off: {0}")]
    BodyBroken(String),
    /// `Content-Type` is something else.
    #[error("the content type must be application/json, not {got}")]
    MediaType { got: String },
    /// `Content-Encoding` is something else.
    #[error("the content encoding must be identity, not {got}")]
    ContentEncoding { got: String },
    /// Nothing is known of this request.
    #[error(
        "no decision about the request `{request}` is remembered: only requests that got a worker have one, and only \
         the last {remembered} or fewer are kept; --decision-log keeps more"
    )]
    NoDecision { request: String, remembered: usize },
    /// No worker has this name.
    #[error("no worker here is called `{worker}`; GET /workers lists them")]
    NoSuchWorker { worker: String },
    /// The worker was told to leave before, or leaves by itself.
    #[error("the worker `{worker}` leaves already; GET this path for how that goes")]
    LeavesAlready { worker: String },
    /// This worker was never drained.
    #[error("no drain of a worker `{worker}` is remembered; POST begins one")]
    NoDrain { worker: String },
    /// No response of this tenant has this name.
    #[error(
        "no response `{response}` is stored: it was never made, was deleted, is too old or made room for others"
    )]
    NoResponse { response: String },
    /// A request continues a response that is not there.
    #[error(
        "`previous_response_id` leads to the response `{response}`, which is not stored: it was never made, was \
         deleted, is too old or made room for others; send the whole conversation as `input`"
    )]
    NoPreviousResponse { response: String },
    /// What happens to well-formed requests.
    #[error(transparent)]
    Route(#[from] RouteError),
}

/// What the client gets to see: `{"error": {...}}`.
#[derive(Debug, Serialize)]
pub(in crate::http) struct ErrorBody {
    error: ErrorFields,
}

#[derive(Debug, Serialize)]
struct ErrorFields {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

/// Everything about an error but its text.
struct Verdict {
    status: StatusCode,
    /// The field `type` of OpenAI's errors.
    kind: &'static str,
    param: Option<String>,
    /// OpenAI's `code`, for programs; also the error's name in `/metrics`.
    code: Option<&'static str>,
    retry_after: Option<Duration>,
}

impl Verdict {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>) -> Self {
        Self { status, kind, param: None, code, retry_after: None }
    }

    fn wrong(status: StatusCode, code: Option<&'static str>) -> Self {
        Self::new(status, "invalid_request_error", code)
    }

    fn later(status: StatusCode, kind: &'static str, code: &'static str, after: Duration) -> Self {
        Self { retry_after: Some(after), ..Self::new(status, kind, Some(code)) }
    }

    fn param(self, param: Option<String>) -> Self {
        Self { param, ..self }
    }
}

/// The field that names a response to go on with.
const PREVIOUS: &str = "previous_response_id";
/// nginx's name for a client that left; nobody reads it but our own metrics.
const CLIENT_CLOSED_REQUEST: u16 = 499;
/// Where the error itself does not know: another worker or a restarted router is seconds away.
const SOON: Duration = Duration::from_secs(1);

impl Reject {
    fn verdict(&self) -> Verdict {
        use StatusCode as S;
        match self {
            Self::Unauthorized(_) => Verdict::wrong(S::UNAUTHORIZED, Some("invalid_api_key")),
            Self::Framing(_) => Verdict::wrong(S::BAD_REQUEST, Some("bad_framing")),
            Self::UnknownHost { .. } => {
                Verdict::wrong(S::MISDIRECTED_REQUEST, Some("unknown_host"))
            }
            Self::ForeignOrigin { .. } => Verdict::wrong(S::FORBIDDEN, Some("foreign_origin")),
            Self::NotOperator | Self::NotScraper => {
                Verdict::wrong(S::FORBIDDEN, Some("operators_only"))
            }
            Self::NoSuchPath { .. } => Verdict::wrong(S::NOT_FOUND, Some("unknown_url")),
            Self::MethodNotAllowed { .. } => {
                Verdict::wrong(S::METHOD_NOT_ALLOWED, Some("method_not_allowed"))
            }
            Self::BodyTooSlow { .. } => Verdict::wrong(S::REQUEST_TIMEOUT, Some("body_too_slow")),
            Self::BodyTooLong { .. } => Verdict::wrong(S::PAYLOAD_TOO_LARGE, Some("body_too_long")),
            Self::BodyBroken(_) => Verdict::wrong(S::BAD_REQUEST, Some("body_broken")),
            Self::MediaType { .. } => {
                Verdict::wrong(S::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_media_type"))
            }
            Self::ContentEncoding { .. } => {
                Verdict::wrong(S::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_content_encoding"))
            }
            Self::NoDecision { .. } => Verdict::wrong(S::NOT_FOUND, Some("unknown_request")),
            Self::NoSuchWorker { .. } => Verdict::wrong(S::NOT_FOUND, Some("unknown_worker")),
            Self::LeavesAlready { .. } => Verdict::wrong(S::CONFLICT, Some("already_draining")),
            Self::NoDrain { .. } => Verdict::wrong(S::NOT_FOUND, Some("unknown_drain")),
            Self::NoResponse { .. } => Verdict::wrong(S::NOT_FOUND, Some("response_not_found")),
            Self::NoPreviousResponse { .. } => {
                Verdict::wrong(S::BAD_REQUEST, Some("previous_response_not_found"))
                    .param(Some(PREVIOUS.to_owned()))
            }
            Self::Route(error) => route_verdict(error),
        }
    }

    /// Of the answer.
    pub(in crate::http) fn status(&self) -> u16 {
        self.verdict().status.as_u16()
    }

    /// The body of the answer, or the data of an SSE event once an answer has begun.
    pub(in crate::http) fn body(&self) -> ErrorBody {
        self.body_with(self.verdict())
    }

    /// OpenAI's `code`, and the text, where they stand in an event of another form.
    pub(in crate::http) fn code_and_message(&self) -> (Option<&'static str>, String) {
        let ErrorBody { error: ErrorFields { code, message, .. } } = self.body();
        (code, message)
    }

    fn body_with(&self, Verdict { kind, param, code, .. }: Verdict) -> ErrorBody {
        // What went wrong inside is for the log; the request id ties the two together.
        let message = if let Self::Route(RouteError::Internal { .. }) = self {
            "internal error; the server's log says more under this request's id".to_owned()
        } else {
            self.to_string()
        };
        ErrorBody { error: ErrorFields { message, kind, param, code } }
    }
}

fn route_verdict(error: &RouteError) -> Verdict {
    use StatusCode as S;
    match error {
        RouteError::BadRequest { param, .. } => {
            Verdict::wrong(S::BAD_REQUEST, None).param(param.clone())
        }
        RouteError::BodyTooComplex { param, .. } => {
            Verdict::wrong(S::BAD_REQUEST, Some("body_too_complex")).param(param.clone())
        }
        RouteError::AnswerTooLarge { .. } => {
            Verdict::wrong(S::BAD_REQUEST, Some("answer_too_large"))
        }
        RouteError::ContextLength { .. } | RouteError::ContextLengthAtLeast { .. } => {
            Verdict::wrong(S::BAD_REQUEST, Some("context_length_exceeded"))
        }
        RouteError::TextWithoutBreaks { param, .. } => {
            Verdict::wrong(S::BAD_REQUEST, Some("text_without_breaks")).param(Some(param.clone()))
        }
        RouteError::UnknownModel { .. } => {
            Verdict::wrong(S::NOT_FOUND, Some("model_not_found")).param(Some("model".into()))
        }
        RouteError::NoWorker { retry_after } => {
            Verdict::later(S::SERVICE_UNAVAILABLE, "server_error", "no_worker", *retry_after)
        }
        RouteError::Overloaded { retry_after, .. } => {
            Verdict::later(S::TOO_MANY_REQUESTS, "rate_limit_error", "overloaded", *retry_after)
        }
        RouteError::KeyLimit { retry_after, .. } => Verdict::later(
            S::TOO_MANY_REQUESTS,
            "rate_limit_error",
            "rate_limit_exceeded",
            *retry_after,
        ),
        RouteError::TooLate { retry_after, .. } => Verdict::later(
            S::TOO_MANY_REQUESTS,
            "rate_limit_error",
            "deadline_impossible",
            *retry_after,
        ),
        RouteError::DeadlineExceeded { .. } => {
            Verdict::new(S::GATEWAY_TIMEOUT, "server_error", Some("deadline_exceeded"))
        }
        RouteError::WorkerLost { .. } => {
            Verdict::later(S::SERVICE_UNAVAILABLE, "server_error", "worker_lost", SOON)
        }
        // bounds that only workers know, such as how many log-probabilities of a prompt one answers with
        RouteError::WorkerFailed {
            kind: kind @ (FailureKind::BadSampling | FailureKind::Grammar),
            ..
        } => Verdict::wrong(S::BAD_REQUEST, Some(kind.as_str())),
        RouteError::WorkerFailed { kind, .. } if !kind.is_retryable() => {
            Verdict::new(S::INTERNAL_SERVER_ERROR, "server_error", Some("worker_failed"))
        }
        RouteError::WorkerFailed { .. } | RouteError::WrongOutput { .. } => {
            Verdict::later(S::SERVICE_UNAVAILABLE, "server_error", "worker_failed", SOON)
        }
        RouteError::ShuttingDown => {
            Verdict::later(S::SERVICE_UNAVAILABLE, "server_error", "shutting_down", SOON)
        }
        RouteError::ClientGone => {
            let status = S::from_u16(CLIENT_CLOSED_REQUEST).expect("499 is a three-digit number");
            Verdict::new(status, "server_error", Some("client_gone"))
        }
        RouteError::Internal { .. } => {
            Verdict::new(S::INTERNAL_SERVER_ERROR, "server_error", Some("internal"))
        }
    }
}

/// The error's text, left on the response for who writes errors in another form, and for the log.
#[derive(Debug, Clone)]
pub(in crate::http) struct ErrorMessage(Arc<str>);

impl ErrorMessage {
    pub(in crate::http) fn as_str(&self) -> &str {
        &self.0
    }
}

/// The error's name, left on the response for the metrics.
#[derive(Debug, Clone, Copy)]
pub(in crate::http) struct ErrorCode(pub(in crate::http) &'static str);

impl IntoResponse for Reject {
    fn into_response(self) -> Response {
        if let Self::Route(error @ RouteError::Internal { .. }) = &self {
            tracing::error!(error = %Causes(error), "a request failed");
        }
        let verdict = self.verdict();
        let (status, retry_after) = (verdict.status, verdict.retry_after);
        let name = ErrorCode(verdict.code.unwrap_or("bad_request"));
        let body = self.body_with(verdict);
        let message = ErrorMessage(body.error.message.as_str().into());
        let mut response = (status, Json(body)).into_response();
        response.extensions_mut().insert(name);
        response.extensions_mut().insert(message);
        let headers = response.headers_mut();
        if let Some(after) = retry_after {
            // Whole seconds, rounded up: 0 would invite a client back at once.
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // After these the connection is not in step any more, or on its way out.
        if matches!(
            self,
            Self::BodyTooSlow { .. }
                | Self::BodyTooLong { .. }
                | Self::BodyBroken(_)
                | Self::Framing(_)
                | Self::Route(RouteError::ShuttingDown)
        ) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn every_error_has_its_status() {
        let second = Duration::from_millis(1500);
        let lost = RouteError::WorkerLost {
            worker: "w".into(),
            source: Arc::new(io::Error::other("gone")),
        };
        let failed =
            |kind| RouteError::WorkerFailed { worker: "w".into(), kind, message: "m".into() };
        for (error, status, retry) in [
            (RouteError::BadRequest { param: None, message: String::new() }, 400, None),
            (RouteError::ContextLength { got: 3, prompt: 2, answer: 1, limit: 2 }, 400, None),
            (RouteError::ContextLengthAtLeast { prompt: 2, answer: 1, limit: 2 }, 400, None),
            (RouteError::TextWithoutBreaks { param: "p".into(), at: 0, limit: 2 }, 400, None),
            (RouteError::BodyTooComplex { limit: 1, param: None }, 400, None),
            (RouteError::AnswerTooLarge { limit: 1 }, 400, None),
            (RouteError::UnknownModel { model: "m".into(), served: "n".into() }, 404, None),
            (RouteError::NoWorker { retry_after: second }, 503, Some("2")),
            (RouteError::Overloaded { what: "queue", retry_after: Duration::ZERO }, 429, Some("1")),
            (
                RouteError::KeyLimit { what: "tokens a minute", limit: 1, retry_after: second },
                429,
                Some("2"),
            ),
            (
                RouteError::TooLate { predicted: second, deadline: second, retry_after: second },
                429,
                Some("2"),
            ),
            (RouteError::DeadlineExceeded { state: "for a worker", waited: second }, 504, None),
            (lost, 503, Some("1")),
            (RouteError::WrongOutput { worker: "w".into(), what: "tokens" }, 503, Some("1")),
            (failed(FailureKind::Engine), 503, Some("1")),
            (failed(FailureKind::BadToken), 500, None),
            (failed(FailureKind::BadSampling), 400, None),
            (failed(FailureKind::Grammar), 400, None),
            (RouteError::ShuttingDown, 503, Some("1")),
            (RouteError::ClientGone, 499, None),
            (RouteError::mistake("secret"), 500, None),
        ] {
            let text = error.to_string();
            let response = Reject::from(error).into_response();
            assert_eq!(response.status().as_u16(), status, "{text}");
            let got = response.headers().get(header::RETRY_AFTER).map(|v| v.to_str().unwrap());
            assert_eq!(got, retry, "{text}");
        }
    }

    #[test]
    fn the_inside_of_an_internal_error_stays_inside() {
        let log = Log::default();
        let kept = log.clone();
        let format = tracing_subscriber::fmt().with_ansi(false).with_writer(move || kept.clone());
        let _guard = tracing::subscriber::set_default(format.finish());
        let reject =
            || Reject::from(RouteError::internal("a secret", io::Error::other("its cause")));
        let body = serde_json::to_string(&reject().body()).unwrap();
        assert!(!body.contains("secret") && !body.contains("cause"), "{body}");
        assert_eq!(
            log.text(),
            "",
            "an event of an answer that has begun is logged with the answer"
        );
        let response = reject().into_response();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let told = log.text();
        assert_eq!(told.matches("internal error: a secret: its cause").count(), 1, "{told}");
        assert_eq!(told.matches("its cause").count(), 1, "{told}");
    }

    /// The log of this thread.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Log {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_body_has_all_four_fields() {
        let error = RouteError::BadRequest { param: Some("n".into()), message: "no".into() };
        let body = serde_json::to_value(Reject::from(error).body()).unwrap();
        let want = serde_json::json!({"error":
            {"message": "no", "type": "invalid_request_error", "param": "n", "code": null}});
        assert_eq!(body, want);
    }
}

//! Errors as Anthropic's API has them: `{"type": "error", "error": {"type", "message"}, "request_id"}`, with statuses that its
//! clients know. A full or empty fleet is 529 there.

use axum::Json;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;

use super::{ErrorMessage, Reject};

/// What a client of Anthropic's API gets to see, as a body or as the data of an `error` event.
#[derive(Debug, Serialize)]
pub(in crate::http) struct AnthropicError {
    #[serde(rename = "type")]
    kind: &'static str,
    error: AnthropicErrorFields,
    request_id: String,
}

#[derive(Debug, Serialize)]
struct AnthropicErrorFields {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

impl AnthropicError {
    /// Of an answer that has begun.
    pub(in crate::http) fn of(reject: &Reject, request_id: &str) -> Self {
        let verdict = reject.verdict();
        let status = status_of(verdict.status);
        Self::new(status, reject.body_with(verdict).error.message, request_id)
    }

    fn new(status: StatusCode, message: String, request_id: &str) -> Self {
        let error = AnthropicErrorFields { kind: kind(status), message };
        Self { kind: "error", error, request_id: request_id.to_owned() }
    }
}

/// Nobody here can take the request now, or everybody is busy.
const OVERLOADED: u16 = 529;

/// The status that stands for one of ours.
pub(in crate::http) fn status_of(ours: StatusCode) -> StatusCode {
    match ours {
        StatusCode::SERVICE_UNAVAILABLE => {
            StatusCode::from_u16(OVERLOADED).expect("529 is a three-digit number")
        }
        other => other,
    }
}

fn kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        504 => "timeout_error",
        OVERLOADED => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

/// An answer to a path of Anthropic's API: where it is an error, in that API's form.
pub(in crate::http) fn rewritten(response: Response, request_id: &str) -> Response {
    let Some(ErrorMessage(message)) = response.extensions().get().cloned() else {
        return response;
    };
    let status = status_of(response.status());
    let error = AnthropicError::new(status, message.as_ref().to_owned(), request_id);
    let mut rewritten = (status, Json(error)).into_response();
    let (parts, _) = response.into_parts();
    *rewritten.extensions_mut() = parts.extensions;
    keep(parts.headers, rewritten.headers_mut());
    rewritten
}

/// All headers but those that tell of the body.
fn keep(from: HeaderMap, to: &mut HeaderMap) {
    let of_body = [header::CONTENT_TYPE, header::CONTENT_LENGTH];
    let mut name = None;
    for (next, value) in from {
        name = next.or(name);
        if let Some(name) = name.as_ref().filter(|name| !of_body.contains(name)) {
            to.append(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::Method;
    use serde_json::json;

    use super::*;
    use crate::error::RouteError;

    fn shown(reject: Reject) -> (u16, serde_json::Value, Option<String>) {
        let error = serde_json::to_value(AnthropicError::of(&reject, "req-1")).unwrap();
        let response = rewritten(reject.into_response(), "req-1");
        let retry = response.headers().get(header::RETRY_AFTER);
        let retry = retry.map(|value| value.to_str().unwrap().to_owned());
        (response.status().as_u16(), error, retry)
    }

    #[test]
    fn each_error_has_a_type_and_a_status_that_clients_know() {
        let second = Duration::from_secs(1);
        let busy = RouteError::Overloaded { what: "queue", retry_after: second };
        let late = RouteError::DeadlineExceeded { state: "for a worker", waited: second };
        for (reject, status, kind) in [
            (Reject::Unauthorized("no key"), 401, "authentication_error"),
            (Reject::NoSuchPath { path: "/x".into() }, 404, "not_found_error"),
            (
                Reject::MethodNotAllowed { method: Method::GET.to_string() },
                405,
                "invalid_request_error",
            ),
            (Reject::BodyTooLong { limit: 1 }, 413, "request_too_large"),
            (busy.into(), 429, "rate_limit_error"),
            (RouteError::NoWorker { retry_after: second }.into(), 529, "overloaded_error"),
            (RouteError::ShuttingDown.into(), 529, "overloaded_error"),
            (late.into(), 504, "timeout_error"),
            (RouteError::mistake("secret").into(), 500, "api_error"),
        ] {
            let text = reject.to_string();
            let (got, error, _) = shown(reject);
            assert_eq!((got, &error["error"]["type"]), (status, &json!(kind)), "{text}");
        }
    }

    #[test]
    fn the_body_is_that_of_anthropic_and_headers_stay() {
        let retry_after = Duration::from_secs(2);
        let (_, error, retry) = shown(RouteError::NoWorker { retry_after }.into());
        let message = "no worker is ready to take this request";
        let want = json!({"type": "error", "request_id": "req-1",
            "error": {"type": "overloaded_error", "message": message}});
        assert_eq!((error, retry.as_deref()), (want, Some("2")));
    }

    #[test]
    fn an_answer_that_is_no_error_stays_as_it_is() {
        let response = rewritten("fine".into_response(), "req-1");
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers()[header::CONTENT_TYPE].to_str().unwrap().starts_with("text"));
    }
}

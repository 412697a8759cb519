//! Pages of this server: what they may do in a browser, and their files. They need nothing from elsewhere, and may load
//! nothing from there.

use axum::http::{HeaderName, header};
use axum::response::IntoResponse;

/// What a page may do: run its own script, use its own style, and ask this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A page.
pub(super) fn page(text: &'static str) -> impl IntoResponse {
    let headers: [(HeaderName, &str); 5] = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"), // the next version of the server has another one
    ];
    (headers, text)
}

/// A script or a style of a page.
pub(super) fn file(media: &'static str, text: &'static str) -> impl IntoResponse {
    let headers: [(HeaderName, &str); 3] = [
        (header::CONTENT_TYPE, media),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}

pub(super) const SCRIPT: &str = "text/javascript; charset=utf-8";
pub(super) const STYLE: &str = "text/css; charset=utf-8";

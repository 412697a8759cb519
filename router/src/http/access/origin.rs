//! Whether a request comes from a page of another origin. Browsers say so, and pages cannot keep them from it.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::config::Names;
use crate::http::parse::fields::clip;
use crate::http::reply::reject::Reject;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Refuses what pages of other origins send, but for those that were allowed. Programs send neither header.
pub(super) fn check(
    headers: &HeaderMap,
    authority: Option<&str>,
    allowed: &Names,
) -> Result<(), Reject> {
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let origin = origins.next().map(|origin| origin.to_str().unwrap_or("unreadable"));
    if origins.next().is_some() {
        return Err(Reject::Framing("Origin came more than once"));
    }
    if origin.is_some_and(|origin| allowed.contain(origin)) {
        return Ok(());
    }
    let foreign = |origin: &str| {
        let of = origin.split_once("://").map(|(_, of)| of);
        !of.zip(authority).is_some_and(|(of, ours)| of.eq_ignore_ascii_case(ours))
    };
    if let Some(origin) = origin.filter(|origin| foreign(origin)) {
        return Err(Reject::ForeignOrigin { origin: format!("of {}", clip(origin)) });
    }
    match headers.get(FETCH_SITE).map(HeaderValue::as_bytes) {
        None | Some(b"same-origin" | b"none") => Ok(()),
        Some(_) => Err(Reject::ForeignOrigin { origin: "of another site".into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(headers: &[(&'static str, &'static str)], allowed: &Names) -> bool {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        check(&headers.collect(), Some("localhost:8000"), allowed).is_ok()
    }

    #[test]
    fn pages_of_other_origins_are_told_by_their_browser() {
        let none = Names::Only(Vec::new());
        for (headers, good) in [
            (&[][..], true),
            (&[("origin", "http://localhost:8000")], true),
            (&[("origin", "http://LOCALHOST:8000")], true),
            (&[("origin", "https://evil.com")], false),
            (&[("origin", "http://localhost:3000")], false),
            (&[("origin", "http://localhost:8000.evil.com")], false),
            (&[("origin", "null")], false),
            (&[("origin", "")], false),
            (&[("origin", "localhost:8000")], false),
            (&[("sec-fetch-site", "cross-site")], false),
            (&[("sec-fetch-site", "same-site")], false),
            (&[("sec-fetch-site", "none")], true),
            (&[("sec-fetch-site", "same-origin"), ("origin", "http://localhost:8000")], true),
            (&[("sec-fetch-site", "cross-site"), ("origin", "http://localhost:8000")], false),
        ] {
            assert_eq!(passes(headers, &none), good, "{headers:?}");
        }
    }

    #[test]
    fn origins_can_be_allowed() {
        let one = Names::Only(vec!["https://chat.example.com".into(), "null".into()]);
        let page = [("origin", "https://chat.example.com"), ("sec-fetch-site", "cross-site")];
        assert!(passes(&page, &one) && passes(&page, &Names::Any));
        assert!(passes(&[("origin", "null")], &one));
        assert!(!passes(&[("origin", "http://chat.example.com")], &one));
        assert!(!passes(&[("sec-fetch-site", "cross-site")], &one));
    }
}

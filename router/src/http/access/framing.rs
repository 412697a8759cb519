//! One way to read a request: where its body ends and whom it is for must be the same to us and to any proxy before us.

use axum::http::{HeaderMap, Version, header};

use crate::http::reply::reject::Reject;

/// Refuses what hyper lets pass and another server may read another way. hyper itself refuses several lengths that
/// differ, and closes the connection after a request with both a length and chunks.
pub(super) fn check(version: Version, headers: &HeaderMap) -> Result<(), Reject> {
    let mut encodings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(encoding) = encodings.next() {
        if encodings.next().is_some() {
            return Err(Reject::Framing("Transfer-Encoding came more than once"));
        }
        if !encoding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") {
            return Err(Reject::Framing("Transfer-Encoding must be chunked, and nothing else"));
        }
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    if hosts.next().is_none() && version == Version::HTTP_11 {
        return Err(Reject::Framing("Host is missing"));
    }
    if hosts.next().is_some() {
        return Err(Reject::Framing("Host came more than once"));
    }
    Ok(())
}

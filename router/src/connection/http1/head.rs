//! Heads of answers that are written here, and what of a head is looked at.

use std::time::SystemTime;

use axum::http::response::Parts;
use axum::http::{HeaderMap, HeaderValue, header};
use bytes::{BufMut as _, BytesMut};

/// How the end of a body is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// By an empty chunk.
    Chunks,
    /// By its length in bytes.
    Length(u64),
    /// The head says it, or there is none.
    Nothing,
}

pub(super) fn head_bytes(head: &Parts, framing: Framing, closes: bool) -> BytesMut {
    let mut out = BytesMut::with_capacity(512); // most heads fit
    let reason = head.status.canonical_reason().unwrap_or_default();
    out.extend_from_slice(format!("HTTP/1.1 {} {reason}\r\n", head.status.as_str()).as_bytes());
    let mut field = |name: &[u8], value: &[u8]| {
        for part in [name, b": ", value, b"\r\n"] {
            out.put_slice(part);
        }
    };
    for (name, value) in head.headers.iter().filter(|(name, _)| *name != header::CONNECTION) {
        field(name.as_ref(), value.as_bytes());
    }
    match framing {
        Framing::Chunks => field(b"transfer-encoding", b"chunked"),
        Framing::Length(bytes) => field(b"content-length", bytes.to_string().as_bytes()),
        Framing::Nothing => {}
    }
    if closes {
        field(b"connection", b"close");
    }
    if !head.headers.contains_key(header::DATE) {
        field(b"date", httpdate::fmt_http_date(SystemTime::now()).as_bytes());
    }
    out.extend_from_slice(b"\r\n");
    out
}

/// A client says that it asks for nothing after this, or an answer that nothing comes after it, as hyper reads it.
pub(super) fn asks_to_close(headers: &HeaderMap) -> bool {
    let fields = headers.get_all(header::CONNECTION).iter();
    let mut words = fields.filter_map(|field: &HeaderValue| field.to_str().ok());
    words.any(|field| field.split(',').any(|word| word.trim().eq_ignore_ascii_case("close")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_closes_where_one_word_of_connection_says_so() {
        let asks = |fields: &[&'static str]| {
            let fields =
                fields.iter().map(|field| (header::CONNECTION, HeaderValue::from_static(field)));
            asks_to_close(&fields.collect())
        };
        assert!(asks(&["close"]) && asks(&["keep-alive, CLOSE "]) && asks(&["te", "close"]));
        assert!(!asks(&[]) && !asks(&["keep-alive"]) && !asks(&["closed"]));
    }
}

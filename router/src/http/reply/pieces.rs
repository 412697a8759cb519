//! A body that is written as the socket takes it, in pieces of bounded size, from something more compact than its text.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use bytes::{Bytes, BytesMut};
use futures_util::stream;

/// A piece ends with the first part that reaches this. A guess: about 0.1 ms of writing.
const PIECE_BYTES: usize = 64 << 10;

/// What writes a body part by part.
pub(in crate::http) trait Parts: Send + 'static {
    /// Appends the next part, small where the body is large. False if that was the last one.
    fn write(&mut self, out: &mut BytesMut) -> bool;
}

/// JSON, with its length where it is one piece.
pub(in crate::http) fn json_response(mut parts: impl Parts) -> Response {
    let (first, more) = piece(&mut parts);
    let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    if !more {
        return (json, first).into_response();
    }
    let body = stream::unfold((Some(first), Some(parts)), |(first, parts)| async move {
        if let Some(first) = first {
            return Some((Ok::<_, Infallible>(first), (None, parts)));
        }
        let mut parts = parts?;
        let (next, more) = piece(&mut parts);
        Some((Ok(next), (None, more.then_some(parts))))
    });
    (json, Body::from_stream(body)).into_response()
}

fn piece(parts: &mut impl Parts) -> (Bytes, bool) {
    let mut out = BytesMut::with_capacity(1 << 10); // most answers fit
    let mut more = true;
    while more && out.len() < PIECE_BYTES {
        more = parts.write(&mut out);
    }
    (out.freeze(), more)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    /// So many parts of 1,000 bytes.
    struct Count(usize);

    impl Parts for Count {
        fn write(&mut self, out: &mut BytesMut) -> bool {
            out.extend_from_slice(&[b'x'; 1000]);
            self.0 -= 1;
            self.0 > 0
        }
    }

    #[tokio::test]
    async fn what_is_small_has_its_length_and_what_is_large_comes_in_pieces() {
        let small = json_response(Count(3)).into_body();
        assert_eq!(axum::body::HttpBody::size_hint(&small).exact(), Some(3000));
        let mut large = json_response(Count(1000)).into_body();
        let mut sizes = Vec::new();
        while let Some(frame) = large.frame().await {
            sizes.push(frame.unwrap().into_data().unwrap().len());
        }
        assert_eq!(sizes.iter().sum::<usize>(), 1_000_000);
        assert!(sizes.iter().all(|size| *size <= PIECE_BYTES + 1000), "{sizes:?}");
    }
}

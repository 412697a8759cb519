//! Reads request bodies: JSON by its headers, at most so long, at most so slow.

mod raw;

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

use crate::http::parse::fields::clip;
use crate::http::reply::reject::Reject;
use crate::limits::memory::{MemoryPool, MemoryShare};

pub(in crate::http) use raw::Raw;

/// How much of a body that is too long is read and thrown away, so that a client that writes before it reads gets to
/// see the answer rather than a reset connection.
const DRAIN_BYTES: usize = 256 << 20;
/// And how long.
const DRAIN_TIME: Duration = Duration::from_secs(10);

/// Bounds of one body.
#[derive(Debug, Clone, Copy)]
pub(in crate::http) struct BodyLimits {
    pub(in crate::http) bytes: usize,
    pub(in crate::http) time: Duration,
}

/// After so much of a body, others have their turn.
const TURN: usize = 64 << 10;

/// The whole body of a request that says that it is JSON.
///
/// # Errors
/// `MediaType` or `ContentEncoding` by the headers alone; `BodyTooLong` as soon as that is certain, with never more
/// than the limit in memory; `BodyTooSlow`; `BodyBroken`; `BodyTooComplex` or `Overloaded` if its share is refused.
pub(in crate::http) async fn read(
    request: Request,
    limits: BodyLimits,
    memory: &MemoryPool,
) -> Result<(Raw, MemoryShare), Reject> {
    check_headers(request.headers())?;
    let declared = declared_length(request.headers());
    let body = request.into_body();
    if declared.is_some_and(|length| length > limits.bytes as u64) {
        drain(body);
        return Err(Reject::BodyTooLong { limit: limits.bytes });
    }
    let declared = declared.and_then(|length| usize::try_from(length).ok());
    collect(body, limits, declared, memory.share()).await
}

async fn collect(
    mut body: Body,
    limits: BodyLimits,
    declared: Option<usize>,
    mut share: MemoryShare,
) -> Result<(Raw, MemoryShare), Reject> {
    let end = Instant::now() + limits.time;
    let mut raw = Raw::new(declared);
    let mut since_pause = 0;
    loop {
        let frame = timeout_at(end, body.frame()).await;
        let frame = match frame {
            Err(_) => return Err(Reject::BodyTooSlow { within: limits.time }),
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(Reject::BodyBroken(error.to_string())),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue }; // trailers
        if raw.len() + data.len() > limits.bytes {
            drain(body);
            return Err(Reject::BodyTooLong { limit: limits.bytes });
        }
        since_pause += data.len();
        match timeout_at(end, raw.push(data, &mut share)).await {
            Ok(Ok(())) => {}
            Ok(Err(refused)) => {
                drain(body);
                return Err(refused.into());
            }
            Err(_) => return Err(Reject::BodyTooSlow { within: limits.time }),
        }
        if since_pause >= TURN {
            since_pause = 0;
            // a socket that always has more would hold this thread for megabytes
            tokio::task::yield_now().await;
        }
    }
    Ok((raw, share))
}

/// Reads on beside the answer, within bounds.
fn drain(mut body: Body) {
    tokio::spawn(async move {
        let end = Instant::now() + DRAIN_TIME;
        let mut read = 0;
        while let Ok(Some(Ok(frame))) = timeout_at(end, body.frame()).await {
            read += frame.data_ref().map_or(0, Bytes::len);
            if read > DRAIN_BYTES {
                return;
            }
        }
    });
}

fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn check_headers(headers: &HeaderMap) -> Result<(), Reject> {
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        let got = clip(&String::from_utf8_lossy(encoding.as_bytes()));
        return Err(Reject::ContentEncoding { got });
    }
    // Clients that name no type send JSON all the same; there is nothing else to send here.
    let Some(content_type) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    match content_type.to_str() {
        Ok(text) if is_json(text) => Ok(()),
        _ => {
            let got = clip(&String::from_utf8_lossy(content_type.as_bytes()));
            Err(Reject::MediaType { got })
        }
    }
}

/// `application/json` or `application/...+json`, in UTF-8.
fn is_json(content_type: &str) -> bool {
    let mut parts = content_type.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default().to_ascii_lowercase();
    let Some(subtype) = essence.strip_prefix("application/") else { return false };
    let charset_is_utf8 = parts.all(|parameter| match parameter.split_once('=') {
        Some((name, value)) if name.trim().eq_ignore_ascii_case("charset") => {
            let value = value.trim().trim_matches('"');
            value.eq_ignore_ascii_case("utf-8") || value.eq_ignore_ascii_case("utf8")
        }
        Some(_) | None => true,
    });
    (subtype == "json" || subtype.ends_with("+json")) && charset_is_utf8
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::error::RouteError;

    fn body(frames: &[usize]) -> Request {
        let frames: Vec<_> =
            frames.iter().map(|size| Ok::<_, Infallible>(vec![b' '; *size])).collect();
        Request::new(Body::from_stream(futures_util::stream::iter(frames)))
    }

    #[tokio::test]
    async fn bodies_are_charged_for_the_room_that_they_take() {
        let memory = MemoryPool::private(1 << 20);
        let limits = BodyLimits { bytes: 1 << 20, time: Duration::from_secs(9) };
        let (raw, share) = read(body(&[5000]), limits, &memory).await.unwrap();
        assert_eq!((raw.len(), share.used()), (5000, 5000));
        drop(share);
        let (raw, share) = read(body(&[5000, 3000, 1]), limits, &memory).await.unwrap();
        assert_eq!((raw.len(), share.used()), (8001, 10_000 + raw::PIECE_BYTES));
        assert!(share.peak() <= 3 * 8001);
        drop((raw, share));
        assert!(read(body(&[1 << 20]), limits, &memory).await.is_ok(), "nothing was kept");
        let too_small = MemoryPool::private(1_000_000);
        let refused = read(body(&[600_000, 400_000]), limits, &too_small).await;
        let Err(Reject::Route(RouteError::BodyTooComplex { .. })) = refused else {
            panic!("the pieces are of 256 KiB, and the first frame is there until it is copied")
        };
    }

    fn with_length(length: usize, frames: &[usize]) -> Request {
        let mut request = body(frames);
        request.headers_mut().insert(header::CONTENT_LENGTH, length.into());
        request
    }

    #[tokio::test]
    async fn as_long_as_may_be_is_read_and_a_byte_more_is_not() {
        let memory = MemoryPool::private(1 << 20);
        let limits = BodyLimits { bytes: 8_001, time: Duration::from_secs(9) };
        let frames = [5_000, 3_000, 1];
        assert!(read(body(&frames), limits, &memory).await.is_ok());
        let (raw, share) = read(with_length(8_001, &frames), limits, &memory).await.unwrap();
        let charged = 8_001 + raw::PIECE_BYTES;
        assert_eq!((raw.len(), share.used()), (8_001, charged), "no more room than it says");
        for request in [with_length(8_002, &frames), body(&[5_000, 3_000, 2])] {
            let refused = read(request, limits, &memory).await;
            assert!(matches!(refused, Err(Reject::BodyTooLong { limit: 8_001 })));
        }
    }

    /// A body of `frames` frames of 10,000 bytes, and who is told of each that is read.
    fn watched(frames: usize) -> (Request, tokio::sync::mpsc::UnboundedReceiver<()>) {
        let (tell, told) = tokio::sync::mpsc::unbounded_channel();
        let stream = futures_util::stream::unfold((0, tell), move |(at, tell)| async move {
            if at == frames {
                return None;
            }
            tell.send(()).ok();
            Some((Ok::<_, Infallible>(vec![b' '; 10_000]), (at + 1, tell)))
        });
        (Request::new(Body::from_stream(stream)), told)
    }

    #[tokio::test]
    async fn what_is_refused_is_read_to_its_end_for_a_client_that_writes_before_it_reads() {
        let limits = BodyLimits { bytes: 25_000, time: Duration::from_secs(9) };
        let (mut declared, first) = watched(9);
        declared.headers_mut().insert(header::CONTENT_LENGTH, 90_000.into());
        let (found_out, second) = watched(9);
        let (without_memory, third) = watched(9);
        let roomy = MemoryPool::private(1 << 20);
        let no_room = MemoryPool::private(12_000);
        for (request, mut told, memory) in [
            (declared, first, &roomy),
            (found_out, second, &roomy),
            (without_memory, third, &no_room),
        ] {
            read(request, limits, memory).await.unwrap_err();
            let mut frames = 0;
            while told.recv().await.is_some() {
                frames += 1;
            }
            assert_eq!(frames, 9);
        }
    }

    #[tokio::test]
    async fn others_have_their_turn_while_a_body_comes_that_always_has_more() {
        let (turn, mut had) = tokio::sync::oneshot::channel();
        tokio::spawn(async move { turn.send(()) });
        let limits = BodyLimits { bytes: 1 << 20, time: Duration::from_secs(9) };
        let memory = MemoryPool::private(1 << 20);
        read(body(&[TURN / 2; 4]), limits, &memory).await.unwrap();
        assert!(had.try_recv().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_has_its_time_in_all_however_it_drips() {
        let drips = futures_util::stream::unfold(0, |at| async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            (at < 6).then_some((Ok::<_, Infallible>("x"), at + 1))
        });
        let limits = BodyLimits { bytes: 100, time: Duration::from_secs(9) };
        let request = Request::new(Body::from_stream(drips));
        let read = read(request, limits, &MemoryPool::private(100)).await;
        assert!(matches!(read, Err(Reject::BodyTooSlow { .. })));
    }

    #[test]
    fn what_is_not_encoded_may_say_so() {
        let mut headers = HeaderMap::new();
        for (encoding, good) in [("identity", true), ("Identity", true), ("gzip", false)] {
            headers.insert(header::CONTENT_ENCODING, encoding.parse().unwrap());
            assert_eq!(check_headers(&headers).is_ok(), good, "{encoding}");
        }
    }

    #[test]
    fn json_by_its_content_type() {
        for good in [
            "application/json",
            "Application/JSON; charset=UTF-8",
            "application/json;charset=\"utf-8\"",
            "application/vnd.api+json",
            "application/json; profile=x",
        ] {
            assert!(is_json(good), "{good}");
        }
        for wrong in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/json; charset=utf-16",
            "application/json5",
            "json",
            "",
        ] {
            assert!(!is_json(wrong), "{wrong}");
        }
    }
}

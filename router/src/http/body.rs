//! Reads request bodies: JSON by its headers, at most so long, at most so slow.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

use crate::error::RouteError;
use crate::http::fields::clip;
use crate::http::reject::Reject;
use crate::memory::{Pool, Refused, Share};

/// How much of a body that is too long is read and thrown away, so that a client that writes before it reads gets to
/// see the answer rather than a reset connection.
const DRAIN_BYTES: usize = 256 << 20;
/// And how long.
const DRAIN_TIME: Duration = Duration::from_secs(10);

/// Bounds of one body.
#[derive(Debug, Clone, Copy)]
pub(super) struct BodyLimits {
    pub(super) bytes: usize,
    pub(super) time: Duration,
}

/// A body as it came, in pieces.
#[derive(Debug, Default)]
pub(super) struct Raw {
    /// Most bodies are one frame, which then is not copied.
    only: Bytes,
    /// What was copied out of frames: pieces of [`PIECE`], and the one that is filled.
    pieces: Vec<Vec<u8>>,
    /// As long as its headers say that it is.
    declared: Option<usize>,
}

/// A piece of a body. Memory that is used for the first time costs more than the bytes that are copied there; so it
/// is taken in small parts.
const PIECE: usize = 256 << 10;

/// After so much of a body, others have their turn.
const TURN: usize = 64 << 10;

/// The whole body of a request that says that it is JSON.
///
/// # Errors
/// `MediaType` or `ContentEncoding` by the headers alone; `BodyTooLong` as soon as that is certain, with never more
/// than the limit in memory; `BodyTooSlow`; `BodyBroken`; `BodyTooComplex` or `Overloaded` if its share is refused.
pub(super) async fn read(
    request: Request,
    limits: BodyLimits,
    memory: &Pool,
) -> Result<(Raw, Share), Reject> {
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
    mut share: Share,
) -> Result<(Raw, Share), Reject> {
    let end = Instant::now() + limits.time;
    let mut raw = Raw { declared, ..Raw::default() };
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
        if let Err(refused) = raw.push(data, &mut share) {
            drain(body);
            return Err(refused.body(None).into());
        }
        if since_pause >= TURN {
            since_pause = 0;
            // a socket that always has more would hold this thread for megabytes
            tokio::task::yield_now().await;
        }
    }
    Ok((raw, share))
}

impl Raw {
    pub(super) fn len(&self) -> usize {
        self.only.len() + self.pieces.iter().map(Vec::len).sum::<usize>()
    }

    /// Adds a frame, charged as room for it is made: a client that announces a long body takes nothing by that.
    fn push(&mut self, data: Bytes, share: &mut Share) -> Result<(), Refused> {
        if self.only.is_empty() && self.pieces.is_empty() {
            share.charge(data.len())?;
            self.only = data;
            return Ok(());
        }
        if !self.only.is_empty() {
            let first = std::mem::take(&mut self.only);
            self.copy(&first, share)?;
            share.give_back(first.len());
        }
        self.copy(&data, share)
    }

    fn copy(&mut self, mut data: &[u8], share: &mut Share) -> Result<(), Refused> {
        while !data.is_empty() {
            let full = self.pieces.last().is_none_or(|piece| piece.len() >= PIECE);
            if full {
                share.charge(size_of::<Vec<u8>>())?;
                self.pieces.push(Vec::new());
            }
            let before = (self.pieces.len() - 1) * PIECE;
            let most = self.declared.map_or(PIECE, |all| all.saturating_sub(before).min(PIECE));
            let piece = self.pieces.last_mut().expect("one was pushed if there was none");
            let (now, later) = data.split_at(data.len().min(PIECE - piece.len()));
            room(piece, now.len(), most, share)?;
            piece.extend_from_slice(now);
            data = later;
        }
        Ok(())
    }

    /// In one piece. That is a copy of a body of more than one piece, so it is for threads that serve no sockets if the
    /// body is large.
    ///
    /// # Errors
    /// `BodyTooComplex` or `Overloaded` if there is no memory for the copy.
    pub(super) fn joined(mut self, share: &mut Share) -> Result<Bytes, RouteError> {
        if self.pieces.len() <= 1 {
            return Ok(self.pieces.pop().map_or(self.only, Bytes::from));
        }
        let len = self.len();
        share.charge(len).map_err(|refused| refused.body(None))?;
        let mut whole = Vec::with_capacity(len);
        for piece in self.pieces {
            whole.extend_from_slice(&piece);
            share.give_back(piece.capacity() + size_of::<Vec<u8>>());
        }
        Ok(Bytes::from(whole))
    }
}

/// Makes room for this much more in a piece: it doubles, up to what it will be at most.
fn room(piece: &mut Vec<u8>, more: usize, most: usize, share: &mut Share) -> Result<(), Refused> {
    let (old, needed) = (piece.capacity(), piece.len() + more);
    if needed > old {
        let new = needed.max((2 * old).min(most));
        share.charge(new)?; // while it moves there may be both
        piece.reserve_exact(new - piece.len());
        share.give_back(old);
    }
    Ok(())
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

    fn body(frames: &[usize]) -> Request {
        let frames: Vec<_> =
            frames.iter().map(|size| Ok::<_, Infallible>(vec![b' '; *size])).collect();
        Request::new(Body::from_stream(futures_util::stream::iter(frames)))
    }

    #[tokio::test]
    async fn bodies_are_charged_for_the_room_that_they_take() {
        let memory = Pool::private(1 << 20);
        let limits = BodyLimits { bytes: 1 << 20, time: Duration::from_secs(9) };
        let (raw, share) = read(body(&[5000]), limits, &memory).await.unwrap();
        assert_eq!((raw.len(), share.used()), (5000, 5000));
        drop(share);
        let (raw, share) = read(body(&[5000, 3000, 1]), limits, &memory).await.unwrap();
        assert_eq!((raw.len(), share.used()), (8001, 10_000 + size_of::<Vec<u8>>()));
        assert!(share.peak() <= 3 * 8001);
        drop((raw, share));
        assert!(read(body(&[1 << 20]), limits, &memory).await.is_ok(), "nothing was kept");
        let too_small = Pool::private(1_000_000);
        let refused = read(body(&[600_000, 400_000]), limits, &too_small).await;
        let Err(Reject::Route(RouteError::BodyTooComplex { .. })) = refused else {
            panic!("the pieces are of 256 KiB, and the first frame is there until it is copied")
        };
    }

    #[tokio::test]
    async fn a_long_body_is_joined_and_charged_once_in_the_end() {
        let memory = Pool::private(1 << 22);
        let limits = BodyLimits { bytes: 1 << 20, time: Duration::from_secs(9) };
        for frames in [&[PIECE, 1][..], &[PIECE - 1, 2], &[1, PIECE, PIECE], &[1; 9], &[900_000, 7]]
        {
            let mut sent = Vec::new();
            let parts: Vec<_> = (0u8..)
                .zip(frames)
                .map(|(i, len)| {
                    sent.extend(std::iter::repeat_n(i, *len));
                    Ok::<_, Infallible>(vec![i; *len])
                })
                .collect();
            let request = Request::new(Body::from_stream(futures_util::stream::iter(parts)));
            let (raw, mut share) = read(request, limits, &memory).await.unwrap();
            assert_eq!(raw.len(), sent.len());
            let pieces = raw.pieces.len();
            let bytes = raw.joined(&mut share).unwrap();
            assert!(bytes == sent, "{frames:?}");
            if pieces > 1 {
                assert_eq!(share.used(), sent.len(), "{frames:?}");
            }
        }
    }

    #[tokio::test]
    async fn joining_without_memory_for_a_copy_is_refused() {
        let memory = Pool::private(1_500_000);
        let limits = BodyLimits { bytes: 1 << 20, time: Duration::from_secs(9) };
        let (raw, mut share) = read(body(&[400_000, 600_000]), limits, &memory).await.unwrap();
        assert!(matches!(raw.joined(&mut share), Err(RouteError::BodyTooComplex { .. })));
    }

    fn with_length(length: usize, frames: &[usize]) -> Request {
        let mut request = body(frames);
        request.headers_mut().insert(header::CONTENT_LENGTH, length.into());
        request
    }

    #[tokio::test]
    async fn as_long_as_may_be_is_read_and_a_byte_more_is_not() {
        let memory = Pool::private(1 << 20);
        let limits = BodyLimits { bytes: 8_001, time: Duration::from_secs(9) };
        let frames = [5_000, 3_000, 1];
        assert!(read(body(&frames), limits, &memory).await.is_ok());
        let (raw, share) = read(with_length(8_001, &frames), limits, &memory).await.unwrap();
        let charged = 8_001 + size_of::<Vec<u8>>();
        assert_eq!((raw.len(), share.used()), (8_001, charged), "no more room than it says");
        for request in [with_length(8_002, &frames), body(&[5_000, 3_000, 2])] {
            let refused = read(request, limits, &memory).await;
            assert!(matches!(refused, Err(Reject::BodyTooLong { limit: 8_001 })));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_has_its_time_in_all_however_it_drips() {
        let drips = futures_util::stream::unfold(0, |at| async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            (at < 6).then_some((Ok::<_, Infallible>("x"), at + 1))
        });
        let limits = BodyLimits { bytes: 100, time: Duration::from_secs(9) };
        let request = Request::new(Body::from_stream(drips));
        let read = read(request, limits, &Pool::private(100)).await;
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
            "json",
            "",
        ] {
            assert!(!is_json(wrong), "{wrong}");
        }
    }
}

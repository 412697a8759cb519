//! Reads request bodies: JSON by its headers, at most so long, at most so slow.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::error::RouteError;
use crate::http::fields::clip;
use crate::http::reject::Reject;
use crate::metrics::Metrics;

/// How much of a body that is too long is read and thrown away, so that a client that writes before it reads gets to
/// see the answer rather than a reset connection.
const DRAIN_BYTES: usize = 256 << 20;
/// And how long.
const DRAIN_TIME: Duration = Duration::from_secs(10);

/// All bodies under way together may hold this much: 64 of the longest at the default limit. A guess.
const ALL_BODIES_BYTES: usize = 1 << 30;
/// One permit of [`BodyMemory`].
const PERMIT_BYTES: usize = 1 << 10;

/// Bounds of one body.
#[derive(Debug, Clone, Copy)]
pub(super) struct BodyLimits {
    pub(super) bytes: usize,
    pub(super) time: Duration,
}

/// What is left of the memory for bodies.
#[derive(Debug, Clone)]
pub(super) struct BodyMemory {
    left: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

impl BodyMemory {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { left: Arc::new(Semaphore::new(ALL_BODIES_BYTES / PERMIT_BYTES)), metrics }
    }

    /// Memory for one body, at first none.
    fn share(&self) -> Share {
        Share { memory: self.clone(), permit: None, used: 0 }
    }
}

/// Memory of one body, given back when this drops. Whoever reads a body keeps it as long as anything is there that was
/// made of the body: its values and texts are as large, and wait for the tokeniser and for a worker.
pub(super) struct Share {
    memory: BodyMemory,
    permit: Option<OwnedSemaphorePermit>,
    used: usize,
}

impl Share {
    fn grow(&mut self, bytes: usize) -> Result<(), RouteError> {
        self.used += bytes;
        self.memory.metrics.http.body_bytes.add(signed(bytes));
        let held = self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = self.used.div_ceil(PERMIT_BYTES).saturating_sub(held);
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.memory.left).try_acquire_many_owned(more);
        let permit = permit.map_err(|_| RouteError::Overloaded {
            what: "request bodies",
            retry_after: Duration::from_secs(1),
        })?;
        match &mut self.permit {
            Some(held) => held.merge(permit),
            None => self.permit = Some(permit),
        }
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.memory.metrics.http.body_bytes.add(-signed(self.used));
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The whole body of a request that says that it is JSON.
///
/// # Errors
/// `MediaType` or `ContentEncoding` by the headers alone; `BodyTooLong` as soon as that is certain, with never more
/// than the limit in memory; `BodyTooSlow`; `BodyBroken`; `Overloaded` if all bodies together hold too much.
pub(super) async fn read(
    request: Request,
    limits: BodyLimits,
    memory: &BodyMemory,
) -> Result<(Bytes, Share), Reject> {
    check_headers(request.headers())?;
    let declared = declared_length(request.headers());
    let body = request.into_body();
    if declared.is_some_and(|length| length > limits.bytes as u64) {
        drain(body);
        return Err(Reject::BodyTooLong { limit: limits.bytes });
    }
    collect(body, limits, memory.share()).await
}

async fn collect(
    mut body: Body,
    limits: BodyLimits,
    mut share: Share,
) -> Result<(Bytes, Share), Reject> {
    let end = Instant::now() + limits.time;
    let mut first = Bytes::new(); // most bodies are one frame, which then is not copied
    let mut whole = BytesMut::new();
    loop {
        let frame = timeout_at(end, body.frame()).await;
        let frame = match frame {
            Err(_) => return Err(Reject::BodyTooSlow { within: limits.time }),
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(Reject::BodyBroken(error.to_string())),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue }; // trailers
        if first.len() + whole.len() + data.len() > limits.bytes {
            drain(body);
            return Err(Reject::BodyTooLong { limit: limits.bytes });
        }
        if let Err(error) = share.grow(data.len()) {
            drain(body);
            return Err(error.into());
        }
        if first.is_empty() && whole.is_empty() {
            first = data;
        } else {
            whole.extend_from_slice(&std::mem::take(&mut first));
            whole.extend_from_slice(&data);
        }
    }
    let bytes = if whole.is_empty() { first } else { whole.freeze() };
    Ok((bytes, share))
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
    use super::*;

    #[tokio::test]
    async fn bodies_share_their_memory_and_give_it_back() {
        let memory = BodyMemory { left: Arc::new(Semaphore::new(3)), metrics: Arc::default() };
        let limits = BodyLimits { bytes: 1 << 20, time: Duration::from_secs(9) };
        let body = |size| Request::new(Body::from(vec![b' '; size]));
        let one =
            read(body(2 * PERMIT_BYTES), limits, &memory).await.unwrap_or_else(|e| panic!("{e}"));
        let two = read(body(PERMIT_BYTES + 1), limits, &memory).await;
        assert!(matches!(two, Err(Reject::Route(RouteError::Overloaded { .. }))));
        drop(one);
        assert!(read(body(PERMIT_BYTES + 1), limits, &memory).await.is_ok());
        assert_eq!(memory.left.available_permits(), 3);
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

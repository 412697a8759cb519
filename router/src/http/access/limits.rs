//! What is left to a key, in the headers that OpenAI's clients know.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::limits::key_ring::{ClientKey, RateLeft};

/// Limit, remaining and reset of one rate.
type Names = [HeaderName; 3];

const REQUESTS: Names = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: Names = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

/// Says what is left to `key`; nothing of what has no limit.
pub(super) fn tell(key: &ClientKey, headers: &mut HeaderMap) {
    let standing = key.standing();
    for (names, left) in [(REQUESTS, standing.requests), (TOKENS, standing.tokens)] {
        let Some(RateLeft { limit, remaining, reset }) = left else { continue };
        let [of_limit, of_remaining, of_reset] = names;
        headers.insert(of_limit, limit.into());
        headers.insert(of_remaining, remaining.into());
        let reset = HeaderValue::try_from(in_words(reset)).expect("digits and letters");
        headers.insert(of_reset, reset);
    }
}

/// As OpenAI writes it: `250ms`, `1.5s`, `6m0s`.
fn in_words(time: Duration) -> String {
    let ms = time.as_millis();
    if ms < 1_000 {
        return format!("{ms}ms");
    }
    let minutes = match ms / 60_000 {
        0 => String::new(),
        minutes => format!("{minutes}m"),
    };
    let (seconds, rest) = (ms % 60_000 / 1_000, ms % 1_000);
    let fraction = format!(".{rest:03}");
    format!("{minutes}{seconds}{}s", fraction.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_openai_writes_them() {
        for (ms, text) in [
            (0, "0ms"),
            (999, "999ms"),
            (1_000, "1s"),
            (1_500, "1.5s"),
            (10_010, "10.01s"),
            (59_999, "59.999s"),
            (60_000, "1m0s"),
            (361_250, "6m1.25s"),
            (7_200_000, "120m0s"),
        ] {
            assert_eq!(in_words(Duration::from_millis(ms)), text);
        }
    }
}

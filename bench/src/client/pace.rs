//! How late tokens are against the pace at which workers give them. Whoever reads an answer sees neither when a token was
//! given nor how many an event has, but of a worker with even steps and tokens of one text both can be told.

use std::time::{Duration, Instant};

/// A worker gives each answer one token a step, and all tokens have the same text.
#[derive(Debug, Clone)]
pub(crate) struct TokenPace {
    step: Duration,
    text: Vec<u8>,
}

impl TokenPace {
    /// `text` is that of a token as it stands in JSON, and not empty.
    pub(crate) fn new(step: Duration, text: &str) -> Self {
        Self { step, text: text.as_bytes().to_vec() }
    }

    /// Tokens of an event.
    pub(super) fn tokens(&self, line: &[u8]) -> u32 {
        let found = line.windows(self.text.len()).filter(|window| *window == self.text);
        u32::try_from(found.count()).unwrap_or(u32::MAX)
    }

    /// By how many ms each token of an answer came later than at this pace after the one that was the least late. A way
    /// that takes the same time for all tokens does not show.
    pub(super) fn late_ms(&self, came: &[(Instant, u32)]) -> Vec<f32> {
        let Some((first, _)) = came.first() else { return Vec::new() };
        let step_ms = self.step.as_secs_f64() * 1e3;
        let mut after_pace_ms = Vec::new();
        for (at, tokens) in came {
            for _ in 0..*tokens {
                let since_ms = at.saturating_duration_since(*first).as_secs_f64() * 1e3;
                after_pace_ms.push(since_ms - step_ms * after_pace_ms.len() as f64);
            }
        }
        let least_ms = after_pace_ms.iter().copied().fold(f64::INFINITY, f64::min);
        after_pace_ms.iter().map(|ms| (ms - least_ms) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn late(came: &[(u64, u32)]) -> Vec<f32> {
        let begin = Instant::now();
        let came = came.iter().map(|(ms, tokens)| (begin + Duration::from_millis(*ms), *tokens));
        TokenPace::new(Duration::from_millis(20), " water").late_ms(&came.collect::<Vec<_>>())
    }

    #[test]
    fn tokens_of_an_event_are_counted_by_their_text() {
        let pace = TokenPace::new(Duration::from_millis(20), " water");
        assert_eq!(pace.tokens(br#"data: {"delta":{"content":" water"}}"#), 1);
        assert_eq!(pace.tokens(br#"data: {"delta":{"content":" water water water"}}"#), 3);
        assert_eq!(pace.tokens(b"data: {}"), 0);
    }

    #[test]
    fn tokens_at_their_pace_are_not_late() {
        assert_eq!(late(&[(0, 1), (20, 1), (40, 1)]), [0.0, 0.0, 0.0]);
        assert!(late(&[]).is_empty());
    }

    #[test]
    fn of_tokens_that_come_together_the_first_is_the_latest() {
        // the second and the third were given at 20 and 40 ms
        assert_eq!(late(&[(0, 1), (45, 2), (60, 1)]), [0.0, 25.0, 5.0, 0.0]);
    }

    #[test]
    fn a_first_token_that_is_late_does_not_hide_it() {
        assert_eq!(late(&[(0, 1), (5, 1), (20, 1)]), [20.0, 5.0, 0.0]);
    }
}

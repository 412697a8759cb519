//! What one request gave. Times are in ms from when it was due, so a client that was late hides nothing.

use std::sync::Arc;

/// One request of a run.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    /// When it was due, from the beginning of the run.
    pub(crate) due_ms: f64,
    /// How much later the client sent it.
    pub(crate) lag_ms: f64,
    pub(crate) result: Result<Answer, Failure>,
}

/// A whole answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answer {
    pub(crate) ttft_ms: f64,
    /// To the last token.
    pub(crate) last_ms: f64,
    /// To the end of the stream.
    pub(crate) e2e_ms: f64,
    /// Between the events that carried tokens; empty where nobody looked.
    pub(crate) gaps_ms: Vec<f32>,
    /// By how much each token came later than at the pace that it was held against; empty where there was none.
    pub(crate) late_ms: Vec<f32>,
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    /// Prompt tokens that the worker took from its cache; `None` where the server does not say.
    pub(crate) cached_tokens: Option<u32>,
    /// Who answered, where the server says it.
    pub(crate) worker: Option<Arc<str>>,
}

/// Why there is no answer, or not all of it.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    /// A status such as `429`, or `connect`, `transport`, `stream_error`, `cut`, `timeout`.
    pub(crate) kind: String,
    pub(crate) text: String,
}

impl Answer {
    /// `None` with a single token, which has no time after another.
    pub(crate) fn tpot_ms(&self) -> Option<f64> {
        let after_first = self.completion_tokens.checked_sub(1).filter(|n| *n > 0)?;
        Some((self.last_ms - self.ttft_ms) / f64::from(after_first))
    }
}

/// What an answer must keep to count as good. A limit that is not set is kept by all.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub(crate) struct Slo {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ttft_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tpot_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) e2e_ms: Option<f64>,
}

impl Slo {
    pub(crate) fn met(&self, answer: &Answer) -> bool {
        let within = |limit: Option<f64>, ms: f64| limit.is_none_or(|limit| ms <= limit);
        within(self.ttft_ms, answer.ttft_ms)
            && within(self.tpot_ms, answer.tpot_ms().unwrap_or(0.0))
            && within(self.e2e_ms, answer.e2e_ms)
    }
}

impl std::str::FromStr for Slo {
    type Err = String;

    /// `ttft=1s,tpot=50ms`; a plain number is ms.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut slo = Self::default();
        for limit in text.split(',') {
            let (name, value) =
                limit.split_once('=').ok_or_else(|| format!("`{limit}` is not NAME=TIME"))?;
            let field = match name.trim() {
                "ttft" => &mut slo.ttft_ms,
                "tpot" => &mut slo.tpot_ms,
                "e2e" => &mut slo.e2e_ms,
                other => return Err(format!("`{other}` is none of ttft, tpot, e2e")),
            };
            *field = Some(time_ms(value.trim())?);
        }
        Ok(slo)
    }
}

/// `50ms`, `1.5s`, `2m`, or a plain number of ms.
pub(crate) fn time_ms(text: &str) -> Result<f64, String> {
    let (number, unit_ms) = match text {
        text if text.ends_with("ms") => (text.strip_suffix("ms"), 1.0),
        text if text.ends_with('s') => (text.strip_suffix('s'), 1e3),
        text if text.ends_with('m') => (text.strip_suffix('m'), 6e4),
        text => (Some(text), 1.0),
    };
    let value = number.and_then(|number| number.trim().parse::<f64>().ok());
    let value = value.filter(|value| value.is_finite() && *value > 0.0);
    Ok(value.ok_or_else(|| format!("`{text}` is not a time such as 50ms or 1.5s"))? * unit_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_with_their_units() {
        let slo: Slo = "ttft=1s,tpot=50ms,e2e=2m".parse().unwrap();
        assert_eq!(slo, Slo { ttft_ms: Some(1e3), tpot_ms: Some(50.0), e2e_ms: Some(12e4) });
        for bad in ["ttft", "ttft=", "ttft=-1s", "ttft=xs", "speed=1s", "tpot=infs"] {
            assert!(bad.parse::<Slo>().is_err(), "{bad}");
        }
    }

    #[test]
    fn time_per_token_counts_from_the_first_one() {
        let answer =
            Answer { ttft_ms: 100.0, last_ms: 190.0, completion_tokens: 10, ..Answer::default() };
        assert_eq!(answer.tpot_ms(), Some(10.0));
        assert_eq!(Answer { completion_tokens: 1, ..answer.clone() }.tpot_ms(), None);
        let slo = Slo { ttft_ms: Some(100.0), tpot_ms: Some(9.9), e2e_ms: None };
        assert!(!slo.met(&answer));
        assert!(slo.met(&Answer { completion_tokens: 1, ..answer }));
    }
}

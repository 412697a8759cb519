//! How many requests come, and how long their prompts are: those that are refused, too, as somebody asked for them.

/// What grows is noticed within the short time, what falls after the long one: a worker that is missing costs more than one
/// that is idle. Guesses: a worker takes a minute to start, and load that ebbs for a minute comes back.
const WINDOWS_MS: [f64; 2] = [30_000.0, 300_000.0];
/// What comes first counts as if it had come over so long.
const LEAST_MS: f64 = 10_000.0;

/// Sums that fade: of requests, of their prompt tokens, and of the squares of these.
#[derive(Debug, Clone, Copy)]
struct Window {
    ms: f64,
    sums: [f64; 3],
    at_ms: f64,
}

impl Window {
    fn faded(&self, now_ms: f64) -> [f64; 3] {
        let fade = (-(now_ms - self.at_ms).max(0.0) / self.ms).exp();
        self.sums.map(|sum| sum * fade)
    }

    fn add(&mut self, tokens: f64, now_ms: f64) {
        let [requests, sum, squares] = self.faded(now_ms);
        self.sums = [requests + 1.0, sum + tokens, squares + tokens * tokens];
        self.at_ms = self.at_ms.max(now_ms);
    }

    fn of_late(&self, since_ms: f64, now_ms: f64) -> ArrivalRate {
        let [requests, tokens, squares] = self.faded(now_ms);
        // until it has passed once, of the time since the first request
        let passed_ms = self.ms * (1.0 - (-(now_ms - since_ms).max(0.0) / self.ms).exp());
        let mean = tokens / requests.max(f64::MIN_POSITIVE);
        ArrivalRate {
            per_s: requests / passed_ms.max(LEAST_MS) * 1e3,
            prompt_tokens: mean,
            spread: (squares / requests.max(f64::MIN_POSITIVE) / (mean * mean).max(1.0)).max(1.0),
        }
    }
}

/// What comes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ArrivalRate {
    /// Requests a second.
    pub(super) per_s: f64,
    /// Of a request, in the mean.
    pub(super) prompt_tokens: f64,
    /// Mean square of these by the square of their mean: 1 where all are alike.
    pub(super) spread: f64,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Arrivals {
    windows: [Window; 2],
    since_ms: Option<f64>,
}

impl Default for Arrivals {
    fn default() -> Self {
        let window = |ms| Window { ms, sums: [0.0; 3], at_ms: 0.0 };
        Self { windows: WINDOWS_MS.map(window), since_ms: None }
    }
}

impl Arrivals {
    /// A request came.
    pub(super) fn came(&mut self, prompt_tokens: u32, now_ms: f64) {
        self.since_ms.get_or_insert(now_ms);
        for window in &mut self.windows {
            window.add(prompt_tokens.into(), now_ms);
        }
    }

    /// By the window in which more tokens come.
    pub(super) fn of_late(&self, now_ms: f64) -> ArrivalRate {
        let nothing = ArrivalRate { per_s: 0.0, prompt_tokens: 0.0, spread: 1.0 };
        let Some(since_ms) = self.since_ms else { return nothing };
        let [short, long] = self.windows.map(|window| window.of_late(since_ms, now_ms));
        let tokens = |rate: &ArrivalRate| rate.per_s * (rate.prompt_tokens + 1.0);
        if tokens(&short) > tokens(&long) { short } else { long }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests at even times from `from_s` to `to_s`.
    fn even(arrivals: &mut Arrivals, (from_s, to_s): (f64, f64), per_s: f64, tokens: u32) {
        for i in 0..((to_s - from_s) * per_s) as u32 {
            arrivals.came(tokens, (from_s + f64::from(i) / per_s) * 1e3);
        }
    }

    #[test]
    fn nothing_comes_of_nothing_and_a_first_request_is_no_flood() {
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.of_late(5.0).per_s, 0.0);
        arrivals.came(100, 1e6);
        let first = arrivals.of_late(1e6);
        assert!((first.per_s - 0.1).abs() < 1e-9, "{first:?}");
        assert_eq!((first.prompt_tokens, first.spread), (100.0, 1.0));
        assert!(arrivals.of_late(0.0).per_s <= 0.1, "a clock that goes back");
        let mut goes_back = Arrivals::default();
        goes_back.came(100, 100e3);
        goes_back.came(100, 0.0);
        assert!((goes_back.of_late(100e3).per_s - 0.2).abs() < 1e-9, "both came just now");
        arrivals.came(0, 1e6);
        assert!(arrivals.of_late(1e6).spread.is_finite());
    }

    #[test]
    fn what_grows_is_known_in_half_a_minute_and_what_ends_is_remembered_for_minutes() {
        let mut arrivals = Arrivals::default();
        even(&mut arrivals, (0.0, 1_200.0), 2.0, 50);
        assert!((arrivals.of_late(1.2e6).per_s - 2.0).abs() < 0.1);
        even(&mut arrivals, (1_200.0, 1_230.0), 20.0, 50);
        let grown = arrivals.of_late(1.23e6).per_s;
        assert!((10.0..15.0).contains(&grown), "63 % of the way: {grown}");
        even(&mut arrivals, (1_230.0, 2_400.0), 20.0, 50);
        assert!((arrivals.of_late(2.4e6).per_s - 20.0).abs() < 0.5);
        let later = arrivals.of_late(2.4e6 + 60_000.0).per_s;
        assert!((15.0..18.0).contains(&later), "a minute without any: {later}");
        assert!(arrivals.of_late(2.4e6 + 3.6e6).per_s < 0.01);
    }

    #[test]
    fn prompts_that_differ_have_a_spread() {
        let mut arrivals = Arrivals::default();
        for i in 0..100 {
            arrivals.came(if i % 2 == 0 { 0 } else { 2_000 }, 1e3 * f64::from(i));
        }
        let rate = arrivals.of_late(99e3);
        assert!((rate.prompt_tokens - 1_000.0).abs() < 20.0, "{rate:?}");
        assert!((rate.spread - 2.0).abs() < 0.05, "{rate:?}");
    }
}

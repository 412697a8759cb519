//! A bucket of tokens: so many a minute, saved up for a minute at most. Pure: the time is an argument, in ms of a clock that
//! only grows.

use std::num::NonZeroU32;

/// Parts of one. A rate of `r` a minute is then `r` parts a millisecond, so that nothing is lost by rounding.
const PARTS: i64 = 60_000;

/// So many a minute; a full bucket holds as many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate(pub NonZeroU32);

impl Rate {
    fn full(self) -> i64 {
        i64::from(self.0.get()) * PARTS
    }

    /// How long so many parts take.
    fn ms(self, parts: i64) -> u64 {
        u64::try_from(parts).map_or(0, |parts| parts.div_ceil(self.0.get().into()))
    }
}

/// What is in a bucket. It may owe: what was used is taken from it, whether it was there or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    /// Parts at `at_ms`; below zero it owes.
    level: i64,
    at_ms: u64,
}

impl TokenBucket {
    /// A full one.
    #[must_use]
    pub fn full(rate: Rate, now_ms: u64) -> Self {
        Self { level: rate.full(), at_ms: now_ms }
    }

    /// What came since it was looked at last; under a new rate it holds no more than that.
    fn refill(&mut self, rate: Rate, now_ms: u64) {
        let elapsed = now_ms.saturating_sub(self.at_ms);
        let came = i64::try_from(elapsed).unwrap_or(i64::MAX).saturating_mul(rate.0.get().into());
        self.level = self.level.saturating_add(came).min(rate.full());
        self.at_ms = self.at_ms.max(now_ms);
    }

    /// Takes `n` where they are there. More than a full bucket holds is taken from a full one, and owed.
    ///
    /// # Errors
    /// The ms until they will be there.
    pub fn take(&mut self, rate: Rate, n: u32, now_ms: u64) -> Result<(), u64> {
        self.refill(rate, now_ms);
        let parts = i64::from(n) * PARTS;
        let lacks = parts.min(rate.full()) - self.level;
        if lacks > 0 {
            return Err(rate.ms(lacks).max(1));
        }
        self.level -= parts;
        Ok(())
    }

    /// Takes `n`, which were used already.
    pub fn charge(&mut self, rate: Rate, n: u32, now_ms: u64) {
        self.refill(rate, now_ms);
        self.level = self.level.saturating_sub(i64::from(n) * PARTS);
    }

    /// Gives `n` back that were taken and not used.
    pub fn give_back(&mut self, rate: Rate, n: u32, now_ms: u64) {
        self.refill(rate, now_ms);
        self.level = self.level.saturating_add(i64::from(n) * PARTS).min(rate.full());
    }

    /// Whole ones that are there now.
    #[must_use]
    pub fn remaining(&mut self, rate: Rate, now_ms: u64) -> u32 {
        self.refill(rate, now_ms);
        u32::try_from(self.level.max(0) / PARTS).unwrap_or(u32::MAX)
    }

    /// The ms until it is full.
    #[must_use]
    pub fn full_in_ms(&mut self, rate: Rate, now_ms: u64) -> u64 {
        self.refill(rate, now_ms);
        rate.ms(rate.full() - self.level)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MINUTE_MS: u64 = 60_000;

    fn rate(n: u32) -> Rate {
        Rate(NonZeroU32::new(n).unwrap())
    }

    #[test]
    fn a_minute_is_saved_up_and_no_more() {
        let mut bucket = TokenBucket::full(rate(60), 1_000);
        for _ in 0..60 {
            assert_eq!(bucket.take(rate(60), 1, 1_000), Ok(()));
        }
        assert_eq!(bucket.take(rate(60), 1, 1_000), Err(1_000), "one comes a second");
        assert_eq!(bucket.take(rate(60), 1, 1_999), Err(1));
        assert_eq!(bucket.take(rate(60), 1, 2_000), Ok(()));
        assert_eq!(
            (bucket.remaining(rate(60), 2_000), bucket.full_in_ms(rate(60), 2_000)),
            (0, MINUTE_MS)
        );
        assert_eq!(bucket.remaining(rate(60), 2_000 + 10 * MINUTE_MS), 60);
        assert_eq!(bucket.full_in_ms(rate(60), 2_000 + 10 * MINUTE_MS), 0);
    }

    #[test]
    fn what_was_used_is_owed_and_what_is_more_than_a_bucket_waits_for_a_full_one() {
        let mut bucket = TokenBucket::full(rate(100), 0);
        bucket.charge(rate(100), 250, 0);
        assert_eq!(
            (bucket.remaining(rate(100), 0), bucket.take(rate(100), 1, 0)),
            (0, Err(90_600))
        );
        let mut bucket = TokenBucket::full(rate(100), 0);
        assert_eq!(bucket.take(rate(100), 1_000, 0), Ok(()), "from a full one");
        assert_eq!(bucket.full_in_ms(rate(100), 0), 10 * MINUTE_MS);
        assert_eq!(bucket.take(rate(100), 1_000, 9 * MINUTE_MS), Err(MINUTE_MS));
        bucket.give_back(rate(100), 1_000, 9 * MINUTE_MS);
        assert_eq!(bucket.remaining(rate(100), 9 * MINUTE_MS), 100);
    }

    #[test]
    fn a_lower_rate_counts_at_once_and_a_clock_that_goes_back_gives_nothing() {
        let mut bucket = TokenBucket::full(rate(1_000), 0);
        assert_eq!(bucket.remaining(rate(10), 0), 10);
        let mut bucket = TokenBucket::full(rate(60), 10_000);
        assert_eq!(bucket.take(rate(60), 60, 10_000), Ok(()));
        assert_eq!(bucket.take(rate(60), 1, 0), Err(1_000));
        assert_eq!(bucket.take(rate(60), 1, 10_999), Err(1));
        let mut bucket = TokenBucket::full(rate(u32::MAX), 0);
        bucket.charge(rate(u32::MAX), u32::MAX, u64::MAX);
        assert_eq!(bucket.remaining(rate(u32::MAX), u64::MAX), 0);
    }

    proptest! {
        /// An oracle that only adds up: within any stretch of time no more is let in than a full bucket and what comes
        /// meanwhile, and what is refused is let in after the time that was said and not a ms before.
        #[test]
        fn no_more_than_a_minute_and_what_comes(
            per_minute in 1u32..5_000,
            asks in proptest::collection::vec((0u64..3_000, 1u32..200), 1..80),
        ) {
            let rate = rate(per_minute);
            let mut bucket = TokenBucket::full(rate, 0);
            let (mut now, mut taken) = (0u64, Vec::new());
            for (pause, n) in asks {
                now += pause;
                let before = bucket;
                match bucket.take(rate, n, now) {
                    Ok(()) => taken.push((now, n)),
                    Err(wait) => {
                        prop_assert_eq!(bucket.take(rate, n, now + wait - 1).is_err(), true);
                        bucket = before;
                        prop_assert_eq!(bucket.take(rate, n, now + wait), Ok(()));
                        bucket = before;
                    }
                }
            }
            for from in 0..taken.len() {
                for to in from..taken.len() {
                    let most = u64::from(taken[to].1); // the last one may be more than a full bucket
                    let all: u64 = taken[from..=to].iter().map(|(_, n)| u64::from(*n)).sum();
                    let came = (taken[to].0 - taken[from].0) * u64::from(per_minute) / MINUTE_MS;
                    prop_assert!(all <= u64::from(per_minute).max(most) + came + 1);
                }
            }
        }
    }
}

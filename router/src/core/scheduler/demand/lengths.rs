//! How long answers are: what one of a tenant is expected to be, and what is left of one that is so long already.

/// Weight that older answers keep when one more ends: some fifty count. A guess.
const FADE: f64 = 0.98;
/// Answers of a tenant that count as much as the mean of all tenants.
const ENOUGH: f64 = 8.0;
/// Length of answers before any has ended. A guess.
const FIRST_TOKENS: f64 = 256.0;
/// Tenants that share one mean: their numbers are digests, so that two of a few seldom do.
const TENANTS: usize = 64;
/// Bounds of lengths are powers of two.
const CLASSES: usize = 24;

/// Answers that ended: how many, and their tokens. Both fade.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    answers: f64,
    tokens: f64,
}

impl Sum {
    fn add(&mut self, tokens: f64) {
        self.answers = self.answers * FADE + 1.0;
        self.tokens = self.tokens * FADE + tokens;
    }

    /// Their mean, where `usual` counts as so many answers more.
    fn mean(&self, usual: f64, weight: f64) -> f64 {
        (self.tokens + weight * usual) / (self.answers + weight)
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(in crate::core::scheduler) struct AnswerLengths {
    all: Sum,
    tenants: [Sum; TENANTS],
    /// By the power of two that they reach; they fade together.
    classes: [Sum; CLASSES],
}

impl Default for AnswerLengths {
    fn default() -> Self {
        Self {
            all: Sum::default(),
            tenants: [Sum::default(); TENANTS],
            classes: [Sum::default(); CLASSES],
        }
    }
}

impl AnswerLengths {
    /// An answer of a tenant ended by itself.
    pub(in crate::core::scheduler) fn ended(&mut self, tenant: u64, tokens: u32) {
        let length = f64::from(tokens);
        self.all.add(length);
        self.tenants[place(tenant)].add(length);
        for class in &mut self.classes {
            (class.answers, class.tokens) = (class.answers * FADE, class.tokens * FADE);
        }
        let class = tokens.checked_ilog2().unwrap_or(0) as usize;
        let class = &mut self.classes[class.min(CLASSES - 1)];
        (class.answers, class.tokens) = (class.answers + 1.0, class.tokens + length);
    }

    /// Tokens of an answer, of any tenant.
    pub(in crate::core::scheduler) fn usual(&self) -> f64 {
        self.all.mean(FIRST_TOKENS, 1.0)
    }

    /// Tokens of an answer of this tenant.
    pub(in crate::core::scheduler) fn of(&self, tenant: u64) -> f64 {
        self.tenants[place(tenant)].mean(self.usual(), ENOUGH)
    }

    /// Tokens to come of an answer that has so many: the mean of what longer ones had more.
    pub(in crate::core::scheduler) fn rest(&self, tokens: f64) -> f64 {
        let (mut answers, mut more) = (0.0, 0.0);
        for (i, class) in self.classes.iter().enumerate() {
            let least = f64::from(1_u32 << i);
            if class.answers == 0.0 || 2.0 * least <= tokens {
                continue;
            }
            // of the class that it is in, the share that is longer, with lengths spread evenly
            let longer = ((2.0 * least - tokens) / least).min(1.0);
            let mean = if longer < 1.0 {
                f64::midpoint(tokens, 2.0 * least)
            } else {
                class.tokens / class.answers
            };
            answers += class.answers * longer;
            more += class.answers * longer * (mean - tokens);
        }
        if answers > 0.5 { more / answers } else { tokens.max(self.usual()) }
    }
}

fn place(tenant: u64) -> usize {
    (tenant % TENANTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_have_lengths_of_their_own_as_far_as_they_are_known() {
        let mut lengths = AnswerLengths::default();
        assert_eq!((lengths.usual(), lengths.of(3)), (256.0, 256.0));
        for _ in 0..400 {
            lengths.ended(1, 20);
            lengths.ended(2, 500);
        }
        assert!((250.0..275.0).contains(&lengths.usual()), "{}", lengths.usual());
        assert!((20.0..60.0).contains(&lengths.of(1)), "{}", lengths.of(1));
        assert!((440.0..500.0).contains(&lengths.of(2)), "{}", lengths.of(2));
        assert_eq!(lengths.of(3), lengths.usual());
    }

    #[test]
    fn what_is_left_is_what_longer_answers_had_more() {
        let mut lengths = AnswerLengths::default();
        assert_eq!((lengths.rest(0.0), lengths.rest(1_000.0)), (256.0, 1_000.0));
        for _ in 0..200 {
            lengths.ended(1, 64);
            lengths.ended(1, 1_024);
        }
        assert!((lengths.rest(0.0) - 544.0).abs() < 10.0, "{}", lengths.rest(0.0));
        assert!((lengths.rest(128.0) - 896.0).abs() < 1.0, "only the long ones are left");
        assert!((lengths.rest(1_536.0) - 256.0).abs() < 1.0, "half of the rest of its class");
    }
}

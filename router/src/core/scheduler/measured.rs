//! What a worker does in what time, from nothing but when its frames come and what they give to requests: for one whose own
//! word about that counts for nothing.

use crate::core::cost::{StepFeatures, context};

/// Time and work that nothing was learnt from yet.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Measured {
    work: StepFeatures,
    ms: f64,
}

impl Measured {
    /// A frame came after so many ms of work, with tokens for so many rows. What the frames before it teach: a prompt belongs to
    /// the frame that gave its first token, with all the time in which nobody got anything.
    pub(super) fn frame(
        &mut self,
        rows: u32,
        kv_tokens: f64,
        ms: f64,
    ) -> Option<(StepFeatures, f64)> {
        let learnt = (self.work != StepFeatures::default()).then_some((self.work, self.ms));
        if learnt.is_some() {
            *self = Self::default();
        }
        self.ms += ms.max(0.0);
        if rows > 0 {
            (self.work.rows, self.work.kv_tokens) = (rows.into(), kv_tokens);
        }
        learnt
    }

    /// With this frame a prompt was done, of which so many tokens had to be computed.
    pub(super) fn prompt(&mut self, prompt_tokens: u32, computed: u32) {
        self.work.prefill_tokens += f64::from(computed);
        self.work.prefill_context +=
            context(prompt_tokens.saturating_sub(computed).into(), computed.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_worth_all_the_time_until_its_first_token() {
        let mut measured = Measured::default();
        for _ in 0..5 {
            assert_eq!(measured.frame(0, 0.0, 100.0), None, "nobody got anything");
        }
        measured.prompt(1_000, 600);
        let (work, ms) = measured.frame(3, 50.0, 20.0).expect("a prompt was done");
        assert_eq!((work.prefill_tokens, work.rows, ms), (600.0, 0.0, 500.0));
        assert_eq!(work.prefill_context, context(400.0, 600.0));
        let (work, ms) = measured.frame(0, 0.0, 7.0).expect("rows got tokens");
        assert_eq!((work.prefill_tokens, work.rows, work.kv_tokens, ms), (0.0, 3.0, 50.0, 20.0));
        assert_eq!(measured.frame(0, 0.0, 7.0), None);
        // a clock that went back, and what others have in the cache
        assert_eq!(measured.frame(0, 50.0, -1e6), None);
        assert_eq!(measured.frame(1, 50.0, 3.0), None);
        assert_eq!(measured.frame(0, 0.0, 7.0).expect("a row got tokens").1, 17.0);
    }
}

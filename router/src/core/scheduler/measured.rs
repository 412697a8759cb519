//! What a worker does in what time, from nothing but when its frames come and what they give to requests: for one whose own
//! word about that counts for nothing.

use crate::core::cost::{StepFeatures, context};

/// So many ms, a guess, are looked at together. Frames that a busy router or a link held back come at once: single gaps between them say
/// nothing, and as costs are fitted by relative errors, some gaps of microseconds would count for more than all others.
const SPAN_MS: f64 = 200.0;
/// A frame that comes after less than this share of the mean gap, a guess, may have been held back with the one before it.
const HELD_BACK: f64 = 0.25;
/// A span ends with so many frames at the latest, however they came.
const MOST_FRAMES: f64 = 256.0;

/// Time and work that nothing was learnt from yet.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Measured {
    work: StepFeatures,
    ms: f64,
    /// Frames with work in them, without the last one.
    frames: f64,
    /// The last frame had some.
    last_worked: bool,
}

impl Measured {
    /// A frame came after so many ms of work, with tokens for so many rows. What the frames before it teach: what one of them did
    /// in the mean, and in what time. A prompt belongs to the frame that gave its first token, with all the time in which nobody
    /// got anything.
    pub(super) fn frame(
        &mut self,
        rows: u32,
        kv_tokens: f64,
        ms: f64,
    ) -> Option<(StepFeatures, f64)> {
        let ms = ms.max(0.0);
        self.frames += f64::from(u8::from(std::mem::take(&mut self.last_worked)));
        let whole = self.ms >= SPAN_MS && ms * self.frames >= HELD_BACK * self.ms;
        let learnt = (self.frames > 0.0 && (whole || self.frames >= MOST_FRAMES)).then(|| {
            let StepFeatures { prefill_tokens, prefill_context, rows, kv_tokens } = self.work;
            let mean = StepFeatures {
                prefill_tokens: prefill_tokens / self.frames,
                prefill_context: prefill_context / self.frames,
                rows: rows / self.frames,
                kv_tokens: kv_tokens / self.frames,
            };
            (mean, self.ms / self.frames)
        });
        if learnt.is_some() {
            *self = Self::default();
        }
        self.ms += ms;
        if rows > 0 {
            self.work.rows += f64::from(rows);
            self.work.kv_tokens += kv_tokens;
            self.last_worked = true;
        }
        learnt
    }

    /// With this frame a prompt was done, of which so many tokens had to be computed.
    pub(super) fn prompt(&mut self, prompt_tokens: u32, computed: u32) {
        self.work.prefill_tokens += f64::from(computed);
        self.work.prefill_context +=
            context(prompt_tokens.saturating_sub(computed).into(), computed.into());
        self.last_worked = true;
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
        let (work, ms) = measured.frame(3, 50.0, 500.0).expect("a prompt was done");
        assert_eq!((work.prefill_tokens, work.rows, ms), (600.0, 0.0, 500.0));
        assert_eq!(work.prefill_context, context(400.0, 600.0));
        let (work, ms) = measured.frame(0, 0.0, 700.0).expect("rows got tokens");
        assert_eq!((work.prefill_tokens, work.rows, work.kv_tokens, ms), (0.0, 3.0, 50.0, 500.0));
        assert_eq!(measured.frame(0, 0.0, 700.0), None);
        // a clock that went back, and what others have in the cache
        assert_eq!(measured.frame(0, 50.0, -1e6), None);
        assert_eq!(measured.frame(1, 50.0, 3.0), None);
        assert_eq!(measured.frame(0, 0.0, 2_000.0).expect("a row got tokens").1, 1_403.0);
    }

    #[test]
    fn short_steps_are_looked_at_together() {
        let mut measured = Measured::default();
        let learnt: Vec<_> = (0..100).filter_map(|_| measured.frame(4, 900.0, 10.0)).collect();
        assert_eq!(learnt.len(), 4, "of twenty frames each");
        for (work, ms) in learnt {
            assert_eq!((work.rows, work.kv_tokens, ms), (4.0, 900.0, 10.0));
        }
    }

    #[test]
    fn frames_that_were_held_back_say_what_they_would_have_said_in_time() {
        let mut measured = Measured::default();
        let gaps = std::iter::once(400.0).chain(std::iter::repeat_n(1e-3, 9)).cycle();
        let learnt: Vec<_> = gaps.take(1_000).filter_map(|ms| measured.frame(2, 0.0, ms)).collect();
        assert!(learnt.len() > 50, "{}", learnt.len());
        assert!(learnt.iter().all(|(work, ms)| work.rows == 2.0 && *ms > 39.0), "{learnt:?}");
    }

    #[test]
    fn no_order_of_gaps_puts_off_what_is_learnt_for_ever() {
        let mut measured = Measured::default();
        let gaps = std::iter::once(1e6).chain(std::iter::repeat_n(0.0, 999));
        let learnt: Vec<_> = gaps.filter_map(|ms| measured.frame(1, 0.0, ms)).collect();
        assert_eq!(learnt.len(), 3, "{learnt:?}");
        assert_eq!(learnt[0].1, 1e6 / 256.0);
    }

    #[test]
    fn a_span_is_whole_after_200_ms_and_a_frame_that_takes_a_quarter_of_the_mean_was_not_held_back()
    {
        for (gap_ms, learnt) in [(25.0, true), (24.9, false)] {
            let mut measured = Measured::default();
            for _ in 0..2 {
                assert_eq!(measured.frame(4, 0.0, 100.0), None);
            }
            let ms = measured.frame(4, 0.0, gap_ms).map(|(_, ms)| ms);
            assert_eq!(ms, learnt.then_some(100.0), "after {gap_ms} ms");
        }
    }
}

//! Log-probabilities of tokens that no model chose: made up, yet such as a model could give. The same token at the same place
//! has the same ones, whatever the batch and whoever goes on with the answer.

use std::sync::Arc;

use headrace_router::core::frame::{
    Failed, FailureKind, Ranked, RequestId, Sampling, TokenLogprob,
};

use super::share;

/// Alternatives at one place, at most, and values of one prompt: as `headrace.engine.sampling.sampler` has it.
const MAX_TOP: u32 = 128;
const MAX_PROMPT_VALUES: u64 = 1 << 20;

/// What a request asks about log-probabilities; by default nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scores {
    /// Alternatives at each place of the answer.
    answer: Option<u32>,
    prompt: Option<PromptScores>,
}

#[derive(Debug, Clone)]
struct PromptScores {
    ids: Arc<[u32]>,
    /// Alternatives at each place.
    top: u32,
}

impl Scores {
    /// Those of a request whose prompt, in tokens of four bytes each, is `prompt`.
    ///
    /// # Errors
    /// More are asked for than a worker gives.
    pub(crate) fn of(
        request: RequestId,
        sampling: &Sampling,
        prompt: &[u8],
    ) -> Result<Self, Failed> {
        let fail = |message| Err(Failed { request, kind: FailureKind::BadSampling, message });
        let tops = [("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)];
        for (name, top) in tops {
            if let Some(top) = top.filter(|top| *top > MAX_TOP) {
                return fail(format!("{name} is {top}, allowed is 0 to {MAX_TOP}"));
            }
        }
        let prompt = match sampling.prompt_logprobs {
            None => None,
            Some(top) => {
                let ids: Arc<[u32]> = prompt
                    .chunks_exact(4)
                    .map(|id| u32::from_le_bytes(id.try_into().expect("4 bytes")))
                    .collect();
                let values = ids.len() as u64 * u64::from(top + 1);
                if values > MAX_PROMPT_VALUES {
                    return fail(format!(
                        "prompt_logprobs asks for {values} values, the limit is {MAX_PROMPT_VALUES}"
                    ));
                }
                Some(PromptScores { ids, top })
            }
        };
        Ok(Self { answer: sampling.logprobs, prompt })
    }

    /// The prompt is to be computed whole: nothing of it may come from a cache.
    pub(super) fn needs_prompt(&self) -> bool {
        self.prompt.is_some()
    }

    /// Those of tokens of the answer, the first of them at `position`.
    pub(super) fn answer(
        &self,
        seed: u64,
        position: u32,
        ids: &[u32],
        vocab: u32,
    ) -> Option<Vec<TokenLogprob>> {
        let top = self.answer?;
        let places = (u64::from(position)..).zip(ids);
        Some(places.map(|(place, id)| scored(seed, place, *id, top, vocab)).collect())
    }

    /// Those of the prompt's tokens from the second on. They are given once.
    pub(super) fn take_prompt(&mut self, vocab: u32) -> Option<Vec<TokenLogprob>> {
        let PromptScores { ids, top } = self.prompt.take()?;
        let places = (0..).zip(ids.iter()).skip(1);
        Some(places.map(|(place, id)| scored(0, place, *id, top, vocab)).collect())
    }
}

/// A token's log-probability, as the most probable one at its place, and those of `top` tokens there. Each of the others has
/// half of what is left by those before it, so that all together stay below 1.
fn scored(seed: u64, place: u64, token: u32, top: u32, vocab: u32) -> TokenLogprob {
    let best = 0.5 + 0.4 * share(seed ^ u64::from(token), place);
    let logprob = best.ln();
    let others = (1..=vocab).map(|step| (token + step) % vocab).filter(|other| *other != token);
    let mut left = 1.0 - best;
    let others = others.map(|other| {
        left /= 2.0;
        Ranked(other, left.ln())
    });
    let top = [Ranked(token, logprob)].into_iter().chain(others).take(top as usize).collect();
    TokenLogprob { logprob, top }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(answer: Option<u32>, prompt: Option<u32>) -> Sampling {
        Sampling { logprobs: answer, prompt_logprobs: prompt, ..Sampling::default() }
    }

    #[test]
    fn they_are_probabilities_of_different_tokens_best_first() {
        for (vocab, top) in [(4096, 20), (4096, 0), (4096, 1), (3, 20), (1, 5)] {
            for place in 0..50 {
                let at = scored(7, place, place as u32 % vocab, top, vocab);
                let listed: f64 = at.top.iter().map(|Ranked(_, logprob)| logprob.exp()).sum();
                assert!(at.logprob < 0.0 && at.logprob.is_finite() && listed < 1.0, "{at:?}");
                assert_eq!(at.top.len(), top.min(vocab) as usize);
                assert!(at.top.is_sorted_by(|a, b| a.1 > b.1), "{at:?}");
                assert!(at.top.iter().all(|Ranked(id, _)| *id < vocab));
                assert!(at.top.first().is_none_or(|first| first.1 == at.logprob));
                let mut ids: Vec<_> = at.top.iter().map(|Ranked(id, _)| id).collect();
                ids.sort_unstable();
                ids.dedup();
                assert_eq!(ids.len(), at.top.len(), "{at:?}");
            }
        }
    }

    #[test]
    fn they_follow_from_the_place_and_not_from_where_an_output_begins() {
        let scores = Scores::of(RequestId(1), &asked(Some(2), None), &[]).unwrap();
        let whole = scores.answer(9, 0, &[5, 6, 7, 8], 4096).unwrap();
        let rest = scores.answer(9, 2, &[7, 8], 4096).unwrap();
        assert_eq!(whole[2..], rest);
        assert_ne!(whole[0].logprob, scores.answer(9, 1, &[5], 4096).unwrap()[0].logprob);
    }

    #[test]
    fn a_prompt_is_scored_once_and_without_its_first_token() {
        let ids: Vec<u8> = [9_u32, 10, 11].iter().flat_map(|id| id.to_le_bytes()).collect();
        let mut scores = Scores::of(RequestId(1), &asked(None, Some(1)), &ids).unwrap();
        assert!(scores.needs_prompt());
        let prompt = scores.take_prompt(4096).unwrap();
        let best: Vec<u32> = prompt.iter().map(|at| at.top[0].0).collect();
        assert_eq!(best, [10, 11]);
        assert_eq!(scores.take_prompt(4096), None);
        assert_eq!(scores.answer(9, 0, &[5], 4096), None, "nobody asked");
    }

    #[test]
    fn more_than_a_worker_gives_is_refused() {
        let ids = vec![0; 4 << 14];
        for (sampling, says) in [
            (asked(Some(129), None), "logprobs is 129, allowed is 0 to 128"),
            (asked(None, Some(u32::MAX)), "prompt_logprobs is"),
            (asked(None, Some(64)), "1064960 values"),
        ] {
            let failed = Scores::of(RequestId(1), &sampling, &ids).unwrap_err();
            assert!(failed.message.contains(says), "{failed:?}");
            assert_eq!(failed.kind, FailureKind::BadSampling);
        }
        assert!(Scores::of(RequestId(1), &asked(None, Some(63)), &ids).is_ok());
    }
}

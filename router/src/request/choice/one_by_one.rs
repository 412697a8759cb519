//! Tokens that came together, handed on one at a time: the reader of their text may end the answer at any of them, and what
//! came behind that one is no part of it, however many the worker sent at once.

use std::vec;

use crate::core::frame::{Finish, TokenLogprob};
use crate::fleet::stream::Chunk;

/// What is left of a chunk.
#[derive(Debug, Default)]
pub(super) struct OneByOne {
    ids: vec::IntoIter<u32>,
    logprobs: vec::IntoIter<Option<TokenLogprob>>,
    /// For the last token.
    finish: Option<Finish>,
    /// Drafts that are not noted yet, and how many of the next tokens were some.
    drafted: u32,
    accepted: u32,
}

impl OneByOne {
    /// Takes a chunk apart. Gives its first token, with all that comes before tokens, and the others if there are any.
    pub(super) fn of(mut chunk: Chunk) -> (Chunk, Option<Box<Self>>) {
        if chunk.ids.len() < 2 {
            return (chunk, None);
        }
        let mut rest = Box::new(Self {
            ids: std::mem::take(&mut chunk.ids).into_iter(),
            logprobs: std::mem::take(&mut chunk.logprobs).into_iter(),
            finish: chunk.finish.take(),
            drafted: chunk.drafted,
            accepted: chunk.accepted,
        });
        let first = rest.next().unwrap_or_default();
        let first = Chunk {
            prompt_logprobs: chunk.prompt_logprobs,
            cached_tokens: chunk.cached_tokens,
            pooled: chunk.pooled,
            ..first
        };
        (first, Some(rest))
    }

    /// The next token; the last one has what the chunk ended with.
    pub(super) fn next(&mut self) -> Option<Chunk> {
        let id = self.ids.next()?;
        let is_last = self.ids.len() == 0;
        // as elsewhere the drafts that were taken are the first tokens; all others count once their tokens are there
        let accepted = self.accepted.min(1);
        let drafted = if is_last { self.drafted } else { accepted };
        self.accepted -= accepted;
        self.drafted -= drafted;
        Some(Chunk {
            ids: vec![id],
            logprobs: self.logprobs.next().map_or_else(Vec::new, |logprob| vec![logprob]),
            finish: self.finish.take_if(|_| is_last),
            drafted,
            accepted,
            ..Chunk::default()
        })
    }

    /// Drafts of tokens that were not handed on, and of those that came to nothing.
    pub(super) fn drafted(&self) -> u32 {
        self.drafted
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunk(tokens: u32, scored: usize, finish: Option<Finish>, drafts: (u32, u32)) -> Chunk {
        let logprob = |at: usize| TokenLogprob { logprob: -(at as f64), top: Vec::new() };
        Chunk {
            ids: (0..tokens).collect(),
            logprobs: (0..scored).map(|at| (at % 3 > 0).then(|| logprob(at))).collect(),
            prompt_logprobs: Some(vec![logprob(9)]),
            cached_tokens: Some(5),
            finish,
            drafted: drafts.0,
            accepted: drafts.1,
            pooled: None,
        }
    }

    proptest! {
        #[test]
        fn what_was_taken_apart_is_all_there_in_order(
            tokens in 0_u32..9, scored in 0_usize..9, ends: bool, rejected in 0_u32..5, accepted in 0_u32..9,
        ) {
            let finish = ends.then_some(Finish::Length);
            let accepted = accepted.min(tokens);
            let scored = scored.min(tokens as usize);
            let whole = || chunk(tokens, scored, finish, (accepted + rejected, accepted));
            let (first, rest) = OneByOne::of(whole());
            prop_assert_eq!(rest.is_some(), tokens > 1);
            let mut all = vec![first];
            let mut rest = rest.unwrap_or_default();
            all.extend(std::iter::from_fn(|| rest.next()));
            prop_assert_eq!(rest.drafted(), 0);
            prop_assert!(all.iter().all(|one| one.ids.len() <= 1 && one.accepted <= one.drafted));
            let ids: Vec<u32> = all.iter().flat_map(|one| one.ids.clone()).collect();
            prop_assert_eq!(ids, whole().ids);
            let scores: Vec<_> = all.iter().flat_map(|one| one.logprobs.clone()).collect();
            prop_assert_eq!(scores, whole().logprobs);
            let sum = |count: fn(&Chunk) -> u32| all.iter().map(count).sum::<u32>();
            prop_assert_eq!(sum(|one| one.drafted), accepted + rejected);
            prop_assert_eq!(sum(|one| one.accepted), accepted);
            let (last, before) = all.split_last().unwrap();
            prop_assert_eq!(last.finish, finish);
            prop_assert!(before.iter().all(|one| one.finish.is_none()));
            prop_assert!(all[0].prompt_logprobs.is_some() && all[0].cached_tokens == Some(5));
            prop_assert!(all[1..].iter().all(|one| one.prompt_logprobs.is_none() && one.cached_tokens.is_none()));
        }
    }

    #[test]
    fn drafts_of_tokens_that_are_not_handed_on_stay() {
        let (first, rest) = OneByOne::of(chunk(4, 0, None, (5, 3)));
        let mut rest = rest.unwrap();
        assert_eq!((first.accepted, first.drafted, rest.drafted()), (1, 1, 4));
        assert_eq!(rest.next().map(|one| (one.accepted, one.drafted)), Some((1, 1)));
        assert_eq!(rest.drafted(), 3);
    }
}

//! What a reader gets of a request's legs at once, and which vector of a prompt can be no part of it.

use crate::core::frame::{Finish, Output, TokenLogprob};

/// What came since the last look.
#[derive(Debug, Default)]
pub struct Chunk {
    /// New tokens, in order.
    pub ids: Vec<u32>,
    /// Those of `ids` in their order, where asked for: of a token that came without, and of the last ones, there may be none.
    pub logprobs: Vec<Option<TokenLogprob>>,
    /// In the first chunk, where asked for.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// In the first chunk.
    pub cached_tokens: Option<u32>,
    /// In the last chunk.
    pub finish: Option<Finish>,
    /// Drafts that were checked.
    pub drafted: u32,
    /// How many of `ids` were drafts.
    pub accepted: u32,
    /// In the only chunk, where asked for: as many finite values as the worker's model has, f32 little-endian.
    pub pooled: Option<Vec<u8>>,
}

impl Chunk {
    pub(super) fn has_news(&self) -> bool {
        !self.ids.is_empty() || self.finish.is_some() || self.prompt_logprobs.is_some()
    }
}

/// What is wrong about the vector of an output, or about its absence. `bytes`: of the one that is awaited.
pub(super) fn wrong_vector(output: &Output, bytes: Option<usize>) -> Option<&'static str> {
    let expected = match output.finish {
        Some(Finish::Length) => bytes,
        Some(Finish::Stop) if bytes.is_some() => return Some("a stop token of a pooled prompt"),
        Some(Finish::Stop | Finish::Cancelled) | None => None,
    };
    let Some(vector) = &output.pooled else {
        return expected.map(|_| "no vector of a pooled prompt");
    };
    if expected != Some(vector.len()) {
        return Some("a vector of another length, or that nobody asked for");
    }
    let finite = |value: &[u8]| {
        <[u8; 4]>::try_from(value).is_ok_and(|value| f32::from_le_bytes(value).is_finite())
    };
    (!vector.chunks(4).all(finite)).then_some("a vector whose values are not finite")
}

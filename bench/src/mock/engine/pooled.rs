//! Vectors of prompts that no model read: made up of their tokens, so that texts that share tokens have vectors that are
//! alike. The same tokens have the same vector, whatever the batch and whichever worker.

use headrace_router::core::frame::Pooling;

use super::mix;

/// Values of a vector, which `Hello.pooled_width` names.
pub(crate) const WIDTH: u32 = 64;
/// Of the one before, in a vector that is mostly of the last token.
const FADES: f64 = 0.7;

/// The vector of a prompt, in place of an answer: `Output.pooled`.
#[derive(Debug, Clone)]
pub(crate) struct Pooled {
    bytes: Vec<u8>,
    /// All of the prompt has to be computed for it.
    pub(super) wants_all: bool,
}

impl Pooled {
    /// What `Submit.pooling` asks for of these tokens of four bytes.
    pub(crate) fn of(pooling: Pooling, tokens: &[u8]) -> Self {
        let ids =
            || tokens.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().expect("4 bytes")));
        let mut sums = [0.0; WIDTH as usize];
        for id in ids() {
            for (place, sum) in sums.iter_mut().enumerate() {
                if pooling == Pooling::Last {
                    *sum *= FADES;
                }
                *sum += value(id, place);
            }
        }
        let count = if pooling == Pooling::Mean { ids().count().max(1) as f64 } else { 1.0 };
        let bytes = sums.iter().flat_map(|sum| ((sum / count) as f32).to_le_bytes()).collect();
        Self { bytes, wants_all: pooling == Pooling::Mean }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.bytes.clone()
    }
}

/// What a token adds to one value: between -1 and 1.
fn value(id: u32, place: usize) -> f64 {
    (mix(mix(u64::from(id)) ^ place as u64) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(pooling: Pooling, ids: &[u32]) -> Vec<f32> {
        let tokens: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let bytes = Pooled::of(pooling, &tokens).bytes();
        bytes.chunks(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
    }

    fn cosine(a: &[f32], b: &[f32]) -> f32 {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    }

    #[test]
    fn prompts_that_share_tokens_are_alike() {
        for pooling in [Pooling::Last, Pooling::Mean] {
            let a = floats(pooling, &[1, 2, 3, 4, 5]);
            assert_eq!(a, floats(pooling, &[1, 2, 3, 4, 5]));
            assert_eq!(a.len(), WIDTH as usize);
            let near = cosine(&a, &floats(pooling, &[1, 9, 3, 4, 5]));
            let far = cosine(&a, &floats(pooling, &[11, 12, 13, 14, 15]));
            assert!(near > 0.6 && far < 0.4, "{pooling}: {near} and {far}");
        }
    }
}

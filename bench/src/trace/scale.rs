//! A trace made smaller: each block of B tokens becomes one of B / N, so that blocks, hits and their order stay the same.

use super::{Requests, Row};
use crate::BadInput;
use crate::random::mix;

/// How lengths and blocks of a trace become those of the prompts that are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scale {
    /// Tokens of the trace that one token of a prompt stands for.
    pub(crate) tokens: u32,
    /// Tokens of the trace's answers that one asked for stands for.
    pub(crate) output: u32,
    /// Tokens of a block as sent.
    pub(crate) block_tokens: u32,
    trace_block_tokens: u32,
}

impl Scale {
    /// # Errors
    /// The blocks cannot be cut into so many parts.
    pub(crate) fn new(requests: &Requests, tokens: u32, output: u32) -> Result<Self, BadInput> {
        let block = requests.block_tokens;
        if tokens == 0 || output == 0 || !block.is_multiple_of(tokens) {
            let why =
                format!("--scale {tokens}: blocks have {block} tokens, and that is no divisor");
            return Err(BadInput(why));
        }
        Ok(Self { tokens, output, block_tokens: block / tokens, trace_block_tokens: block })
    }

    /// Length of the prompt as sent. Whole blocks stay whole, and the last one keeps at least a token: dividing the
    /// length would change the number of blocks.
    pub(crate) fn input_tokens(&self, row: &Row) -> u32 {
        let whole =
            u32::try_from(row.blocks.len()).expect("a prompt has fewer blocks").saturating_sub(1);
        let last = row.input_tokens.saturating_sub(whole * self.trace_block_tokens);
        whole * self.block_tokens + last.div_ceil(self.tokens).clamp(1, self.block_tokens)
    }

    /// `max_tokens` as sent.
    pub(crate) fn output_tokens(&self, row: &Row) -> u32 {
        row.output_tokens.div_ceil(self.output)
    }

    /// The prompt: the tokens of a block are a function of its id, so equal ids are equal tokens. They lie from
    /// `FIRST_TOKEN` to `vocab`, which is greater.
    pub(crate) fn prompt(&self, row: &Row, vocab: u32) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(row.blocks.len() * self.block_tokens as usize);
        for id in &row.blocks {
            let seed = mix(*id ^ SEED);
            tokens.extend((0..u64::from(self.block_tokens)).map(|i| token(mix(seed ^ i), vocab)));
        }
        tokens.truncate(self.input_tokens(row) as usize);
        tokens
    }
}

/// Some constant, so that id 0 is no special case.
const SEED: u64 = 0x6865_6164_7261_6365;
/// Special tokens and single bytes come first in the vocabularies in use.
pub(crate) const FIRST_TOKEN: u32 = 300;

fn token(random: u64, vocab: u32) -> u32 {
    let span = u64::from(vocab - FIRST_TOKEN);
    FIRST_TOKEN + u32::try_from(((random >> 32) * span) >> 32).expect("below the span")
}

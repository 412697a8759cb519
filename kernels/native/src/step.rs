//! The rows of one engine step, and whether they fit together and fit the cache.

use crate::attention::{KvShape, SequenceRows};
use crate::moe::exchange::Failure;

/// Rows of one engine step. `Batch` in Python explains the fields.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// `[rows]`.
    pub tokens: &'a [i32],
    /// `[rows]`.
    pub positions: &'a [i32],
    /// `[rows]`.
    pub slots: &'a [i64],
    /// `[sequences + 1]`.
    pub seq_starts: &'a [i32],
    /// `[sequences]`.
    pub context_lens: &'a [i32],
    /// `[sequences, max_blocks]`.
    pub block_tables: &'a [i32],
    /// `[n]`.
    pub logit_rows: &'a [i32],
    /// `[m]`.
    pub pool_rows: &'a [i32],
    /// Only in a draft pass.
    pub draft: Option<Draft<'a>>,
}

/// What a draft pass reads besides. `DraftBatch` in Python explains the fields.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// `[rows]`: a row of `hidden`, or `-(block + 1)`.
    pub hidden_from: &'a [i32],
    /// `[sequences]`.
    pub first_keys: &'a [i32],
    /// What another pass kept.
    pub hidden: &'a [f32],
}

/// Why a step was not computed. But for an exchange that failed half-way, nothing was read or written then.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Two arrays of the step disagree.
    #[error("{what} has {got} entries, expected {expected}")]
    Length {
        /// Name of the array.
        what: &'static str,
        /// Entries that it has.
        got: usize,
        /// What the others say.
        expected: usize,
    },
    /// An entry is out of range.
    #[error("{what} holds {got}, which is not below {limit}")]
    Range {
        /// Name of the array.
        what: &'static str,
        /// The first entry that is too large or negative.
        got: i64,
        /// Entries must be below.
        limit: usize,
    },
    /// Rows are not in the order of their sequences, or a row is at a position that its sequence lacks.
    #[error("sequence {sequence}: rows, positions and context_lens disagree")]
    Sequence {
        /// Number of the sequence, from 0.
        sequence: usize,
    },
    /// A row of a draft pass would see no key, or the one of position 0, which there is not.
    #[error("sequence {sequence}: first_keys holds {got}, must be in 1..={position}")]
    FirstKey {
        /// Number of the sequence, from 0.
        sequence: usize,
        /// What `first_keys` holds for it.
        got: i32,
        /// Of its first row.
        position: i32,
    },
    /// A main pass was run as a draft pass, or the other way round.
    #[error("{0}")]
    Kind(&'static str),
    /// Rows did not reach the experts of other ranks, or results did not come back.
    #[error("the exchange of rows between ranks failed: {0}")]
    Exchange(#[source] Failure),
}

impl Step<'_> {
    /// Sequence after sequence, where rows read keys: rows and block tables.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = SequenceRows<'_>> + Clone {
        let max_blocks = self.block_tables.len() / self.context_lens.len().max(1);
        self.seq_starts.windows(2).enumerate().map(move |(s, bounds)| {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            SequenceRows {
                start,
                positions: &self.positions[start..end],
                first_key: self.draft.map_or(0, |draft| draft.first_keys[s] as usize),
                blocks: &self.block_tables[s * max_blocks..(s + 1) * max_blocks],
            }
        })
    }

    /// Whether arrays fit together, and fit a cache of `kv` floats.
    pub(crate) fn check(&self, shape: &KvShape, kv: usize) -> Result<(), StepError> {
        let (rows, sequences) = (self.tokens.len(), self.context_lens.len());
        let blocks = kv / shape.block_floats();
        let max_blocks = self.block_tables.len() / sequences.max(1);
        length("positions", self.positions.len(), rows)?;
        length("slots", self.slots.len(), rows)?;
        length("seq_starts", self.seq_starts.len(), sequences + 1)?;
        length("block_tables", self.block_tables.len(), max_blocks * sequences)?;
        below("slots", self.slots.iter().copied(), blocks * shape.block_tokens)?;
        below("block_tables", self.block_tables.iter().map(|x| i64::from(*x)), blocks)?;
        below("logit_rows", self.logit_rows.iter().map(|x| i64::from(*x)), rows)?;
        below("pool_rows", self.pool_rows.iter().map(|x| i64::from(*x)), rows)?;
        let mut next = 0;
        for (sequence, context) in self.context_lens.iter().enumerate() {
            let wrong = StepError::Sequence { sequence };
            let (start, end) = (self.seq_starts[sequence], self.seq_starts[sequence + 1]);
            if start != next || end < start || end as usize > rows || *context < end - start {
                return Err(wrong);
            }
            if *context as usize > max_blocks * shape.block_tokens {
                let limit = max_blocks * shape.block_tokens + 1;
                let got = i64::from(*context);
                return Err(StepError::Range { what: "context_lens", got, limit });
            }
            let positions = (context - (end - start))..*context;
            if !positions.eq(self.positions[start as usize..end as usize].iter().copied()) {
                return Err(wrong);
            }
            next = end;
        }
        length("rows of all sequences", next as usize, rows)?;
        self.draft.map_or(Ok(()), |draft| self.check_draft(draft, shape.tail, blocks))
    }

    fn check_draft(&self, draft: Draft<'_>, width: usize, blocks: usize) -> Result<(), StepError> {
        length("hidden_from", draft.hidden_from.len(), self.tokens.len())?;
        length("first_keys", draft.first_keys.len(), self.context_lens.len())?;
        let hidden = draft.hidden.len() / width.max(1);
        let rows = draft.hidden_from.iter().map(|from| i64::from(*from));
        below("hidden_from", rows.clone().filter(|from| *from >= 0), hidden)?;
        let tails = rows.filter(|from| *from < 0).map(|from| -(from + 1));
        below("blocks of hidden_from", tails, blocks)?;
        for (sequence, bounds) in self.seq_starts.windows(2).enumerate() {
            let position = self.positions[bounds[0] as usize..bounds[1] as usize].first();
            let got = draft.first_keys[sequence];
            if let Some(position) = position.filter(|position| !(1..=**position).contains(&got)) {
                return Err(StepError::FirstKey { sequence, got, position: *position });
            }
        }
        Ok(())
    }
}

pub(crate) fn length(what: &'static str, got: usize, expected: usize) -> Result<(), StepError> {
    if got == expected { Ok(()) } else { Err(StepError::Length { what, got, expected }) }
}

pub(crate) fn below(
    what: &'static str,
    mut entries: impl Iterator<Item = i64>,
    limit: usize,
) -> Result<(), StepError> {
    match entries.find(|x| !(0..limit as i64).contains(x)) {
        Some(got) => Err(StepError::Range { what, got, limit }),
        None => Ok(()),
    }
}

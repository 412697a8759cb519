//! A model's forward pass, recorded once and run for every step without going back to Python.

use std::sync::Arc;

use crate::attention::{self, Attention, KvShape, RowPlace, SequenceRows};
use crate::linear::{self, Linear};
use crate::rows::{self, Rope};
use crate::simd::Level;
use crate::weight::{Table, Weight};

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
}

/// Why a step was not computed. Nothing was read or written then.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StepError {
    /// Two arrays of the step disagree.
    #[error("{what} has {got} entries, expected {expected}")]
    Length {
        /// The array.
        what: &'static str,
        /// Its length.
        got: usize,
        /// What the others say.
        expected: usize,
    },
    /// An entry is out of range.
    #[error("{what} holds {got}, which is not below {limit}")]
    Range {
        /// The array.
        what: &'static str,
        /// The entry.
        got: i64,
        /// Its bound.
        limit: usize,
    },
    /// Rows are not in the order of their sequences, or a row is at a position that its sequence lacks.
    #[error("sequence {sequence}: rows, positions and context_lens disagree")]
    Sequence {
        /// Which.
        sequence: usize,
    },
}

/// A value of the recording: `[rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value(usize);

#[derive(Debug)]
enum Op {
    Embed { table: Arc<Table> },
    RmsNorm { x: Value, weight: Vec<f32>, eps: f32 },
    Linear { x: Value, weight: Arc<Weight>, residual: Option<Value> },
    RopeAndStoreKv { qkv: Value, layer: usize },
    PagedAttention { qkv: Value, layer: usize },
    SiluMul { x: Value },
    WantedRows { x: Value },
}

impl Op {
    fn reads(&self) -> [Option<Value>; 2] {
        match self {
            Self::Embed { .. } => [None, None],
            Self::Linear { x, residual, .. } => [Some(*x), *residual],
            Self::RmsNorm { x, .. } | Self::SiluMul { x } | Self::WantedRows { x } => {
                [Some(*x), None]
            }
            Self::RopeAndStoreKv { qkv, .. } | Self::PagedAttention { qkv, .. } => {
                [Some(*qkv), None]
            }
        }
    }
}

/// Where a value lies, and its shape. Values that are no longer read give their buffer to later ones.
#[derive(Debug, Clone, Copy)]
struct Place {
    width: usize,
    wanted_only: bool,
    buffer: usize,
}

/// What attention needs to know of the model.
#[derive(Debug, Clone)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Positions.
    pub rope: Rope,
    /// The cache.
    pub kv: KvShape,
}

/// The recording. Methods named as operations append one and return its value.
#[derive(Debug)]
pub struct Program {
    level: Level,
    attention: AttentionConfig,
    ops: Vec<Op>,
    places: Vec<Place>,
    buffers: Vec<Vec<f32>>,
    angles: Vec<f32>,
    row_places: Vec<RowPlace>,
    linear: linear::Scratch,
    scratch: attention::Scratch,
}

impl Program {
    /// An empty recording.
    /// # Panics
    /// If the shape of the cache does not fit the kernels.
    pub fn new(level: Level, attention: AttentionConfig) -> Self {
        let KvShape { kv_heads, head_dim, block_tokens, .. } = attention.kv;
        assert!(kv_heads > 0 && attention.heads.is_multiple_of(kv_heads), "whole groups of heads");
        assert!(
            block_tokens > 0 && block_tokens.is_multiple_of(16),
            "block_tokens: multiple of 16"
        );
        assert!(attention.rope.inv_freq.len() * 2 <= head_dim, "rotated part of a head");
        Self {
            level,
            attention,
            ops: Vec::new(),
            places: Vec::new(),
            buffers: Vec::new(),
            angles: Vec::new(),
            row_places: Vec::new(),
            linear: linear::Scratch::default(),
            scratch: attention::Scratch::default(),
        }
    }

    fn push(&mut self, op: Op, width: usize, wanted_only: bool) -> Value {
        for value in op.reads().into_iter().flatten() {
            let same = self.places[value.0].wanted_only == wanted_only;
            assert!(same || matches!(op, Op::WantedRows { .. }), "operands of different rows");
        }
        self.ops.push(op);
        self.places.push(Place { width, wanted_only, buffer: 0 });
        Value(self.places.len() - 1)
    }

    fn width(&self, value: Value) -> usize {
        self.places[value.0].width
    }

    /// Rows of `table`, which are `width` wide, by token.
    pub fn embed(&mut self, table: Arc<Table>, width: usize) -> Value {
        self.push(Op::Embed { table }, width, false)
    }

    /// [`rows::rms_norm`].
    pub fn rms_norm(&mut self, x: Value, weight: Vec<f32>, eps: f32) -> Value {
        let Place { width, wanted_only, .. } = self.places[x.0];
        assert_eq!(width, weight.len(), "width of a norm");
        self.push(Op::RmsNorm { x, weight, eps }, width, wanted_only)
    }

    /// `x W^T (+ bias) (+ residual)`.
    pub fn linear(&mut self, x: Value, weight: Arc<Weight>, residual: Option<Value>) -> Value {
        let Place { width, wanted_only, .. } = self.places[x.0];
        let n = weight.n();
        assert_eq!(width, weight.k(), "width of a product");
        assert!(residual.is_none_or(|r| self.width(r) == n), "width of a residual");
        self.push(Op::Linear { x, weight, residual }, n, wanted_only)
    }

    /// [`rows::rope_and_store_kv`]. The result takes the place of `qkv`, which is read no more.
    pub fn rope_and_store_kv(&mut self, qkv: Value, layer: usize) -> Value {
        let AttentionConfig { heads, kv, .. } = &self.attention;
        let width = (heads + 2 * kv.kv_heads) * kv.head_dim;
        assert!(self.width(qkv) == width && layer < kv.layers, "shape of qkv");
        self.push(Op::RopeAndStoreKv { qkv, layer }, width, false)
    }

    /// [`Attention`] of the turned queries.
    pub fn paged_attention(&mut self, qkv: Value, layer: usize) -> Value {
        let width = self.attention.heads * self.attention.kv.head_dim;
        assert!(self.width(qkv) >= width && layer < self.attention.kv.layers, "shape of qkv");
        self.push(Op::PagedAttention { qkv, layer }, width, false)
    }

    /// [`rows::silu_mul`].
    pub fn silu_mul(&mut self, x: Value) -> Value {
        let Place { width, wanted_only, .. } = self.places[x.0];
        assert!(width.is_multiple_of(2), "[gate | up]");
        self.push(Op::SiluMul { x }, width / 2, wanted_only)
    }

    /// The rows whose logits are wanted.
    pub fn wanted_rows(&mut self, x: Value) -> Value {
        self.push(Op::WantedRows { x }, self.width(x), true)
    }

    /// Ends the recording: gives every value a buffer. The last operation is the result.
    /// # Panics
    /// If the result is not of the wanted rows.
    pub fn finish(&mut self) {
        let wanted = self.places.last().is_some_and(|place| place.wanted_only);
        assert!(wanted, "the result is of the wanted rows");
        let mut last_read = vec![0; self.ops.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for value in op.reads().into_iter().flatten() {
                last_read[value.0] = i;
            }
        }
        let mut free = Vec::new();
        let mut count = 0;
        for (i, op) in self.ops.iter().enumerate() {
            let in_place = if let Op::RopeAndStoreKv { qkv, .. } = op {
                Some(self.places[qkv.0].buffer)
            } else {
                None
            };
            self.places[i].buffer = in_place.or_else(|| free.pop()).unwrap_or_else(|| {
                count += 1;
                count - 1
            });
            for value in op.reads().into_iter().flatten() {
                if last_read[value.0] == i && in_place.is_none() {
                    free.push(self.places[value.0].buffer);
                }
            }
        }
        self.buffers = vec![Vec::new(); count];
    }

    /// Width of the result.
    pub fn out_width(&self) -> usize {
        self.places.last().map_or(0, |place| place.width)
    }

    /// Bytes of a block of the cache.
    pub fn block_bytes(&self) -> usize {
        self.attention.kv.block_floats() * size_of::<f32>()
    }

    /// The level it runs at.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Stores keys and values of all rows in `kv` and writes `[logit_rows, out_width]` to `out`. `stored` is
    /// told each layer whose keys and values are stored, at once.
    /// # Errors
    /// When the step does not fit together or does not fit the cache.
    pub fn run(
        &mut self,
        step: &Step<'_>,
        kv: &mut [f32],
        out: &mut [f32],
        stored: &mut dyn FnMut(usize),
    ) -> Result<(), StepError> {
        self.check(step, kv.len(), out.len())?;
        let rows = step.tokens.len();
        self.row_places.clear();
        let block_tokens = self.attention.kv.block_tokens as i64;
        self.row_places.extend(step.slots.iter().map(|slot| RowPlace {
            block: (slot / block_tokens) as usize,
            offset: (slot % block_tokens) as usize,
        }));
        let angles = 2 * self.attention.rope.inv_freq.len();
        self.angles.resize(rows * angles, 0.0);
        if rows == 0 {
            return Ok(());
        }
        for (position, out) in step.positions.iter().zip(self.angles.chunks_exact_mut(angles)) {
            self.attention.rope.angles(*position as usize, out);
        }
        let last = self.ops.len() - 1;
        for i in 0..self.ops.len() {
            let place = self.places[i];
            let rows = if place.wanted_only { step.logit_rows.len() } else { rows };
            let len = rows * place.width;
            let mut buffer = std::mem::take(&mut self.buffers[place.buffer]);
            if i == last {
                self.apply(i, step, kv, &mut out[..len]);
            } else {
                if buffer.len() < len {
                    buffer.resize(len, 0.0);
                }
                self.apply(i, step, kv, &mut buffer[..len]);
            }
            self.buffers[place.buffer] = buffer;
            if let Op::RopeAndStoreKv { layer, .. } = self.ops[i] {
                stored(layer);
            }
        }
        Ok(())
    }

    fn apply(&mut self, i: usize, step: &Step<'_>, kv: &mut [f32], out: &mut [f32]) {
        let (level, places, buffers) = (self.level, &self.places, &self.buffers);
        let rows = step.tokens.len();
        let read = |value: Value| {
            let place = places[value.0];
            let rows = if place.wanted_only { step.logit_rows.len() } else { rows };
            &buffers[place.buffer][..rows * place.width]
        };
        let AttentionConfig { heads, scale, kv: shape, .. } = &self.attention;
        match &self.ops[i] {
            Op::Embed { table } => {
                let width = places[i].width;
                for (token, out) in step.tokens.iter().zip(out.chunks_exact_mut(width)) {
                    table.elements().read(*token as usize * width, out);
                }
            }
            Op::RmsNorm { x, weight, eps } => rows::rms_norm(level, read(*x), weight, *eps, out),
            Op::Linear { x, weight, residual } => {
                let job = Linear { x: read(*x), weight, residual: residual.map(read), y: out };
                job.compute(level, &mut self.linear);
            }
            Op::RopeAndStoreKv { layer, .. } => {
                let (angles, places) = (&self.angles, &self.row_places);
                rows::rope_and_store_kv(out, *heads, angles, places, shape, *layer, kv);
            }
            Op::PagedAttention { qkv, layer } => {
                let max_blocks = step.block_tables.len() / step.context_lens.len();
                for (s, bounds) in step.seq_starts.windows(2).enumerate() {
                    let (start, end) = (bounds[0] as usize, bounds[1] as usize);
                    let attention = Attention {
                        qkv: read(*qkv),
                        width: places[qkv.0].width,
                        heads: *heads,
                        scale: *scale,
                        kv,
                        shape,
                        layer: *layer,
                        rows: SequenceRows {
                            start,
                            positions: &step.positions[start..end],
                            blocks: &step.block_tables[s * max_blocks..(s + 1) * max_blocks],
                        },
                        out,
                    };
                    attention.compute(level, &mut self.scratch);
                }
            }
            Op::SiluMul { x } => rows::silu_mul(level, read(*x), places[i].width, out),
            Op::WantedRows { x } => {
                let width = places[i].width;
                let x = read(*x);
                for (row, out) in step.logit_rows.iter().zip(out.chunks_exact_mut(width)) {
                    out.copy_from_slice(&x[*row as usize * width..][..width]);
                }
            }
        }
    }

    fn check(&self, step: &Step<'_>, kv: usize, out: usize) -> Result<(), StepError> {
        let (rows, sequences) = (step.tokens.len(), step.context_lens.len());
        let block_tokens = self.attention.kv.block_tokens;
        let blocks = kv / self.attention.kv.block_floats();
        let max_blocks = step.block_tables.len() / sequences.max(1);
        length("positions", step.positions.len(), rows)?;
        length("slots", step.slots.len(), rows)?;
        length("seq_starts", step.seq_starts.len(), sequences + 1)?;
        length("block_tables", step.block_tables.len(), max_blocks * sequences)?;
        length("out", out, step.logit_rows.len() * self.out_width())?;
        for op in &self.ops {
            if let Op::Embed { table } = op {
                let vocab = table.elements().len() / self.places[0].width;
                below("tokens", step.tokens.iter().map(|x| i64::from(*x)), vocab)?;
            }
        }
        below("slots", step.slots.iter().copied(), blocks * block_tokens)?;
        below("block_tables", step.block_tables.iter().map(|x| i64::from(*x)), blocks)?;
        below("logit_rows", step.logit_rows.iter().map(|x| i64::from(*x)), rows)?;
        let mut next = 0;
        for (sequence, context) in step.context_lens.iter().enumerate() {
            let wrong = StepError::Sequence { sequence };
            let (start, end) = (step.seq_starts[sequence], step.seq_starts[sequence + 1]);
            if start != next || end < start || end as usize > rows || *context < end - start {
                return Err(wrong);
            }
            if *context as usize > max_blocks * block_tokens {
                let got = i64::from(*context);
                return Err(StepError::Range {
                    what: "context_lens",
                    got,
                    limit: max_blocks * block_tokens + 1,
                });
            }
            let positions = (context - (end - start))..*context;
            if !positions.eq(step.positions[start as usize..end as usize].iter().copied()) {
                return Err(wrong);
            }
            next = end;
        }
        length("rows of all sequences", next as usize, rows)
    }
}

fn length(what: &'static str, got: usize, expected: usize) -> Result<(), StepError> {
    if got == expected { Ok(()) } else { Err(StepError::Length { what, got, expected }) }
}

fn below(
    what: &'static str,
    mut entries: impl Iterator<Item = i64>,
    limit: usize,
) -> Result<(), StepError> {
    match entries.find(|x| !(0..limit as i64).contains(x)) {
        Some(got) => Err(StepError::Range { what, got, limit }),
        None => Ok(()),
    }
}

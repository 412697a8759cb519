//! A model's forward pass, recorded once and run for every step without going back to Python.

use std::sync::Arc;

use crate::attention::{KvShape, RowPlace};
use crate::mla::{self, HeadMatrices, MlaShape};
use crate::moe::{self, Experts};
use crate::op::{Op, Place, RecordError, Value};
use crate::rows::Rope;
use crate::simd::Level;
use crate::weight::{Table, Weight};
use crate::{attention, product};

/// What attention needs to know of the model.
#[derive(Debug, Clone)]
pub struct AttentionConfig {
    /// Query heads of every layer.
    pub heads: usize,
    /// Factor on scores.
    pub scale: f32,
    /// How positions turn queries and keys.
    pub rope: Rope,
    /// The cache. Its tail is what a pass keeps of a row.
    pub kv: KvShape,
    /// Where heads share a latent.
    pub mla: Option<MlaShape>,
}

/// The recording. Methods named as operations append one and return its value, or say why they cannot.
#[derive(Debug)]
pub struct Program {
    pub(crate) level: Level,
    pub(crate) attention: AttentionConfig,
    pub(crate) ops: Vec<Op>,
    pub(crate) places: Vec<Place>,
    pub(crate) buffers: Vec<Vec<f32>>,
    pub(crate) scratch: Scratch,
}

/// Memory that steps reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) angles: Vec<f32>,
    pub(crate) row_places: Vec<RowPlace>,
    pub(crate) linear: product::Scratch,
    pub(crate) attention: attention::Scratch,
    pub(crate) mla: mla::Scratch,
    pub(crate) moe: moe::Scratch,
}

type Recorded = Result<Value, RecordError>;

impl Program {
    /// An empty recording.
    /// # Errors
    /// If the shape of the cache does not fit the kernels.
    pub fn new(level: Level, attention: AttentionConfig) -> Result<Self, RecordError> {
        let AttentionConfig { heads, rope, kv, .. } = &attention;
        let must = |is: bool, what, got, must| {
            if is { Ok(()) } else { Err(RecordError::Config { what, got, must }) }
        };
        let KvShape { layers, kv_heads, key_dim, value_dim, block_tokens, .. } = *kv;
        let turned = rope.inv_freq.len() * 2;
        must(layers > 0, "layers", layers, "at least 1")?;
        must(key_dim > 0, "width of a key", key_dim, "at least 1")?;
        must(value_dim > 0, "width of a value", value_dim, "at least 1")?;
        let groups = kv_heads > 0 && *heads > 0 && heads.is_multiple_of(kv_heads);
        must(groups, "heads", *heads, "a multiple of kv_heads")?;
        let whole = block_tokens > 0 && block_tokens.is_multiple_of(16);
        must(whole, "block_tokens", block_tokens, "a multiple of 16 on a CPU")?;
        must(turned > 0, "inv_freq", 0, "not empty")?;
        if let Some(mla) = &attention.mla {
            must(turned == mla.rope_dim, "rope_dim", mla.rope_dim, "twice as many as inv_freq")?;
            must(mla.v_dim > 0, "v_dim", mla.v_dim, "at least 1")?;
        } else {
            must(turned <= key_dim, "inv_freq", turned / 2, "at most half a head")?;
        }
        let (ops, places, buffers) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { level, attention, ops, places, buffers, scratch: Scratch::default() })
    }

    fn push(&mut self, op: Op, width: usize, wanted_only: bool) -> Value {
        self.ops.push(op);
        self.places.push(Place { width, wanted_only, buffer: 0 });
        Value(self.places.len() - 1)
    }

    /// Where `x` is, which must be `expected` wide if that is given.
    fn operand(
        &self,
        op: &'static str,
        what: &'static str,
        x: Value,
        expected: Option<usize>,
    ) -> Result<Place, RecordError> {
        let why = "a value of another program";
        let place = *self.places.get(x.0).ok_or(RecordError::Not { op, why })?;
        let (got, expected) = (place.width, expected.unwrap_or(place.width));
        if got == expected {
            Ok(place)
        } else {
            Err(RecordError::Width { op, what, got, expected })
        }
    }

    /// Rows of `table`, which are `width` wide, by token.
    /// # Errors
    /// If they have no width.
    pub fn embed(&mut self, table: Arc<Table>, width: usize) -> Recorded {
        if width == 0 {
            return Err(RecordError::Not { op: "embed", why: "the table has no columns" });
        }
        Ok(self.push(Op::Embed { table }, width, false))
    }

    /// [`crate::rows::rms_norm`].
    /// # Errors
    /// If the weight is not as wide as `x`.
    pub fn rms_norm(&mut self, x: Value, weight: Vec<f32>, eps: f32) -> Recorded {
        let place = self.operand("rms_norm", "x", x, Some(weight.len()))?;
        Ok(self.push(Op::RmsNorm { x, weight, eps }, place.width, place.wanted_only))
    }

    /// `x W^T (+ bias) (+ residual)`.
    /// # Errors
    /// If shapes do not fit.
    pub fn linear(&mut self, x: Value, weight: Arc<Weight>, residual: Option<Value>) -> Recorded {
        let (op, n) = ("linear", weight.n());
        let rows = self.operand(op, "x", x, Some(weight.k()))?.wanted_only;
        if let Some(residual) = residual
            && self.operand(op, "residual", residual, Some(n))?.wanted_only != rows
        {
            return Err(RecordError::Rows { op });
        }
        Ok(self.push(Op::Linear { x, weight, residual }, n, rows))
    }

    /// [`crate::rows::rope_and_store_kv`]. The result takes the place of `qkv`, which is read no more.
    /// # Errors
    /// If shapes do not fit.
    pub fn rope_and_store_kv(&mut self, qkv: Value, layer: usize) -> Recorded {
        let op = "rope_and_store_kv";
        let width = self.qkv_width(op, layer)?;
        self.all_rows(op, "qkv", qkv, width)?;
        Ok(self.push(Op::RopeAndStoreKv { qkv, layer }, width, false))
    }

    /// [`attention::Attention`] of the turned queries.
    /// # Errors
    /// If shapes do not fit.
    pub fn paged_attention(&mut self, qkv: Value, layer: usize) -> Recorded {
        let op = "paged_attention";
        let width = self.qkv_width(op, layer)?;
        self.all_rows(op, "qkv", qkv, width)?;
        let width = self.attention.heads * self.attention.kv.value_dim;
        Ok(self.push(Op::PagedAttention { qkv, layer }, width, false))
    }

    /// [`mla::store`]. The result takes the place of `q`, which is read no more.
    /// # Errors
    /// If shapes do not fit.
    pub fn mla_store(
        &mut self,
        q: Value,
        latent: Value,
        norm: Vec<f32>,
        eps: f32,
        layer: usize,
    ) -> Recorded {
        let op = "mla_store";
        let MlaShape { heads, kv_lora_rank, rope_dim, .. } = self.mla_shape(op, layer)?;
        let width = heads * self.mla_shape(op, layer)?.query_dim();
        self.all_rows(op, "q", q, width)?;
        self.all_rows(op, "latent", latent, kv_lora_rank + rope_dim)?;
        if norm.len() != kv_lora_rank {
            let (got, expected) = (norm.len(), kv_lora_rank);
            return Err(RecordError::Width { op, what: "norm", got, expected });
        }
        Ok(self.push(Op::MlaStore { q, latent, norm, eps, layer }, width, false))
    }

    /// [`mla::MlaAttention`] of the turned queries.
    /// # Errors
    /// If shapes do not fit.
    pub fn mla_attention(&mut self, q: Value, kv_b: Arc<HeadMatrices>, layer: usize) -> Recorded {
        let op = "mla_attention";
        let shape = self.mla_shape(op, layer)?;
        self.all_rows(op, "q", q, shape.heads * shape.query_dim())?;
        if !kv_b.fits(&shape) {
            return Err(RecordError::Not { op, why: "kv_b is of heads of another shape" });
        }
        Ok(self.push(Op::MlaAttention { q, kv_b, layer }, shape.heads * shape.v_dim, false))
    }

    /// [`crate::rows::silu_mul`].
    /// # Errors
    /// If `x` is not `[gate | up]`.
    pub fn silu_mul(&mut self, x: Value) -> Recorded {
        let op = "silu_mul";
        let Place { width, wanted_only, .. } = self.operand(op, "x", x, None)?;
        if !width.is_multiple_of(2) {
            return Err(RecordError::Width { op, what: "x", got: width, expected: width + 1 });
        }
        Ok(self.push(Op::SiluMul { x }, width / 2, wanted_only))
    }

    /// [`moe::Moe`].
    /// # Errors
    /// If shapes do not fit.
    pub fn moe(&mut self, x: Value, experts: Arc<Experts>, residual: Value) -> Recorded {
        let (op, width) = ("moe", experts.hidden());
        let rows = self.operand(op, "x", x, Some(width))?.wanted_only;
        if self.operand(op, "residual", residual, Some(width))?.wanted_only != rows {
            return Err(RecordError::Rows { op });
        }
        Ok(self.push(Op::Moe { x, experts, residual }, width, rows))
    }

    /// Columns `start..stop` of `x`.
    /// # Errors
    /// If there are none, or `x` does not have them.
    pub fn columns(&mut self, x: Value, start: usize, stop: usize) -> Recorded {
        let Place { width, wanted_only, .. } = self.operand("columns", "x", x, None)?;
        if start >= stop || stop > width {
            return Err(RecordError::Columns { start, stop, width });
        }
        Ok(self.push(Op::Columns { x, start }, stop - start, wanted_only))
    }

    /// `[a | b]`.
    /// # Errors
    /// If they are not of the same rows.
    pub fn concat(&mut self, a: Value, b: Value) -> Recorded {
        let op = "concat";
        let (first, second) = (self.operand(op, "a", a, None)?, self.operand(op, "b", b, None)?);
        if first.wanted_only != second.wanted_only {
            return Err(RecordError::Rows { op });
        }
        let width = first.width + second.width;
        Ok(self.push(Op::Concat { a, b }, width, first.wanted_only))
    }

    /// The rows whose logits are wanted.
    /// # Errors
    /// If `x` is not of all rows.
    pub fn wanted_rows(&mut self, x: Value) -> Recorded {
        let place = self.operand("wanted_rows", "x", x, None)?;
        self.all_rows("wanted_rows", "x", x, place.width)?;
        Ok(self.push(Op::WantedRows { x }, place.width, true))
    }

    /// Gives `x` to who runs the program; a main pass also writes it into the tails of blocks.
    /// # Errors
    /// If it is not as wide as a tail.
    pub fn keep_hidden(&mut self, x: Value) -> Result<(), RecordError> {
        let width = self.tail("keep_hidden")?;
        self.all_rows("keep_hidden", "x", x, width)?;
        self.push(Op::KeepHidden { x }, 0, false);
        Ok(())
    }

    /// What another pass kept. This makes the recording a draft pass.
    /// # Errors
    /// If blocks have no tail.
    pub fn hidden(&mut self) -> Recorded {
        let width = self.tail("hidden")?;
        Ok(self.push(Op::Hidden, width, false))
    }

    /// Gives the rows of `x` that a step pools to who runs the program; with `norm`, [`crate::rows::rms_norm`] of them.
    /// # Errors
    /// If `x` is not of all rows, or the weight not as wide.
    pub fn pool_rows(
        &mut self,
        x: Value,
        norm: Option<(Vec<f32>, f32)>,
    ) -> Result<(), RecordError> {
        let width = match &norm {
            Some((weight, _)) => weight.len(),
            None => self.operand("pool_rows", "x", x, None)?.width,
        };
        self.all_rows("pool_rows", "x", x, width)?;
        self.push(Op::PoolRows { x, norm }, 0, false);
        Ok(())
    }

    fn tail(&self, op: &'static str) -> Result<usize, RecordError> {
        let why = "the cache was made without a drafting layer";
        let width = self.attention.kv.tail;
        if width > 0 { Ok(width) } else { Err(RecordError::Not { op, why }) }
    }

    fn all_rows(
        &self,
        op: &'static str,
        what: &'static str,
        x: Value,
        width: usize,
    ) -> Result<(), RecordError> {
        let place = self.operand(op, what, x, Some(width))?;
        if place.wanted_only { Err(RecordError::Rows { op }) } else { Ok(()) }
    }

    fn qkv_width(&self, op: &'static str, layer: usize) -> Result<usize, RecordError> {
        let AttentionConfig { heads, kv, mla, .. } = &self.attention;
        if mla.is_some() {
            return Err(RecordError::Not { op, why: "the model's heads share a latent" });
        }
        self.layer(op, layer)?;
        Ok((heads + 2 * kv.kv_heads) * kv.key_dim)
    }

    fn mla_shape(&self, op: &'static str, layer: usize) -> Result<MlaShape, RecordError> {
        let why = "the model's heads have keys of their own";
        let shape = self.attention.mla.ok_or(RecordError::Not { op, why })?;
        self.layer(op, layer)?;
        Ok(shape)
    }

    fn layer(&self, op: &'static str, layer: usize) -> Result<(), RecordError> {
        let layers = self.attention.kv.layers;
        if layer < layers { Ok(()) } else { Err(RecordError::Layer { op, layer, layers }) }
    }

    /// Ends the recording: gives every value a buffer. The last operation is the result.
    /// # Errors
    /// If the result is not of the wanted rows.
    pub fn finish(&mut self) -> Result<(), RecordError> {
        if !self.places.last().is_some_and(|place| place.wanted_only) {
            let why = "the last operation, the result, is not of the wanted rows";
            return Err(RecordError::Not { op: "finish", why });
        }
        let mut last_read: Vec<usize> = (0..self.ops.len()).collect();
        for (i, op) in self.ops.iter().enumerate() {
            for value in op.reads().into_iter().flatten() {
                last_read[value.0] = i;
            }
        }
        let mut free = Vec::new();
        let mut count = 0;
        for (i, op) in self.ops.iter().enumerate() {
            let spent = op.spends();
            let in_place = spent.map(|value| self.places[value.0].buffer);
            self.places[i].buffer = in_place.or_else(|| free.pop()).unwrap_or_else(|| {
                count += 1;
                count - 1
            });
            let [a, b] = op.reads();
            for value in [a, b.filter(|_| a != b), Some(Value(i))].into_iter().flatten() {
                if last_read[value.0] == i && Some(value) != spent {
                    free.push(self.places[value.0].buffer);
                }
            }
        }
        self.buffers = vec![Vec::new(); count];
        Ok(())
    }

    /// Whether it is a pass of the module that drafts.
    pub fn is_draft(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Hidden))
    }

    /// Whether experts are on several ranks, which wait for each other in every step, also in one without rows.
    pub fn is_apart(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Moe { experts, .. } if experts.is_apart()))
    }

    /// Floats that a run keeps of each row.
    pub fn kept_width(&self) -> usize {
        let keeps = self.ops.iter().any(|op| matches!(op, Op::KeepHidden { .. }));
        if keeps { self.attention.kv.tail } else { 0 }
    }

    /// Floats of each row that a step pools; 0 where the program gives none.
    pub fn pooled_width(&self) -> usize {
        let x = self
            .ops
            .iter()
            .find_map(|op| if let Op::PoolRows { x, .. } = op { Some(*x) } else { None });
        x.map_or(0, |x| x.place(&self.places).width)
    }

    /// Width of the result.
    pub fn out_width(&self) -> usize {
        self.places.last().map_or(0, |place| place.width)
    }

    /// Bytes of a block of the cache.
    pub fn block_bytes(&self) -> usize {
        self.attention.kv.block_floats() * size_of::<f32>()
    }

    /// Layers of the cache.
    pub fn layers(&self) -> usize {
        self.attention.kv.layers
    }

    /// The level it runs at.
    pub fn level(&self) -> Level {
        self.level
    }
}

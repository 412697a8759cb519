//! Multi-head latent attention, absorbed: all heads read one latent and one turned key of each position.
//!
//! A head's key of a position is `[W_UK latent | turned]` and its value `W_UV latent`. The matrices are moved to the
//! other side: the query is taken through `W_UK` once, then all heads share the key `[latent | turned]` and the value
//! `latent`, and the sum of latents is taken through `W_UV`. Prefill is computed the same way, although the other one
//! has fewer products there: so there is one arithmetic, and a prompt's bits do not depend on how it is cut.
//!
//! The cache is that of [`crate::attention`] with one head of keys and values. Where `nope_dim` is 0, scores do not
//! read the latent, and it is kept once, as the value. Otherwise it is kept twice: as the first part of the key,
//! across tokens, and as the value, across outputs. Both inner loops then read streams; the other way would be a
//! transposition of each block for each tile of queries.

use std::ops::Range;

use crate::attention::{self, Attention, KvShape, SequenceRows};
use crate::product::{self, Finish, Product, RowsAt};
use crate::rows::{self, Store};
use crate::simd::Level;
use crate::weight::{Dtype, Elements, Weight};

/// Floats of queries or latents that are worked on at once. They stay in the cache, and are rows enough for the tiles.
const CHUNK: usize = 512 * 1024;
/// Rows of a chunk are a multiple of this, which is one of every tile.
const CHUNK_ROWS: usize = 12;

/// Sizes of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaShape {
    /// Query heads, which all read one latent.
    pub heads: usize,
    /// Elements of the latent.
    pub kv_lora_rank: usize,
    /// Elements of a query that go through `W_UK`.
    pub nope_dim: usize,
    /// Elements of a query that are turned.
    pub rope_dim: usize,
    /// Elements of a head's output.
    pub v_dim: usize,
}

impl MlaShape {
    /// Elements of a query head.
    pub fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Elements of what is read of the latent for scores.
    fn scored(&self) -> usize {
        if self.nope_dim > 0 { self.kv_lora_rank } else { 0 }
    }

    /// Shape of the KV cache that heads of these sizes read.
    pub fn kv_shape(&self, layers: usize, block_tokens: usize, tail: usize) -> KvShape {
        KvShape {
            layers,
            kv_heads: 1,
            key_dim: self.scored() + self.rope_dim,
            value_dim: self.kv_lora_rank,
            block_tokens,
            tail,
        }
    }
}

/// `W_UK` and `W_UV` of each head of a layer.
#[derive(Debug)]
pub struct HeadMatrices {
    keys: Option<Weight>, // [kv_lora_rank, nope_dim]
    values: Weight,       // [v_dim, kv_lora_rank]
}

impl HeadMatrices {
    /// Packs `[heads, nope_dim + v_dim, kv_lora_rank]`.
    /// # Panics
    /// If there are not that many elements.
    pub fn pack(kv_b: Elements<'_>, shape: &MlaShape, dtype: Dtype) -> Self {
        let MlaShape { heads, kv_lora_rank: rank, nope_dim: nope, v_dim, .. } = *shape;
        let head = (nope + v_dim) * rank;
        assert!(kv_b.len() == heads * head, "shape of kv_b");
        let parts = |range: Range<usize>| {
            (0..heads).map(move |h| kv_b.slice(h * head + range.start..h * head + range.end))
        };
        let keys = (nope > 0).then(|| {
            let across: Vec<Vec<f32>> =
                parts(0..nope * rank).map(|part| transposed(part, rank)).collect();
            let across: Vec<_> = across.iter().map(|part| Elements::F32(part)).collect();
            Weight::pack_apart(&across, rank, nope, dtype)
        });
        let values: Vec<_> = parts(nope * rank..head).collect();
        Self { keys, values: Weight::pack_apart(&values, v_dim, rank, dtype) }
    }

    /// Those that were packed before and stay where they are: the keys where there are any, and the values, of which
    /// [`Self::read_all`] gave the images.
    pub fn lent(keys: Option<Weight>, values: Weight) -> Self {
        Self { keys, values }
    }

    /// Appends the image of the keys, where there are any, and that of the values to `out`.
    pub fn read_all(&self, out: &mut Vec<u8>) {
        if let Some(keys) = &self.keys {
            keys.read_all(out);
        }
        self.values.read_all(out);
    }

    /// Whether they are of heads of this shape.
    pub fn fits(&self, shape: &MlaShape) -> bool {
        let MlaShape { heads, kv_lora_rank: rank, nope_dim: nope, v_dim, .. } = *shape;
        let of = |w: &Weight, n, k| w.count() == heads && w.n() == n && w.k() == k;
        self.keys.as_ref().map_or(nope == 0, |keys| of(keys, rank, nope))
            && of(&self.values, v_dim, rank)
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.keys.as_ref().map_or(0, Weight::bytes) + self.values.bytes()
    }
}

fn transposed(matrix: Elements<'_>, columns: usize) -> Vec<f32> {
    let rows = matrix.len() / columns;
    let mut row = vec![0.0; columns];
    let mut out = vec![0.0; matrix.len()];
    for i in 0..rows {
        matrix.read(i * columns, &mut row);
        for (to, x) in out[i..].iter_mut().step_by(rows).zip(&row) {
            *to = *x;
        }
    }
    out
}

/// Turns the queries in place, and puts normed latents and turned keys into the cache.
///
/// A row of `q` is the query heads, each with the part that is not turned first; a row of `latent` the latent and the
/// shared key.
pub fn store(
    level: Level,
    shape: &MlaShape,
    q: &mut [f32],
    latent: &[f32],
    norm: (&[f32], f32),
    to: Store<'_>,
) {
    let Store { rope, angles, places, kv, shape: cache, layer } = to;
    let rank = shape.kv_lora_rank;
    let width = shape.heads * shape.query_dim();
    let mut normed = vec![0.0; rank];
    let mut key = vec![0.0; shape.rope_dim];
    let rows = q.chunks_exact_mut(width).zip(latent.chunks_exact(rank + shape.rope_dim));
    let angles = angles.chunks_exact(angles.len() / places.len());
    for (((q, latent), angles), place) in rows.zip(angles).zip(places) {
        for head in q.chunks_exact_mut(shape.query_dim()) {
            rope.turn(&mut head[shape.nope_dim..], angles);
        }
        rows::rms_norm(level, &latent[..rank], norm.0, norm.1, &mut normed);
        key.copy_from_slice(&latent[rank..]);
        rope.turn(&mut key, angles);
        cache.put_key(kv, *place, layer, 0, normed[..shape.scored()].iter().chain(&key));
        cache.put_value(kv, *place, layer, 0, &normed);
    }
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    queries: Vec<f32>,
    latents: Vec<f32>,
    attention: attention::Scratch,
}

/// Attention of all rows of a step in one layer.
#[derive(Debug)]
pub struct MlaAttention<'a> {
    /// Sizes of the heads.
    pub shape: &'a MlaShape,
    /// `[rows, heads * query_dim]`, turned.
    pub q: &'a [f32],
    /// The matrices of the layer.
    pub kv_b: &'a HeadMatrices,
    /// Factor on scores.
    pub scale: f32,
    /// The KV cache: whole blocks.
    pub kv: &'a [f32],
    /// Shape of the blocks of `kv`.
    pub cache: &'a KvShape,
    /// Which layer of it.
    pub layer: usize,
    /// `[rows, heads * v_dim]`.
    pub out: &'a mut [f32],
}

impl MlaAttention<'_> {
    /// Computes `out`; `sequences` are the rows of the step in order.
    /// # Panics
    /// If lengths do not fit.
    pub fn compute<'s>(
        mut self,
        level: Level,
        sequences: &(impl Iterator<Item = SequenceRows<'s>> + Clone),
        linear: &mut product::Scratch,
        scratch: &mut Scratch,
    ) {
        let width = self.shape.heads * self.shape.query_dim();
        let rows = self.q.len() / width;
        let most = self.shape.heads * self.cache.key_dim.max(self.cache.value_dim);
        let chunk = (CHUNK / most / CHUNK_ROWS).max(1) * CHUNK_ROWS;
        for start in (0..rows).step_by(chunk) {
            let chunk = start..rows.min(start + chunk);
            self.absorb(level, chunk.clone(), linear, &mut scratch.queries);
            let latents = self.shape.heads * self.cache.value_dim;
            scratch.latents.resize((chunk.len() * latents).max(scratch.latents.len()), 0.0);
            for sequence in sequences.clone() {
                if let Some(rows) = within(sequence, &chunk) {
                    self.attend(level, chunk.start, rows, scratch);
                }
            }
            self.values(level, chunk, linear, &scratch.latents);
        }
    }

    /// Queries through `W_UK`: `[rows, heads * (kv_lora_rank + rope_dim)]`.
    fn absorb(
        &self,
        level: Level,
        rows: Range<usize>,
        linear: &mut product::Scratch,
        queries: &mut Vec<f32>,
    ) {
        let Some(keys) = &self.kv_b.keys else { return };
        let MlaShape { heads, kv_lora_rank: rank, nope_dim: nope, .. } = *self.shape;
        let (from, to) = (self.shape.query_dim(), self.cache.key_dim);
        queries.resize((rows.len() * heads * to).max(queries.len()), 0.0);
        for index in 0..heads {
            let product = Product {
                x: &self.q[rows.start * heads * from..],
                x_at: RowsAt { start: index * from, stride: heads * from, ids: None },
                rows: rows.len(),
                x_packed: false,
                weight: keys,
                index,
                y: &mut *queries,
                y_at: RowsAt { start: index * to, stride: heads * to, ids: None },
                finish: Finish::Set { residual: None },
            };
            product.compute(level, linear);
        }
        let q = self.q[rows.start * heads * from..].chunks_exact(from);
        for (to, q) in queries.chunks_exact_mut(to).zip(q).take(rows.len() * heads) {
            to[rank..].copy_from_slice(&q[nope..]);
        }
    }

    /// Sums of latents of some rows of one sequence; the buffers begin with row `first`.
    fn attend(&self, level: Level, first: usize, rows: SequenceRows<'_>, scratch: &mut Scratch) {
        let heads = self.shape.heads;
        let width = heads * self.cache.key_dim;
        let attention = Attention {
            queries: if self.kv_b.keys.is_some() {
                &scratch.queries
            } else {
                &self.q[first * width..]
            },
            width,
            heads,
            scale: self.scale,
            kv: self.kv,
            shape: self.cache,
            layer: self.layer,
            rows: SequenceRows { start: rows.start - first, ..rows },
            out: &mut scratch.latents,
        };
        attention.compute(level, &mut scratch.attention);
    }

    /// Sums of latents through `W_UV`.
    fn values(
        &mut self,
        level: Level,
        rows: Range<usize>,
        linear: &mut product::Scratch,
        latents: &[f32],
    ) {
        let MlaShape { heads, kv_lora_rank: rank, v_dim, .. } = *self.shape;
        for index in 0..heads {
            let product = Product {
                x: latents,
                x_at: RowsAt { start: index * rank, stride: heads * rank, ids: None },
                rows: rows.len(),
                x_packed: false,
                weight: &self.kv_b.values,
                index,
                y: &mut self.out[rows.start * heads * v_dim..],
                y_at: RowsAt { start: index * v_dim, stride: heads * v_dim, ids: None },
                finish: Finish::Set { residual: None },
            };
            product.compute(level, linear);
        }
    }
}

/// The rows of a sequence that are in `chunk`, if any.
fn within<'a>(sequence: SequenceRows<'a>, chunk: &Range<usize>) -> Option<SequenceRows<'a>> {
    let end = sequence.start + sequence.positions.len();
    let (start, stop) = (sequence.start.max(chunk.start), end.min(chunk.end));
    (start < stop).then(|| SequenceRows {
        start,
        positions: &sequence.positions[start - sequence.start..stop - sequence.start],
        ..sequence
    })
}

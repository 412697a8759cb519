//! Work on one row at a time: norm, activation, rotary positions and storing keys and values.

use crate::attention::{KvShape, RowPlace};
use crate::math;
use crate::simd::{Kernel, LANES, Level, Simd};

/// Up to sixteen lanes; those that `x` lacks are `other`.
#[inline(always)]
pub(crate) fn load_or<S: Simd>(s: S, other: f32, x: &[f32]) -> S::V {
    if let Ok(full) = x.try_into() {
        return s.load(full);
    }
    let mut lanes = [other; LANES];
    lanes[..x.len()].copy_from_slice(x);
    s.load(&lanes)
}

/// Up to sixteen lanes; those that `x` lacks are zero.
#[inline(always)]
fn load_some<S: Simd>(s: S, x: &[f32]) -> S::V {
    load_or(s, 0.0, x)
}

/// The lanes that `out` has.
#[inline(always)]
pub(crate) fn store_some<S: Simd>(s: S, v: S::V, out: &mut [f32]) {
    if let Ok(full) = (&mut *out).try_into() {
        return s.store(v, full);
    }
    let mut lanes = [0.0; LANES];
    s.store(v, &mut lanes);
    out.copy_from_slice(&lanes[..out.len()]);
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let mut squares = s.splat(0.0);
            for x in x.chunks(LANES) {
                let x = load_some(s, x);
                squares = s.fma(x, x, squares);
            }
            let scale = s.splat(1.0 / (s.sum(squares) / width as f32 + self.eps).sqrt());
            for ((x, w), out) in
                x.chunks(LANES).zip(self.weight.chunks(LANES)).zip(out.chunks_mut(LANES))
            {
                let normed = s.mul(load_some(s, x), scale);
                store_some(s, s.mul(normed, load_some(s, w)), out);
            }
        }
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, row by row.
/// # Panics
/// If `x` and `out` are not the same number of whole rows.
pub fn rms_norm(level: Level, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(weight.len()), "whole rows");
    level.run(RmsNorm { x, weight, eps, out });
}

struct SiluMul<'a> {
    gate_up: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.gate_up.chunks_exact(2 * self.width);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(self.width)) {
            let (gate, up) = row.split_at(self.width);
            for ((gate, up), out) in
                gate.chunks(LANES).zip(up.chunks(LANES)).zip(out.chunks_mut(LANES))
            {
                let gate = load_some(s, gate);
                let one_more = s.add(s.splat(1.0), math::exp(s, s.sub(s.splat(0.0), gate)));
                store_some(s, s.mul(s.div(gate, one_more), load_some(s, up)), out);
            }
        }
    }
}

/// `out = silu(gate) * up`, where a row of `gate_up` is `[gate | up]`.
/// # Panics
/// If the lengths are not whole rows.
pub fn silu_mul(level: Level, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(gate_up.len() == 2 * out.len() && out.len().is_multiple_of(width), "whole rows");
    level.run(SiluMul { gate_up, width, out });
}

struct Sigmoid<'a>(&'a mut [f32]);

impl Kernel for Sigmoid<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for x in self.0.chunks_mut(LANES) {
            let one_more = s.add(s.splat(1.0), math::exp(s, s.sub(s.splat(0.0), load_some(s, x))));
            store_some(s, s.div(s.splat(1.0), one_more), x);
        }
    }
}

/// `x = 1 / (1 + e^-x)`.
pub fn sigmoid(level: Level, x: &mut [f32]) {
    level.run(Sigmoid(x));
}

/// Rotary position embedding: pairs of elements turn together.
#[derive(Debug, Clone)]
pub struct Rope {
    /// Radians per position, one for each of the `n` pairs; elements after `2 n` stay.
    pub inv_freq: Vec<f32>,
    /// Factor on sine and cosine (yarn), else 1.
    pub scale: f32,
    /// Whether elements `2 i` and `2 i + 1` are a pair (DeepSeek), else `i` and `i + n` (Llama).
    pub interleave: bool,
}

impl Rope {
    /// Cosines, then sines, of one position. The angle is rounded to `f32`, as in `transformers`.
    pub fn angles(&self, position: usize, out: &mut [f32]) {
        let (cosines, sines) = out.split_at_mut(self.inv_freq.len());
        for ((f, cosine), sine) in self.inv_freq.iter().zip(cosines).zip(sines) {
            let (sin, cos) = math::sin_cos(f64::from(position as f32 * f));
            (*cosine, *sine) = (cos as f32 * self.scale, sin as f32 * self.scale);
        }
    }

    /// Turns `x` by [`Self::angles`].
    #[inline]
    pub fn turn(&self, x: &mut [f32], angles: &[f32]) {
        let half = self.inv_freq.len();
        let (cosines, sines) = angles.split_at(half);
        // Products and sums rounded one by one, the same with any vector width.
        let turned = |x: f32, y: f32, cos: f32, sin: f32| (x * cos - y * sin, y * cos + x * sin);
        if self.interleave {
            for (([x, y], cos), sin) in x.as_chunks_mut().0.iter_mut().zip(cosines).zip(sines) {
                (*x, *y) = turned(*x, *y, *cos, *sin);
            }
            return;
        }
        let (first, rest) = x.split_at_mut(half);
        for (((x, y), cos), sin) in first.iter_mut().zip(rest).zip(cosines).zip(sines) {
            (*x, *y) = turned(*x, *y, *cos, *sin);
        }
    }
}

/// Where the keys and values of a step's rows go.
#[derive(Debug)]
pub struct Store<'a> {
    /// Turns keys and queries.
    pub rope: &'a Rope,
    /// [`Rope::angles`] of each row.
    pub angles: &'a [f32],
    /// Place of each row.
    pub places: &'a [RowPlace],
    /// The KV cache: whole blocks.
    pub kv: &'a mut [f32],
    /// Shape of the blocks of `kv`.
    pub shape: &'a KvShape,
    /// Which layer of it.
    pub layer: usize,
}

/// Turns the queries in place and puts the turned keys, and the values, into the cache.
///
/// A row of `qkv` is `heads` query heads, then the key heads, then the value heads, all of one size.
pub fn rope_and_store_kv(qkv: &mut [f32], heads: usize, to: Store<'_>) {
    let Store { rope, angles, places, kv, shape, layer } = to;
    let dim = shape.key_dim;
    let width = (heads + 2 * shape.kv_heads) * dim;
    let rows = qkv.chunks_exact_mut(width).zip(angles.chunks_exact(angles.len() / places.len()));
    for ((row, angles), place) in rows.zip(places) {
        for head in row[..(heads + shape.kv_heads) * dim].chunks_exact_mut(dim) {
            rope.turn(head, angles);
        }
        let (keys, values) = row[heads * dim..].split_at(shape.kv_heads * dim);
        for (h, (key, value)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate() {
            shape.put_key(kv, *place, layer, h, key.iter());
            shape.put_value(kv, *place, layer, h, value);
        }
    }
}

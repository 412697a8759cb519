//! Weight matrices, packed once into the order in which the inner loop reads them.
//!
//! A *panel* is 32 output columns: for k = 0, 1, 2, ... their 32 elements side by side. A lone row streams
//! through memory once; a tile of rows finds its panel in the cache.

mod image;
mod stored;

use std::ops::Range;

use crate::math;
use crate::simd::LANES;
use crate::tile::{Bf16x16, F16x16, F32x16};
pub use stored::Lent;
pub(crate) use stored::Stored;

/// Output columns of a panel.
pub const PANEL: usize = 2 * LANES;
/// Consecutive `k` that share one scale per output column in [`Dtype::Int8`].
pub const GROUP: usize = 64;

/// How elements are stored. Arithmetic is `f32`, and with int8 that of [`crate::product::integers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// Four bytes an element.
    Float32,
    /// Two bytes an element, with the exponent of `f32`.
    Bfloat16,
    /// Two bytes an element, with eleven bits of precision.
    Float16,
    /// One byte, and an `f32` scale per output column and [`GROUP`] of `k`.
    Int8,
}

impl Dtype {
    /// The dtype of that name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "float32" => Some(Self::Float32),
            "bfloat16" => Some(Self::Bfloat16),
            "float16" => Some(Self::Float16),
            "int8" => Some(Self::Int8),
            _ => None,
        }
    }
}

/// Elements as a checkpoint stores them, row-major.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// Values as they are computed with.
    F32(&'a [f32]),
    /// Bits of bfloat16.
    Bf16(&'a [u16]),
    /// Bits of float16.
    F16(&'a [u16]),
}

impl Elements<'_> {
    /// Elements in all.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) | Self::F16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those in `range`.
    /// # Panics
    /// If there are not that many.
    pub fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::F32(x) => Self::F32(&x[range]),
            Self::Bf16(x) => Self::Bf16(&x[range]),
            Self::F16(x) => Self::F16(&x[range]),
        }
    }

    /// Widens `out.len()` elements from `start` on.
    pub fn read(&self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        match self {
            Self::F32(x) => out.copy_from_slice(&x[range]),
            Self::Bf16(x) => {
                for (out, x) in out.iter_mut().zip(&x[range]) {
                    *out = math::bf16_to_f32(*x);
                }
            }
            Self::F16(x) => {
                for (out, x) in out.iter_mut().zip(&x[range]) {
                    *out = math::f16_to_f32(*x);
                }
            }
        }
    }
}

/// A table of rows to look up, such as embeddings, as the checkpoint stores them.
#[derive(Debug)]
pub struct Table(Rows);

#[derive(Debug)]
enum Rows {
    F32(Stored<f32>),
    Bf16(Stored<u16>),
    F16(Stored<u16>),
}

/// Rows of a table that others have in memory.
pub enum LentRows {
    /// Values as they are computed with.
    F32(Lent<f32>),
    /// Bits of bfloat16.
    Bf16(Lent<u16>),
    /// Bits of float16.
    F16(Lent<u16>),
}

impl Table {
    /// A copy of `elements`.
    pub fn new(elements: Elements<'_>) -> Self {
        Self(match elements {
            Elements::F32(x) => Rows::F32(Stored::Own(x.to_vec())),
            Elements::Bf16(x) => Rows::Bf16(Stored::Own(x.to_vec())),
            Elements::F16(x) => Rows::F16(Stored::Own(x.to_vec())),
        })
    }

    /// Rows that stay where they are.
    pub fn lent(rows: LentRows) -> Self {
        Self(match rows {
            LentRows::F32(x) => Rows::F32(Stored::Lent(x)),
            LentRows::Bf16(x) => Rows::Bf16(Stored::Lent(x)),
            LentRows::F16(x) => Rows::F16(Stored::Lent(x)),
        })
    }

    /// The rows one after the other, as the checkpoint stores them.
    pub fn elements(&self) -> Elements<'_> {
        match &self.0 {
            Rows::F32(x) => Elements::F32(x),
            Rows::Bf16(x) => Elements::Bf16(x),
            Rows::F16(x) => Elements::F16(x),
        }
    }
}

/// Pairs of `k` of sixteen columns: those of the first column, then those of the second, and so on.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub struct Pairs(pub(crate) [i8; 2 * LANES]);

/// Lane `half` of `i` in panel `p` is at `(p * k + i) * 2 + half`; pairs and scales likewise, by pair and group.
#[derive(Debug)]
pub(crate) enum Lanes {
    F32(Stored<F32x16>),
    Bf16(Stored<Bf16x16>),
    F16(Stored<F16x16>),
    I8 { pairs: Stored<Pairs>, scales: Stored<F32x16> },
}

/// The lanes of matrices that others have in memory, in their order.
pub enum LentLanes {
    /// Of [`Dtype::Float32`].
    F32(Lent<F32x16>),
    /// Of [`Dtype::Bfloat16`].
    Bf16(Lent<Bf16x16>),
    /// Of [`Dtype::Float16`].
    F16(Lent<F16x16>),
    /// Of [`Dtype::Int8`]: pairs, then scales.
    I8(Lent<Pairs>, Lent<F32x16>),
}

/// A packed `[n, k]` matrix and its optional bias `[n]`, to compute `x W^T + bias`; or several such matrices
/// without biases one after the other, each of which begins a panel: those of experts, or of heads.
#[derive(Debug)]
pub struct Weight {
    pub(crate) lanes: Lanes,
    pub(crate) bias: Option<Vec<f32>>,
    count: usize,
    n: usize,
    k: usize,
}

impl Weight {
    /// Packs matrices of `k` columns, stacked on top of each other.
    /// # Panics
    /// If a part is not whole rows of `k`, or the bias is not one element per row.
    pub fn pack(parts: &[Elements<'_>], k: usize, bias: Option<Vec<f32>>, dtype: Dtype) -> Self {
        assert!(
            k > 0 && parts.iter().all(|part| part.len().is_multiple_of(k)),
            "whole rows of {k}"
        );
        let n = parts.iter().map(|part| part.len() / k).sum::<usize>();
        assert!(bias.as_ref().is_none_or(|bias| bias.len() == n), "one bias per output");
        let mut lanes = Lanes::with_room(n.div_ceil(PANEL), k, dtype);
        lanes.push_matrix(parts, n, k);
        Self { lanes, bias, count: 1, n, k }
    }

    /// `count` matrices `[n, k]` that were packed before and stay where they are. `None` unless there are as many lanes as
    /// they have, and one bias per output of the only one, if any.
    pub fn lent(
        lanes: LentLanes,
        count: usize,
        (n, k): (usize, usize),
        bias: Option<Vec<f32>>,
    ) -> Option<Self> {
        if count == 0 || k == 0 {
            return None;
        }
        let halves = count * 2 * n.div_ceil(PANEL);
        let (lanes, whole) = match lanes {
            LentLanes::F32(x) => (Lanes::F32(Stored::Lent(x)), halves * k),
            LentLanes::Bf16(x) => (Lanes::Bf16(Stored::Lent(x)), halves * k),
            LentLanes::F16(x) => (Lanes::F16(Stored::Lent(x)), halves * k),
            LentLanes::I8(pairs, scales) => {
                if (*scales).as_ref().len() != halves * k.div_ceil(GROUP) {
                    return None;
                }
                let (pairs, scales) = (Stored::Lent(pairs), Stored::Lent(scales));
                (Lanes::I8 { pairs, scales }, halves * k.div_ceil(2))
            }
        };
        let found = match &lanes {
            Lanes::F32(x) => x.len(),
            Lanes::Bf16(x) => x.len(),
            Lanes::F16(x) => x.len(),
            Lanes::I8 { pairs, .. } => pairs.len(),
        };
        let biased = bias.as_ref().is_none_or(|bias| count == 1 && bias.len() == n);
        (found == whole && biased).then_some(Self { lanes, bias, count, n, k })
    }

    /// Packs matrices `[n, k]`, to be used one by one.
    /// # Panics
    /// If there is none, or one has another shape.
    pub fn pack_apart(matrices: &[Elements<'_>], n: usize, k: usize, dtype: Dtype) -> Self {
        assert!(!matrices.is_empty(), "matrices of one shape");
        let mut packed = Self::with_room(matrices.len(), n, k, dtype);
        for matrix in matrices {
            packed.push(*matrix);
        }
        packed
    }

    /// None yet, with room for `count` matrices `[n, k]`, to be used one by one.
    pub fn with_room(count: usize, n: usize, k: usize, dtype: Dtype) -> Self {
        let lanes = Lanes::with_room(count * n.div_ceil(PANEL), k, dtype);
        Self { lanes, bias: None, count: 0, n, k }
    }

    /// Packs one more.
    /// # Panics
    /// If it has another shape.
    pub fn push(&mut self, matrix: Elements<'_>) {
        assert!(self.k > 0 && matrix.len() == self.n * self.k, "matrices of one shape");
        self.lanes.push_matrix(&[matrix], self.n, self.k);
        self.count += 1;
    }

    /// Overwrites matrix `index` with the first one of `from`, in the same place in memory.
    /// # Panics
    /// If there is no such matrix, or `from` is of another shape or dtype.
    pub fn replace(&mut self, index: usize, from: &Self) {
        let one = (from.n, from.k) == (self.n, self.k) && from.count > 0 && index < self.count;
        assert!(one, "matrix {index} of {}, all of one shape", self.count);
        let panels = self.n.div_ceil(PANEL);
        self.lanes.replace(index * panels, panels, self.k, &from.lanes);
    }

    /// How many matrices.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Output features of each.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features, the same of every matrix.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes that a lone row reads for all of them.
    pub fn bytes(&self) -> usize {
        match &self.lanes {
            Lanes::F32(lanes) => size_of_val(&lanes[..]),
            Lanes::Bf16(lanes) => size_of_val(&lanes[..]),
            Lanes::F16(lanes) => size_of_val(&lanes[..]),
            Lanes::I8 { pairs, scales } => size_of_val(&pairs[..]) + size_of_val(&scales[..]),
        }
    }
}

impl Lanes {
    fn with_room(panels: usize, k: usize, dtype: Dtype) -> Self {
        match dtype {
            Dtype::Float32 => Self::F32(Stored::Own(Vec::with_capacity(panels * k * 2))),
            Dtype::Bfloat16 => Self::Bf16(Stored::Own(Vec::with_capacity(panels * k * 2))),
            Dtype::Float16 => Self::F16(Stored::Own(Vec::with_capacity(panels * k * 2))),
            Dtype::Int8 => Self::I8 {
                pairs: Stored::Own(Vec::with_capacity(panels * k.div_ceil(2) * 2)),
                scales: Stored::Own(Vec::with_capacity(panels * k.div_ceil(GROUP) * 2)),
            },
        }
    }

    /// The panels of `n` rows of `k`, which lie in `parts`; what the last one lacks is zero.
    fn push_matrix(&mut self, parts: &[Elements<'_>], n: usize, k: usize) {
        let mut rows =
            parts.iter().flat_map(|part| (0..part.len() / k).map(move |row| (part, row)));
        let mut panel = vec![0.0; PANEL * k]; // [column][k]
        for _ in 0..n.div_ceil(PANEL) {
            panel.fill(0.0);
            for (column, (part, row)) in panel.chunks_exact_mut(k).zip(rows.by_ref()) {
                part.read(row * k, column);
            }
            self.push_panel(&mut panel, k);
        }
    }

    /// Overwrites panels from `first` on with the first `panels` of `from`.
    fn replace(&mut self, first: usize, panels: usize, k: usize, from: &Self) {
        fn copy<T: Copy>(to: &mut [T], from: &[T], first: usize, panels: usize, of_panel: usize) {
            let len = panels * of_panel;
            to[first * of_panel..][..len].copy_from_slice(&from[..len]);
        }
        match (self, from) {
            (Self::F32(to), Self::F32(from)) => copy(to.own(), from, first, panels, 2 * k),
            (Self::Bf16(to), Self::Bf16(from)) => copy(to.own(), from, first, panels, 2 * k),
            (Self::F16(to), Self::F16(from)) => copy(to.own(), from, first, panels, 2 * k),
            (Self::I8 { pairs, scales }, Self::I8 { pairs: from, scales: from_scales }) => {
                copy(pairs.own(), from, first, panels, 2 * k.div_ceil(2));
                copy(scales.own(), from_scales, first, panels, 2 * k.div_ceil(GROUP));
            }
            _ => unreachable!("both were packed as one dtype"),
        }
    }

    fn push_panel(&mut self, panel: &mut [f32], k: usize) {
        if let Self::I8 { pairs, scales } = self {
            quantize(panel, k, scales.own());
            push_pairs(panel, k, pairs.own());
            return;
        }
        for i in 0..k {
            for half in 0..2 {
                let mut lane = [0.0; LANES];
                for (l, lane) in lane.iter_mut().enumerate() {
                    *lane = panel[(half * LANES + l) * k + i];
                }
                match self {
                    Self::F32(lanes) => lanes.own().push(F32x16(lane)),
                    Self::Bf16(lanes) => lanes.own().push(Bf16x16(lane.map(math::f32_to_bf16))),
                    Self::F16(lanes) => lanes.own().push(F16x16(lane.map(math::f32_to_f16))),
                    Self::I8 { .. } => unreachable!("those are pairs"),
                }
            }
        }
    }
}

/// A panel of integers; where `k` is odd, the last pair ends with zero.
fn push_pairs(panel: &[f32], k: usize, pairs: &mut Vec<Pairs>) {
    for i in (0..k).step_by(2) {
        for half in panel.chunks_exact(LANES * k) {
            let mut pair = [0; 2 * LANES];
            for (to, column) in pair.as_chunks_mut::<2>().0.iter_mut().zip(half.chunks_exact(k)) {
                *to = [column[i] as i8, column.get(i + 1).map_or(0, |x| *x as i8)];
            }
            pairs.push(Pairs(pair));
        }
    }
}

/// Replaces each group of a column by integers -127..=127 and pushes their scale, which is NaN where an element is no
/// finite number: then all products with the column are.
fn quantize(panel: &mut [f32], k: usize, scales: &mut Vec<F32x16>) {
    for start in (0..k).step_by(GROUP) {
        let end = (start + GROUP).min(k);
        let mut lanes = [[0.0; LANES]; 2];
        for column in 0..PANEL {
            let group = &mut panel[column * k + start..column * k + end];
            // `max` drops NaN; the bits of magnitudes are ordered as those are, and NaN is above infinity.
            let peak = group.iter().fold(0, |peak, x| x.abs().to_bits().max(peak));
            let peak = f32::from_bits(peak);
            let scale = if peak.is_finite() { peak / 127.0 } else { f32::NAN };
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            for x in group {
                *x = (*x * inverse).round_ties_even().clamp(-127.0, 127.0);
            }
            lanes[column / LANES][column % LANES] = scale;
        }
        scales.extend(lanes.map(F32x16));
    }
}

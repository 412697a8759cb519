//! `y = x W^T (+ bias) (+ residual)`.
//!
//! Each element is `fma(x[k], w[k], sum)` over k = 0, 1, 2, ... from zero. With int8 weights that sum starts
//! anew in every group of 64, and the groups' sums are added with `fma(sum, scale, total)`.

use std::ops::Range;

use crate::simd::{Kernel, LANES, Level, Simd};
use crate::tile::{F32x16, Lane, tile};
use crate::weight::{GROUP, Lanes, PANEL, Weight};

/// Most rows of a tile on any machine.
const MAX_TILE: usize = 12;
/// Floats of `x` that are worked on at once, so that they stay in a second-level cache of 512 KiB.
const BLOCK: usize = 96 * 1024;

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    x: Vec<f32>,
    panel: Vec<F32x16>,
}

/// One product of whole, dense rows.
#[derive(Debug)]
pub struct Linear<'a> {
    /// `[rows, k]`.
    pub x: &'a [f32],
    /// `[n, k]`.
    pub weight: &'a Weight,
    /// `[rows, n]`, added at the end.
    pub residual: Option<&'a [f32]>,
    /// `[rows, n]`.
    pub y: &'a mut [f32],
}

impl Linear<'_> {
    /// Computes `y`.
    /// # Panics
    /// If a length does not fit the weight.
    pub fn compute(self, level: Level, scratch: &mut Scratch) {
        let (n, k) = (self.weight.n(), self.weight.k());
        assert!(
            self.x.len().is_multiple_of(k) && self.y.len() == self.x.len() / k * n,
            "shape of y"
        );
        assert!(self.residual.is_none_or(|r| r.len() == self.y.len()), "shape of the residual");
        let product = Product {
            x: self.x,
            x_at: RowsAt::dense(k),
            rows: self.x.len() / k,
            weight: self.weight,
            index: 0,
            y: self.y,
            y_at: RowsAt::dense(n),
            finish: Finish::Set { residual: self.residual },
        };
        product.compute(level, scratch);
    }
}

/// Where the rows of a matrix lie in a slice: row `i` is number `ids[i]`, or `i` itself.
#[derive(Debug, Clone, Copy)]
pub struct RowsAt<'a> {
    /// Where number 0 begins.
    pub start: usize,
    /// From a row to the next.
    pub stride: usize,
    /// Which rows.
    pub ids: Option<&'a [u32]>,
}

impl RowsAt<'_> {
    /// Rows of `width` without gaps.
    pub fn dense(width: usize) -> Self {
        Self { start: 0, stride: width, ids: None }
    }

    #[inline]
    fn of(&self, row: usize) -> usize {
        self.start + self.ids.map_or(row, |ids| ids[row] as usize) * self.stride
    }
}

/// What becomes of the sums.
#[derive(Debug, Clone, Copy)]
pub enum Finish<'a> {
    /// They replace `y`, plus the weight's bias, plus the residual, which lies as `y` does.
    Set {
        /// Added last.
        residual: Option<&'a [f32]>,
    },
    /// They are added to `y`.
    Add,
}

/// One product of rows that lie anywhere with one matrix of a [`Weight`].
#[derive(Debug)]
pub struct Product<'a> {
    /// Holds rows of `k`.
    pub x: &'a [f32],
    /// Where they are.
    pub x_at: RowsAt<'a>,
    /// How many.
    pub rows: usize,
    /// The matrices.
    pub weight: &'a Weight,
    /// Which of them.
    pub index: usize,
    /// Holds rows of `n`.
    pub y: &'a mut [f32],
    /// Where they are.
    pub y_at: RowsAt<'a>,
    /// What becomes of the sums.
    pub finish: Finish<'a>,
}

impl Product<'_> {
    /// Computes `y`.
    /// # Panics
    /// If a row does not lie in its slice.
    pub fn compute(self, level: Level, scratch: &mut Scratch) {
        match &self.weight.lanes {
            Lanes::F32(lanes) => self.with(level, lanes, None, scratch),
            Lanes::Bf16(lanes) => self.with(level, lanes, None, scratch),
            Lanes::F16(lanes) => self.with(level, lanes, None, scratch),
            Lanes::I8 { lanes, scales } => self.with(level, lanes, Some(scales), scratch),
        }
    }

    fn with<L: Lane>(
        self,
        level: Level,
        lanes: &[L],
        scales: Option<&[F32x16]>,
        scratch: &mut Scratch,
    ) {
        let (n, k) = (self.weight.n(), self.weight.k());
        let first = self.index * n.div_ceil(PANEL);
        let panels = Panels {
            lanes: &lanes[first * k * 2..],
            scales: scales.map(|scales| &scales[first * k.div_ceil(GROUP) * 2..]),
            k,
        };
        let bias = self.weight.bias.as_deref();
        let mut edge = Edge { n, at: self.y_at, bias, finish: self.finish, y: self.y };
        // Small enough for the cache, and a multiple of every tile.
        let block = (BLOCK / k / MAX_TILE).max(1) * MAX_TILE;
        for start in (0..self.rows).step_by(block) {
            let rows = start..self.rows.min(start + block);
            block_of(level, self.x, self.x_at, rows, panels, &mut edge, scratch);
        }
    }
}

/// Panels of one matrix, and maybe more behind it.
#[derive(Debug, Clone, Copy)]
struct Panels<'a, L> {
    lanes: &'a [L],
    scales: Option<&'a [F32x16]>,
    k: usize,
}

impl<'a, L> Panels<'a, L> {
    fn lanes(&self, panel: usize) -> &'a [L] {
        &self.lanes[panel * self.k * 2..(panel + 1) * self.k * 2]
    }

    fn scales(&self, panel: usize) -> Option<&'a [F32x16]> {
        let groups = self.k.div_ceil(GROUP);
        self.scales.map(|s| &s[panel * groups * 2..(panel + 1) * groups * 2])
    }
}

/// `rows` cut into tiles of nearly equal height, none above `most`.
fn tiles(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = rows.div_ceil(most);
    (0..count).map(move |i| {
        let start = rows * i / count;
        (start, rows * (i + 1) / count - start)
    })
}

fn block_of<L: Lane>(
    level: Level,
    x: &[f32],
    x_at: RowsAt<'_>,
    range: Range<usize>,
    weight: Panels<'_, L>,
    edge: &mut Edge<'_>,
    scratch: &mut Scratch,
) {
    let (rows, k) = (range.len(), weight.k);
    let row_of = |row: usize| &x[x_at.of(range.start + row)..][..k];
    let most = level.tile_rows();
    // [tile][k][rows of the tile], so that a tile reads one stream.
    let packed = if rows == 1 {
        row_of(0)
    } else {
        scratch.x.resize((rows * k).max(scratch.x.len()), 0.0);
        for (start, height) in tiles(rows, most) {
            let packed = &mut scratch.x[start * k..(start + height) * k];
            for m in 0..height {
                for (packed, x) in packed.chunks_exact_mut(height).zip(row_of(start + m)) {
                    packed[m] = *x;
                }
            }
        }
        &scratch.x[..rows * k]
    };
    let panels = edge.n.div_ceil(PANEL);
    let widen = rows > most && size_of::<L>() < size_of::<F32x16>();
    let pairs = rows <= level.paired_rows();
    let mut panel = 0;
    while panel < panels {
        let count = if pairs && panel + 1 < panels { 2 } else { 1 };
        let scale = [weight.scales(panel), weight.scales(panel + count - 1)];
        if widen {
            // Many rows read this panel: widen it once. The values are the same, so are the sums.
            scratch.panel.resize((k * 2).max(scratch.panel.len()), F32x16([0.0; LANES]));
            level.run(Widen { from: weight.lanes(panel), to: &mut scratch.panel[..k * 2] });
            let w = [&scratch.panel[..k * 2]; 2];
            for (start, height) in tiles(rows, most) {
                let a = &packed[start * k..(start + height) * k];
                Cell { a, height, w, scale, count }.compute(
                    level,
                    range.start + start,
                    panel,
                    edge,
                );
            }
        } else {
            let w = [weight.lanes(panel), weight.lanes(panel + count - 1)];
            for (start, height) in tiles(rows, most) {
                let a = &packed[start * k..(start + height) * k];
                Cell { a, height, w, scale, count }.compute(
                    level,
                    range.start + start,
                    panel,
                    edge,
                );
            }
        }
        panel += count;
    }
}

struct Widen<'a, L> {
    from: &'a [L],
    to: &'a mut [F32x16],
}

impl<L: Lane> Kernel for Widen<'_, L> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, to) in self.from.iter().zip(self.to) {
            s.store(from.load(s), &mut to.0);
        }
    }
}

/// Where sums go, and what is added to them on the way.
struct Edge<'a> {
    n: usize,
    at: RowsAt<'a>,
    bias: Option<&'a [f32]>,
    finish: Finish<'a>,
    y: &'a mut [f32],
}

impl Edge<'_> {
    /// Finishes the sums of row `row`, columns `column..`, as far as there are columns.
    fn put<const N: usize>(&mut self, row: usize, column: usize, sums: &[[f32; LANES]; N]) {
        if column >= self.n {
            return;
        }
        let width = (N * LANES).min(self.n - column);
        let at = self.at.of(row) + column;
        let y = &mut self.y[at..at + width];
        let sums = &sums.as_flattened()[..width];
        let Finish::Set { residual } = self.finish else {
            for (y, sum) in y.iter_mut().zip(sums) {
                *y += sum;
            }
            return;
        };
        y.copy_from_slice(sums);
        if let Some(bias) = self.bias {
            for (y, b) in y.iter_mut().zip(&bias[column..column + width]) {
                *y += b;
            }
        }
        if let Some(residual) = residual {
            for (y, r) in y.iter_mut().zip(&residual[at..at + width]) {
                *y += r;
            }
        }
    }
}

/// One tile of rows by `count` (one or two) panels.
struct Cell<'a, L> {
    a: &'a [f32],
    height: usize,
    w: [&'a [L]; 2],
    scale: [Option<&'a [F32x16]>; 2],
    count: usize,
}

impl<L: Lane> Cell<'_, L> {
    fn compute(&self, level: Level, row: usize, panel: usize, edge: &mut Edge<'_>) {
        match self.height {
            1 => self.rows::<1>(level, row, panel, edge),
            2 => self.rows::<2>(level, row, panel, edge),
            3 => self.rows::<3>(level, row, panel, edge),
            4 => self.rows::<4>(level, row, panel, edge),
            5 => self.rows::<5>(level, row, panel, edge),
            6 => self.rows::<6>(level, row, panel, edge),
            7 => self.rows::<7>(level, row, panel, edge),
            8 => self.rows::<8>(level, row, panel, edge),
            9 => self.rows::<9>(level, row, panel, edge),
            10 => self.rows::<10>(level, row, panel, edge),
            11 => self.rows::<11>(level, row, panel, edge),
            12 => self.rows::<12>(level, row, panel, edge),
            height => unreachable!("a tile of {height} rows"),
        }
    }

    fn rows<const M: usize>(&self, level: Level, row: usize, panel: usize, edge: &mut Edge<'_>) {
        let (a, _) = self.a.as_chunks::<M>();
        let column = panel * PANEL;
        let [w0, w1] = self.w;
        if self.count == 2 {
            let w = [w0, &w0[1..], w1, &w1[1..]];
            let scale = self.scale[0].zip(self.scale[1]).map(|(a, b)| [a, &a[1..], b, &b[1..]]);
            self.store::<M, 4>(level.run(Sums { a, w, scale }), row, column, edge);
        } else if level.is_wide() || M <= 3 {
            let scale = self.scale[0].map(|a| [a, &a[1..]]);
            self.store::<M, 2>(level.run(Sums { a, w: [w0, &w0[1..]], scale }), row, column, edge);
        } else {
            for half in 0..2 {
                let scale = self.scale[0].map(|a| [&a[half..]]);
                let sums = level.run(Sums { a, w: [&w0[half..]], scale });
                self.store::<M, 1>(sums, row, column + half * LANES, edge);
            }
        }
    }

    fn store<const M: usize, const N: usize>(
        &self,
        sums: [[[f32; LANES]; N]; M],
        row: usize,
        column: usize,
        edge: &mut Edge<'_>,
    ) {
        for (m, sums) in sums.iter().enumerate() {
            edge.put(row + m, column, sums);
        }
    }
}

struct Sums<'a, L, const M: usize, const N: usize> {
    a: &'a [[f32; M]],
    w: [&'a [L]; N],
    scale: Option<[&'a [F32x16]; N]>,
}

impl<L: Lane, const M: usize, const N: usize> Kernel for Sums<'_, L, M, N> {
    type Output = [[[f32; LANES]; N]; M];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut total = [[s.splat(0.0); N]; M];
        for (g, a) in self.a.chunks(GROUP).enumerate() {
            let mut w = self.w;
            for w in &mut w {
                *w = &w[g * GROUP * 2..];
            }
            let Some(scale) = self.scale else {
                tile::<S, L, M, N, 2>(s, a, w, &mut total);
                continue;
            };
            let mut sums = [[s.splat(0.0); N]; M];
            tile::<S, L, M, N, 2>(s, a, w, &mut sums);
            for n in 0..N {
                let scale = scale[n][g * 2].load(s);
                for m in 0..M {
                    total[m][n] = s.fma(sums[m][n], scale, total[m][n]);
                }
            }
        }
        let mut out = [[[0.0; LANES]; N]; M];
        for (out, total) in out.iter_mut().zip(&total) {
            for (out, total) in out.iter_mut().zip(total) {
                s.store(*total, out);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight::{Dtype, Elements};

    /// Numbers in -1..1 that need all bits of an `f32`.
    fn noise(seed: u32, n: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(747_796_405) | 1;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    fn linear(level: Level, x: &[f32], weight: &Weight) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / weight.k() * weight.n()];
        Linear { x, weight, residual: None, y: &mut y }.compute(level, &mut Scratch::default());
        y
    }

    const DTYPES: [Dtype; 4] = [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16, Dtype::Int8];

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_any_batch_at_every_level() {
        for (n, k) in [(33, 65), (96, 200), (130, 64), (7, 3)] {
            let w = noise(1, n * k);
            for dtype in DTYPES {
                let bias = Some(noise(3, n));
                let weight = Weight::pack(&[Elements::F32(&w)], k, bias, dtype);
                let x = noise(2, 300 * k);
                let alone: Vec<f32> =
                    x.chunks(k).flat_map(|row| linear(Level::detect(), row, &weight)).collect();
                for level in Level::all() {
                    for rows in [1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 300] {
                        let y = linear(level, &x[..rows * k], &weight);
                        let same = y.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{level:?} {dtype:?} {rows} rows, n {n}, k {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn float32_is_the_sequential_sum() {
        let (n, k) = (40, 77);
        let (w, x) = (noise(4, n * k), noise(5, k));
        let weight = Weight::pack(&[Elements::F32(&w)], k, None, Dtype::Float32);
        for (y, w) in linear(Level::detect(), &x, &weight).iter().zip(w.chunks(k)) {
            let want = x.iter().zip(w).fold(0.0_f32, |sum, (x, w)| x.mul_add(*w, sum));
            assert_eq!(y.to_bits(), want.to_bits());
        }
    }

    #[test]
    fn stacked_parts_are_the_stacked_outputs_and_the_residual_is_added() {
        let k = 20;
        let (a, b, x) = (noise(6, 5 * k), noise(7, 40 * k), noise(8, 2 * k));
        let both = [Elements::F32(&a), Elements::F32(&b)];
        let weight = Weight::pack(&both, k, None, Dtype::Float32);
        let plain = linear(Level::detect(), &x, &weight);
        let first = Weight::pack(&both[..1], k, None, Dtype::Float32);
        assert_eq!(plain[45..50], linear(Level::detect(), &x, &first)[5..10]);
        let residual = noise(9, plain.len());
        let mut y = vec![0.0; plain.len()];
        let job = Linear { x: &x, weight: &weight, residual: Some(&residual), y: &mut y };
        job.compute(Level::detect(), &mut Scratch::default());
        for ((y, p), r) in y.iter().zip(plain).zip(residual) {
            assert_eq!(*y, p + r);
        }
    }

    #[test]
    fn int8_is_within_half_a_step_of_each_weight() {
        let (n, k) = (32, 130);
        let w = noise(10, n * k);
        let weight = Weight::pack(&[Elements::F32(&w)], k, None, Dtype::Int8);
        for i in 0..k {
            let mut x = vec![0.0; k];
            x[i] = 1.0;
            for (y, row) in linear(Level::detect(), &x, &weight).iter().zip(w.chunks(k)) {
                assert!((y - row[i]).abs() <= 0.5001 / 127.0, "{y} for {}", row[i]);
            }
        }
    }
}

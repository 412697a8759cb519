//! Rows that lie anywhere times one of many matrices: what [`crate::linear`], heads and experts are made of.
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

/// Shortest panels that are read in pairs. A guess: those of experts are 64, those of whole layers from 256 on.
const PAIRED_K: usize = 128;

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    x: Vec<f32>,
    panel: Vec<F32x16>,
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
    /// Whether the product before, with the same scratch, had the same rows of the same `x`: they are not packed again.
    pub x_packed: bool,
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
            let x = Source {
                x: self.x,
                at: self.x_at,
                rows: start..self.rows.min(start + block),
                packed: self.x_packed && self.rows <= block,
            };
            block_of(level, &x, panels, &mut edge, scratch);
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

/// Some rows of `x`.
struct Source<'a> {
    x: &'a [f32],
    at: RowsAt<'a>,
    rows: Range<usize>,
    /// Whether the scratch holds them already.
    packed: bool,
}

impl<'a> Source<'a> {
    fn row(&self, row: usize, k: usize) -> &'a [f32] {
        &self.x[self.at.of(self.rows.start + row)..][..k]
    }

    /// `[tile][k][rows of the tile]`, so that a tile reads one stream.
    fn pack<'s>(&self, k: usize, most: usize, packed: &'s mut Vec<f32>) -> &'s [f32] {
        let rows = self.rows.len();
        packed.resize((rows * k).max(packed.len()), 0.0);
        if !self.packed {
            for (start, height) in tiles(rows, most) {
                let tile = &mut packed[start * k..(start + height) * k];
                for m in 0..height {
                    for (to, x) in tile.chunks_exact_mut(height).zip(self.row(start + m, k)) {
                        to[m] = *x;
                    }
                }
            }
        }
        &packed[..rows * k]
    }
}

fn block_of<L: Lane>(
    level: Level,
    x: &Source<'_>,
    weight: Panels<'_, L>,
    edge: &mut Edge<'_>,
    scratch: &mut Scratch,
) {
    let (rows, k) = (x.rows.len(), weight.k);
    let most = level.tile_rows();
    let packed = if rows == 1 { x.row(0, k) } else { x.pack(k, most, &mut scratch.x) };
    let panels = edge.n.div_ceil(PANEL);
    let widen = rows > most && size_of::<L>() < size_of::<F32x16>();
    // Two panels are two streams; short ones are read one after the other, in the order they lie in.
    let pairs = rows <= level.paired_rows() && k >= PAIRED_K;
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
                let row = x.rows.start + start;
                Cell { a, height, w, scale, count }.compute(level, row, panel, edge);
            }
        } else {
            let w = [weight.lanes(panel), weight.lanes(panel + count - 1)];
            for (start, height) in tiles(rows, most) {
                let a = &packed[start * k..(start + height) * k];
                let row = x.rows.start + start;
                Cell { a, height, w, scale, count }.compute(level, row, panel, edge);
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

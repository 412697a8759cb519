//! Rows that lie anywhere times one of many matrices: what [`crate::linear`], heads and experts are made of.
//!
//! Each element is `fma(x[k], w[k], sum)` over k = 0, 1, 2, ... from zero; with int8 weights that of [`integers`].

pub(crate) mod integers;

use std::ops::Range;

use self::integers::Integers;
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::tile::{F32x16, Lane, tile};
use crate::weight::{Lanes, PANEL, Weight};

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
    integers: Integers,
}

/// Where the rows of a matrix lie in a slice: row `i` is number `ids[i]`, or `i` itself.
#[derive(Debug, Clone, Copy)]
pub struct RowsAt<'a> {
    /// Where number 0 begins.
    pub start: usize,
    /// From a row to the next.
    pub stride: usize,
    /// Number of each row; `None` where row `i` is number `i`.
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
        /// Added after the bias; none where `None`.
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
    /// Rows of `x`, and of `y`.
    pub rows: usize,
    /// Whether the product before, with the same scratch, had the same rows of the same `x`: they are not packed again.
    pub x_packed: bool,
    /// One or several matrices of one shape.
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
        let (n, k, weight) = (self.weight.n(), self.weight.k(), self.weight);
        let first = self.index * n.div_ceil(PANEL);
        let bias = weight.bias.as_deref();
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
            let (edge, at) = (&mut edge, first * k * 2);
            match &weight.lanes {
                Lanes::F32(lanes) => block_of(level, &x, &lanes[at..], k, edge, scratch),
                Lanes::Bf16(lanes) => block_of(level, &x, &lanes[at..], k, edge, scratch),
                Lanes::F16(lanes) => block_of(level, &x, &lanes[at..], k, edge, scratch),
                Lanes::I8 { pairs, scales } => {
                    let panels = integers::Panels::from(first, k, pairs, scales);
                    integers::block_of(level, &x, panels, edge, &mut scratch.integers);
                }
            }
        }
    }
}

/// `rows` cut into tiles of nearly equal height, none above `most`.
pub(crate) fn tiles(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = rows.div_ceil(most);
    (0..count).map(move |i| {
        let start = rows * i / count;
        (start, rows * (i + 1) / count - start)
    })
}

/// Some rows of `x`.
pub(crate) struct Source<'a> {
    x: &'a [f32],
    at: RowsAt<'a>,
    pub(crate) rows: Range<usize>,
    /// Whether the scratch holds them already.
    pub(crate) packed: bool,
}

impl<'a> Source<'a> {
    pub(crate) fn row(&self, row: usize, k: usize) -> &'a [f32] {
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
    lanes: &[L],
    k: usize,
    edge: &mut Edge<'_>,
    scratch: &mut Scratch,
) {
    let rows = x.rows.len();
    let most = level.tiles().most;
    let packed = if rows == 1 { x.row(0, k) } else { x.pack(k, most, &mut scratch.x) };
    let panels = edge.n.div_ceil(PANEL);
    let panel_of = |panel: usize| &lanes[panel * k * 2..(panel + 1) * k * 2];
    let widen = rows > most && size_of::<L>() < size_of::<F32x16>();
    // Two panels are two streams; short ones are read one after the other, in the order they lie in.
    let pairs = rows <= level.tiles().paired && k >= PAIRED_K;
    let mut panel = 0;
    while panel < panels {
        let count = if pairs && panel + 1 < panels { 2 } else { 1 };
        if widen {
            // Many rows read this panel: widen it once. The values are the same, so are the sums.
            scratch.panel.resize((k * 2).max(scratch.panel.len()), F32x16([0.0; LANES]));
            level.run(Widen { from: panel_of(panel), to: &mut scratch.panel[..k * 2] });
            let w = [&scratch.panel[..k * 2]; 2];
            for (start, height) in tiles(rows, most) {
                let a = &packed[start * k..(start + height) * k];
                let row = x.rows.start + start;
                at_height(height, &mut Cell { a, w, count, level, row, panel, edge });
            }
        } else {
            let w = [panel_of(panel), panel_of(panel + count - 1)];
            for (start, height) in tiles(rows, most) {
                let a = &packed[start * k..(start + height) * k];
                let row = x.rows.start + start;
                at_height(height, &mut Cell { a, w, count, level, row, panel, edge });
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
pub(crate) struct Edge<'a> {
    pub(crate) n: usize,
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

    /// Finishes the sums of rows `row..`.
    pub(crate) fn put_all<const M: usize, const N: usize>(
        &mut self,
        row: usize,
        column: usize,
        sums: &[[[f32; LANES]; N]; M],
    ) {
        for (m, sums) in sums.iter().enumerate() {
            self.put(row + m, column, sums);
        }
    }
}

/// Work on a tile of rows, whose height the compiler knows.
pub(crate) trait Tile {
    /// Does it for `M` rows.
    fn rows<const M: usize>(&mut self);
}

/// Work on a tile of 1 to 12 rows.
pub(crate) fn at_height(height: usize, tile: &mut impl Tile) {
    match height {
        1 => tile.rows::<1>(),
        2 => tile.rows::<2>(),
        3 => tile.rows::<3>(),
        4 => tile.rows::<4>(),
        5 => tile.rows::<5>(),
        6 => tile.rows::<6>(),
        7 => tile.rows::<7>(),
        8 => tile.rows::<8>(),
        9 => tile.rows::<9>(),
        10 => tile.rows::<10>(),
        11 => tile.rows::<11>(),
        12 => tile.rows::<12>(),
        height => unreachable!("a tile of {height} rows"),
    }
}

/// One tile of rows by `count` (one or two) panels.
struct Cell<'a, 'y, L> {
    a: &'a [f32],
    w: [&'a [L]; 2],
    count: usize,
    level: Level,
    row: usize,
    panel: usize,
    edge: &'a mut Edge<'y>,
}

impl<L: Lane> Tile for Cell<'_, '_, L> {
    fn rows<const M: usize>(&mut self) {
        let Self { level, row, .. } = *self;
        let (a, _) = self.a.as_chunks::<M>();
        let column = self.panel * PANEL;
        let [w0, w1] = self.w;
        if self.count == 2 {
            let w = [w0, &w0[1..], w1, &w1[1..]];
            self.edge.put_all(row, column, &level.run(Sums { a, w }));
        } else if M <= level.tiles().whole {
            self.edge.put_all(row, column, &level.run(Sums { a, w: [w0, &w0[1..]] }));
        } else {
            for half in 0..2 {
                let sums = level.run(Sums { a, w: [&w0[half..]] });
                self.edge.put_all(row, column + half * LANES, &sums);
            }
        }
    }
}

struct Sums<'a, L, const M: usize, const N: usize> {
    a: &'a [[f32; M]],
    w: [&'a [L]; N],
}

impl<L: Lane, const M: usize, const N: usize> Kernel for Sums<'_, L, M, N> {
    type Output = [[[f32; LANES]; N]; M];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        if const { !S::TILES.have(M, N) } {
            unreachable!("no tile of {M} rows by {N} vectors"); // so it is not compiled
        }
        let mut total = [[s.splat(0.0); N]; M];
        tile::<S, L, M, N, 2>(s, self.a, self.w, &mut total);
        let mut out = [[[0.0; LANES]; N]; M];
        for (out, total) in out.iter_mut().zip(&total) {
            for (out, total) in out.iter_mut().zip(total) {
                s.store(*total, out);
            }
        }
        out
    }
}

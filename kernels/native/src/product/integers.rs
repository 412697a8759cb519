//! Products with int8 weights: whole numbers inside of a group, so that their order does not matter.
//!
//! The 64 elements of a row that meet one group of weights become integers of sixteen bits and a scale: they keep 15
//! bits of the greatest, where the weights have 7. So each product is below 2^22 and the sum of a group below 2^28: it
//! is exact, whichever instruction adds how many of them at once. An element is `fma(sum * row scale, column scale,
//! total)` over the groups in order, from zero.

use crate::product::{Edge, Source, Tile, at_height, tiles};
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::tile::{AHEAD, F32x16, Lane};
use crate::weight::{GROUP, PANEL, Pairs};

/// The greatest integer of a row.
const GREATEST: f32 = 32_767.0;
/// A group whose greatest element is not above this counts as zeros: the inverse of its scale would be infinite.
const LEAST: f32 = 1e-30;
/// Adding it rounds to an integer, ties to even, and leaves that in the low bits.
const ROUNDER: f32 = 12_582_912.0;
/// Rows up to which the stream of weights is what takes the time.
const STREAMING_ROWS: usize = 4;

/// Rows as integers: `[tile][pairs of k][rows of the tile]`, and scales `[tile][groups][rows of the tile]`.
#[derive(Debug, Default)]
pub(crate) struct Integers {
    pairs: Vec<i32>, // the first of a pair in the low half
    scales: Vec<f32>,
}

/// Panels of one matrix, and maybe more behind it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels<'a> {
    pairs: &'a [Pairs],
    scales: &'a [F32x16],
    k: usize,
}

impl<'a> Panels<'a> {
    /// Those of `k` elements a column, from number `first` on.
    pub(crate) fn from(first: usize, k: usize, pairs: &'a [Pairs], scales: &'a [F32x16]) -> Self {
        let pairs = &pairs[first * k.div_ceil(2) * 2..];
        Self { pairs, scales: &scales[first * k.div_ceil(GROUP) * 2..], k }
    }

    fn pairs(&self, panel: usize) -> &'a [Pairs] {
        let pairs = self.k.div_ceil(2);
        &self.pairs[panel * pairs * 2..(panel + 1) * pairs * 2]
    }

    fn scales(&self, panel: usize) -> &'a [F32x16] {
        let groups = self.k.div_ceil(GROUP);
        &self.scales[panel * groups * 2..(panel + 1) * groups * 2]
    }
}

/// Computes the rows of `x`.
pub(crate) fn block_of(
    level: Level,
    x: &Source<'_>,
    weight: Panels<'_>,
    edge: &mut Edge<'_>,
    integers: &mut Integers,
) {
    let (rows, k) = (x.rows.len(), weight.k);
    let (pairs, groups) = (k.div_ceil(2), k.div_ceil(GROUP));
    let most = level.tiles().most;
    integers.pack(level, x, k, most);
    // One stream of weights: it comes at nearly the rate of a plain read, two side by side at three quarters of it.
    for panel in 0..edge.n.div_ceil(PANEL) {
        let (w, scale) = (weight.pairs(panel), weight.scales(panel));
        for (start, height) in tiles(rows, most) {
            let a = &integers.pairs[start * pairs..(start + height) * pairs];
            let a_scale = &integers.scales[start * groups..(start + height) * groups];
            let row = x.rows.start + start;
            let mut cell = Cell { a, a_scale, w, scale, level, row, panel, edge };
            at_height(height, &mut cell);
        }
    }
}

impl Integers {
    fn pack(&mut self, level: Level, x: &Source<'_>, k: usize, most: usize) {
        if x.packed {
            return;
        }
        let (pairs, groups, rows) = (k.div_ceil(2), k.div_ceil(GROUP), x.rows.len());
        self.pairs.resize((rows * pairs).max(self.pairs.len()), 0);
        self.scales.resize((rows * groups).max(self.scales.len()), 0.0);
        for (start, height) in tiles(rows, most) {
            for m in 0..height {
                level.run(Quantise {
                    x: x.row(start + m, k),
                    pairs: &mut self.pairs[start * pairs..(start + height) * pairs],
                    scales: &mut self.scales[start * groups..(start + height) * groups],
                    height,
                    m,
                });
            }
        }
    }
}

/// Row `m` of a tile of `height`.
struct Quantise<'a> {
    x: &'a [f32],
    pairs: &'a mut [i32],
    scales: &'a mut [f32],
    height: usize,
    m: usize,
}

impl Kernel for Quantise<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { height, m, .. } = self;
        let groups = self.x.chunks(GROUP).zip(self.pairs.chunks_mut(GROUP / 2 * height));
        for ((x, pairs), scale) in groups.zip(self.scales[m..].iter_mut().step_by(height)) {
            let mut group = [0.0; GROUP];
            group[..x.len()].copy_from_slice(x);
            let (integers, of_group) = quantised(&group);
            *scale = of_group;
            let to = pairs[m..].iter_mut().step_by(height);
            for (to, [first, second]) in to.zip(integers.as_chunks().0) {
                *to = i32::from(first.cast_unsigned()) | i32::from(*second) << 16;
            }
        }
    }
}

/// Integers and their scale, which is NaN where an element is no finite number: then all sums are.
#[inline(always)]
fn quantised(group: &[f32; GROUP]) -> ([i16; GROUP], f32) {
    let mut peak = 0;
    for x in group {
        peak = peak.max(x.to_bits() & 0x7fff_ffff); // ordered as the magnitudes are; NaN is above infinity
    }
    let peak = f32::from_bits(peak);
    let mut integers = [0; GROUP];
    if !peak.is_finite() {
        return (integers, f32::NAN);
    }
    if peak <= LEAST {
        return (integers, 0.0);
    }
    let inverse = GREATEST / peak;
    for (integer, x) in integers.iter_mut().zip(group) {
        *integer = (x * inverse + ROUNDER).to_bits() as i16;
    }
    (integers, peak / GREATEST)
}

/// One tile of rows by one panel.
struct Cell<'a, 'y> {
    a: &'a [i32],
    a_scale: &'a [f32],
    w: &'a [Pairs],
    scale: &'a [F32x16],
    level: Level,
    row: usize,
    panel: usize,
    edge: &'a mut Edge<'y>,
}

impl Tile for Cell<'_, '_> {
    fn rows<const M: usize>(&mut self) {
        let Self { level, row, w, scale, .. } = *self;
        let (a, a_scale) = (self.a.as_chunks::<M>().0, self.a_scale.as_chunks::<M>().0);
        let column = self.panel * PANEL;
        if M <= level.tiles().whole {
            let (w, scale) = ([w, &w[1..]], [scale, &scale[1..]]);
            let sums = level.run_integers(Sums { a, a_scale, w, scale });
            self.edge.put_all(row, column, &sums);
        } else {
            for half in 0..2 {
                let (w, scale) = ([&w[half..]], [&scale[half..]]);
                let sums = level.run_integers(Sums { a, a_scale, w, scale });
                self.edge.put_all(row, column + half * LANES, &sums);
            }
        }
    }
}

/// Every other entry of each of `w` is a lane's, and of `scale`.
struct Sums<'a, const M: usize, const N: usize> {
    a: &'a [[i32; M]],
    a_scale: &'a [[f32; M]],
    w: [&'a [Pairs]; N],
    scale: [&'a [F32x16]; N],
}

impl<const M: usize, const N: usize> Kernel for Sums<'_, M, N> {
    type Output = [[[f32; LANES]; N]; M];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        if const { !S::TILES.have(M, N) } {
            unreachable!("no tile of {M} rows by {N} vectors"); // so it is not compiled
        }
        let mut total = [[s.splat(0.0); N]; M];
        for (g, (a, a_scale)) in self.a.chunks(GROUP / 2).zip(self.a_scale).enumerate() {
            let mut w = self.w;
            for w in &mut w {
                *w = &w[g * GROUP..];
            }
            let sums = tile(s, a, w);
            for n in 0..N {
                let scale = self.scale[n][g * 2].load(s);
                for m in 0..M {
                    let sum = s.mul(s.float(sums[m][n]), s.splat(a_scale[m]));
                    total[m][n] = s.fma(sum, scale, total[m][n]);
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

/// The sums of one group.
#[inline(always)]
fn tile<S: Simd, const M: usize, const N: usize>(
    s: S,
    a: &[[i32; M]],
    w: [&[Pairs]; N],
) -> [[S::Sums; N]; M] {
    let mut sums = [[s.zero_sums(); N]; M];
    for (i, a) in a.iter().enumerate() {
        if M <= STREAMING_ROWS {
            s.prefetch(std::ptr::from_ref(&w[0][i * 2]).wrapping_byte_add(AHEAD));
        }
        // Row by row: a pair of the row is in a register while it meets all columns, and then no more. Column by column
        // the pairs of all rows stay in registers, and sums have to go to the stack.
        let columns: [S::Pairs; N] = std::array::from_fn(|n| s.load_pairs(&w[n][i * 2].0));
        for m in 0..M {
            for n in 0..N {
                sums[m][n] = s.add_products(sums[m][n], a[m], columns[n]);
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::Linear;
    use crate::product::Scratch;
    use crate::weight::{Dtype, Elements, Weight};

    fn linear(level: Level, x: &[f32], w: &[f32]) -> Vec<f32> {
        let weight = Weight::pack(&[Elements::F32(w)], x.len(), None, Dtype::Int8);
        let mut y = vec![f32::NAN; weight.n()];
        let job = Linear { x, weight: &weight, residual: None, y: &mut y };
        job.compute(level, &mut Scratch::default());
        y
    }

    #[test]
    fn integers_are_within_half_a_step_of_the_elements() {
        let group: [f32; GROUP] = std::array::from_fn(|i| (i as f32 * 0.37).sin() * 9.0);
        let (integers, scale) = quantised(&group);
        for (integer, x) in integers.iter().zip(group) {
            // The quotient is rounded, too, to 2^-9 where it is large; and so is this product.
            assert!((f32::from(*integer) * scale - x).abs() <= 0.505 * scale, "{integer} for {x}");
        }
        assert_eq!(integers.iter().map(|x| x.unsigned_abs()).max(), Some(32_767));
    }

    #[test]
    fn the_greatest_integers_do_not_overflow() {
        let (x, w) = ([-3.0; GROUP], [2.0; GROUP]);
        for level in Level::all() {
            let y = linear(level, &x, &w)[0];
            assert!((y + 384.0).abs() < 1e-3, "{y} at {level:?}");
        }
    }

    #[test]
    fn what_is_no_finite_number_shows_in_every_output() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 3 * GROUP];
            x[70] = bad;
            let w = [0.5; 2 * 3 * GROUP];
            for level in Level::all() {
                assert!(linear(level, &x, &w).iter().all(|y| y.is_nan()), "{bad} at {level:?}");
            }
        }
    }

    #[test]
    fn what_is_no_finite_number_in_a_weight_shows_in_its_output_and_no_other() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut w = [0.5; 3 * 3 * GROUP];
            w[3 * GROUP + 70] = bad;
            for level in Level::all() {
                let y = linear(level, &[1.0; 3 * GROUP], &w);
                assert!(y[1].is_nan(), "{bad} at {level:?}");
                assert!(y[0].is_finite() && y[0] == y[2], "{y:?} at {level:?}");
            }
        }
    }

    #[test]
    fn next_to_nothing_counts_as_zero() {
        let mut x = [1e-38; 2 * GROUP];
        x[GROUP..].fill(2.0);
        assert_eq!(linear(Level::detect(), &x, &[1.0; 2 * GROUP]), [128.0]);
    }
}

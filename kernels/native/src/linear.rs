//! `y = x W^T (+ bias) (+ residual)` of whole, dense rows.

use crate::product::{Finish, Product, RowsAt, Scratch};
use crate::simd::Level;
use crate::weight::Weight;

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
            x_packed: false,
            weight: self.weight,
            index: 0,
            y: self.y,
            y_at: RowsAt::dense(n),
            finish: Finish::Set { residual: self.residual },
        };
        product.compute(level, scratch);
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

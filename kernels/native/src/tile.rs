//! The inner loop of all that is `f32`: a small tile of sums of products.

use crate::simd::{LANES, Simd};

/// Sixteen elements as they are stored, aligned to their own size.
pub trait Lane: Copy {
    /// Widens them, exactly.
    fn load<S: Simd>(&self, s: S) -> S::V;
}

impl Lane for [f32; LANES] {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S) -> S::V {
        s.load(self)
    }
}

/// Sixteen `f32` that lie aligned.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct F32x16(pub [f32; LANES]);

impl Lane for F32x16 {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S) -> S::V {
        s.load(&self.0)
    }
}

/// The bits of sixteen bfloat16, aligned.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub struct Bf16x16(pub [u16; LANES]);

impl Lane for Bf16x16 {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S) -> S::V {
        s.load_bf16(&self.0)
    }
}

/// The bits of sixteen float16, aligned.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub struct F16x16(pub [u16; LANES]);

impl Lane for F16x16 {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S) -> S::V {
        s.load_f16(&self.0)
    }
}

/// Bytes ahead of the reader that few rows ask for, where widening hides the stream from the prefetcher of the
/// processor. Measured on a Zen 4 server core: int8 15 -> 17 GB/s; float32 loses by it and does without.
pub(crate) const AHEAD: usize = 2048;

/// `sums[m][n] += a[i][m] * w[n][i * STRIDE]` for `i` = 0, 1, 2, ... in that order.
#[inline(always)]
pub fn tile<S: Simd, L: Lane, const M: usize, const N: usize, const STRIDE: usize>(
    s: S,
    a: &[[f32; M]],
    w: [&[L]; N],
    sums: &mut [[S::V; N]; M],
) {
    let mut acc = *sums;
    for (i, a) in a.iter().enumerate() {
        let mut column = [s.splat(0.0); N];
        for n in 0..N {
            let lane = &w[n][i * STRIDE];
            if M == 1 && size_of::<L>() < size_of::<F32x16>() && n % 2 == 0 {
                s.prefetch(std::ptr::from_ref(lane).wrapping_byte_add(AHEAD));
            }
            column[n] = lane.load(s);
        }
        for m in 0..M {
            let x = s.splat(a[m]);
            for n in 0..N {
                acc[m][n] = s.fma(x, column[n], acc[m][n]);
            }
        }
    }
    *sums = acc;
}

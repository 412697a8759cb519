//! Elementary functions that give the same bits on every machine, and 16-bit floats.

use std::f32::consts::{LN_2, LOG2_E};
use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};

use crate::simd::Simd;

/// Below this, `exp` is zero; softmax weights that small vanish beside the greatest, which is 1.
const EXP_LOW: f32 = -86.5;
/// Above this, `exp` stays at its value here: no infinity comes out of a finite number.
const EXP_HIGH: f32 = 88.0;
/// What `LN_2` lacks of the logarithm of 2.
const LN_2_REST: f32 = -1.904_654_3e-9;
/// Adding it leaves the integer part in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// `e^x` within 2 units in the last place; exactly 1 at 0 and exactly 0 at -infinity.
///
/// Range reduction to half an octave, then the polynomial of Cephes' `expf`.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let clamped = s.max(s.splat(EXP_LOW), x); // in this order NaN stays NaN
    let clamped = s.select_less(s.splat(EXP_HIGH), clamped, s.splat(EXP_HIGH), clamped);
    let t = s.fma(clamped, s.splat(LOG2_E), s.splat(ROUNDER));
    let n = s.sub(t, s.splat(ROUNDER));
    let r = s.fma(n, s.splat(-LN_2), clamped);
    let r = s.fma(n, s.splat(-LN_2_REST), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let y = s.add(s.fma(s.mul(r, r), p, r), s.splat(1.0));
    s.select_less(x, s.splat(EXP_LOW), s.splat(0.0), s.add_exponent(y, t))
}

/// Sine and cosine of an angle up to some million radians, to about 1e-15.
pub fn sin_cos(x: f64) -> (f64, f64) {
    const PI_2_REST: f64 = 6.123_233_995_736_766e-17;
    let quarter = (x * FRAC_2_PI).round_ties_even();
    let r = quarter.mul_add(-FRAC_PI_2, x);
    let r = quarter.mul_add(-PI_2_REST, r);
    let square = r * r;
    // Taylor series; |r| <= pi/4, so the first term left out is below 1e-17.
    let (mut sin, mut cos) = (1.0, 1.0);
    for i in (0..8).rev() {
        let n = f64::from(2 * i);
        sin = 1.0 - square / ((n + 2.0) * (n + 3.0)) * sin;
        cos = 1.0 - square / ((n + 1.0) * (n + 2.0)) * cos;
    }
    let (sin, cos) = (r * sin, cos);
    match (quarter as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// Converts exactly: every value of the short format is an `f32`.
#[inline(always)]
pub fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Nearest, ties to even; NaN stays NaN.
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Converts exactly: every value of the short format is an `f32`.
#[inline(always)]
pub fn f16_to_f32(x: u16) -> f32 {
    let sign = u32::from(x & 0x8000) << 16;
    let rest = u32::from(x & 0x7fff) << 13;
    let magnitude = if rest >= 0x0f80_0000 {
        f32::from_bits(rest | 0x7f80_0000) // infinity, NaN
    } else {
        // Shifted into place the exponent is 112 too low; multiplying mends it for subnormals too.
        f32::from_bits(rest) * f32::from_bits(0x7780_0000)
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

/// Nearest, ties to even; too large becomes infinity; NaN stays NaN.
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00; // rounds to 65,536 or more
    }
    if magnitude < 0x3880_0000 {
        // Subnormal: adding 0.5 puts the last bit of float16 in the last bit of float32.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0x3f00_0000) as u16;
    }
    let rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    sign | ((rounded - 0x3800_0000) >> 13) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, LANES, Level};

    struct Exp([f32; LANES]);
    impl Kernel for Exp {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            s.store(exp(s, s.load(&self.0)), &mut out);
            out
        }
    }

    #[test]
    fn exp_is_close_and_the_same_at_every_level() {
        for i in 0..4_000_i16 {
            let mut x = [0.0; LANES];
            for (lane, x) in (0_u8..).zip(&mut x) {
                *x = f32::from(i - 2_000) * 0.043 + f32::from(lane) * 0.0027;
            }
            let wide = Level::detect().run(Exp(x));
            for level in Level::all() {
                assert_eq!(
                    level.run(Exp(x)).map(f32::to_bits),
                    wide.map(f32::to_bits),
                    "{level:?}"
                );
            }
            for (x, y) in x.into_iter().zip(wide) {
                let want = f64::from(x).exp();
                assert!((f64::from(y) - want).abs() <= want * 2.5e-7, "exp({x}) = {y}, not {want}");
            }
        }
    }

    #[test]
    fn exp_at_its_corners() {
        let mut x = [0.0; LANES];
        x[..4].copy_from_slice(&[0.0, f32::NEG_INFINITY, f32::NAN, 1e9]);
        let y = Level::detect().run(Exp(x));
        assert_eq!(&y[..2], &[1.0, 0.0]);
        assert!(y[2].is_nan() && y[3].is_finite());
    }

    #[test]
    fn sin_cos_agree_with_the_library() {
        for i in 0..200_000_u32 {
            let x = f64::from(i) * 0.7371;
            let (sin, cos) = sin_cos(x);
            assert!((sin - x.sin()).abs() < 1e-11 && (cos - x.cos()).abs() < 1e-11, "{x}");
        }
    }

    #[test]
    fn sixteen_bit_floats_round_trip() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16_to_f32(bits), bf16_to_f32(bits));
            assert!(a.is_nan() || f32_to_f16(a) == bits, "{bits:#x}");
            assert!(b.is_nan() || f32_to_bf16(b) == bits, "{bits:#x}");
        }
        assert_eq!(f32_to_f16(1.0 + 1.0 / 2048.0), f32_to_f16(1.0)); // a tie, to even
        assert_eq!(f32_to_f16(65_520.0), 0x7c00);
        assert!(f16_to_f32(f32_to_f16(f32::NAN)).is_nan());
    }
}

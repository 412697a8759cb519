//! Sixteen `f32` lanes on any machine, and the only `unsafe` code of this crate.
//!
//! A token type ([`Avx512`], [`Avx2`], [`Portable`]) proves that its instruction set was detected. Kernels
//! are generic over [`Simd`], written once, and entered through [`Simd::run`], which compiles them for that
//! instruction set. Every operation rounds as IEEE 754 says, so all three give the same bits.
#![allow(
    unsafe_code,
    reason = "intrinsics, behind tokens that exist only after detection; nothing else is unsafe"
)]

/// Logical vector width. AVX2 uses two registers for it, NEON four.
pub const LANES: usize = 16;

/// A computation that [`Simd::run`] compiles for one instruction set.
///
/// `run` and all it calls must be `#[inline(always)]`, or they are compiled for the baseline instead.
pub trait Kernel {
    /// What it computes.
    type Output;
    /// Computes with the instructions of `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Operations on sixteen lanes. `max` and `select_less` treat NaN as x86 does.
pub trait Simd: Copy {
    /// Sixteen lanes.
    type V: Copy;
    /// Whether the register file holds a 12 x 32 tile of `f32` (else 6 x 16).
    const WIDE: bool;

    /// Runs `kernel` compiled for this instruction set.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;
    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Reads lanes.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// Reads bfloat16 lanes, exactly.
    fn load_bf16(self, x: &[u16; LANES]) -> Self::V;
    /// Reads float16 lanes, exactly.
    fn load_f16(self, x: &[u16; LANES]) -> Self::V;
    /// Reads integer lanes, exactly.
    fn load_i8(self, x: &[i8; LANES]) -> Self::V;
    /// Writes lanes.
    fn store(self, v: Self::V, out: &mut [f32; LANES]);
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a > b ? a : b`.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? yes : no`.
    fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Adds the low nine bits of `n`'s representation to the exponent field of `v`.
    fn add_exponent(self, v: Self::V, n: Self::V) -> Self::V;
    /// Asks for the cache line at `at`, which may lie outside of any object.
    fn prefetch<T>(self, at: *const T);

    /// Sum over the lanes in a fixed tree.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                x[i] += x[i + half];
            }
            half /= 2;
        }
        x[0]
    }

    /// Greatest lane.
    #[inline(always)]
    fn greatest(self, v: Self::V) -> f32 {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                x[i] = if x[i] > x[i + half] { x[i] } else { x[i + half] };
            }
            half /= 2;
        }
        x[0]
    }
}

/// The instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 F/BW/DQ/VL.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// What the compiler's baseline has: NEON on ARM.
    Portable(Portable),
}

impl Level {
    /// The widest that this machine has.
    pub fn detect() -> Self {
        Self::all()[0]
    }

    /// All that this machine has, the widest first.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx512::detect().map(Self::Avx512));
            all.extend(Avx2::detect().map(Self::Avx2));
        }
        all.push(Self::Portable(Portable));
        all
    }

    /// The name that [`Level::named`] takes.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            Self::Portable(_) => "portable",
        }
    }

    /// The level of that name, if this machine has it.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|level| level.name() == name)
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(kernel),
            Self::Portable(simd) => simd.run(kernel),
        }
    }

    /// Whether the register file holds a 12 x 32 tile, as [`Simd::WIDE`].
    pub fn is_wide(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::WIDE,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::WIDE,
            Self::Portable(_) => Portable::WIDE,
        }
    }

    /// Rows of the largest tile.
    pub fn tile_rows(self) -> usize {
        if self.is_wide() { 12 } else { 6 }
    }

    /// Rows up to which the registers hold two panels, which hides the latency of so few sums.
    pub fn paired_rows(self) -> usize {
        if self.is_wide() { 3 } else { 1 }
    }
}

/// Arrays, left to the compiler's vectoriser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Portable;

/// Sixteen lanes as an array.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub struct Array([f32; LANES]);

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> Array {
    let mut out = [0.0; LANES];
    for (i, out) in out.iter_mut().enumerate() {
        *out = f(i);
    }
    Array(out)
}

impl Simd for Portable {
    type V = Array;
    const WIDE: bool = false;

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Array {
        Array([x; LANES])
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Array {
        Array(*x)
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Array {
        each(|i| crate::math::bf16_to_f32(x[i]))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Array {
        each(|i| crate::math::f16_to_f32(x[i]))
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Array {
        each(|i| f32::from(x[i]))
    }
    #[inline(always)]
    fn store(self, v: Array, out: &mut [f32; LANES]) {
        *out = v.0;
    }
    #[inline(always)]
    fn fma(self, a: Array, b: Array, c: Array) -> Array {
        each(|i| a.0[i].mul_add(b.0[i], c.0[i]))
    }
    #[inline(always)]
    fn add(self, a: Array, b: Array) -> Array {
        each(|i| a.0[i] + b.0[i])
    }
    #[inline(always)]
    fn sub(self, a: Array, b: Array) -> Array {
        each(|i| a.0[i] - b.0[i])
    }
    #[inline(always)]
    fn mul(self, a: Array, b: Array) -> Array {
        each(|i| a.0[i] * b.0[i])
    }
    #[inline(always)]
    fn div(self, a: Array, b: Array) -> Array {
        each(|i| a.0[i] / b.0[i])
    }
    #[inline(always)]
    fn max(self, a: Array, b: Array) -> Array {
        each(|i| if a.0[i] > b.0[i] { a.0[i] } else { b.0[i] })
    }
    #[inline(always)]
    fn select_less(self, a: Array, b: Array, yes: Array, no: Array) -> Array {
        each(|i| if a.0[i] < b.0[i] { yes.0[i] } else { no.0[i] })
    }
    #[inline(always)]
    fn add_exponent(self, v: Array, n: Array) -> Array {
        each(|i| f32::from_bits(v.0[i].to_bits().wrapping_add(n.0[i].to_bits() << 23)))
    }
    #[inline(always)]
    fn prefetch<T>(self, _at: *const T) {}
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Kernel, LANES, Simd};

    /// An expression of intrinsics inside a method of a token.
    macro_rules! detected {
        ($e:expr) => {
            // SAFETY: `self` exists, and its only constructor is `detect`, so the processor has the
            // instructions. Pointers given to loads and stores come from references to arrays of exactly
            // the bytes that are read or written; unaligned forms are used throughout.
            unsafe { $e }
        };
    }

    /// Proof that AVX-512 F, BW, DQ and VL (with AVX2, FMA and F16C) are there.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Avx512(());

    impl Avx512 {
        /// The proof, if the processor and the system have them.
        pub fn detect() -> Option<Self> {
            let found = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            (found && Avx2::detect().is_some()).then_some(Self(()))
        }
    }

    impl Simd for Avx512 {
        type V = __m512;
        const WIDE: bool = true;

        #[inline]
        fn run<K: Kernel>(self, kernel: K) -> K::Output {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn compiled<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
                kernel.run(simd)
            }
            detected!(compiled(self, kernel))
        }
        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            detected!(_mm512_set1_ps(x))
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> __m512 {
            detected!(_mm512_loadu_ps(x.as_ptr()))
        }
        #[inline(always)]
        fn load_bf16(self, x: &[u16; LANES]) -> __m512 {
            detected!({
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            })
        }
        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> __m512 {
            detected!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
        }
        #[inline(always)]
        fn load_i8(self, x: &[i8; LANES]) -> __m512 {
            detected!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))))
        }
        #[inline(always)]
        fn store(self, v: __m512, out: &mut [f32; LANES]) {
            detected!(_mm512_storeu_ps(out.as_mut_ptr(), v));
        }
        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            detected!(_mm512_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            detected!(_mm512_add_ps(a, b))
        }
        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            detected!(_mm512_sub_ps(a, b))
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            detected!(_mm512_mul_ps(a, b))
        }
        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            detected!(_mm512_div_ps(a, b))
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            detected!(_mm512_max_ps(a, b))
        }
        #[inline(always)]
        fn select_less(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
            detected!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
        }
        #[inline(always)]
        fn add_exponent(self, v: __m512, n: __m512) -> __m512 {
            detected!({
                let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), n))
            })
        }
        #[inline(always)]
        fn prefetch<T>(self, at: *const T) {
            detected!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
        }
    }

    /// Proof that AVX2, FMA and F16C are there.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Avx2(());

    impl Avx2 {
        /// The proof, if the processor and the system have them.
        pub fn detect() -> Option<Self> {
            let found = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            found.then_some(Self(()))
        }
    }

    impl Simd for Avx2 {
        type V = [__m256; 2];
        const WIDE: bool = false;

        #[inline]
        fn run<K: Kernel>(self, kernel: K) -> K::Output {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn compiled<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
                kernel.run(simd)
            }
            detected!(compiled(self, kernel))
        }
        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            detected!([_mm256_set1_ps(x), _mm256_set1_ps(x)])
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Self::V {
            detected!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))])
        }
        #[inline(always)]
        fn load_bf16(self, x: &[u16; LANES]) -> Self::V {
            detected!({
                let halves =
                    [_mm_loadu_si128(x.as_ptr().cast()), _mm_loadu_si128(x.as_ptr().add(8).cast())];
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves[0]))),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves[1]))),
                ]
            })
        }
        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> Self::V {
            detected!([
                _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(8).cast())),
            ])
        }
        #[inline(always)]
        fn load_i8(self, x: &[i8; LANES]) -> Self::V {
            detected!([
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().add(8).cast()))),
            ])
        }
        #[inline(always)]
        fn store(self, v: Self::V, out: &mut [f32; LANES]) {
            detected!({
                _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8), v[1]);
            });
        }
        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            detected!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
        }
        #[inline(always)]
        fn add(self, a: Self::V, b: Self::V) -> Self::V {
            detected!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn sub(self, a: Self::V, b: Self::V) -> Self::V {
            detected!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn mul(self, a: Self::V, b: Self::V) -> Self::V {
            detected!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn div(self, a: Self::V, b: Self::V) -> Self::V {
            detected!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn max(self, a: Self::V, b: Self::V) -> Self::V {
            detected!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
            detected!([
                _mm256_blendv_ps(no[0], yes[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
                _mm256_blendv_ps(no[1], yes[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
            ])
        }
        #[inline(always)]
        fn add_exponent(self, v: Self::V, n: Self::V) -> Self::V {
            detected!({
                let n = [
                    _mm256_slli_epi32::<23>(_mm256_castps_si256(n[0])),
                    _mm256_slli_epi32::<23>(_mm256_castps_si256(n[1])),
                ];
                [
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v[0]), n[0])),
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v[1]), n[1])),
                ]
            })
        }
        #[inline(always)]
        fn prefetch<T>(self, at: *const T) {
            detected!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
        }
    }
}

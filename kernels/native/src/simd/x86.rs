//! The instruction sets of x86-64.

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

/// Proof that AVX-512 F, BW, DQ and VL (with AVX2, FMA and F16C) are there, and VNNI if so it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx512<const VNNI: bool>(());

impl Avx512<false> {
    /// The proof, if the processor and the system have them.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        (found && Avx2::detect().is_some()).then_some(Self(()))
    }

    /// The proof that VNNI is there, too.
    pub fn detect_vnni() -> Option<Avx512<true>> {
        let found = is_x86_feature_detected!("avx512vnni") && Self::detect().is_some();
        found.then_some(Avx512(()))
    }
}

impl Avx512<true> {
    /// The same without VNNI.
    pub fn plain(self) -> Avx512<false> {
        Avx512(())
    }
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type V = __m512;
    type Sums = __m512i;
    type Pairs = __m512i;
    const WIDE: bool = true;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn plain<S: Simd, K: Kernel>(simd: S, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        fn vnni<S: Simd, K: Kernel>(simd: S, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        if VNNI { detected!(vnni(self, kernel)) } else { detected!(plain(self, kernel)) }
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
    fn zero_sums(self) -> __m512i {
        detected!(_mm512_setzero_si512())
    }
    #[inline(always)]
    fn load_pairs(self, x: &[i8; 2 * LANES]) -> __m512i {
        detected!(_mm512_cvtepi8_epi16(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn add_products(self, sums: __m512i, pair: i32, pairs: __m512i) -> __m512i {
        detected!({
            let pair = _mm512_set1_epi32(pair);
            if VNNI {
                _mm512_dpwssd_epi32(sums, pairs, pair)
            } else {
                _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, pair))
            }
        })
    }
    #[inline(always)]
    fn float(self, sums: __m512i) -> __m512 {
        detected!(_mm512_cvtepi32_ps(sums))
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
    type Sums = [__m256i; 2];
    type Pairs = [__m256i; 2];
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
    fn zero_sums(self) -> Self::Sums {
        detected!([_mm256_setzero_si256(), _mm256_setzero_si256()])
    }
    #[inline(always)]
    fn load_pairs(self, x: &[i8; 2 * LANES]) -> Self::Pairs {
        detected!([
            _mm256_cvtepi8_epi16(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(x.as_ptr().add(LANES).cast())),
        ])
    }
    #[inline(always)]
    fn add_products(self, sums: Self::Sums, pair: i32, pairs: Self::Pairs) -> Self::Sums {
        detected!({
            let pair = _mm256_set1_epi32(pair);
            [
                _mm256_add_epi32(sums[0], _mm256_madd_epi16(pairs[0], pair)),
                _mm256_add_epi32(sums[1], _mm256_madd_epi16(pairs[1], pair)),
            ]
        })
    }
    #[inline(always)]
    fn float(self, sums: Self::Sums) -> Self::V {
        detected!([_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])])
    }
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        detected!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
    }
}

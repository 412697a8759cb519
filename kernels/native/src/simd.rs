//! Sixteen lanes on any machine, and the only `unsafe` code of this crate.
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
    /// A register (or several) of sixteen `f32` lanes.
    type V: Copy;
    /// Sixteen sums of integers.
    type Sums: Copy;
    /// Sixteen pairs of integers of sixteen bits.
    type Pairs: Copy;
    /// Whether there are 32 registers of sixteen lanes (else eight).
    const WIDE: bool;
    /// What they hold.
    const TILES: Tiles = Tiles::of(Self::WIDE);

    /// Runs `kernel` compiled for this instruction set.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;
    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Reads sixteen lanes from memory.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// Reads bfloat16 lanes, exactly.
    fn load_bf16(self, x: &[u16; LANES]) -> Self::V;
    /// Reads float16 lanes, exactly.
    fn load_f16(self, x: &[u16; LANES]) -> Self::V;
    /// Writes sixteen lanes to memory.
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
    /// Sums of zero.
    fn zero_sums(self) -> Self::Sums;
    /// Widens pairs that lie side by side.
    fn load_pairs(self, x: &[i8; 2 * LANES]) -> Self::Pairs;
    /// Adds the products of one pair (the first in the low half) with the pair of each lane. The caller sees to it
    /// that sums stay below 2^31.
    fn add_products(self, sums: Self::Sums, pair: i32, pairs: Self::Pairs) -> Self::Sums;
    /// The nearest `f32`.
    fn float(self, sums: Self::Sums) -> Self::V;
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

    /// The greatest of the sixteen lanes.
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
    /// AVX-512 F/BW/DQ/VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512<true>),
    /// AVX-512 F/BW/DQ/VL.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
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
            all.extend(Avx512::detect_vnni().map(Self::Avx512Vnni));
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
            Self::Avx512Vnni(_) => "avx512vnni",
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
            Self::Avx512Vnni(simd) => simd.plain().run(kernel), // what sums no integers is compiled once for both
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(kernel),
            Self::Portable(simd) => simd.run(kernel),
        }
    }

    /// As [`Level::run`], for kernels that sum integers.
    #[inline]
    pub fn run_integers<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) | Self::Avx2(_) => self.run(kernel),
            Self::Portable(_) => self.run(kernel),
        }
    }

    /// Those that kernels use, as [`Simd::TILES`].
    pub fn tiles(self) -> Tiles {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) | Self::Avx512(_) => Avx512::<false>::TILES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::TILES,
            Self::Portable(_) => Portable::TILES,
        }
    }
}

/// Rows of the tiles of sums that the registers hold, by what is beside them. Larger ones are not compiled.
#[derive(Debug, Clone, Copy)]
pub struct Tiles {
    /// Of any tile.
    pub most: usize,
    /// By two vectors of columns: one panel.
    pub whole: usize,
    /// By four: two panels, which hide the latency of so few sums.
    pub paired: usize,
}

impl Tiles {
    const fn of(wide: bool) -> Self {
        if wide {
            Self { most: 12, whole: 12, paired: 3 }
        } else {
            Self { most: 6, whole: 3, paired: 1 }
        }
    }

    /// Whether products use a tile of so many rows by so many vectors of columns.
    pub(crate) const fn have(self, rows: usize, vectors: usize) -> bool {
        match vectors {
            1 => self.whole < rows && rows <= self.most,
            2 => rows <= self.whole,
            4 => rows <= self.paired,
            _ => false,
        }
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
    type Sums = [i32; LANES];
    type Pairs = [i16; 2 * LANES];
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
    fn zero_sums(self) -> Self::Sums {
        [0; LANES]
    }
    #[inline(always)]
    fn load_pairs(self, x: &[i8; 2 * LANES]) -> Self::Pairs {
        x.map(i16::from)
    }
    #[inline(always)]
    fn add_products(self, mut sums: Self::Sums, pair: i32, pairs: Self::Pairs) -> Self::Sums {
        let (first, second) = (i32::from(pair as i16), pair >> 16);
        for (sum, [a, b]) in sums.iter_mut().zip(pairs.as_chunks().0) {
            *sum += first * i32::from(*a) + second * i32::from(*b);
        }
        sums
    }
    #[inline(always)]
    fn float(self, sums: Self::Sums) -> Array {
        each(|i| sums[i] as f32)
    }
    #[inline(always)]
    fn prefetch<T>(self, _at: *const T) {}
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests {
    use super::Level;

    /// Tests run over [`Level::all`]: what the processor lacks is passed over in silence.
    #[test]
    fn levels_that_the_environment_requires_are_here() {
        let here: Vec<_> = Level::all().into_iter().map(Level::name).collect();
        for name in std::env::var("HEADRACE_REQUIRE").unwrap_or_default().split(',') {
            let name = name.trim();
            assert!(!name.starts_with("avx") || here.contains(&name), "no {name}: only {here:?}");
        }
    }
}

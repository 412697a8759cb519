//! Draws a token of each row by the exponential race, under top-p and min-p.
//!
//! With v the noise of a token in (0, 1) and w its weight, its time is -log(1 - v) / w; the first one wins. A *score* is
//! about -log2(v / w), made of the bits of v without a logarithm or an exponential, within a tenth. v / w is below the
//! time, so whoever comes before the token with the greatest score has a score not far below it: those few are compared
//! exactly, in `f64`. Where the winner is not in the top-p set, nothing less probable is, and the race goes on without
//! them: no row is ever sorted. Sums of weights are of `f32`, and where they decide by less than their error, of `f64`.

use std::f64::consts::LOG2_E;

use crate::math;
use crate::rows::{load_or, store_some};
use crate::simd::{Kernel, LANES, Level, Simd};

/// Bits of noise.
const NOISE_BITS: i32 = 31;
/// Columns whose greatest score is kept.
const BLOCK: usize = 256;
/// What a score lacks of -log2(v / w), up to `WITHIN`: the bias of the exponent, and noise that is not divided.
const OFFSET: f64 = (127 + NOISE_BITS) as f64;
/// How far the bits of a number are from its logarithm, at most 0.0861, and what rounding adds.
const WITHIN: f64 = 0.1;
/// Far above the relative error of a weight or a sum of them: arguments of up to 87 have an error of 1e-5.
const SLACK: f64 = 1e-4;

/// How a token of one row is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    /// Logits of the row.
    pub row: &'a [f32],
    /// The token of each column.
    pub tokens: &'a [u32],
    /// The greatest logit.
    pub best: f32,
    /// Divides the logits; above zero.
    pub temperature: f64,
    /// The most probable tokens that have this share of the mass; 1 is all of them.
    pub top_p: f64,
    /// The least weight, where the greatest is 1.
    pub min_p: f64,
    /// Of the noise.
    pub keys: [u32; 2],
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    scores: Vec<f32>,   // [columns]
    greatest: Vec<f32>, // [blocks]
}

impl Draw<'_> {
    /// The column of the token that is drawn.
    /// # Panics
    /// If there is not one token for each logit, or `best` is not the greatest one.
    pub fn race(&self, level: Level, scratch: &mut Scratch) -> usize {
        assert!(self.row.len() == self.tokens.len(), "a token for each column");
        scratch.scores.resize(self.row.len(), 0.0);
        scratch.greatest.resize(self.row.len().div_ceil(BLOCK), 0.0);
        let Scratch { scores, greatest } = scratch;
        level.run(Score { draw: self, scores, greatest });
        loop {
            let column = self.first(scores, greatest);
            if self.top_p >= 1.0 || self.is_in_mass(level, column) {
                return column;
            }
            scores[column] = f32::NEG_INFINITY;
            level.run(Keep { row: self.row, at: self.row[column], scores, greatest });
        }
    }

    /// The column that comes first of those with a score, on a tie the lowest.
    fn first(&self, scores: &mut [f32], greatest: &mut [f32]) -> usize {
        let likely = loop {
            let (block, score) = (0..)
                .zip(&*greatest)
                .fold((0, f32::NEG_INFINITY), |a, b| if *b.1 > a.1 { (b.0, *b.1) } else { a });
            assert!(score > f32::NEG_INFINITY, "the most probable token is never cut");
            let scores = &mut scores[block * BLOCK..];
            let column = scores.iter().position(|x| *x == score).expect("its block has it");
            if self.is_heavy(block * BLOCK + column) {
                break block * BLOCK + column;
            }
            scores[column] = f32::NEG_INFINITY;
            greatest[block] = greatest_of(&scores[..BLOCK.min(scores.len())]);
        };
        let mut winner = (likely, self.log_time(likely));
        let least = (-winner.1 * LOG2_E - OFFSET - WITHIN) as f32;
        for (block, scores) in scores.chunks(BLOCK).enumerate() {
            if greatest[block] < least {
                continue;
            }
            for (column, _) in scores.iter().enumerate().filter(|(_, score)| **score >= least) {
                let column = block * BLOCK + column;
                let time = self.log_time(column);
                if (time < winner.1 || time == winner.1 && column < winner.0)
                    && self.is_heavy(column)
                {
                    winner = (column, time);
                }
            }
        }
        winner.0
    }

    /// Logarithm of the weight.
    fn log_weight(&self, column: usize) -> f64 {
        (f64::from(self.row[column]) - f64::from(self.best)) / self.temperature
    }

    /// Logarithm of the time.
    fn log_time(&self, column: usize) -> f64 {
        let bits = noise(self.tokens[column], self.keys);
        let v = (f64::from(bits) + 0.5) * 0.5_f64.powi(NOISE_BITS);
        (-(-v).ln_1p()).ln() - self.log_weight(column)
    }

    /// Whether min-p leaves it.
    fn is_heavy(&self, column: usize) -> bool {
        self.log_weight(column).exp() >= self.min_p
    }

    /// Whether those before it, most probable first and on a tie the lowest column, have less than the share of top-p.
    fn is_in_mass(&self, level: Level, column: usize) -> bool {
        let at = self.row[column];
        let equals = |row: &[f32]| row.iter().filter(|x| **x == at).count();
        if at == self.best && self.row[..column].chunks(BLOCK).all(|row| equals(row) == 0) {
            return true; // nobody is before it
        }
        let [total, before] = level.run(Mass { draw: self, column });
        let limit = self.top_p * total;
        if (before - limit).abs() > SLACK * total {
            return before < limit;
        }
        let (mut total, mut before) = (0.0, 0.0);
        for (i, x) in self.row.iter().enumerate() {
            let weight = self.log_weight(i).exp();
            total += weight;
            before += if *x > at || *x == at && i < column { weight } else { 0.0 };
        }
        before < self.top_p * total
    }
}

/// The two key words of the noise of a seed at a position, which counts from the start of the prompt.
#[must_use]
pub fn keys(seed: u64, position: u64) -> [u32; 2] {
    let mixed = mix(mix(seed).wrapping_add(position));
    [mixed as u32, (mixed >> 32) as u32] // the low half, the high one
}

/// The finaliser of splitmix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// 31 bits for each token; `noise.py` has the same function and says where it is from.
#[inline(always)]
fn noise(token: u32, [first, second]: [u32; 2]) -> u32 {
    let mut x = token ^ first;
    x ^= x >> 16;
    x = x.wrapping_mul(0x21F0_AAAD);
    x ^= x >> 15;
    x = x.wrapping_add(second);
    x = x.wrapping_mul(0xD35A_2D97);
    x ^= x >> 15;
    x & 0x7FFF_FFFF
}

fn greatest_of(scores: &[f32]) -> f32 {
    scores.iter().fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a })
}

/// Scores of all columns, minus infinity for those that min-p certainly cuts.
struct Score<'a> {
    draw: &'a Draw<'a>,
    scores: &'a mut [f32],
    greatest: &'a mut [f32],
}

impl Kernel for Score<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Draw { best, temperature, min_p, keys, .. } = *self.draw;
        let (best, factor) = (s.splat(best), s.splat((LOG2_E / temperature) as f32));
        let (cut, none) = (s.splat((min_p.log2() - WITHIN) as f32), s.splat(f32::NEG_INFINITY));
        let blocks = self.draw.row.chunks(BLOCK).zip(self.draw.tokens.chunks(BLOCK));
        let scores = self.scores.chunks_mut(BLOCK).zip(self.greatest);
        for ((row, tokens), (scores, of_block)) in blocks.zip(scores) {
            // The bits of a number are its logarithm, more or less.
            let mut log_v = [0.0; BLOCK];
            for (log_v, token) in log_v.iter_mut().zip(tokens) {
                let v = noise(*token, keys).cast_signed() as f32 + 0.5;
                *log_v = v.to_bits().cast_signed() as f32 * (1.0 / (1 << 23) as f32);
            }
            let mut greatest = none;
            let (log_v, _) = log_v.as_chunks::<LANES>();
            let lanes = row.chunks(LANES).zip(scores.chunks_mut(LANES));
            for ((logits, to), log_v) in lanes.zip(log_v) {
                let logits = load_or(s, f32::NEG_INFINITY, logits);
                let log_w = s.mul(s.sub(logits, best), factor);
                let score = s.select_less(log_w, cut, none, s.sub(log_w, s.load(log_v)));
                greatest = s.max(score, greatest);
                store_some(s, score, to);
            }
            *of_block = s.greatest(greatest);
        }
    }
}

/// Takes the score of all with a logit below `at`.
struct Keep<'a> {
    row: &'a [f32],
    at: f32,
    scores: &'a mut [f32],
    greatest: &'a mut [f32],
}

impl Kernel for Keep<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (at, none) = (s.splat(self.at), s.splat(f32::NEG_INFINITY));
        let blocks = self.row.chunks(BLOCK).zip(self.scores.chunks_mut(BLOCK));
        for ((row, scores), of_block) in blocks.zip(self.greatest) {
            let mut greatest = none;
            for (row, to) in row.chunks(LANES).zip(scores.chunks_mut(LANES)) {
                let score = load_or(s, f32::NEG_INFINITY, to);
                let score = s.select_less(load_or(s, f32::NEG_INFINITY, row), at, none, score);
                greatest = s.max(score, greatest);
                store_some(s, score, to);
            }
            *of_block = s.greatest(greatest);
        }
    }
}

/// The mass of all tokens, and of those before a column.
struct Mass<'a> {
    draw: &'a Draw<'a>,
    column: usize,
}

impl Kernel for Mass<'_> {
    type Output = [f64; 2];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f64; 2] {
        let Draw { row, best, temperature, .. } = *self.draw;
        let (best, factor) = (s.splat(best), s.splat((1.0 / temperature) as f32));
        let (at, zero) = (s.splat(row[self.column]), s.splat(0.0));
        let (left, right) = row.split_at(self.column);
        let mut masses = [0.0; 2];
        for (row, is_left) in [(left, true), (right, false)] {
            for row in row.chunks(BLOCK) {
                let (mut total, mut before) = (zero, zero);
                for logits in row.chunks(LANES) {
                    let logits = load_or(s, f32::NEG_INFINITY, logits);
                    let weight = math::exp(s, s.mul(s.sub(logits, best), factor));
                    total = s.add(total, weight);
                    let above = s.select_less(at, logits, weight, zero);
                    let not_below = s.select_less(logits, at, zero, weight);
                    before = s.add(before, if is_left { not_below } else { above });
                }
                masses[0] += f64::from(s.sum(total));
                masses[1] += f64::from(s.sum(before));
            }
        }
        masses
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The textbook: all times in `f64`, and who is left by a sort.
    fn drawn(draw: &Draw<'_>) -> usize {
        let mut order: Vec<usize> = (0..draw.row.len()).collect();
        order.sort_by(|a, b| draw.row[*b].total_cmp(&draw.row[*a]).then(a.cmp(b)));
        let weight = |i: usize| draw.log_weight(i).exp();
        let total: f64 = (0..draw.row.len()).map(weight).sum();
        let (mut before, mut winner) = (0.0, (f64::INFINITY, 0));
        for i in order {
            if draw.top_p < 1.0 && before >= draw.top_p * total {
                break;
            }
            before += weight(i);
            if weight(i) >= draw.min_p && draw.log_time(i) < winner.0 {
                winner = (draw.log_time(i), i);
            }
        }
        winner.1
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]
        #[test]
        fn it_draws_what_the_textbook_draws_at_every_level(
            mut row in prop::collection::vec(-12.0_f32..12.0, 1..900),
            spread in prop::sample::select(vec![0.0_f32, 0.01, 0.3, 1.0, 5.0]),
            masked in 0_usize..3,
            temperature in prop::sample::select(vec![1e-6, 0.2, 0.7, 1.0, 3.0, 1e6]),
            top_p in prop::sample::select(vec![1.0, 0.99, 0.9, 0.5, 0.1, 1e-9]),
            min_p in prop::sample::select(vec![0.0, 0.01, 0.3, 1.0]),
            keys: [u32; 2],
        ) {
            for (i, x) in row.iter_mut().enumerate() {
                *x = *x * spread + 0.0; // and no negative zero
                if masked > 0 && i % (masked + 1) == 1 {
                    *x = f32::NEG_INFINITY;
                }
            }
            let tokens: Vec<u32> = (0..row.len() as u32).map(|i| 3 * i + 1).collect();
            let best = greatest_of(&row);
            let draw = Draw { row: &row, tokens: &tokens, best, temperature, top_p, min_p, keys };
            for level in Level::all() {
                let mut scratch = Scratch::default();
                prop_assert_eq!(draw.race(level, &mut scratch), drawn(&draw), "{:?}", level);
            }
        }
    }

    #[test]
    fn many_draws_have_the_right_shares() {
        let row = [0.0_f32, -1.0, -2.0, f32::NEG_INFINITY];
        let mut counts = [0_u32; 4];
        let mut scratch = Scratch::default();
        for i in 0..20_000_u32 {
            let keys = [i.wrapping_mul(0x9E37_79B9), i ^ 0x5bd1_e995];
            let draw = Draw {
                row: &row,
                tokens: &[0, 1, 2, 3],
                best: 0.0,
                temperature: 1.0,
                top_p: 1.0,
                min_p: 0.0,
                keys,
            };
            counts[draw.race(Level::detect(), &mut scratch)] += 1;
        }
        let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        for (x, count) in row.iter().zip(counts) {
            let share = f64::from(*x).exp() / total;
            assert!((f64::from(count) / 20_000.0 - share).abs() < 0.015, "{counts:?}");
        }
    }
}

//! The most probable tokens of a row, and few more: maxima of blocks bound the k-th best, so that no row is sorted.

use crate::rows::load_or;
use crate::simd::{Kernel, LANES, Level, Simd};

/// Columns whose maximum stands for them, unless so many are asked for that blocks have to be smaller; a guess.
const BLOCK: usize = 64;

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Maxima {
    of_blocks: Vec<f32>,
    ordered: Vec<f32>,
}

/// Columns with their logits, the greatest first and on a tie the lowest column: those that are no less than the `k`-th
/// greatest, and perhaps a few more. What is no number is none of them.
/// # Panics
/// Unless `k` is at least one and at most the length of the row.
pub fn highest(level: Level, row: &[f32], k: usize, maxima: &mut Maxima) -> Vec<(usize, f32)> {
    assert!((1..=row.len()).contains(&k), "{k} of {} columns", row.len());
    let width = (row.len() / (4 * k)).clamp(1, BLOCK); // so there are at least `k` blocks
    let Maxima { of_blocks, ordered } = maxima;
    of_blocks.clear();
    of_blocks.resize(row.len() / width, f32::NEG_INFINITY);
    level.run(MaximaOfBlocks { row, width, maxima: of_blocks });
    ordered.clone_from(of_blocks);
    // `k` blocks have at least as many columns with such a logit.
    let (_, floor, _) = ordered.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let floor = *floor;
    let mut found = Vec::with_capacity(2 * k);
    for (block, logits) in row.chunks(width).enumerate() {
        // The columns behind the last block are in none.
        if of_blocks.get(block).is_some_and(|maximum| *maximum < floor) {
            continue;
        }
        let columns = (block * width..).zip(logits.iter().copied());
        found.extend(columns.filter(|(_, logit)| *logit >= floor));
    }
    found.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("what is not below a bound is a number"));
    found
}

struct MaximaOfBlocks<'a> {
    row: &'a [f32],
    width: usize,
    maxima: &'a mut [f32],
}

impl Kernel for MaximaOfBlocks<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (block, maximum) in self.row.chunks_exact(self.width).zip(self.maxima) {
            let mut greatest = s.splat(f32::NEG_INFINITY);
            for logits in block.chunks(LANES) {
                // In this order, so that what is no number is never the greatest.
                greatest = s.max(load_or(s, f32::NEG_INFINITY, logits), greatest);
            }
            *maximum = s.greatest(greatest);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn it_begins_with_what_a_sort_begins_with_at_every_level(
            mut row in prop::collection::vec(-12.0_f32..12.0, 1..900),
            coarse: bool,
            masked in 0_usize..3,
            share in 0.0_f64..=1.0,
        ) {
            for (i, x) in row.iter_mut().enumerate() {
                if coarse {
                    *x = x.round(); // ties, and negative zeros
                }
                if masked > 0 && i % (masked + 1) == 1 {
                    *x = f32::NEG_INFINITY;
                }
            }
            let k = ((share * share * row.len() as f64) as usize).clamp(1, row.len());
            let mut sorted: Vec<(usize, f32)> = row.iter().copied().enumerate().collect();
            sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("numbers"));
            for level in Level::all() {
                let found = highest(level, &row, k, &mut Maxima::default());
                prop_assert!(found.len() >= k);
                prop_assert_eq!(&found[..], &sorted[..found.len()], "{:?}", level);
            }
        }
    }

    #[test]
    fn few_more_are_found_than_were_asked_for() {
        let row: Vec<f32> =
            (0..49_152_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32).collect();
        for k in [1, 20, 128] {
            let found = highest(Level::detect(), &row, k, &mut Maxima::default()).len();
            assert!((k..=2 * k).contains(&found), "{found} for {k}");
        }
    }

    #[test]
    fn what_is_no_number_is_left_out() {
        let row = [f32::NAN, 1.0, f32::NAN, 2.0];
        let found = highest(Level::detect(), &row, 4, &mut Maxima::default());
        assert_eq!(found, [(3, 2.0), (1, 1.0)]);
        assert_eq!(highest(Level::detect(), &[f32::NAN; 70], 3, &mut Maxima::default()), []);
    }
}

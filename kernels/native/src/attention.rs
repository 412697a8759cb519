//! Attention of query rows over the paged cache.
//!
//! Each (row, head) walks its keys in splits of 64 *positions*, first to last, whatever else is computed:
//! scores are sequential sums over the head's elements, the softmax is rescaled once per split, and values
//! are added position by position. Rows and heads that share keys go through together only to load less.
//! A row whose causal end lies before the end of its companions adds exact zeros there.

use crate::math;
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::tile::tile;

/// Positions between two rescalings of the softmax.
const SPLIT: usize = 64;
/// Parts of a split that are one vector of positions.
const PARTS: usize = SPLIT / LANES;

/// What the cache holds. A block is contiguous: for each layer, the keys of each head, then the values; then the tail.
///
/// Keys lie as `[block_tokens / 16][key_dim][16 tokens]`, so that lanes are tokens and a score needs no sum
/// across lanes; values as `[block_tokens][value_dim rounded up to 16]`, so that lanes are outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers that keep keys and values.
    pub layers: usize,
    /// Heads of keys and of values.
    pub kv_heads: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Tokens of a block, a multiple of 16.
    pub block_tokens: usize,
    /// Floats behind the layers, which attention does not read.
    pub tail: usize,
}

impl KvShape {
    /// Floats of a value, with its padding.
    pub fn value_width(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Floats of a block.
    pub fn block_floats(&self) -> usize {
        self.layers * self.layer_floats() + self.tail
    }

    fn layer_floats(&self) -> usize {
        self.kv_heads * self.block_tokens * (self.key_dim + self.value_width())
    }

    /// Where a head's keys begin.
    pub fn keys_at(&self, block: usize, layer: usize, head: usize) -> usize {
        block * self.block_floats()
            + layer * self.layer_floats()
            + head * self.block_tokens * self.key_dim
    }

    /// Where a head's values begin.
    pub fn values_at(&self, block: usize, layer: usize, head: usize) -> usize {
        self.keys_at(block, layer, self.kv_heads) + head * self.block_tokens * self.value_width()
    }

    /// Where a block's tail begins.
    pub fn tail_at(&self, block: usize) -> usize {
        self.keys_at(block, self.layers, 0)
    }

    /// Puts the key of a row of one head into its place, element by element.
    pub fn put_key<'a>(
        &self,
        kv: &mut [f32],
        place: RowPlace,
        layer: usize,
        head: usize,
        key: impl Iterator<Item = &'a f32>,
    ) {
        let at =
            self.keys_at(place.block, layer, head) + place.offset / LANES * self.key_dim * LANES;
        let column = &mut kv[at..at + self.key_dim * LANES];
        for (to, x) in column[place.offset % LANES..].iter_mut().step_by(LANES).zip(key) {
            *to = *x;
        }
    }

    /// Puts the value of a row of one head into its place.
    pub fn put_value(
        &self,
        kv: &mut [f32],
        place: RowPlace,
        layer: usize,
        head: usize,
        value: &[f32],
    ) {
        let at = self.values_at(place.block, layer, head) + place.offset * self.value_width();
        kv[at..at + self.value_dim].copy_from_slice(value);
    }
}

/// Where a row's key and value go.
#[derive(Debug, Clone, Copy)]
pub struct RowPlace {
    /// Block of the cache.
    pub block: usize,
    /// Token in the block.
    pub offset: usize,
}

/// Rows of one sequence: they share a block table.
#[derive(Debug, Clone, Copy)]
pub struct SequenceRows<'a> {
    /// Number of the first row in the batch.
    pub start: usize,
    /// Position of each row. It sees that position and those before, down to the first key.
    pub positions: &'a [i32],
    /// The first position that has a key; not behind any row's.
    pub first_key: usize,
    /// Blocks of the sequence.
    pub blocks: &'a [i32],
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    queries: Vec<f32>,
    sums: Vec<f32>,
}

/// Attention of the rows of one sequence in one layer.
#[derive(Debug)]
pub struct Attention<'a> {
    /// `[rows, width]`, query heads of `key_dim` first.
    pub queries: &'a [f32],
    /// Floats of a row of `queries`.
    pub width: usize,
    /// Query heads, a multiple of `shape.kv_heads`.
    pub heads: usize,
    /// Factor on scores.
    pub scale: f32,
    /// The KV cache: whole blocks.
    pub kv: &'a [f32],
    /// Shape of the blocks of `kv`.
    pub shape: &'a KvShape,
    /// Which layer of it.
    pub layer: usize,
    /// The rows that attend, all of one sequence.
    pub rows: SequenceRows<'a>,
    /// `[rows, heads * value_dim]`, rows as in `queries`.
    pub out: &'a mut [f32],
}

impl Attention<'_> {
    /// Computes `out` of these rows.
    pub fn compute(mut self, level: Level, scratch: &mut Scratch) {
        let group = self.heads / self.shape.kv_heads;
        let units = self.rows.positions.len() * group; // (row, head) pairs that read the same keys
        let most = level.tiles().most;
        let count = units.div_ceil(most);
        for kv_head in 0..self.shape.kv_heads {
            for i in 0..count {
                let (start, end) = (units * i / count, units * (i + 1) / count);
                self.units(level, kv_head, start, end - start, scratch);
            }
        }
    }

    fn units(&mut self, level: Level, head: usize, start: usize, count: usize, to: &mut Scratch) {
        match count {
            1 => self.run::<1>(level, head, start, to),
            2 => self.run::<2>(level, head, start, to),
            3 => self.run::<3>(level, head, start, to),
            4 => self.run::<4>(level, head, start, to),
            5 => self.run::<5>(level, head, start, to),
            6 => self.run::<6>(level, head, start, to),
            7 => self.run::<7>(level, head, start, to),
            8 => self.run::<8>(level, head, start, to),
            9 => self.run::<9>(level, head, start, to),
            10 => self.run::<10>(level, head, start, to),
            11 => self.run::<11>(level, head, start, to),
            12 => self.run::<12>(level, head, start, to),
            count => unreachable!("a tile of {count} rows"),
        }
    }

    fn run<const M: usize>(&mut self, level: Level, head: usize, start: usize, to: &mut Scratch) {
        let KvShape { kv_heads, key_dim, value_dim, .. } = *self.shape;
        let group = self.heads / kv_heads;
        let at: [(usize, usize); M] =
            std::array::from_fn(|m| ((start + m) / group, head * group + (start + m) % group));
        // [key_dim][M], so that a score reads one stream.
        to.queries.resize((key_dim * M).max(to.queries.len()), 0.0);
        let (queries, _) = to.queries[..key_dim * M].as_chunks_mut::<M>();
        for (m, (row, head)) in at.iter().enumerate() {
            let from = (self.rows.start + row) * self.width + head * key_dim;
            for (to, q) in queries.iter_mut().zip(&self.queries[from..from + key_dim]) {
                to[m] = q * self.scale;
            }
        }
        let value_width = self.shape.value_width();
        to.sums.clear();
        to.sums.resize(M * value_width, 0.0);
        let visible = at.map(|(row, _)| self.rows.positions[row] as usize + 1);
        let sums = to.sums.as_mut_slice();
        let kv = Keys { kv: self.kv, shape: self.shape, layer: self.layer, head };
        let SequenceRows { blocks, first_key, .. } = self.rows;
        level.run(Softmax { queries, first_key, visible, kv, blocks, sums });
        for (sums, (row, head)) in to.sums.chunks_exact(value_width).zip(at) {
            let to = ((self.rows.start + row) * self.heads + head) * value_dim;
            self.out[to..to + value_dim].copy_from_slice(&sums[..value_dim]);
        }
    }
}

/// The cache of one layer and head.
#[derive(Clone, Copy)]
struct Keys<'a> {
    kv: &'a [f32],
    shape: &'a KvShape,
    layer: usize,
    head: usize,
}

impl<'a> Keys<'a> {
    /// Keys and values of the 16 positions from `position` on.
    #[inline(always)]
    fn part(&self, blocks: &[i32], position: usize) -> (&'a [[f32; LANES]], &'a [[f32; LANES]]) {
        let shape = self.shape;
        let block = blocks[position / shape.block_tokens] as usize;
        let offset = position % shape.block_tokens;
        let keys = shape.keys_at(block, self.layer, self.head) + offset * shape.key_dim;
        let values = shape.values_at(block, self.layer, self.head) + offset * shape.value_width();
        (
            self.kv[keys..keys + LANES * shape.key_dim].as_chunks().0,
            self.kv[values..values + LANES * shape.value_width()].as_chunks().0,
        )
    }
}

/// `M` (row, head) pairs over the keys of one head.
struct Softmax<'a, const M: usize> {
    queries: &'a [[f32; M]],
    /// The first position that they see.
    first_key: usize,
    /// Behind the last position that each sees.
    visible: [usize; M],
    kv: Keys<'a>,
    blocks: &'a [i32],
    /// `[M][value_width]`, zeros; becomes the output.
    sums: &'a mut [f32],
}

impl<const M: usize> Kernel for Softmax<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if const { M > S::TILES.most } {
            unreachable!("no tile of {M} rows"); // so it is not compiled
        }
        let columns = self.kv.shape.value_width() / LANES;
        let sums = std::mem::take(&mut self.sums);
        let (sums, _) = sums.as_chunks_mut::<LANES>(); // [M][columns]
        let mut lane = [0.0; LANES];
        for (i, lane) in lane.iter_mut().enumerate() {
            *lane = i as f32;
        }
        let lane = s.load(&lane);
        let mut greatest = [f32::NEG_INFINITY; M];
        let mut weight = [0.0; M];
        let (mut shared, mut end) = (usize::MAX, 0);
        for visible in self.visible {
            shared = shared.min(visible);
            end = end.max(visible);
        }
        // Splits begin at multiples of their length, also where there are no keys yet.
        for start in (self.first_key / SPLIT * SPLIT..end).step_by(SPLIT) {
            let parts = (end - start).div_ceil(LANES).min(PARTS);
            // Scores: lanes are positions.
            let mut scores = [[s.splat(f32::NEG_INFINITY); M]; PARTS];
            let mut part = 0;
            while part < parts {
                let scores = &mut scores[part..];
                let at = start + part * LANES;
                part += match parts - part {
                    4.. if const { Self::abreast::<S>() == 4 } => {
                        self.score::<S, 4>(s, at, lane, scores)
                    }
                    2.. if const { Self::abreast::<S>() >= 2 } => {
                        self.score::<S, 2>(s, at, lane, scores)
                    }
                    _ => self.score::<S, 1>(s, at, lane, scores),
                };
            }
            // Softmax weights, turned around: [position][M].
            let mut p = [[0.0; M]; SPLIT];
            let mut rescale = [0.0; M];
            for m in 0..M {
                let low = s.max(scores[0][m], scores[1][m]);
                let high = s.max(scores[2][m], scores[3][m]);
                let peak = s.greatest(s.max(low, high));
                let peak = if greatest[m] > peak { greatest[m] } else { peak };
                rescale[m] = exp_one(s, greatest[m] - peak);
                greatest[m] = peak;
                let mut total = s.splat(0.0);
                for part in 0..PARTS {
                    let e = math::exp(s, s.sub(scores[part][m], s.splat(peak)));
                    total = s.add(total, e);
                    let mut e_lanes = [0.0; LANES];
                    s.store(e, &mut e_lanes);
                    for (i, e) in e_lanes.into_iter().enumerate() {
                        p[part * LANES + i][m] = e;
                    }
                }
                weight[m] = weight[m] * rescale[m] + s.sum(total);
            }
            // Values: lanes are outputs.
            let (first_key, end) = (self.first_key, end.min(start + SPLIT));
            let split = Split { blocks: self.blocks, first_key, shared, start, end };
            let turned = Turned { p: &p, rescale: &rescale, visible: &self.visible };
            let kv = self.kv;
            let mut column = 0;
            while column < columns {
                column += match columns - column {
                    4.. if const { Self::abreast::<S>() == 4 } => {
                        add_values::<S, M, 4>(s, kv, split, column, &turned, sums)
                    }
                    2.. if const { Self::abreast::<S>() >= 2 } => {
                        add_values::<S, M, 2>(s, kv, split, column, &turned, sums)
                    }
                    _ => add_values::<S, M, 1>(s, kv, split, column, &turned, sums),
                };
            }
        }
        for m in 0..M {
            for column in 0..columns {
                let sum = &mut sums[m * columns + column];
                s.store(s.div(s.load(sum), s.splat(weight[m])), sum);
            }
        }
    }
}

impl<const M: usize> Softmax<'_, M> {
    /// Vectors of positions, or of outputs, to sum at once: as many as the registers hold beside `M` rows.
    const fn abreast<S: Simd>() -> usize {
        match (S::WIDE, M <= 3) {
            (true, true) => 4,
            (true, false) | (false, true) => 2,
            (false, false) => 1,
        }
    }

    /// Scores of `N` vectors of positions from `at` on, minus infinity where a row does not see them; returns `N`.
    #[inline(always)]
    fn score<S: Simd, const N: usize>(
        &self,
        s: S,
        at: usize,
        lane: S::V,
        scores: &mut [[S::V; M]],
    ) -> usize {
        let mut keys: [&[[f32; LANES]]; N] = [&[]; N];
        for (n, keys) in keys.iter_mut().enumerate() {
            *keys = self.kv.part(self.blocks, at + n * LANES).0;
        }
        let mut sums = [[s.splat(0.0); N]; M];
        tile::<S, [f32; LANES], M, N, 1>(s, self.queries, keys, &mut sums);
        for n in 0..N {
            for m in 0..M {
                // Only differences below 2^24 matter, and those are exact.
                let left = s.splat(self.visible[m] as f32 - (at + n * LANES) as f32);
                let hidden = s.splat(f32::NEG_INFINITY);
                // 0 * infinity is NaN: a score of -infinity would be as if the row did not see it.
                let score = s.fma(sums[m][n], s.splat(0.0), sums[m][n]);
                scores[n][m] = s.select_less(lane, left, score, hidden);
                if at + n * LANES < self.first_key {
                    let missing = s.splat((self.first_key - (at + n * LANES)) as f32);
                    scores[n][m] = s.select_less(lane, missing, hidden, scores[n][m]);
                }
            }
        }
        N
    }
}

#[inline(always)]
fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    s.store(math::exp(s, s.splat(x)), &mut lanes);
    lanes[0]
}

/// Positions `start..end` of one split, less those before `first_key`.
#[derive(Clone, Copy)]
struct Split<'a> {
    blocks: &'a [i32],
    first_key: usize,
    /// All rows see the positions before it.
    shared: usize,
    start: usize,
    end: usize,
}

/// The weights of one split, position by position.
struct Turned<'a, const M: usize> {
    p: &'a [[f32; M]; SPLIT],
    /// Of what was summed before it.
    rescale: &'a [f32; M],
    /// Behind the last position that each row sees.
    visible: &'a [usize; M],
}

/// Rescales `N` columns of the sums from `column` on, and adds the split's values to them; returns `N`.
#[inline(always)]
fn add_values<S: Simd, const M: usize, const N: usize>(
    s: S,
    kv: Keys<'_>,
    split: Split<'_>,
    column: usize,
    turned: &Turned<'_, M>,
    sums: &mut [[f32; LANES]],
) -> usize {
    let Turned { p, rescale, visible } = turned;
    let columns = kv.shape.value_width() / LANES;
    let mut acc = [[s.splat(0.0); N]; M];
    for m in 0..M {
        for n in 0..N {
            acc[m][n] = s.mul(s.load(&sums[m * columns + column + n]), s.splat(rescale[m]));
        }
    }
    for (p, first) in p.chunks(LANES).zip((split.start..split.end).step_by(LANES)) {
        let (_, values) = kv.part(split.blocks, first);
        let count = LANES.min(split.end - first);
        let skip = split.first_key.saturating_sub(first).min(count);
        let mut values = values[skip * columns..].chunks_exact(columns);
        let shared = split.shared.saturating_sub(first).clamp(skip, count);
        for (p, values) in p[skip..shared].iter().zip(values.by_ref()) {
            let values = &values[column..column + N];
            for n in 0..N {
                let value = s.load(&values[n]);
                for m in 0..M {
                    acc[m][n] = s.fma(s.splat(p[m]), value, acc[m][n]);
                }
            }
        }
        // The newest positions, which some rows do not see. Their weight there is 0, but 0 * NaN is NaN.
        for (i, (p, values)) in (shared..count).zip(p[shared..count].iter().zip(values)) {
            let values = &values[column..column + N];
            for n in 0..N {
                let value = s.load(&values[n]);
                for m in 0..M {
                    if first + i < visible[m] {
                        acc[m][n] = s.fma(s.splat(p[m]), value, acc[m][n]);
                    }
                }
            }
        }
    }
    for m in 0..M {
        for n in 0..N {
            s.store(acc[m][n], &mut sums[m * columns + column + n]);
        }
    }
    N
}

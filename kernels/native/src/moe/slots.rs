//! The experts that this rank holds, each in a slot, and what they make of rows.
//!
//! A slot keeps its place in memory; which expert is in it may change. Each result is one sum as in [`crate::product`]
//! over the expert's `weight * silu(gate) * up`, so it does not depend on which other rows asked the same slot, although
//! the products go over all rows of a slot at once.

use std::ops::Range;

use super::{ExpertsError, check_size, reserve};
use crate::product::{self, Finish, Product, RowsAt};
use crate::rows;
use crate::simd::Level;
use crate::weight::{Dtype, Elements, Weight};

/// Floats of `[gate | up]` that are kept at once, so that they stay in a second-level cache.
const ROOM: usize = 64 * 1024;

/// Weights of experts of one size.
#[derive(Debug)]
pub struct Slots {
    gate_up: Weight,
    down: Weight,
    dtype: Dtype,
}

/// Rows, and the slots that each of them asks.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// `[rows, hidden]`.
    pub x: &'a [f32],
    /// `[rows, top_k]`; `-1` where a row asks fewer.
    pub slots: &'a [i32],
    /// `[rows, top_k]`, of the slot in the same place.
    pub weights: &'a [f32],
    /// Slots that a row asks at most.
    pub top_k: usize,
}

/// Results one by one, or one sum of each row.
#[derive(Debug, Default)]
pub struct Results {
    /// `[results, hidden]`; one by one they are in the order of slots.
    pub y: Vec<f32>,
    /// Width of `y`.
    pub hidden: usize,
    /// `[rows, answers]`: which rows of `y` are of that row, `-1` where there are fewer.
    pub places: Vec<i32>,
    /// Results that a row has at most.
    pub answers: usize,
}

/// What becomes of the results.
#[derive(Debug)]
pub enum Sink<'a> {
    /// They are added to the rows `[rows, hidden]` that asked, slot after slot.
    Sums(&'a mut [f32]),
    /// They are kept one by one.
    Apart(&'a mut Results),
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Where each slot's rows end.
    ends: Vec<usize>,
    /// Rows of each slot, ascending, slot after slot; and their weights.
    rows: Vec<u32>,
    weights: Vec<f32>,
    gate_up: Vec<f32>,
    middle: Vec<f32>,
}

impl Scratch {
    /// Turns what is asked around: rows by slot. `places` is told where each went.
    fn sort(&mut self, slots: usize, asked: &Asked<'_>, places: Option<&mut Vec<i32>>) {
        self.ends.clear();
        self.ends.resize(slots, 0);
        for slot in asked.slots.iter().filter(|slot| **slot >= 0) {
            self.ends[*slot as usize] += 1;
        }
        let mut next = 0;
        for end in &mut self.ends {
            next += *end;
            *end = next - *end; // the beginning, until its rows are put in
        }
        self.rows.resize(next, 0);
        self.weights.resize(next, 0.0);
        let pairs =
            asked.slots.chunks_exact(asked.top_k).zip(asked.weights.chunks_exact(asked.top_k));
        for (row, (slots, weights)) in (0..).zip(pairs) {
            for (slot, weight) in slots.iter().zip(weights).filter(|(slot, _)| **slot >= 0) {
                let end = &mut self.ends[*slot as usize];
                (self.rows[*end], self.weights[*end]) = (row, *weight);
                *end += 1;
            }
        }
        let Some(places) = places else { return };
        places.clear();
        let mut next: Vec<usize> = (0..slots).map(|slot| self.rows_of(slot).start).collect();
        places.extend(asked.slots.iter().map(|slot| {
            let Ok(slot) = usize::try_from(*slot) else { return -1 };
            next[slot] += 1;
            next[slot] as i32 - 1
        }));
    }

    /// Where the rows of a slot are in `rows` and `weights`.
    fn rows_of(&self, slot: usize) -> Range<usize> {
        let start = if slot == 0 { 0 } else { self.ends[slot - 1] };
        start..self.ends[slot]
    }

    /// Slots from `first` on that have no more than `most` rows together; at least one.
    fn run(&self, first: usize, most: usize) -> Range<usize> {
        let start = self.rows_of(first).start;
        let more = self.ends[first + 1..].iter().take_while(|end| **end - start <= most).count();
        first..first + 1 + more
    }
}

impl Slots {
    /// Room for `count` experts, which are packed as `dtype` one by one: so they are not in memory together as they came.
    pub fn with_room(count: usize, (hidden, width): (usize, usize), dtype: Dtype) -> Self {
        Self {
            gate_up: Weight::with_room(count, 2 * width, hidden, dtype),
            down: Weight::with_room(count, hidden, width, dtype),
            dtype,
        }
    }

    /// Packs the expert of the next slot, `[2 * width, hidden]` and `[hidden, width]`.
    /// # Errors
    /// If it has another shape.
    pub fn push(&mut self, gate_up: Elements<'_>, down: Elements<'_>) -> Result<(), ExpertsError> {
        check_size("gate_up", gate_up.len(), self.gate_up.n() * self.gate_up.k())?;
        check_size("down", down.len(), self.down.n() * self.down.k())?;
        self.gate_up.push(gate_up);
        self.down.push(down);
        Ok(())
    }

    /// Experts that were packed before and stay where they are, of which [`Self::read_part`] gave the bytes.
    /// # Errors
    /// If the halves are not of as many experts, or not of one shape.
    pub fn lent(gate_up: Weight, down: Weight, dtype: Dtype) -> Result<Self, ExpertsError> {
        check_size("list of down", down.count(), gate_up.count())?;
        check_size("row of gate_up", gate_up.k(), down.n())?;
        check_size("gate_up", gate_up.n(), 2 * down.k())?;
        Ok(Self { gate_up, down, dtype })
    }

    /// Parts of the bytes of all of them, in their order: lanes of each `gate_up`, their scales, and so with `down`.
    pub fn parts(&self) -> usize {
        4 * self.count()
    }

    /// Appends a part to `out`.
    /// # Panics
    /// If there is no such part.
    pub fn read_part(&self, part: usize, out: &mut Vec<u8>) {
        let slot = part % self.count();
        match part / self.count() {
            0 => self.gate_up.read_lanes(slot, out),
            1 => self.gate_up.read_scales(slot, out),
            2 => self.down.read_lanes(slot, out),
            _ => self.down.read_scales(slot, out),
        }
    }

    /// None yet, with room for one expert of the same shape: to be put into a slot by [`Self::put`].
    pub fn one_alike(&self) -> Self {
        Self::with_room(1, (self.hidden(), self.width()), self.dtype)
    }

    /// Overwrites a slot with the first expert of `from`, where its weights are.
    /// # Errors
    /// If there is no such slot.
    /// # Panics
    /// If experts are of another shape.
    pub fn put(&mut self, slot: usize, from: &Self) -> Result<(), ExpertsError> {
        self.check_slot(slot)?;
        self.gate_up.replace(slot, &from.gate_up);
        self.down.replace(slot, &from.down);
        Ok(())
    }

    /// Bytes of the image of one slot.
    pub fn image_len(&self) -> usize {
        self.gate_up.image_len() + self.down.image_len()
    }

    /// The expert in a slot, packed as it is: [`Self::write_image`] makes the same bits of it.
    /// # Errors
    /// If there is no such slot.
    pub fn read_image(&self, slot: usize) -> Result<Vec<u8>, ExpertsError> {
        self.check_slot(slot)?;
        let mut image = Vec::with_capacity(self.image_len());
        self.gate_up.read_image(slot, &mut image);
        self.down.read_image(slot, &mut image);
        Ok(image)
    }

    /// Overwrites a slot with the expert of an image, where its weights are.
    /// # Errors
    /// If there is no such slot, or the image is of another shape or dtype. Nothing is changed then.
    pub fn write_image(&mut self, slot: usize, image: &[u8]) -> Result<(), ExpertsError> {
        self.check_slot(slot)?;
        check_size("image of an expert", image.len(), self.image_len())?;
        let (gate_up, down) = image.split_at(self.gate_up.image_len());
        self.gate_up.write_image(slot, gate_up);
        self.down.write_image(slot, down);
        Ok(())
    }

    fn check_slot(&self, slot: usize) -> Result<(), ExpertsError> {
        let slots = self.count();
        if slot < slots { Ok(()) } else { Err(ExpertsError::Slot { slot, slots }) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.down.count()
    }

    /// Width of rows.
    pub fn hidden(&self) -> usize {
        self.down.n()
    }

    /// Width of what an expert has in between.
    pub fn width(&self) -> usize {
        self.down.k()
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// What the slots make of the rows that ask them.
    /// # Panics
    /// If lengths do not fit, or there is no such slot.
    pub fn compute(
        &self,
        level: Level,
        asked: Asked<'_>,
        linear: &mut product::Scratch,
        scratch: &mut Scratch,
        mut into: Sink<'_>,
    ) {
        let places =
            if let Sink::Apart(results) = &mut into { Some(&mut results.places) } else { None };
        scratch.sort(self.count(), &asked, places);
        if let Sink::Apart(results) = &mut into {
            results.y.resize(scratch.rows.len() * self.hidden(), 0.0);
            (results.hidden, results.answers) = (self.hidden(), asked.top_k);
        }
        let mut first = 0;
        while first < self.count() {
            let run = scratch.run(first, ROOM / (2 * self.width()));
            first = run.end;
            self.run(level, run, asked.x, linear, scratch, &mut into);
        }
    }

    /// Results of some consecutive slots. All of their `gate_up` comes before all of their `down`: so a lone row reads
    /// long streams, not a little here and a little there.
    fn run(
        &self,
        level: Level,
        run: Range<usize>,
        x: &[f32],
        linear: &mut product::Scratch,
        scratch: &mut Scratch,
        into: &mut Sink<'_>,
    ) {
        let Self { gate_up, down, .. } = self;
        let (hidden, width) = (down.n(), down.k());
        let all = scratch.rows_of(run.start).start..scratch.rows_of(run.end - 1).end;
        if all.is_empty() {
            return;
        }
        let mut both = std::mem::take(&mut scratch.gate_up);
        let mut middle = std::mem::take(&mut scratch.middle);
        let gate_ups = reserve(&mut both, all.len() * 2 * width);
        let mut packed: &[u32] = &[];
        for slot in run.clone() {
            let rows = scratch.rows_of(slot);
            let ids = &scratch.rows[rows.clone()];
            if ids.is_empty() {
                continue;
            }
            let product = Product {
                x,
                x_at: RowsAt { start: 0, stride: hidden, ids: Some(ids) },
                rows: ids.len(),
                x_packed: ids == packed,
                weight: gate_up,
                index: slot,
                y: &mut gate_ups[(rows.start - all.start) * 2 * width..],
                y_at: RowsAt::dense(2 * width),
                finish: Finish::Set { residual: None },
            };
            product.compute(level, linear);
            packed = ids;
        }
        let middles = reserve(&mut middle, all.len() * width);
        rows::silu_mul(level, gate_ups, width, middles);
        for (row, weight) in middles.chunks_exact_mut(width).zip(&scratch.weights[all.clone()]) {
            for x in row {
                *x *= weight;
            }
        }
        for slot in run {
            let rows = scratch.rows_of(slot);
            let (y, y_at, finish) = match into {
                Sink::Sums(y) => {
                    let ids = Some(&scratch.rows[rows.clone()]);
                    (&mut **y, RowsAt { start: 0, stride: hidden, ids }, Finish::Add)
                }
                Sink::Apart(results) => {
                    let y = &mut results.y[rows.start * hidden..];
                    (y, RowsAt::dense(hidden), Finish::Set { residual: None })
                }
            };
            let product = Product {
                x: &middles[(rows.start - all.start) * width..],
                x_at: RowsAt::dense(width),
                rows: rows.len(),
                x_packed: false,
                weight: down,
                index: slot,
                y,
                y_at,
                finish,
            };
            product.compute(level, linear);
        }
        (scratch.gate_up, scratch.middle) = (both, middle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight::Lanes;

    const SIZE: (usize, usize) = (70, 5);

    fn expert(seed: usize) -> [Vec<f32>; 2] {
        let (hidden, width) = SIZE;
        [2 * width * hidden, hidden * width].map(|len| {
            (0..len).map(|i| ((i + seed) * 2_654_435_761 % 1_000_003) as f32 / 5e5 - 1.0).collect()
        })
    }

    fn slots(seeds: &[usize], dtype: Dtype) -> Result<Slots, ExpertsError> {
        let mut slots = Slots::with_room(seeds.len(), SIZE, dtype);
        for seed in seeds {
            let [gate_up, down] = expert(*seed);
            slots.push(Elements::F32(&gate_up), Elements::F32(&down))?;
        }
        Ok(slots)
    }

    fn address(weight: &Weight) -> usize {
        match &weight.lanes {
            Lanes::F32(lanes) => lanes.as_ptr().addr(),
            Lanes::Bf16(lanes) => lanes.as_ptr().addr(),
            Lanes::F16(lanes) => lanes.as_ptr().addr(),
            Lanes::I8 { pairs, .. } => pairs.as_ptr().addr(),
        }
    }

    #[test]
    fn another_expert_comes_to_the_same_place_in_memory() -> Result<(), ExpertsError> {
        for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16, Dtype::Int8] {
            let mut held = slots(&[1, 2, 3], dtype)?;
            let before = (address(&held.gate_up), address(&held.down));
            held.put(1, &slots(&[9], dtype)?)?;
            assert_eq!((address(&held.gate_up), address(&held.down)), before);
            assert_eq!(format!("{held:?}"), format!("{:?}", slots(&[1, 9, 3], dtype)?));
        }
        Ok(())
    }

    #[test]
    fn an_image_makes_the_bits_of_a_load() -> Result<(), ExpertsError> {
        for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16, Dtype::Int8] {
            let mut held = slots(&[1, 2, 3], dtype)?;
            let before = (address(&held.gate_up), address(&held.down));
            let image = slots(&[8, 9], dtype)?.read_image(1)?;
            assert_eq!(image.len(), held.image_len());
            held.write_image(2, &image)?;
            assert_eq!((address(&held.gate_up), address(&held.down)), before);
            let debug = format!("{held:?}");
            assert_eq!(debug, format!("{:?}", slots(&[1, 2, 9], dtype)?));
            let short = held.write_image(0, &image[1..]);
            assert!(matches!(short, Err(ExpertsError::Size { .. })), "{short:?}");
            let missing = held.write_image(3, &image);
            assert_eq!(missing, Err(ExpertsError::Slot { slot: 3, slots: 3 }));
            assert_eq!(held.read_image(3), Err(ExpertsError::Slot { slot: 3, slots: 3 }));
            assert_eq!(format!("{held:?}"), debug);
        }
        Ok(())
    }

    #[test]
    fn results_are_summed_and_kept_apart_to_the_same_bits() -> Result<(), ExpertsError> {
        let (hidden, _) = SIZE;
        let slots = slots(&[4, 5, 6], Dtype::Float32)?;
        let [x, _] = expert(7);
        let (x, weights) = (&x[..3 * hidden], [0.5, 0.25, 2.0, 0.125, 1.5, 3.0]);
        // The second row asks one slot, the third none.
        let asked = Asked { x, slots: &[0, 2, -1, 1, -1, -1], weights: &weights, top_k: 2 };
        let (level, mut linear) = (Level::detect(), product::Scratch::default());
        let mut scratch = Scratch::default();
        let (mut sums, mut results) = (vec![1.0; 3 * hidden], Results::default());
        slots.compute(level, asked, &mut linear, &mut scratch, Sink::Sums(&mut sums));
        slots.compute(level, asked, &mut linear, &mut scratch, Sink::Apart(&mut results));
        assert_eq!(results.places, [0, 2, -1, 1, -1, -1]);
        assert_eq!((results.y.len(), results.answers), (3 * hidden, 2));
        let mut combined = vec![1.0; 3 * hidden];
        crate::moe::exchange::combine(&results.y, &results.places, hidden, &mut combined);
        assert_eq!(combined, sums);
        assert!(sums[2 * hidden..].iter().all(|x| *x == 1.0));
        Ok(())
    }
}

//! A layer of experts: each row goes through the few that it chooses, and their outputs are added.
//!
//! An element is `((residual + y_a) + y_b) + ...` over the row's experts in ascending order, where `y_e` is one sum as
//! in [`crate::product`] over the expert's `weight * silu(gate) * up`. So it does not depend on which other rows chose
//! the same expert, although the products go over all rows of an expert at once.

pub mod routing;

use std::ops::Range;

use self::routing::{Routing, RoutingError};
use crate::linear::Linear;
use crate::product::{self, Finish, Product, RowsAt};
use crate::rows;
use crate::simd::Level;
use crate::weight::{Dtype, Elements, Weight};

/// Floats of `[gate | up]` that are kept at once, so that they stay in a second-level cache.
const ROOM: usize = 64 * 1024;

/// The router and the experts of one layer.
#[derive(Debug)]
pub struct Experts {
    routing: Routing,
    gate: Weight,
    bias: Vec<f32>,
    gate_up: Weight,
    down: Weight,
}

/// Why a layer cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ExpertsError {
    /// Rows cannot be routed so.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// A tensor or a list of them has the wrong size.
    #[error("experts: {what} has {got} elements, expected {expected}")]
    Size {
        /// Name of the tensor or list.
        what: &'static str,
        /// Elements that it has.
        got: usize,
        /// What the routing and the first expert say.
        expected: usize,
    },
}

fn check_size(what: &'static str, got: usize, expected: usize) -> Result<(), ExpertsError> {
    if got == expected { Ok(()) } else { Err(ExpertsError::Size { what, got, expected }) }
}

impl Experts {
    /// The router, `[experts, hidden]` and `[experts]`, which stays `f32`, and room for experts of this width, which are
    /// packed as `dtype` one by one: so they are not in memory together as they came.
    /// # Errors
    /// If parts do not fit together.
    pub fn with_room(
        gate: Elements<'_>,
        bias: Vec<f32>,
        (hidden, width): (usize, usize),
        routing: Routing,
        dtype: Dtype,
    ) -> Result<Self, ExpertsError> {
        routing.check()?;
        let count = routing.experts;
        check_size("gate", gate.len(), count * hidden)?;
        check_size("bias", bias.len(), count)?;
        Ok(Self {
            routing,
            gate: Weight::pack(&[gate], hidden, None, Dtype::Float32),
            bias,
            gate_up: Weight::with_room(count, 2 * width, hidden, dtype),
            down: Weight::with_room(count, hidden, width, dtype),
        })
    }

    /// Packs the next expert, `[2 * width, hidden]` and `[hidden, width]`.
    /// # Errors
    /// If it has another shape.
    pub fn push(&mut self, gate_up: Elements<'_>, down: Elements<'_>) -> Result<(), ExpertsError> {
        check_size("gate_up", gate_up.len(), self.gate_up.n() * self.gate_up.k())?;
        check_size("down", down.len(), self.down.n() * self.down.k())?;
        self.gate_up.push(gate_up);
        self.down.push(down);
        Ok(())
    }

    /// Width of the rows.
    pub fn hidden(&self) -> usize {
        self.gate.k()
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        self.gate.bytes() + self.gate_up.bytes() + self.down.bytes()
    }
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    scores: Vec<f32>,
    routing: routing::Scratch,
    /// (expert, weight) of each row, `top_k` of them.
    chosen: Vec<(u32, f32)>,
    /// Where each expert's rows end.
    ends: Vec<usize>,
    /// Rows of each expert, ascending, expert after expert; and their weights.
    rows: Vec<u32>,
    weights: Vec<f32>,
    gate_up: Vec<f32>,
    middle: Vec<f32>,
}

impl Scratch {
    /// Turns `chosen` around: rows by expert.
    fn sort(&mut self, experts: usize, top_k: usize) {
        self.ends.clear();
        self.ends.resize(experts, 0);
        for (expert, _) in &self.chosen {
            self.ends[*expert as usize] += 1;
        }
        let mut next = 0;
        for end in &mut self.ends {
            next += *end;
            *end = next - *end; // the beginning, until its rows are put in
        }
        self.rows.resize(next, 0);
        self.weights.resize(next, 0.0);
        for (row, chosen) in (0..).zip(self.chosen.chunks_exact(top_k)) {
            for (expert, weight) in chosen {
                let end = &mut self.ends[*expert as usize];
                (self.rows[*end], self.weights[*end]) = (row, *weight);
                *end += 1;
            }
        }
    }

    /// Where the rows of an expert are in `rows` and `weights`.
    fn rows_of(&self, expert: usize) -> Range<usize> {
        let start = if expert == 0 { 0 } else { self.ends[expert - 1] };
        start..self.ends[expert]
    }

    /// Experts from `first` on that have no more than `most` rows together; at least one.
    fn run(&self, first: usize, most: usize) -> Range<usize> {
        let start = self.rows_of(first).start;
        let more = self.ends[first + 1..].iter().take_while(|end| **end - start <= most).count();
        first..first + 1 + more
    }
}

/// One layer over some rows.
#[derive(Debug)]
pub struct Moe<'a> {
    /// `[rows, hidden]`.
    pub x: &'a [f32],
    /// Router and experts of the layer.
    pub experts: &'a Experts,
    /// `[rows, hidden]`, to which the experts are added.
    pub residual: &'a [f32],
    /// `[rows, hidden]`.
    pub y: &'a mut [f32],
}

impl Moe<'_> {
    /// Computes `y`.
    /// # Panics
    /// If lengths do not fit.
    pub fn compute(mut self, level: Level, linear: &mut product::Scratch, scratch: &mut Scratch) {
        let Experts { routing, gate, bias, down, .. } = self.experts;
        let (hidden, width) = (down.n(), down.k());
        assert!(self.x.len().is_multiple_of(hidden), "whole rows");
        self.y.copy_from_slice(self.residual);
        let scores_len = self.x.len() / hidden * routing.experts;
        let scores = reserve(&mut scratch.scores, scores_len);
        let job = Linear { x: self.x, weight: gate, residual: None, y: &mut *scores };
        job.compute(level, linear);
        for logit in scores.iter_mut().filter(|logit| !logit.is_finite()) {
            *logit = f32::NAN; // the sigmoid of an infinity would be a score like others
        }
        rows::sigmoid(level, scores);
        scratch.chosen.clear();
        for scores in scores.chunks_exact(routing.experts) {
            let chosen = &mut scratch.chosen;
            let to = |expert: usize, weight| chosen.push((expert as u32, weight));
            routing.route(scores, bias, &mut scratch.routing, to);
        }
        scratch.sort(routing.experts, routing.top_k);
        let mut first = 0;
        while first < routing.experts {
            let run = scratch.run(first, ROOM / (2 * width));
            first = run.end;
            self.run(level, run, linear, scratch);
        }
    }

    /// Adds the outputs of some consecutive experts. All of their `gate_up` comes before all of their `down`: so a lone
    /// row reads long streams, not a little here and a little there.
    fn run(
        &mut self,
        level: Level,
        run: Range<usize>,
        linear: &mut product::Scratch,
        scratch: &mut Scratch,
    ) {
        let Experts { gate_up, down, .. } = self.experts;
        let (hidden, width) = (down.n(), down.k());
        let all = scratch.rows_of(run.start).start..scratch.rows_of(run.end - 1).end;
        if all.is_empty() {
            return;
        }
        let mut both = std::mem::take(&mut scratch.gate_up);
        let mut middle = std::mem::take(&mut scratch.middle);
        let gate_ups = reserve(&mut both, all.len() * 2 * width);
        let mut packed: &[u32] = &[];
        for expert in run.clone() {
            let rows = scratch.rows_of(expert);
            let ids = &scratch.rows[rows.clone()];
            if ids.is_empty() {
                continue;
            }
            let product = Product {
                x: self.x,
                x_at: RowsAt { start: 0, stride: hidden, ids: Some(ids) },
                rows: ids.len(),
                x_packed: ids == packed,
                weight: gate_up,
                index: expert,
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
        for expert in run {
            let rows = scratch.rows_of(expert);
            let product = Product {
                x: &middles[(rows.start - all.start) * width..],
                x_at: RowsAt::dense(width),
                rows: rows.len(),
                x_packed: false,
                weight: down,
                index: expert,
                y: &mut *self.y,
                y_at: RowsAt { start: 0, stride: hidden, ids: Some(&scratch.rows[rows]) },
                finish: Finish::Add,
            };
            product.compute(level, linear);
        }
        (scratch.gate_up, scratch.middle) = (both, middle);
    }
}

/// `len` floats of a buffer that only grows.
fn reserve(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

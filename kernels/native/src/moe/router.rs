//! The router of a layer: which experts each of some rows goes to, and how often each expert was chosen.

use std::sync::atomic::{AtomicU64, Ordering};

use super::routing::{self, Routing};
use super::{ExpertsError, check_size, reserve};
use crate::linear::Linear;
use crate::product;
use crate::rows;
use crate::simd::Level;
use crate::weight::{Dtype, Elements, Weight};

/// `[experts, hidden]` with a bias each, in `f32` whatever the experts are.
#[derive(Debug)]
pub struct Router {
    routing: Routing,
    gate: Weight,
    bias: Vec<f32>,
    /// Rows that chose each expert so far.
    counts: Vec<AtomicU64>,
}

/// The experts of some rows.
#[derive(Debug, Default)]
pub struct Chosen {
    /// `[rows, top_k]`, ascending within a row.
    pub ids: Vec<i32>,
    /// `[rows, top_k]`.
    pub weights: Vec<f32>,
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    scores: Vec<f32>,
    routing: routing::Scratch,
    counts: Vec<u64>,
}

impl Router {
    /// Of a `gate` `[experts, hidden]` and a bias of each expert.
    /// # Errors
    /// If they do not fit together.
    pub fn new(
        gate: Elements<'_>,
        bias: Vec<f32>,
        hidden: usize,
        routing: Routing,
    ) -> Result<Self, ExpertsError> {
        routing.check()?;
        let count = routing.experts;
        check_size("gate", gate.len(), count * hidden)?;
        check_size("bias", bias.len(), count)?;
        let gate = Weight::pack(&[gate], hidden, None, Dtype::Float32);
        let counts = (0..count).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { routing, gate, bias, counts })
    }

    /// How rows choose.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Width of the rows.
    pub fn hidden(&self) -> usize {
        self.gate.k()
    }

    /// Bytes of the gate.
    pub fn bytes(&self) -> usize {
        self.gate.bytes()
    }

    /// Rows that chose each expert since the model was loaded. Any thread may ask.
    pub fn counts(&self) -> Vec<u64> {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// The experts of rows `x`.
    /// # Panics
    /// If `x` is not whole rows.
    pub fn route(
        &self,
        level: Level,
        x: &[f32],
        linear: &mut product::Scratch,
        scratch: &mut Scratch,
        chosen: &mut Chosen,
    ) {
        let Self { routing, gate, bias, counts } = self;
        assert!(x.len().is_multiple_of(gate.k()), "whole rows");
        let scores = reserve(&mut scratch.scores, x.len() / gate.k() * routing.experts);
        Linear { x, weight: gate, residual: None, y: &mut *scores }.compute(level, linear);
        for logit in scores.iter_mut().filter(|logit| !logit.is_finite()) {
            *logit = f32::NAN; // the sigmoid of an infinity would be a score like others
        }
        rows::sigmoid(level, scores);
        chosen.ids.clear();
        chosen.weights.clear();
        scratch.counts.clear();
        scratch.counts.resize(routing.experts, 0);
        for scores in scores.chunks_exact(routing.experts) {
            routing.route(scores, bias, &mut scratch.routing, |expert, weight| {
                chosen.ids.push(expert as i32);
                chosen.weights.push(weight);
                scratch.counts[expert] += 1;
            });
        }
        for (count, more) in counts.iter().zip(&scratch.counts).filter(|(_, more)| **more > 0) {
            count.fetch_add(*more, Ordering::Relaxed);
        }
    }
}

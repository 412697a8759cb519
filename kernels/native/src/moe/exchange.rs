//! How rows reach experts on other ranks, and how results come back: what moves them is behind [`Exchange`].

use super::parcels::Parcels;
use super::router::Chosen;
use super::slots::{Asked, Results};

/// Why rows or results did not arrive: what the one who moves them says.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// In which order results of several ranks are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// One by one, in the order of experts: the same bits on any number of ranks.
    Exact,
    /// First those of each rank, then the sums in the order of ranks: fewer bytes, the same bits for one shape of a group.
    Partial,
}

/// This rank's rows and where they go.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'a> {
    /// `[rows, hidden]`.
    pub x: &'a [f32],
    /// `[rows, top_k]`.
    pub chosen: &'a Chosen,
    /// Width of rows.
    pub hidden: usize,
    /// Experts of a row.
    pub top_k: usize,
}

/// Rows that came to this rank's slots, from this rank or others.
#[derive(Debug, Default)]
pub struct Received {
    /// `[n, hidden]`.
    pub x: Vec<f32>,
    /// `[n, top_k]`; `-1` where another rank has the expert.
    pub slots: Vec<i32>,
    /// `[n, top_k]`.
    pub weights: Vec<f32>,
}

impl Received {
    /// Room for so many rows.
    pub(super) fn resize(&mut self, rows: usize, hidden: usize, top_k: usize) {
        self.x.resize(rows * hidden, 0.0);
        self.slots.resize(rows * top_k, -1);
        self.weights.resize(rows * top_k, 0.0);
    }

    /// Puts other rows behind these.
    pub(super) fn append(&mut self, rows: Asked<'_>) {
        self.x.extend_from_slice(rows.x);
        self.slots.extend_from_slice(rows.slots);
        self.weights.extend_from_slice(rows.weights);
    }

    pub(super) fn asked(&self, top_k: usize) -> Asked<'_> {
        Asked { x: &self.x, slots: &self.slots, weights: &self.weights, top_k }
    }
}

/// What came back for this rank's own rows.
#[derive(Debug, Default)]
pub struct Returned {
    /// `[m, hidden]`.
    pub y: Vec<f32>,
    /// `[rows, answers]`: the rows of `y` that are summed, in this order; `-1` where a row has fewer.
    pub places: Vec<i32>,
}

/// Moves rows to the ranks that hold their experts, and results back. Calls come in this order, layer by layer.
pub trait Exchange: Send + Sync + std::fmt::Debug {
    /// In which order results are summed.
    fn combine(&self) -> Combine;
    /// Sends rows on their way. The shared expert is computed before anybody waits for them.
    /// # Errors
    /// If they cannot be sent.
    fn send(&self, routed: Routed<'_>) -> Result<(), Failure>;
    /// Waits for the rows that ask this rank's slots.
    /// # Errors
    /// If they do not come.
    fn receive(&self, received: &mut Received) -> Result<(), Failure>;
    /// Sends the results of received rows back, and waits for those of this rank's own rows.
    /// # Errors
    /// If they do not come.
    fn collect(&self, results: &Results, returned: &mut Returned) -> Result<(), Failure>;
}

/// What brings rows to the experts of other ranks, and results back.
#[derive(Debug)]
pub enum Dispatch {
    /// Somebody else does, such as Python.
    Calls(Box<dyn Exchange>),
    /// The program does, with what carries parcels.
    Parcels(Box<dyn Parcels>),
}

/// Adds to each row of `y` the rows of `results` that `places` names, one after the other.
/// # Panics
/// If lengths do not fit.
pub fn combine(results: &[f32], places: &[i32], hidden: usize, y: &mut [f32]) {
    let terms = places.len() / (y.len() / hidden).max(1);
    if terms == 0 {
        return;
    }
    for (y, places) in y.chunks_exact_mut(hidden).zip(places.chunks_exact(terms)) {
        for place in places.iter().filter(|place| **place >= 0) {
            for (y, term) in y.iter_mut().zip(&results[*place as usize * hidden..][..hidden]) {
                *y += term;
            }
        }
    }
}

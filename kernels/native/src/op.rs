//! The operations that a program consists of, and why one cannot be recorded.

use std::sync::Arc;

use crate::mla::HeadMatrices;
use crate::moe::Experts;
use crate::weight::{Table, Weight};

/// A value of the recording: `[rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value(pub(crate) usize);

impl Value {
    pub(crate) fn place(self, places: &[Place]) -> Place {
        places[self.0]
    }
}

#[derive(Debug)]
pub(crate) enum Op {
    Embed { table: Arc<Table> },
    RmsNorm { x: Value, weight: Vec<f32>, eps: f32 },
    Linear { x: Value, weight: Arc<Weight>, residual: Option<Value> },
    RopeAndStoreKv { qkv: Value, layer: usize },
    PagedAttention { qkv: Value, layer: usize },
    MlaStore { q: Value, latent: Value, norm: Vec<f32>, eps: f32, layer: usize },
    MlaAttention { q: Value, kv_b: Arc<HeadMatrices>, layer: usize },
    SiluMul { x: Value },
    Moe { x: Value, experts: Arc<Experts>, residual: Value },
    Columns { x: Value, start: usize },
    Concat { a: Value, b: Value },
    WantedRows { x: Value },
    KeepHidden { x: Value },
    Hidden,
    PoolRows { x: Value, norm: Option<(Vec<f32>, f32)> },
}

impl Op {
    pub(crate) fn reads(&self) -> [Option<Value>; 2] {
        match self {
            Self::Embed { .. } | Self::Hidden => [None, None],
            Self::Linear { x, residual, .. } => [Some(*x), *residual],
            Self::Moe { x: a, residual: b, .. }
            | Self::Concat { a, b }
            | Self::MlaStore { q: a, latent: b, .. } => [Some(*a), Some(*b)],
            Self::RmsNorm { x, .. }
            | Self::SiluMul { x }
            | Self::WantedRows { x }
            | Self::Columns { x, .. }
            | Self::KeepHidden { x }
            | Self::PoolRows { x, .. }
            | Self::RopeAndStoreKv { qkv: x, .. }
            | Self::PagedAttention { qkv: x, .. }
            | Self::MlaAttention { q: x, .. } => [Some(*x), None],
        }
    }

    /// The value that the result takes the place of.
    pub(crate) fn spends(&self) -> Option<Value> {
        if let Self::RopeAndStoreKv { qkv: x, .. } | Self::MlaStore { q: x, .. } = self {
            Some(*x)
        } else {
            None
        }
    }
}

/// Where a value lies, and its shape. Values that are no longer read give their buffer to later ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) width: usize,
    pub(crate) wanted_only: bool,
    pub(crate) buffer: usize,
}

/// Why a program cannot be recorded.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RecordError {
    /// The cache does not fit the kernels.
    #[error("{what} is {got}, must be {must}")]
    Config {
        /// Name of the size.
        what: &'static str,
        /// The size as it was given.
        got: usize,
        /// What it must be.
        must: &'static str,
    },
    /// An operand does not fit the operation.
    #[error("{op}: {what} is {got} wide, expected {expected}")]
    Width {
        /// Name of the operation.
        op: &'static str,
        /// Name of the operand.
        what: &'static str,
        /// Width of the operand.
        got: usize,
        /// Width that the operation takes.
        expected: usize,
    },
    /// Some operands are of all rows, some of the wanted ones.
    #[error("{op}: operands are not of the same rows, or not of all")]
    Rows {
        /// Name of the operation.
        op: &'static str,
    },
    /// There is no such layer in the cache.
    #[error("{op}: layer {layer} of a cache of {layers}")]
    Layer {
        /// Name of the operation.
        op: &'static str,
        /// Number of the layer, from 0.
        layer: usize,
        /// How many there are.
        layers: usize,
    },
    /// Columns that a value does not have.
    #[error("columns: {start}..{stop} of {width}")]
    Columns {
        /// Number of the first column.
        start: usize,
        /// Behind the last.
        stop: usize,
        /// Width of the value.
        width: usize,
    },
    /// The operation is not one of this model.
    #[error("{op}: {why}")]
    Not {
        /// Name of the operation.
        op: &'static str,
        /// Reason, for people.
        why: &'static str,
    },
}

//! What carries rows and results of a layer to other ranks and back, where a program exchanges them by itself.
//!
//! A parcel is some rows of columns, column after column. Parcels are written out of the memory in which rows lie, and
//! read into that in which they are computed; what is in between is behind [`Parcels`].

use std::sync::Arc;
use std::time::Duration;

use super::exchange::{Combine, Failure};

/// Rows a slot from which own rows are computed by themselves: reading weights twice is little beside computing then.
/// On one host nothing is gained by it; 16 costs up to a third, 64 a twentieth (`bench/results/ranks_apart.json`).
pub const ROWS_APART: usize = 64;

/// Where a rank sends the rows of each expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// The rank that computes each expert for this one.
    pub owners: Vec<i64>,
    /// The slot there.
    pub slots: Vec<i32>,
}

/// Numbers of a column that is sent.
#[derive(Debug, Clone, Copy)]
pub enum Cells<'a> {
    /// Rows and weights.
    F32(&'a [f32]),
    /// Slots.
    I32(&'a [i32]),
}

/// Rows of one column that is sent.
#[derive(Debug, Clone, Copy)]
pub struct Column<'a> {
    /// Rows of `width`.
    pub cells: Cells<'a>,
    /// Numbers of a row.
    pub width: usize,
    /// Which of the rows goes first, second, and so on; `None` where they go as they lie.
    pub order: Option<&'a [i64]>,
}

/// Parcels for all ranks: columns of as many rows each, which go to rank after rank.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// Of the same widths on all ranks.
    pub columns: &'a [Column<'a>],
    /// Rows for each rank. Those for this rank stay.
    pub counts: &'a [usize],
}

/// Memory of a column that is received.
#[derive(Debug)]
pub enum CellsMut<'a> {
    /// Rows and weights.
    F32(&'a mut [f32]),
    /// Slots.
    I32(&'a mut [i32]),
}

/// Room for the rows of one column.
#[derive(Debug)]
pub struct ColumnMut<'a> {
    /// Rows of `width`, those of one rank after those of another.
    pub cells: CellsMut<'a>,
    /// Numbers of a row.
    pub width: usize,
}

/// Carries parcels between the ranks of a group, which all post one after the other in the same order. An exchange is
/// `post`, then `counts`, then `take`, with the same parcels in all three.
pub trait Parcels: Send + Sync + std::fmt::Debug {
    /// Number of this rank.
    fn rank(&self) -> usize;
    /// Ranks of the group.
    fn ranks(&self) -> usize;
    /// In which order results are summed.
    fn combine(&self) -> Combine;
    /// Rows a slot from which own rows are computed by themselves, while those of others are on their way. No bit depends
    /// on it.
    fn rows_apart(&self) -> usize {
        ROWS_APART
    }
    /// Where rows go. It changes between two passes only.
    fn home(&self) -> Arc<Home>;
    /// Sends as much as there is room for; the rest goes in the calls that follow.
    /// # Errors
    /// If the round or the group is over.
    fn post(&self, out: Outgoing<'_>) -> Result<(), Failure>;
    /// Whether something has come from each other rank, so that `counts` would not wait.
    /// # Errors
    /// If the round or the group is over.
    fn has_come(&self, out: Outgoing<'_>) -> Result<bool, Failure>;
    /// Waits until it is known how many rows come from each rank; none come from this one.
    /// # Errors
    /// If the round or the group is over.
    fn counts(&self, out: Outgoing<'_>, into: &mut Vec<usize>) -> Result<(), Failure>;
    /// Waits for all rows, and until all of this rank's have gone.
    /// # Errors
    /// If the round or the group is over.
    fn take(&self, out: Outgoing<'_>, into: &mut [ColumnMut<'_>]) -> Result<(), Failure>;
    /// Is told how long the slots of this rank computed for one layer.
    fn computed(&self, slots: Duration);
}

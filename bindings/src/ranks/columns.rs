//! Columns of rows in memory of Python, and a parcel as one run of bytes: column after column, row after row.
#![expect(
    unsafe_code,
    reason = "the bytes of Python buffers, read and written with the GIL released"
)]

use pyo3::buffer::PyBuffer;

use super::layout::Shared;
use crate::memory;

/// What parcels are sent from.
pub(crate) trait Source {
    /// Of all columns.
    fn row_bytes(&self) -> usize;
    /// Bytes `start` and on of the parcel of `rows` from `first` on, into a piece.
    fn send(
        &self,
        shared: &Shared,
        piece: (usize, usize, u64),
        first_and_rows: (usize, usize),
        start_and_len: (usize, usize),
    );
}

/// What parcels are received into, those of one rank after those of another.
pub(crate) trait Target {
    /// Bytes `start` and on of a parcel, which becomes `rows` from `first` on, out of a piece.
    fn receive(
        &mut self,
        shared: &Shared,
        piece: (usize, usize, u64),
        first_and_rows: (usize, usize),
        start_and_len: (usize, usize),
    );
}

/// Columns of as many rows each.
#[derive(Debug)]
pub(crate) struct Columns {
    buffers: Vec<PyBuffer<u8>>,
    row_bytes: Vec<usize>,
    rows: usize,
    writable: bool,
}

impl Columns {
    /// # Errors
    /// If bytes do not lie side by side, or are not those of as many rows in each column.
    pub(crate) fn new(
        buffers: Vec<PyBuffer<u8>>,
        row_bytes: Vec<usize>,
    ) -> Result<Self, &'static str> {
        let writable = false;
        if buffers.is_empty() || buffers.len() != row_bytes.len() {
            return Err("at least one column, and the bytes of a row of each");
        }
        if !buffers.iter().all(|buffer| buffer.is_c_contiguous()) {
            return Err("the bytes of a column must lie side by side");
        }
        // The first column has rows that can be counted.
        if row_bytes[0] == 0 {
            return Err("rows of the first column are empty");
        }
        let rows = buffers[0].len_bytes() / row_bytes[0];
        if !buffers.iter().zip(&row_bytes).all(|(buffer, width)| buffer.len_bytes() == rows * width)
        {
            return Err("all columns have as many whole rows");
        }
        Ok(Self { buffers, row_bytes, rows, writable })
    }

    /// # Errors
    /// Also if a column can only be read.
    pub(crate) fn writable(
        buffers: Vec<PyBuffer<u8>>,
        row_bytes: Vec<usize>,
    ) -> Result<Self, &'static str> {
        if buffers.iter().any(|buffer| buffer.readonly()) {
            return Err("a column can only be read");
        }
        Ok(Self { writable: true, ..Self::new(buffers, row_bytes)? })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Whether rows are as wide as those of `other`, column by column.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.row_bytes == other.row_bytes
    }

    /// The stretches of memory behind bytes `start` to `start + len` of the parcel of `rows` from `first` on: address,
    /// bytes, and where they begin in that range.
    fn stretches(
        &self,
        first: usize,
        rows: usize,
        start: usize,
        len: usize,
    ) -> impl Iterator<Item = (*mut u8, usize, usize)> {
        assert!(first + rows <= self.rows, "the parcel is of these columns");
        let mut column_start = 0;
        self.buffers.iter().zip(&self.row_bytes).filter_map(move |(buffer, width)| {
            let column_end = column_start + rows * width;
            let (from, to) = (start.max(column_start), (start + len).min(column_end));
            let within = first * width + from.saturating_sub(column_start);
            column_start = column_end;
            // `within + (to - from)` is at most `(first + rows) * width`, the length of the buffer or less
            (from < to).then(|| {
                (buffer.buf_ptr().cast::<u8>().wrapping_add(within), to - from, from - start)
            })
        })
    }

    /// The parcel of a rank to itself: `rows` of `source` from `theirs` on become those from `first` on.
    pub(crate) fn copy_from(&self, first: usize, source: &Self, theirs: usize, rows: usize) {
        assert!(self.writable && self.is_like(source), "columns of one form");
        assert!(first + rows <= self.rows && theirs + rows <= source.rows, "the rows are there");
        for ((to, from), width) in self.buffers.iter().zip(&source.buffers).zip(&self.row_bytes) {
            // SAFETY: both ranges lie in their buffers, as asserted, and both exports are held; the target is ours, as
            // in `receive`, and `memory::copy` allows for a source that somebody writes to
            unsafe {
                memory::copy(
                    from.buf_ptr().cast::<u8>().add(theirs * width),
                    to.buf_ptr().cast::<u8>().add(first * width),
                    rows * width,
                );
            }
        }
    }
}

impl Source for Columns {
    fn row_bytes(&self) -> usize {
        self.row_bytes.iter().sum()
    }

    fn send(
        &self,
        shared: &Shared,
        piece: (usize, usize, u64),
        (first, rows): (usize, usize),
        (start, len): (usize, usize),
    ) {
        for (source, count, at) in self.stretches(first, rows, start, len) {
            // SAFETY: `stretches` gives bytes inside a buffer, whose export `self` holds
            unsafe { shared.write_piece(piece, at, source, count) };
        }
    }
}

impl Target for Columns {
    fn receive(
        &mut self,
        shared: &Shared,
        piece: (usize, usize, u64),
        (first, rows): (usize, usize),
        (start, len): (usize, usize),
    ) {
        assert!(self.writable, "these columns receive");
        for (target, count, at) in self.stretches(first, rows, start, len) {
            // SAFETY: `stretches` gives bytes inside a buffer, whose export `self` holds, and `writable` found that it
            // may be written. It was made to receive: nobody else has it before this exchange is over.
            unsafe { shared.read_piece(piece, at, target, count) };
        }
    }
}

//! Columns in the memory of a program: rows go from where they lie into a piece, and out of it to where they are computed.
#![expect(
    unsafe_code,
    reason = "bytes of borrowed slices of numbers, read and written through their addresses"
)]

use headrace_kernels::moe::parcels::{Cells, CellsMut, Column, ColumnMut};

use super::columns::{Source, Target};
use super::layout::Shared;

/// All columns that are sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentRows<'a>(pub(super) &'a [Column<'a>]);

/// Room for all that is received.
#[derive(Debug)]
pub(super) struct RoomForRows<'a, 'b>(pub(super) &'a mut [ColumnMut<'b>]);

/// Bytes of a number of any column.
const NUMBER: usize = 4;

/// The part of bytes `start` to `start + len` of a parcel that is of the column whose bytes there begin at `column_start`:
/// from where to where in the column.
fn part(column_start: usize, bytes: usize, start: usize, len: usize) -> Option<(usize, usize)> {
    let (from, to) = (start.max(column_start), (start + len).min(column_start + bytes));
    (from < to).then(|| (from - column_start, to - column_start))
}

impl Source for SentRows<'_> {
    fn row_bytes(&self) -> usize {
        self.0.iter().map(|column| column.width * NUMBER).sum()
    }

    fn send(
        &self,
        shared: &Shared,
        piece: (usize, usize, u64),
        (first, rows): (usize, usize),
        (start, len): (usize, usize),
    ) {
        let mut column_start = 0;
        for column in self.0 {
            let width = column.width * NUMBER;
            if let Some((from, to)) = part(column_start, rows * width, start, len) {
                let at = column_start + from - start;
                match column.order {
                    None => put(shared, piece, at, column.cells, first * width + from, to - from),
                    Some(order) => {
                        let order = &order[first..first + rows];
                        let mut done = from;
                        while done < to {
                            let (row, within) = (done / width, done % width);
                            let count = (width - within).min(to - done);
                            let source = order[row] as usize * width + within;
                            put(shared, piece, at + done - from, column.cells, source, count);
                            done += count;
                        }
                    }
                }
            }
            column_start += rows * width;
        }
    }
}

/// Bytes `start` and on of `cells` to `at` in a piece.
fn put(
    shared: &Shared,
    piece: (usize, usize, u64),
    at: usize,
    cells: Cells<'_>,
    start: usize,
    len: usize,
) {
    let (address, bytes) = match cells {
        Cells::F32(x) => (x.as_ptr().cast::<u8>(), size_of_val(x)),
        Cells::I32(x) => (x.as_ptr().cast::<u8>(), size_of_val(x)),
    };
    assert!(start <= bytes && len <= bytes - start, "the rows are in their column");
    // SAFETY: bytes `start` to `start + len` lie in the slice, as just asserted. It is borrowed: nobody writes to it.
    unsafe { shared.write_piece(piece, at, address.add(start), len) };
}

impl Target for RoomForRows<'_, '_> {
    fn receive(
        &mut self,
        shared: &Shared,
        piece: (usize, usize, u64),
        (first, rows): (usize, usize),
        (start, len): (usize, usize),
    ) {
        let mut column_start = 0;
        for column in &mut *self.0 {
            let width = column.width * NUMBER;
            if let Some((from, to)) = part(column_start, rows * width, start, len) {
                let (address, bytes) = match &mut column.cells {
                    CellsMut::F32(x) => (x.as_mut_ptr().cast::<u8>(), size_of_val(*x)),
                    CellsMut::I32(x) => (x.as_mut_ptr().cast::<u8>(), size_of_val(*x)),
                };
                let (at, begin) = (column_start + from - start, first * width + from);
                assert!(begin + (to - from) <= bytes, "there is room for the rows");
                // SAFETY: the bytes lie in the slice, as just asserted, which is borrowed for writing: nobody else has it.
                // Any bytes are numbers of these types.
                unsafe { shared.read_piece(piece, at, address.add(begin), to - from) };
            }
            column_start += rows * width;
        }
    }
}

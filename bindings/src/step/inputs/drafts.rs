//! The rows of a pass that drafts.

use numpy::IntoPyArray;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::super::slices::{each_below, each_has, indices, open};
use super::{Array, Blocks, Facts, InputColumns, RowFlags, Table};

/// `positions`, `slots`, `seq_starts`, `context_lens` and `block_tables` of `DraftBatch`.
pub(super) type DraftRows<'py> =
    (Array<'py, i32>, Array<'py, i64>, Array<'py, i32>, Array<'py, i32>, Table<'py>);

/// Places in the step, batch rows, stops and drafts of the sequences that are followed; their rows; `tokens`,
/// `hidden_from` and `first_keys` of these; and the row, place and position of tokens that only the sequences know.
pub(super) type Followed<'py> = (
    Array<'py, i64>,
    Array<'py, i64>,
    Array<'py, i64>,
    Array<'py, i64>,
    DraftRows<'py>,
    Array<'py, i32>,
    Array<'py, i32>,
    Array<'py, i32>,
    Vec<(usize, usize, i64)>,
);

/// The rows that a step computed, and what is to be drafted after them.
pub(super) struct StepRows<'a> {
    pub(super) batch_rows: &'a [i64],
    pub(super) seq_starts: &'a [i32],
    pub(super) positions: &'a [i32],
    pub(super) tokens: &'a [i32],
    pub(super) drafts: &'a [i64],
    pub(super) follows: Option<&'a [bool]>,
}

impl StepRows<'_> {
    fn check(&self, rows: usize) -> PyResult<()> {
        let of = self.batch_rows.len();
        each_below(rows, "batch row", self.batch_rows)?;
        each_has(
            of,
            &[("drafts", self.drafts.len()), ("follows", self.follows.map_or(of, <[bool]>::len))],
        )?;
        each_has(of + 1, &[("seq_starts", self.seq_starts.len())])?;
        each_has(self.tokens.len(), &[("positions", self.positions.len())])?;
        let starts: Vec<i64> = self.seq_starts[..of].iter().map(|start| (*start).into()).collect();
        each_below(self.tokens.len(), "first row", &starts)
    }
}

pub(super) fn draft_rows<'py>(
    py: Python<'py>,
    blocks: Blocks<'_>,
    batch_rows: &[i64],
    starts: &[i64],
    stops: &[i64],
) -> PyResult<DraftRows<'py>> {
    let (mut positions, mut slots) = (Vec::new(), Vec::new());
    let mut seq_starts = vec![0_i32];
    let mut context_lens = Vec::with_capacity(batch_rows.len());
    positions.reserve(batch_rows.len());
    slots.reserve(batch_rows.len());
    for (place, row) in indices(batch_rows).enumerate() {
        let (start, stop) = (starts[place], stops[place]);
        if start < 0 || stop <= start {
            return Err(PyValueError::new_err(format!("no rows from {start} to {stop}")));
        }
        blocks.at(row, stop - 1)?; // so many have a place, and a number of 32 bits
        for position in start..stop {
            positions.push(position as i32);
            slots.push(blocks.slot(row, position)?);
        }
        seq_starts.push(positions.len() as i32);
        context_lens.push(stop as i32);
    }
    let longest = stops.iter().copied().max().unwrap_or(0);
    Ok((
        positions.into_pyarray(py),
        slots.into_pyarray(py),
        seq_starts.into_pyarray(py),
        context_lens.into_pyarray(py),
        blocks.table_of(py, batch_rows, longest)?,
    ))
}

pub(super) fn follow<'py>(
    columns: &InputColumns,
    py: Python<'py>,
    step: &StepRows<'_>,
) -> PyResult<Followed<'py>> {
    step.check(columns.rows)?;
    let (mut facts, mut flags) = (open(py, &columns.facts)?, open(py, &columns.flags)?);
    let (mut newest, mut table) = (open(py, &columns.newest)?, open(py, &columns.blocks)?);
    let (facts, flags) = (Facts::of(facts.as_slice_mut()?), RowFlags::of(flags.as_slice_mut()?));
    let newest = newest.as_slice_mut()?;
    each_has(columns.rows, &[("newest", newest.len())])?;
    let blocks = columns.blocks_of(table.as_slice_mut()?);
    let (mut chosen, mut batch_rows) = (Vec::new(), Vec::new());
    let (mut starts, mut stops, mut drafts) = (Vec::new(), Vec::new(), Vec::new());
    let (mut tokens, mut hidden_from, mut first_keys) = (Vec::new(), Vec::new(), Vec::new());
    let mut unknown = Vec::new();
    for (place, row) in indices(step.batch_rows).enumerate() {
        let (after, total) = (facts.computed[row], facts.total[row]);
        let first_row = step.seq_starts[place];
        let before = i64::from(step.positions[first_row as usize]);
        if before < 0 {
            return Err(PyValueError::new_err(format!("a row at position {before}")));
        }
        let has_room = facts.filled[row] * columns.block_tokens > after;
        let goes_on = !flags.ended[row] && total > after && has_room;
        let stop = after + i64::from(goes_on);
        let is_aligned = before > 0
            && facts.keys_to[row] == before
            && before.rem_euclid(columns.block_tokens) == 0;
        let start = if is_aligned { before } else { before + 1 };
        if !step.follows.is_none_or(|follows| follows[place]) || stop <= start {
            continue;
        }
        blocks.at(row, stop - 1)?; // bounds the rows
        if facts.keys_to[row] < start {
            facts.keys_from[row] = start; // a hole
        }
        facts.keys_to[row] = stop;
        let in_prompt = total <= facts.prompt_len[row] || total - after > 1;
        for position in start..stop {
            let in_batch = i64::from(first_row) + position - before;
            let at = usize::try_from(in_batch).unwrap_or(0).min(step.tokens.len() - 1);
            if position == after && in_prompt {
                unknown.push((tokens.len(), place, position));
            }
            tokens.push(if position == after { newest[row] } else { step.tokens[at] });
            hidden_from.push(if position == before {
                -1 - blocks.at(row, before - 1)? as i32
            } else {
                (in_batch - 1) as i32
            });
        }
        chosen.push(place as i64);
        batch_rows.push(row as i64);
        starts.push(start);
        stops.push(stop);
        drafts.push(step.drafts[place]);
        first_keys.push(facts.keys_from[row] as i32);
    }
    let of_pass = draft_rows(py, blocks, &batch_rows, &starts, &stops)?;
    Ok((
        chosen.into_pyarray(py),
        batch_rows.into_pyarray(py),
        stops.into_pyarray(py),
        drafts.into_pyarray(py),
        of_pass,
        tokens.into_pyarray(py),
        hidden_from.into_pyarray(py),
        first_keys.into_pyarray(py),
        unknown,
    ))
}

//! Which tokens of a step count, and where answers end.

use std::collections::{HashMap, HashSet};

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

use super::slices::{Ints, check_parts, each_has};

type Array<'py, T> = Bound<'py, PyArray1<T>>;

const STOP: i8 = 1;
const LENGTH: i8 = 2;

/// What each sequence got: tokens that count, cut where its answer ends. All but `ids` are `[sequences]`.
#[derive(Default)]
pub(super) struct Cut {
    pub(super) kept: Vec<i64>, // before an answer was cut
    pub(super) ids: Vec<i64>,
    pub(super) counts: Vec<i64>,
    pub(super) finish: Vec<i8>,
    drafted: Vec<i64>,
    accepted: Vec<i64>,
}

pub(super) type CutArrays<'py> = (
    Array<'py, i64>,
    (Array<'py, i64>, Array<'py, i64>, Array<'py, i8>, Array<'py, i64>, Array<'py, i64>),
);

impl Cut {
    pub(super) fn with_capacity(sequences: usize, ids: usize) -> Self {
        Self {
            kept: Vec::with_capacity(sequences),
            ids: Vec::with_capacity(ids),
            counts: Vec::with_capacity(sequences),
            finish: Vec::with_capacity(sequences),
            drafted: Vec::with_capacity(sequences),
            accepted: Vec::with_capacity(sequences),
        }
    }

    /// Add a sequence with these rows. Returns its last token, and whether it goes on.
    ///
    /// A token counts with all before it that equal the draft of the row after them; none below 0 does.
    pub(super) fn push(
        &mut self,
        ids: &[i64],
        drafts: &[i32],
        left: i64,
        is_stop: impl Fn(&i64) -> bool,
    ) -> (Option<i64>, bool) {
        let each = ids.iter().zip(drafts.iter().skip(1));
        let right = each.take_while(|(id, draft)| **id == i64::from(**draft)).count();
        let kept = right + usize::from(ids.get(right).is_some_and(|id| *id >= 0));
        let end = ids[..kept].iter().position(is_stop);
        let own = &ids[..end.map_or(kept, |end| end + 1)];
        let count = own.len() as i64;
        let finish = match end {
            Some(_) => STOP,
            None if count >= left => LENGTH,
            None => 0,
        };
        self.kept.push(kept as i64);
        self.ids.extend_from_slice(own);
        self.counts.push(count);
        self.finish.push(finish);
        self.drafted.push((ids.len() as i64 - 1).max(0));
        self.accepted.push((kept as i64 - 1).max(0).min(count));
        (own.last().copied(), finish == 0)
    }

    pub(super) fn into_arrays(self, py: Python<'_>) -> CutArrays<'_> {
        let columns = (
            self.ids.into_pyarray(py),
            self.counts.into_pyarray(py),
            self.finish.into_pyarray(py),
            self.drafted.into_pyarray(py),
            self.accepted.into_pyarray(py),
        );
        (self.kept.into_pyarray(py), columns)
    }
}

#[pyfunction]
#[pyo3(signature = (ids, *, rows, drafts, totals, limits, stops, more_stops))]
pub(crate) fn cut_answers<'py>(
    py: Python<'py>,
    ids: Ints<'py>,
    rows: Ints<'py>,
    drafts: PyReadonlyArray1<'py, i32>,
    totals: Ints<'py>,
    limits: Ints<'py>,
    stops: PyReadonlyArray2<'py, i64>,
    more_stops: HashMap<usize, HashSet<i64>>,
) -> PyResult<CutArrays<'py>> {
    let each = stops.shape()[0];
    let (ids, rows, drafts) = (ids.as_slice()?, rows.as_slice()?, drafts.as_slice()?);
    let (totals, limits, stops) = (totals.as_slice()?, limits.as_slice()?, stops.as_slice()?);
    check_parts("ids", rows, ids.len())?;
    each_has(ids.len(), &[("drafts", drafts.len())])?;
    each_has(rows.len(), &[("totals", totals.len()), ("limits", limits.len()), ("stops", each)])?;
    let width = stops.len().checked_div(each).unwrap_or(0);
    let mut cut = Cut::with_capacity(each, ids.len());
    let mut start = 0;
    for row in 0..each {
        let own = start..start + rows[row] as usize; // which was checked
        start = own.end;
        let few = &stops[row * width..][..width];
        let more = more_stops.get(&row);
        let is_stop = |id: &i64| more.map_or_else(|| few.contains(id), |more| more.contains(id));
        cut.push(&ids[own.clone()], &drafts[own], limits[row].saturating_sub(totals[row]), is_stop);
    }
    Ok(cut.into_arrays(py))
}

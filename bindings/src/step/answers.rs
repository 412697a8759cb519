//! Which tokens of a step count, and where answers end.

use std::collections::{HashMap, HashSet};

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

use super::slices::{Ints, check_parts, each_has};

type Array<'py, T> = Bound<'py, PyArray1<T>>;

const STOP: i8 = 1;
const LENGTH: i8 = 2;

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn kept_drafts<'py>(
    py: Python<'py>,
    rows: Ints<'py>,
    drafts: PyReadonlyArray1<'py, i32>,
    ids: Ints<'py>,
) -> PyResult<Array<'py, i64>> {
    let (rows, drafts, ids) = (rows.as_slice()?, drafts.as_slice()?, ids.as_slice()?);
    check_parts("ids", rows, ids.len())?;
    each_has(ids.len(), &[("drafts", drafts.len())])?;
    let mut start = 0;
    let kept = |rows: &i64| {
        let own = start..start + *rows as usize; // which was checked
        start = own.end;
        let (ids, drafts) = (&ids[own.clone()], &drafts[own]);
        let right = ids.iter().zip(drafts.iter().skip(1));
        let right = right.take_while(|(id, draft)| **id == i64::from(**draft)).count();
        right as i64 + i64::from(ids.get(right).is_some_and(|id| *id >= 0))
    };
    Ok(rows.iter().map(kept).collect::<Vec<_>>().into_pyarray(py))
}

#[pyfunction]
#[pyo3(signature = (ids, *, rows, kept, totals, limits, stops, more_stops))]
#[expect(clippy::too_many_arguments, reason = "named in Python")]
#[expect(clippy::type_complexity, reason = "named in Python")]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn cut_answers<'py>(
    py: Python<'py>,
    ids: Ints<'py>,
    rows: Ints<'py>,
    kept: Ints<'py>,
    totals: Ints<'py>,
    limits: Ints<'py>,
    stops: PyReadonlyArray2<'py, i64>,
    more_stops: HashMap<usize, HashSet<i64>>,
) -> PyResult<(Array<'py, i64>, Array<'py, i64>, Array<'py, i8>, Array<'py, i64>, Array<'py, i64>)>
{
    let each = stops.shape()[0];
    let (ids, rows, kept) = (ids.as_slice()?, rows.as_slice()?, kept.as_slice()?);
    let (totals, limits, stops) = (totals.as_slice()?, limits.as_slice()?, stops.as_slice()?);
    check_parts("ids", rows, ids.len())?;
    each_has(
        rows.len(),
        &[
            ("kept", kept.len()),
            ("totals", totals.len()),
            ("limits", limits.len()),
            ("stops", each),
        ],
    )?;
    let width = stops.len().checked_div(each).unwrap_or(0);
    let mut tokens = Vec::with_capacity(ids.len());
    let (mut counts, mut finish) = (Vec::with_capacity(each), Vec::with_capacity(each));
    let (mut drafted, mut accepted) = (Vec::with_capacity(each), Vec::with_capacity(each));
    let mut rest = ids;
    for row in 0..each {
        let (own, others) = rest.split_at(rows[row] as usize); // which was checked
        rest = others;
        let own = &own[..usize::try_from(kept[row]).unwrap_or(0).min(own.len())];
        let more = more_stops.get(&row);
        let few = &stops[row * width..][..width];
        let stops = |id: &i64| more.map_or_else(|| few.contains(id), |more| more.contains(id));
        let end = own.iter().position(stops);
        let own = &own[..end.map_or(own.len(), |end| end + 1)];
        let count = own.len() as i64;
        tokens.extend_from_slice(own);
        counts.push(count);
        finish.push(match end {
            Some(_) => STOP,
            None if totals[row] + count >= limits[row] => LENGTH,
            None => 0,
        });
        drafted.push((rows[row] - 1).max(0));
        accepted.push((kept[row] - 1).max(0).min(count));
    }
    Ok((
        tokens.into_pyarray(py),
        counts.into_pyarray(py),
        finish.into_pyarray(py),
        drafted.into_pyarray(py),
        accepted.into_pyarray(py),
    ))
}

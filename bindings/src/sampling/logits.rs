//! What requests change about logits, and the most probable tokens.

use headrace_kernels::sampling::edits::Edits;
use headrace_kernels::sampling::highest::{Maxima, highest};
use headrace_kernels::simd::Level;
use numpy::{
    IntoPyArray, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray2,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

type Ints<'py> = PyReadonlyArray1<'py, i64>;
type Floats<'py> = PyReadonlyArray1<'py, f32>;

#[pyfunction]
#[pyo3(signature = (logits, *, added, penalised, forbidden, kept))]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn edit_logits(
    py: Python<'_>,
    mut logits: PyReadwriteArray2<'_, f32>,
    added: (Ints<'_>, Floats<'_>),
    penalised: (Ints<'_>, Floats<'_>, Floats<'_>),
    forbidden: Ints<'_>,
    kept: Vec<(usize, Ints<'_>)>,
) -> PyResult<()> {
    let width = logits.shape()[1];
    let kept = kept.iter().map(|(row, columns)| Ok((*row, columns.as_slice()?)));
    let edits = Edits {
        added: (added.0.as_slice()?, added.1.as_slice()?),
        penalised: (penalised.0.as_slice()?, penalised.1.as_slice()?, penalised.2.as_slice()?),
        forbidden: forbidden.as_slice()?,
        kept: kept.collect::<PyResult<_>>()?,
    };
    let logits = logits.as_slice_mut()?;
    py.detach(|| edits.apply(logits, width))
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Columns, and their logits.
type Ranks<'py> = (Bound<'py, PyArray2<i64>>, Bound<'py, PyArray2<f64>>);

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn highest_logits<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    k: Ints<'py>,
) -> PyResult<Ranks<'py>> {
    let (rows, columns) = logits.as_array().dim();
    let (logits, k) = (logits.as_slice()?, k.as_slice()?);
    let known = |k: &i64| usize::try_from(*k).is_ok_and(|k| (1..=columns).contains(&k));
    if k.len() != rows || !k.iter().all(known) {
        let text = format!("the highest {k:?} of {rows} rows of {columns} logits");
        return Err(PyValueError::new_err(text));
    }
    let (ids, values, most) = py.detach(|| {
        let (level, mut maxima) = (Level::detect(), Maxima::default());
        let of_rows = logits.chunks_exact(columns.max(1)).zip(k);
        let found: Vec<_> =
            of_rows.map(|(row, k)| highest(level, row, *k as usize, &mut maxima)).collect();
        let most = found.iter().map(Vec::len).max().unwrap_or(0);
        let (mut ids, mut values) = (vec![0; rows * most], vec![f64::NEG_INFINITY; rows * most]);
        for (row, found) in found.iter().enumerate() {
            for (place, (column, logit)) in (row * most..).zip(found) {
                ids[place] = *column as i64;
                values[place] = f64::from(*logit);
            }
        }
        (ids, values, most)
    });
    let shape = [rows, most];
    Ok((ids.into_pyarray(py).reshape(shape)?, values.into_pyarray(py).reshape(shape)?))
}

//! Plans of sends for Python: a layer's in one call, where tensor operations would be fifteen.

use headrace_kernels::moe::exchange::Combine;
use headrace_kernels::moe::sends::{Asking, Sends, in_order_of_sends};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

type Plan<'py> = (
    Bound<'py, PyArray1<i64>>,
    Vec<usize>,
    Bound<'py, PyArray2<i32>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<i32>>,
    Vec<usize>,
);

#[pyfunction]
#[pyo3(signature = (ids, weights, *, owners, slots, ranks, partial))]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn plan_sends<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray2<'py, i32>,
    weights: PyReadonlyArray2<'py, f32>,
    owners: PyReadonlyArray1<'py, i64>,
    slots: PyReadonlyArray1<'py, i32>,
    ranks: usize,
    partial: bool,
) -> PyResult<Plan<'py>> {
    let (rows, top_k) = ids.as_array().dim();
    let asking = Asking {
        ids: ids.as_slice()?,
        weights: weights.as_slice()?,
        top_k,
        owners: owners.as_slice()?,
        slots: slots.as_slice()?,
        ranks,
    };
    let combine = if partial { Combine::Partial } else { Combine::Exact };
    let plan = Sends::plan(asking, combine).map_err(PyValueError::new_err)?;
    let width = Sends::answers_of_a_row(top_k, ranks, combine);
    let sends = plan.rows.len();
    Ok((
        plan.rows.into_pyarray(py),
        plan.counts,
        plan.slots.into_pyarray(py).reshape([sends, top_k])?,
        plan.weights.into_pyarray(py).reshape([sends, top_k])?,
        plan.places.into_pyarray(py).reshape([rows, width])?,
        plan.answers,
    ))
}

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn order_of_sends<'py>(
    py: Python<'py>,
    places: PyReadonlyArray2<'py, i32>,
    counts: Vec<usize>,
) -> PyResult<(Bound<'py, PyArray1<i64>>, Vec<usize>)> {
    let width = places.as_array().dim().1;
    let (order, back) =
        in_order_of_sends(places.as_slice()?, width, &counts).map_err(PyValueError::new_err)?;
    Ok((order.into_pyarray(py), back))
}

//! The outputs of a step as msgpack, from columns: one call, whatever their number.

use headrace_router::fleet::codec::OutputColumns;
use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

#[pyfunction]
#[pyo3(signature = (requests, counts, ids, *, drafted, accepted, special))]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn encode_outputs<'py>(
    py: Python<'py>,
    requests: PyReadonlyArray1<'py, u64>,
    counts: PyReadonlyArray1<'py, u32>,
    ids: PyReadonlyArray1<'py, u32>,
    drafted: PyReadonlyArray1<'py, u32>,
    accepted: PyReadonlyArray1<'py, u32>,
    special: Vec<(usize, PyBackedBytes)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let columns = OutputColumns {
        requests: requests.as_slice()?,
        counts: counts.as_slice()?,
        ids: ids.as_slice()?,
        drafted: drafted.as_slice()?,
        accepted: accepted.as_slice()?,
        special: &special,
    };
    let body = py.detach(|| columns.encode());
    let body = body.map_err(|error| PyValueError::new_err(format!("outputs: {error}")))?;
    Ok(PyBytes::new(py, &body))
}

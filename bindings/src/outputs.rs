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
    counts: PyReadonlyArray1<'py, i64>,
    ids: PyReadonlyArray1<'py, i64>,
    drafted: PyReadonlyArray1<'py, i64>,
    accepted: PyReadonlyArray1<'py, i64>,
    special: Vec<(usize, PyBackedBytes)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let (counts, ids) = (of_32_bits("counts", &counts)?, of_32_bits("ids", &ids)?);
    let (drafted, accepted) =
        (of_32_bits("drafted", &drafted)?, of_32_bits("accepted", &accepted)?);
    let columns = OutputColumns {
        requests: requests.as_slice()?,
        counts: &counts,
        ids: &ids,
        drafted: &drafted,
        accepted: &accepted,
        special: &special,
    };
    let body = py.detach(|| columns.encode());
    let body = body.map_err(|error| PyValueError::new_err(format!("outputs: {error}")))?;
    Ok(PyBytes::new(py, &body))
}

fn of_32_bits(name: &str, values: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<u32>> {
    let value = |value: &i64| {
        u32::try_from(*value)
            .map_err(|_| PyValueError::new_err(format!("outputs: {name} of {value}")))
    };
    values.as_slice()?.iter().map(value).collect()
}

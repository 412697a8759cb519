//! The outputs of a step as msgpack, from columns: one call, whatever their number.

use headrace_router::core::frame::{Frame, Load, Step};
use headrace_router::fleet::codec::{self, OutputColumns};
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

/// The whole body of a `Step`. `numbers` and `load` are its fields in their order, but for `ms` and `outputs`.
#[pyfunction]
#[pyo3(signature = (numbers, ms, load, requests, counts, ids, *, drafted, accepted))]
#[expect(clippy::too_many_arguments, reason = "named in Python")]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn encode_step<'py>(
    py: Python<'py>,
    numbers: (u64, u32, u32, u64, u32, u64, u64, u32, u32),
    ms: f64,
    load: (u32, u32, u32, u32, u64),
    requests: PyReadonlyArray1<'py, u64>,
    counts: PyReadonlyArray1<'py, i64>,
    ids: PyReadonlyArray1<'py, i64>,
    drafted: PyReadonlyArray1<'py, i64>,
    accepted: PyReadonlyArray1<'py, i64>,
) -> PyResult<Bound<'py, PyBytes>> {
    let (
        step,
        waited_us,
        prefill_tokens,
        prefill_context,
        decode_rows,
        kv_tokens,
        waiting_tokens,
        n,
        m,
    ) = numbers;
    let (blocks_used, blocks_cached, running, waiting, preemptions) = load;
    let frame = Frame::Step(Step {
        step,
        ms,
        waited_us,
        prefill_tokens,
        prefill_context,
        decode_rows,
        kv_tokens,
        waiting_tokens,
        drafted: n,
        accepted: m,
        load: Load { blocks_used, blocks_cached, running, waiting, preemptions },
        outputs: Vec::new(),
    });
    let (counts, ids) = (of_32_bits("counts", &counts)?, of_32_bits("ids", &ids)?);
    let (drafted, accepted) =
        (of_32_bits("drafted", &drafted)?, of_32_bits("accepted", &accepted)?);
    let columns = OutputColumns::<&[u8]> {
        requests: requests.as_slice()?,
        counts: &counts,
        ids: &ids,
        drafted: &drafted,
        accepted: &accepted,
        special: &[],
    };
    let value_error = |text: String| PyValueError::new_err(format!("step: {text}"));
    let outputs = columns.encode().map_err(|error| value_error(error.to_string()))?;
    let mut body = Vec::with_capacity(64 + outputs.len());
    codec::encode(&frame, &mut body).map_err(|error| value_error(error.to_string()))?;
    body.pop(); // the empty array of outputs, which comes last
    body.extend_from_slice(&outputs);
    Ok(PyBytes::new(py, &body))
}

fn of_32_bits(name: &str, values: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<u32>> {
    let value = |value: &i64| {
        u32::try_from(*value)
            .map_err(|_| PyValueError::new_err(format!("outputs: {name} of {value}")))
    };
    values.as_slice()?.iter().map(value).collect()
}

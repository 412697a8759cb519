//! Frames as dicts, `{"Ping": {"nonce": 1}}`: for tools and tests. Workers use `headrace.wire.codec`.

pub(crate) mod outputs;

use headrace_router::core::frame::Frame;
use headrace_router::fleet::codec;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use pythonize::pythonize;

use crate::errors;

#[pyfunction]
pub(crate) fn encode_frame<'py>(frame: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let py = frame.py();
    let frame: Frame = errors::depythonize(frame).map_err(errors::WireError::new_err)?;
    let mut body = Vec::new();
    codec::encode(&frame, &mut body).map_err(errors::codec)?;
    Ok(PyBytes::new(py, &body))
}

#[pyfunction]
pub(crate) fn decode_frame<'py>(py: Python<'py>, body: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let frame = py.detach(|| codec::decode(body)).map_err(errors::codec)?;
    Ok(pythonize(py, &frame)?)
}

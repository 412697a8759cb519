//! The block index. Calls convert keys, detach, and hold a lock for as long as the index works.

use std::sync::{Mutex, MutexGuard, PoisonError};

use headrace_router::core::index::{self, BlockHolder};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct BlockIndex(Mutex<index::BlockIndex>);

/// Block keys as Python has them: bytes with 8 for each key as in the frames, an array of uint64 (numpy, `array`), or a
/// sequence of ints.
fn keys_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let py = object.py();
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return from_le_bytes(bytes.as_bytes());
    }
    if let Ok(list) = object.cast::<PyList>() {
        return list.iter().map(|key| key.extract()).collect();
    }
    if let Ok(array) = PyBuffer::<u64>::get(object) {
        return array.to_vec(py);
    }
    match PyBuffer::<u8>::get(object) {
        Ok(bytes) => from_le_bytes(&bytes.to_vec(py)?),
        Err(_) => object.extract(),
    }
}

fn from_le_bytes(bytes: &[u8]) -> PyResult<Vec<u64>> {
    let (keys, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        let text = format!("keys have 8 bytes each, {} is no multiple", bytes.len());
        return Err(PyValueError::new_err(text));
    }
    Ok(keys.iter().map(|key| u64::from_le_bytes(*key)).collect())
}

#[pymethods]
impl BlockIndex {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(index::BlockIndex::new()))
    }

    fn join(&self, py: Python<'_>, capacity: u32) -> PyResult<u16> {
        let place = py.detach(|| self.lock().join(capacity));
        place.map(|place| place.0).ok_or_else(|| PyOverflowError::new_err("all places are taken"))
    }

    fn leave(&self, py: Python<'_>, place: u16) {
        py.detach(|| self.lock().leave(BlockHolder(place)));
    }

    fn store(&self, py: Python<'_>, place: u16, keys: &Bound<'_, PyAny>) -> PyResult<u32> {
        let keys = keys_of(keys)?;
        py.detach(|| self.lock().store(BlockHolder(place), &keys))
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn remove(&self, py: Python<'_>, place: u16, keys: &Bound<'_, PyAny>) -> PyResult<u32> {
        let keys = keys_of(keys)?;
        Ok(py.detach(|| self.lock().remove(BlockHolder(place), &keys)))
    }

    fn overlaps(&self, py: Python<'_>, prompt: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let prompt = keys_of(prompt)?;
        Ok(py.detach(|| {
            let mut overlaps = Vec::new();
            self.lock().overlaps(&prompt, &mut overlaps);
            overlaps
        }))
    }

    fn held(&self, py: Python<'_>, place: u16) -> u32 {
        py.detach(|| self.lock().held(BlockHolder(place)))
    }

    #[getter]
    fn places(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().places())
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().bytes())
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().len())
    }
}

impl BlockIndex {
    fn lock(&self) -> MutexGuard<'_, index::BlockIndex> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

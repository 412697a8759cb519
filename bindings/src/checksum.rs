//! The checksum of KV that goes over a network.
#![expect(unsafe_code, reason = "the bytes of a Python buffer, read with the GIL released")]

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[pyfunction]
#[pyo3(signature = (buffer, value=0))]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn crc32(py: Python<'_>, buffer: PyBuffer<u8>, value: u32) -> PyResult<u32> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the bytes must lie side by side"));
    }
    if buffer.len_bytes() == 0 {
        return Ok(value); // its pointer may be null
    }
    // SAFETY: `buffer` holds the export until the end of this function, so the memory stays where it is and as long as
    // it is. Exported KV blocks are not written to while their ticket is good; when it is withdrawn in the middle of
    // this, the bytes are read torn, and so is the sum, which nobody uses then. They are plain integers in any case.
    let bytes =
        unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) };
    Ok(py.detach(|| {
        let mut hasher = crc32fast::Hasher::new_with_initial(value);
        hasher.update(bytes);
        hasher.finalize()
    }))
}

//! Copies and checksums of KV segments, many in one call: with the GIL given up once for all of them, not once for each.
#![expect(
    unsafe_code,
    reason = "the bytes of Python buffers, read and written with the GIL released"
)]

use numpy::PyReadonlyArray1;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::memory;

/// The bytes of a Python buffer, as an address that a closure without the GIL may have.
#[derive(Clone, Copy)]
struct Bytes {
    address: usize,
    len: usize,
}

impl Bytes {
    fn of(buffer: &PyBuffer<u8>) -> PyResult<Self> {
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("the bytes must lie side by side"));
        }
        Ok(Self { address: buffer.buf_ptr() as usize, len: buffer.len_bytes() })
    }
}

#[pyfunction]
#[pyo3(signature = (parts, value=0))]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn crc32(py: Python<'_>, parts: Vec<PyBuffer<u8>>, value: u32) -> PyResult<u32> {
    let bytes = parts.iter().map(Bytes::of).collect::<PyResult<Vec<_>>>()?;
    let sum = py.detach(|| {
        let mut hasher = crc32fast::Hasher::new_with_initial(value);
        for part in bytes.iter().filter(|part| part.len > 0) {
            // SAFETY: `parts` holds the exports until the end of this function, so the memory stays where it is. Exported
            // KV blocks are not written to while their ticket is good; of bytes that change because it is withdrawn,
            // nobody uses the sum.
            unsafe {
                memory::read(part.address as *const u8, part.len, |piece| hasher.update(piece));
            }
        }
        hasher.finalize()
    });
    Ok(sum)
}

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn copy_segments(
    py: Python<'_>,
    source: PyBuffer<u8>,
    source_starts: PyReadonlyArray1<'_, u64>,
    target: PyBuffer<u8>,
    target_starts: PyReadonlyArray1<'_, u64>,
    nbytes: usize,
) -> PyResult<()> {
    if target.readonly() {
        return Err(PyValueError::new_err("the target can only be read"));
    }
    let (from, to) = (Bytes::of(&source)?, Bytes::of(&target)?);
    let (reads, writes) = (source_starts.as_slice()?, target_starts.as_slice()?);
    if reads.len() != writes.len() {
        return Err(PyValueError::new_err("as many starts in the source as in the target"));
    }
    let inside = |starts: &[u64], len: usize| {
        starts.iter().all(|&start| {
            usize::try_from(start)
                .ok()
                .and_then(|start| start.checked_add(nbytes))
                .is_some_and(|end| end <= len)
        })
    };
    if !inside(reads, from.len) || !inside(writes, to.len) {
        return Err(PyValueError::new_err("a segment does not lie inside its memory"));
    }
    py.detach(|| {
        let mut done = 0;
        while done < reads.len() {
            // segments side by side on both sides are one
            let mut run = 1;
            let side_by_side = |starts: &[u64], at: usize, run: usize| {
                starts[at + run] == starts[at] + (run * nbytes) as u64
            };
            while done + run < reads.len()
                && side_by_side(reads, done, run)
                && side_by_side(writes, done, run)
            {
                run += 1;
            }
            // SAFETY: both ranges were checked to lie inside their buffers, which hold the memory until the end of
            // this function. Other processes may write to the source (then its ticket is withdrawn, and what was copied
            // is not used); nobody else reads or writes the target, because its blocks are reserved for this.
            unsafe {
                memory::copy(
                    (from.address + reads[done] as usize) as *const u8,
                    (to.address + writes[done] as usize) as *mut u8,
                    run * nbytes,
                );
            }
            done += run;
        }
    });
    Ok(())
}

//! Weights in a file that Python has mapped: read where they are, by every process that maps the file.
#![expect(unsafe_code, reason = "bytes of a mapped file, read as what was written there")]

use std::marker::PhantomData;
use std::sync::Arc;

use headrace_kernels::tile::{Bf16x16, F16x16, F32x16};
use headrace_kernels::weight::{Dtype, GROUP, Lent, LentLanes, PANEL, Pairs, Weight};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What any bytes are, in the order of a little-endian machine.
///
/// # Safety
/// Every pattern of bits is a value, and there is no padding.
pub(super) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: numbers, or arrays of them whose alignment is not above their size
unsafe impl Plain for f32 {}
// SAFETY: as above
unsafe impl Plain for u16 {}
// SAFETY: as above
unsafe impl Plain for F32x16 {}
// SAFETY: as above
unsafe impl Plain for Bf16x16 {}
// SAFETY: as above
unsafe impl Plain for F16x16 {}
// SAFETY: as above
unsafe impl Plain for Pairs {}

/// What is left to read of a mapped file. The mapping stays for as long as any part that was read.
pub(super) struct Image {
    buffer: Arc<PyBuffer<u8>>,
    start: usize,
}

impl Image {
    /// From byte `start` on. The buffer has to be one that nobody can write to.
    pub(super) fn of(buffer: PyBuffer<u8>, start: usize) -> PyResult<Self> {
        if cfg!(target_endian = "big") {
            return Err(PyValueError::new_err("images are of little-endian machines"));
        }
        if !buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("a mapped file that is only read is expected"));
        }
        Ok(Self { buffer: Arc::new(buffer), start })
    }

    /// The next `len` elements.
    pub(super) fn part<T: Plain>(&mut self, len: usize) -> PyResult<Lent<T>> {
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| self.start.checked_add(bytes));
        let end = end.filter(|end| *end <= self.buffer.len_bytes()).ok_or_else(|| {
            let text = format!("an image at byte {} ends behind the file", self.start);
            PyValueError::new_err(text)
        })?;
        let address = self.buffer.buf_ptr().addr() + self.start;
        if len > 0 && !address.is_multiple_of(align_of::<T>()) {
            let text = format!("an image at byte {} is not aligned", self.start);
            return Err(PyValueError::new_err(text));
        }
        let part =
            Part { buffer: self.buffer.clone(), start: self.start, len, of: PhantomData::<T> };
        self.start = end;
        Ok(Arc::new(part))
    }

    /// The next `count` matrices `[n, k]`, as [`Weight::read_all`] wrote them.
    pub(super) fn matrices(
        &mut self,
        dtype: Dtype,
        count: usize,
        (n, k): (usize, usize),
        bias: Option<Vec<f32>>,
    ) -> PyResult<Weight> {
        let halves = count.saturating_mul(2 * n.div_ceil(PANEL));
        let lanes = match dtype {
            Dtype::Float32 => LentLanes::F32(self.part::<F32x16>(halves.saturating_mul(k))?),
            Dtype::Bfloat16 => LentLanes::Bf16(self.part::<Bf16x16>(halves.saturating_mul(k))?),
            Dtype::Float16 => LentLanes::F16(self.part::<F16x16>(halves.saturating_mul(k))?),
            Dtype::Int8 => LentLanes::I8(
                self.part::<Pairs>(halves.saturating_mul(k.div_ceil(2)))?,
                self.part::<F32x16>(halves.saturating_mul(k.div_ceil(GROUP)))?,
            ),
        };
        Weight::lent(lanes, count, (n, k), bias).ok_or_else(|| {
            let text = format!("there are no {count} matrices of {n} x {k} with this bias");
            PyValueError::new_err(text)
        })
    }
}

/// `len` elements from byte `start` of the buffer on: there and aligned, as `Image::part` saw to it.
struct Part<T> {
    buffer: Arc<PyBuffer<u8>>,
    start: usize,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Plain> AsRef<[T]> for Part<T> {
    fn as_ref(&self) -> &[T] {
        if self.len == 0 {
            return &[]; // whose address need not be aligned
        }
        // SAFETY: the bytes are inside of the buffer, aligned, and any bytes are a `T`. The buffer keeps its memory where it is
        // for as long as `self` is there; Python cannot write to it, and a file of the cache is never written to again: a
        // new one takes its place.
        unsafe {
            let start = self.buffer.buf_ptr().cast::<u8>().add(self.start);
            std::slice::from_raw_parts(start.cast::<T>(), self.len)
        }
    }
}

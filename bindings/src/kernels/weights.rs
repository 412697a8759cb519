//! Matrices and tables: packed from what a checkpoint has, or mapped from a file in which they lie packed.

use std::sync::Arc;

use headrace_kernels::weight::{self, Elements, LentRows};
use numpy::{PyArray1, PyReadonlyArray2};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::dtype_named;
use super::mapped::Image;

/// Rows of a checkpoint as they are stored: `f32`, or 16 bits whose meaning a name says.
#[derive(FromPyObject)]
pub(super) enum Stored<'py> {
    F32(PyReadonlyArray2<'py, f32>),
    Bits(PyReadonlyArray2<'py, u16>),
}

impl Stored<'_> {
    pub(super) fn width(&self) -> usize {
        match self {
            Self::F32(x) => x.as_array().ncols(),
            Self::Bits(x) => x.as_array().ncols(),
        }
    }

    pub(super) fn elements(&self, stored: &str) -> PyResult<Elements<'_>> {
        match (self, stored) {
            (Self::F32(x), "float32") => Ok(Elements::F32(x.as_slice()?)),
            (Self::Bits(x), "bfloat16") => Ok(Elements::Bf16(x.as_slice()?)),
            (Self::Bits(x), "float16") => Ok(Elements::F16(x.as_slice()?)),
            _ => Err(PyTypeError::new_err(format!("elements of the array are not {stored}"))),
        }
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Weight(pub(super) Arc<weight::Weight>);

#[pymethods]
impl Weight {
    #[new]
    #[pyo3(signature = (parts, stored, dtype, bias=None))]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(
        py: Python<'_>,
        parts: Vec<Stored<'_>>,
        stored: &str,
        dtype: &str,
        bias: Option<Vec<f32>>,
    ) -> PyResult<Self> {
        let dtype = dtype_named(dtype)?;
        let k = parts.first().map_or(0, Stored::width);
        if k == 0 || parts.iter().any(|part| part.width() != k) {
            return Err(PyValueError::new_err("parts must be stacked rows of one width"));
        }
        let parts = parts.iter().map(|part| part.elements(stored)).collect::<PyResult<Vec<_>>>()?;
        let n: usize = parts.iter().map(|part| part.len() / k).sum();
        if bias.as_ref().is_some_and(|bias| bias.len() != n) {
            return Err(PyValueError::new_err(format!("the bias must have {n} elements")));
        }
        let packed = py.detach(|| weight::Weight::pack(&parts, k, bias, dtype));
        Ok(Self(Arc::new(packed)))
    }

    #[staticmethod]
    #[pyo3(signature = (buffer, start, *, n, k, dtype, bias=None))]
    fn mapped(
        buffer: PyBuffer<u8>,
        start: usize,
        n: usize,
        k: usize,
        dtype: &str,
        bias: Option<Vec<f32>>,
    ) -> PyResult<Self> {
        let mut image = Image::of(buffer, start)?;
        Ok(Self(Arc::new(image.matrices(dtype_named(dtype)?, 1, (n, k), bias)?)))
    }

    fn image<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u8>> {
        let mut image = Vec::with_capacity(self.0.image_len());
        py.detach(|| self.0.read_all(&mut image));
        PyArray1::from_vec(py, image)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Table {
    pub(super) table: Arc<weight::Table>,
    pub(super) width: usize,
}

#[pymethods]
impl Table {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(rows: Stored<'_>, stored: &str) -> PyResult<Self> {
        let table = Arc::new(weight::Table::new(rows.elements(stored)?));
        Ok(Self { table, width: rows.width() })
    }

    #[staticmethod]
    #[pyo3(signature = (buffer, start, *, rows, width, stored))]
    fn mapped(
        buffer: PyBuffer<u8>,
        start: usize,
        rows: usize,
        width: usize,
        stored: &str,
    ) -> PyResult<Self> {
        let mut image = Image::of(buffer, start)?;
        let len = rows.saturating_mul(width);
        let rows = match stored {
            "float32" => LentRows::F32(image.part::<f32>(len)?),
            "bfloat16" => LentRows::Bf16(image.part::<u16>(len)?),
            "float16" => LentRows::F16(image.part::<u16>(len)?),
            _ => return Err(PyTypeError::new_err(format!("no table is stored as {stored}"))),
        };
        Ok(Self { table: Arc::new(weight::Table::lent(rows)), width })
    }
}

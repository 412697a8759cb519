//! Experts of a layer for Python: packed one by one, or mapped from a file in which they lie packed.

use std::sync::{Arc, Mutex, PoisonError};

use headrace_kernels::moe::exchange::{Combine, Dispatch};
use headrace_kernels::moe::router::Router;
use headrace_kernels::moe::routing::Routing;
use headrace_kernels::moe::{self, slots};
use headrace_kernels::weight::Elements;
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::exchange::PyExchange;
use super::mapped::Image;
use super::weights::{Stored, Weight};
use super::{dtype_named, value_error};
use crate::ranks::SharedExchange;

/// Experts until a layer takes them.
#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Slots(Mutex<Option<slots::Slots>>);

impl Slots {
    fn of(slots: slots::Slots) -> Self {
        Self(Mutex::new(Some(slots)))
    }

    fn with<T>(&self, read: impl FnOnce(&slots::Slots) -> T) -> PyResult<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(read).ok_or_else(taken)
    }

    fn take(&self) -> PyResult<slots::Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(taken)
    }
}

fn taken() -> PyErr {
    PyValueError::new_err("a layer has these experts already")
}

#[pymethods]
impl Slots {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(
        py: Python<'_>,
        gate_up: Bound<'_, PyAny>,
        down: Bound<'_, PyAny>,
        shape: (usize, usize),
        dtype: &str,
    ) -> PyResult<Self> {
        let (count, hidden) = shape;
        for (what, got) in [("gate_up", gate_up.len()?), ("down", down.len()?)] {
            if got != count || got == 0 {
                let text = format!("experts: list of {what} has {got} elements, expected {count}");
                return Err(PyValueError::new_err(text));
            }
        }
        let width = down.get_item(0)?.extract::<(Stored<'_>, String)>()?.0.width();
        let mut slots = slots::Slots::with_room(count, (hidden, width), dtype_named(dtype)?);
        for slot in 0..count {
            // Each is read when it is asked for, and let go of before the next one.
            let (first, first_stored): (Stored<'_>, String) = gate_up.get_item(slot)?.extract()?;
            let (second, second_stored): (Stored<'_>, String) = down.get_item(slot)?.extract()?;
            let first = expert_half(&first, &first_stored, hidden)?;
            let second = expert_half(&second, &second_stored, width)?;
            py.detach(|| slots.push(first, second)).map_err(value_error)?;
        }
        Ok(Self::of(slots))
    }

    #[staticmethod]
    #[pyo3(signature = (buffer, start, *, count, hidden, width, dtype))]
    fn mapped(
        buffer: PyBuffer<u8>,
        start: usize,
        count: usize,
        hidden: usize,
        width: usize,
        dtype: &str,
    ) -> PyResult<Self> {
        let (dtype, mut image) = (dtype_named(dtype)?, Image::of(buffer, start)?);
        let gate_up = image.matrices(dtype, count, (width.saturating_mul(2), hidden), None)?;
        let down = image.matrices(dtype, count, (hidden, width), None)?;
        Ok(Self::of(slots::Slots::lent(gate_up, down, dtype).map_err(value_error)?))
    }

    #[getter]
    fn parts(&self) -> PyResult<usize> {
        self.with(slots::Slots::parts)
    }

    fn image<'py>(&self, py: Python<'py>, part: usize) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let image = py.detach(|| {
            self.with(|slots| {
                let mut image = Vec::new();
                (part < slots.parts()).then(|| slots.read_part(part, &mut image))?;
                Some(image)
            })
        })?;
        let image = image.ok_or_else(|| PyValueError::new_err(format!("no part {part}")))?;
        Ok(PyArray1::from_vec(py, image))
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Experts(pub(super) Arc<moe::Experts>);

#[pymethods]
impl Experts {
    #[new]
    #[pyo3(signature = (gate, bias, slots, *, top_k, groups, top_groups, normalise, scale,
                        shared=None, exchange=None, partial=false))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(
        gate: PyReadonlyArray2<'_, f32>,
        bias: Vec<f32>,
        slots: PyRef<'_, Slots>,
        top_k: usize,
        groups: usize,
        top_groups: usize,
        normalise: bool,
        scale: f32,
        shared: Option<(PyRef<'_, Weight>, PyRef<'_, Weight>)>,
        exchange: Option<Bound<'_, PyAny>>,
        partial: bool,
    ) -> PyResult<Self> {
        let (experts, hidden) = gate.as_array().dim();
        let routing = Routing { experts, top_k, groups, top_groups, normalise, scale };
        let gate = Elements::F32(gate.as_slice()?);
        let router = Router::new(gate, bias, hidden, routing).map_err(value_error)?;
        let shared = shared.map(|(gate_up, down)| moe::SharedExpert {
            gate_up: gate_up.0.clone(),
            down: down.0.clone(),
        });
        let combine = if partial { Combine::Partial } else { Combine::Exact };
        let dispatch = exchange.map(|python| {
            if let Ok(native) = python.cast::<SharedExchange>() {
                return Dispatch::Parcels(Box::new(native.get().clone()));
            }
            Dispatch::Calls(Box::new(PyExchange { python: python.unbind(), combine }))
        });
        let experts =
            moe::Experts::new(router, slots.take()?, shared, dispatch).map_err(value_error)?;
        Ok(Self(Arc::new(experts)))
    }

    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn overwrite(
        &self,
        py: Python<'_>,
        slot: usize,
        gate_up: (Stored<'_>, String),
        down: (Stored<'_>, String),
    ) -> PyResult<()> {
        let (hidden, width) = self.0.expert_size();
        let first = expert_half(&gate_up.0, &gate_up.1, hidden)?;
        let second = expert_half(&down.0, &down.1, width)?;
        py.detach(|| self.0.overwrite(slot, first, second)).map_err(value_error)
    }

    #[getter]
    fn slot_nbytes(&self) -> usize {
        self.0.image_len()
    }

    fn read_slot<'py>(&self, py: Python<'py>, slot: usize) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let image = py.detach(|| self.0.read_image(slot)).map_err(value_error)?;
        Ok(PyArray1::from_vec(py, image))
    }

    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn write_slot(
        &self,
        py: Python<'_>,
        slot: usize,
        image: PyReadonlyArray1<'_, u8>,
    ) -> PyResult<()> {
        let image = image.as_slice()?;
        py.detach(|| self.0.write_image(slot, image)).map_err(value_error)
    }

    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_vec(py, self.0.counts())
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }
}

/// One of the two matrices of an expert, which is `width` wide.
fn expert_half<'a>(half: &'a Stored<'_>, stored: &str, width: usize) -> PyResult<Elements<'a>> {
    if half.width() == width {
        return half.elements(stored);
    }
    Err(PyValueError::new_err(format!("experts: a tensor is not {width} wide")))
}

//! Rows on their way between ranks: Python moves them, on the thread of the step.

use headrace_kernels::moe::exchange::{Combine, Exchange, Failure, Received, Returned, Routed};
use headrace_kernels::moe::slots::Results;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2};
use pyo3::prelude::*;

/// `_RankExchange` of `_core.pyi`.
#[derive(Debug)]
pub(crate) struct PyExchange {
    pub(crate) python: Py<PyAny>,
    pub(crate) combine: Combine,
}

impl Exchange for PyExchange {
    fn combine(&self) -> Combine {
        self.combine
    }

    fn send(&self, routed: Routed<'_>) -> Result<(), Failure> {
        let Routed { x, chosen, hidden, top_k } = routed;
        Python::attach(|py| -> PyResult<()> {
            let x = rows(py, x, hidden)?;
            let (ids, weights) = (rows(py, &chosen.ids, top_k)?, rows(py, &chosen.weights, top_k)?);
            self.python.call_method1(py, "send", (x, ids, weights)).map(drop)
        })
        .map_err(Failure::from)
    }

    fn receive(&self, received: &mut Received) -> Result<(), Failure> {
        type Arrays<'py> =
            (PyReadonlyArray2<'py, f32>, PyReadonlyArray2<'py, i32>, PyReadonlyArray2<'py, f32>);
        Python::attach(|py| -> PyResult<()> {
            let got = self.python.bind(py).call_method0("receive")?;
            let (x, slots, weights): Arrays<'_> = got.extract()?;
            fill(&mut received.x, x.as_slice()?);
            fill(&mut received.slots, slots.as_slice()?);
            fill(&mut received.weights, weights.as_slice()?);
            Ok(())
        })
        .map_err(Failure::from)
    }

    fn collect(&self, results: &Results, returned: &mut Returned) -> Result<(), Failure> {
        Python::attach(|py| -> PyResult<()> {
            let y = rows(py, &results.y, results.hidden)?;
            let places = rows(py, &results.places, results.answers)?;
            let got = self.python.bind(py).call_method1("collect", (y, places))?;
            let (y, places): (PyReadonlyArray2<'_, f32>, PyReadonlyArray2<'_, i32>) =
                got.extract()?;
            fill(&mut returned.y, y.as_slice()?);
            fill(&mut returned.places, places.as_slice()?);
            Ok(())
        })
        .map_err(Failure::from)
    }
}

/// A copy of rows of `width`, which is Python's.
fn rows<'py, T: numpy::Element>(
    py: Python<'py>,
    flat: &[T],
    width: usize,
) -> PyResult<Bound<'py, PyArray2<T>>> {
    PyArray1::from_slice(py, flat).reshape([flat.len() / width, width])
}

fn fill<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
}

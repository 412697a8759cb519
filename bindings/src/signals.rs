//! The end of a Python process that is told to end, whatever holds the GIL.

use std::time::Duration;

use headrace_router::process::signals::{STOP, Signals, StopDeadlines};
use headrace_router::process::stopper::Stopper;
use pyo3::prelude::*;

/// Python's own handlers stay and do the work; this thread only sees to it that the process ends.
#[pyfunction]
#[pyo3(signature = (numbers, drain_s=None))]
pub(crate) fn end_on_signals(numbers: Vec<i32>, drain_s: Option<f64>) -> PyResult<()> {
    let drain = drain_s.map(Duration::try_from_secs_f64).transpose();
    let drain =
        drain.map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?;
    Signals::catch_these(numbers)?.obey(
        Stopper::default(),
        StopDeadlines { drain, stop: STOP },
        None,
    )?;
    Ok(())
}

//! The load tools, the mock fleet and the simulator, as whole programs.

use pyo3::prelude::*;

use crate::router::default_interrupt;

/// The whole program. Ctrl-C ends it at once: Python's own handler would wait for a call that does not return.
#[pyfunction]
pub(crate) fn bench_main(py: Python<'_>, argv: Vec<String>) -> PyResult<u8> {
    default_interrupt(py)?;
    Ok(py.detach(|| headrace_bench::main(argv)))
}

//! The CPU kernels for Python: packed weights, and a recorded forward pass that runs with the GIL released.

use std::sync::Arc;

use headrace_kernels::attention::KvShape;
use headrace_kernels::program::{self, AttentionConfig, Step};
use headrace_kernels::rows::Rope;
use headrace_kernels::simd::Level;
use headrace_kernels::weight::{self, Dtype, Elements};
use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1, PyReadwriteArray2};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// Rows of a checkpoint as they are stored: `f32`, or 16 bits whose meaning a name says.
#[derive(FromPyObject)]
enum Stored<'py> {
    F32(PyReadonlyArray2<'py, f32>),
    Bits(PyReadonlyArray2<'py, u16>),
}

impl Stored<'_> {
    fn width(&self) -> usize {
        match self {
            Self::F32(x) => x.as_array().ncols(),
            Self::Bits(x) => x.as_array().ncols(),
        }
    }

    fn elements(&self, stored: &str) -> PyResult<Elements<'_>> {
        match (self, stored) {
            (Self::F32(x), "float32") => Ok(Elements::F32(x.as_slice()?)),
            (Self::Bits(x), "bfloat16") => Ok(Elements::Bf16(x.as_slice()?)),
            (Self::Bits(x), "float16") => Ok(Elements::F16(x.as_slice()?)),
            _ => Err(PyTypeError::new_err(format!("elements of the array are not {stored}"))),
        }
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Weight(Arc<weight::Weight>);

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
        let dtype = Dtype::named(dtype)
            .ok_or_else(|| PyValueError::new_err(format!("unknown dtype {dtype:?}")))?;
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

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Table {
    table: Arc<weight::Table>,
    width: usize,
}

#[pymethods]
impl Table {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(rows: Stored<'_>, stored: &str) -> PyResult<Self> {
        let table = Arc::new(weight::Table::new(rows.elements(stored)?));
        Ok(Self { table, width: rows.width() })
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Value(program::Value);

#[pyclass(module = "headrace._core")]
pub(crate) struct Program {
    program: program::Program,
    layers: usize,
}

#[pymethods]
impl Program {
    #[new]
    #[pyo3(signature = (*, heads, kv_heads, head_dim, layers, block_tokens, scale, inv_freq,
                        rope_scale, simd=None))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    fn new(
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        layers: usize,
        block_tokens: usize,
        scale: f32,
        inv_freq: Vec<f32>,
        rope_scale: f32,
        simd: Option<&str>,
    ) -> PyResult<Self> {
        if block_tokens == 0 || !block_tokens.is_multiple_of(16) {
            let text = format!("block_tokens is {block_tokens}, must be a multiple of 16 on a CPU");
            return Err(PyValueError::new_err(text));
        }
        let level = match simd {
            None => Level::detect(),
            Some(name) => Level::named(name).ok_or_else(|| {
                PyValueError::new_err(format!("this machine has no level {name:?}"))
            })?,
        };
        let kv = KvShape { layers, kv_heads, head_dim, block_tokens };
        let rope = Rope { inv_freq, scale: rope_scale };
        let attention = AttentionConfig { heads, scale, rope, kv };
        let program = program::Program::new(level, attention);
        Ok(Self { program, layers })
    }

    fn embed(&mut self, table: &Table) -> Value {
        Value(self.program.embed(table.table.clone(), table.width))
    }

    fn rms_norm(&mut self, x: &Value, weight: Vec<f32>, eps: f32) -> Value {
        Value(self.program.rms_norm(x.0, weight, eps))
    }

    #[pyo3(signature = (x, weight, residual=None))]
    fn linear(&mut self, x: &Value, weight: &Weight, residual: Option<&Value>) -> Value {
        Value(self.program.linear(x.0, weight.0.clone(), residual.map(|r| r.0)))
    }

    fn rope_and_store_kv(&mut self, qkv: &Value, layer: usize) -> Value {
        Value(self.program.rope_and_store_kv(qkv.0, layer))
    }

    fn paged_attention(&mut self, qkv: &Value, layer: usize) -> Value {
        Value(self.program.paged_attention(qkv.0, layer))
    }

    fn silu_mul(&mut self, gate_up: &Value) -> Value {
        Value(self.program.silu_mul(gate_up.0))
    }

    fn wanted_rows(&mut self, x: &Value) -> Value {
        Value(self.program.wanted_rows(x.0))
    }

    fn finish(&mut self) {
        self.program.finish();
    }

    #[getter]
    fn out_width(&self) -> usize {
        self.program.out_width()
    }

    #[getter]
    fn block_bytes(&self) -> usize {
        self.program.block_bytes()
    }

    #[getter]
    fn simd(&self) -> &'static str {
        self.program.level().name()
    }

    #[pyo3(signature = (*, tokens, positions, slots, seq_starts, context_lens, block_tables,
                        logit_rows, kv, out, progress=None,
                        layers_per_group=1))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn run(
        &mut self,
        py: Python<'_>,
        tokens: PyReadonlyArray1<'_, i32>,
        positions: PyReadonlyArray1<'_, i32>,
        slots: PyReadonlyArray1<'_, i64>,
        seq_starts: PyReadonlyArray1<'_, i32>,
        context_lens: PyReadonlyArray1<'_, i32>,
        block_tables: PyReadonlyArray2<'_, i32>,
        logit_rows: PyReadonlyArray1<'_, i32>,
        mut kv: PyReadwriteArray1<'_, f32>,
        mut out: PyReadwriteArray2<'_, f32>,
        progress: Option<Py<PyAny>>,
        layers_per_group: usize,
    ) -> PyResult<()> {
        let step = Step {
            tokens: tokens.as_slice()?,
            positions: positions.as_slice()?,
            slots: slots.as_slice()?,
            seq_starts: seq_starts.as_slice()?,
            context_lens: context_lens.as_slice()?,
            block_tables: block_tables.as_slice()?,
            logit_rows: logit_rows.as_slice()?,
        };
        let (kv, out) = (kv.as_slice_mut()?, out.as_slice_mut()?);
        if layers_per_group == 0 {
            return Err(PyValueError::new_err("layers_per_group is 0; it is at least 1"));
        }
        let (layers, per_group) = (self.layers, layers_per_group);
        let mut raised = Ok(());
        let mut stored = |layer: usize| {
            let done = layer + 1;
            let Some(progress) = progress.as_ref() else { return };
            if raised.is_ok() && (done == layers || done.is_multiple_of(per_group)) {
                let groups = done.div_ceil(per_group);
                raised = Python::attach(|py| progress.call1(py, (groups,)).map(drop));
            }
        };
        py.detach(|| self.program.run(&step, kv, out, &mut stored))
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        raised
    }
}

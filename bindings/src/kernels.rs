//! The CPU kernels for Python: packed weights, and a recorded forward pass that runs with the GIL released.

mod exchange;
mod experts;
mod mapped;
mod weights;

use std::sync::Arc;

use headrace_kernels::attention::KvShape;
use headrace_kernels::mla::{self, MlaShape};
use headrace_kernels::op::{self, RecordError};
use headrace_kernels::program::{self, AttentionConfig};
use headrace_kernels::rows::Rope;
use headrace_kernels::run::Outputs;
use headrace_kernels::simd::Level;
use headrace_kernels::step::{Draft, Step, StepError};
use headrace_kernels::weight::Dtype;
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1, PyReadwriteArray2};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

pub(crate) use experts::{Experts, Slots};
use mapped::Image;
use weights::Stored;
pub(crate) use weights::{Table, Weight};

fn dtype_named(name: &str) -> PyResult<Dtype> {
    Dtype::named(name).ok_or_else(|| PyValueError::new_err(format!("unknown dtype {name:?}")))
}

fn level_named(name: Option<&str>) -> PyResult<Level> {
    let Some(name) = name else { return Ok(Level::detect()) };
    Level::named(name)
        .ok_or_else(|| PyValueError::new_err(format!("this machine has no level {name:?}")))
}

/// What was wrong with an argument, in words.
fn value_error(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct HeadMatrices(Arc<mla::HeadMatrices>);

#[pymethods]
impl HeadMatrices {
    #[new]
    #[pyo3(signature = (rows, stored, dtype, *, heads, nope_dim, v_dim))]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(
        py: Python<'_>,
        rows: Stored<'_>,
        stored: &str,
        dtype: &str,
        heads: usize,
        nope_dim: usize,
        v_dim: usize,
    ) -> PyResult<Self> {
        let dtype = dtype_named(dtype)?;
        let (kv_b, kv_lora_rank) = (rows.elements(stored)?, rows.width());
        let shape = MlaShape { heads, kv_lora_rank, nope_dim, rope_dim: 0, v_dim };
        let expected = heads * (nope_dim + v_dim) * kv_lora_rank;
        if expected == 0 || v_dim == 0 || kv_b.len() != expected {
            let text = format!(
                "kv_b has {} elements, expected {heads} heads of {nope_dim} + {v_dim} rows of {kv_lora_rank}",
                kv_b.len()
            );
            return Err(PyValueError::new_err(text));
        }
        let packed = py.detach(|| mla::HeadMatrices::pack(kv_b, &shape, dtype));
        Ok(Self(Arc::new(packed)))
    }

    #[staticmethod]
    #[pyo3(signature = (buffer, start, *, heads, nope_dim, v_dim, kv_lora_rank, dtype))]
    fn mapped(
        buffer: PyBuffer<u8>,
        start: usize,
        heads: usize,
        nope_dim: usize,
        v_dim: usize,
        kv_lora_rank: usize,
        dtype: &str,
    ) -> PyResult<Self> {
        let (dtype, mut image) = (dtype_named(dtype)?, Image::of(buffer, start)?);
        let mut next = |n, k| image.matrices(dtype, heads, (n, k), None);
        let keys = (nope_dim > 0).then(|| next(kv_lora_rank, nope_dim)).transpose()?;
        let values = next(v_dim, kv_lora_rank)?;
        Ok(Self(Arc::new(mla::HeadMatrices::lent(keys, values))))
    }

    fn image<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u8>> {
        let mut image = Vec::new();
        py.detach(|| self.0.read_all(&mut image));
        PyArray1::from_vec(py, image)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Value(op::Value);

#[pyclass(module = "headrace._core")]
pub(crate) struct Program(program::Program);

impl Program {
    fn with(simd: Option<&str>, attention: AttentionConfig) -> PyResult<Self> {
        let level = level_named(simd)?;
        Ok(Self(program::Program::new(level, attention).map_err(value_error)?))
    }
}

/// What an exchange raised is raised as it is.
fn step_error(error: StepError) -> PyErr {
    let StepError::Exchange(failure) = error else { return value_error(error) };
    match failure.downcast::<PyErr>() {
        Ok(raised) => *raised,
        Err(failure) => PyRuntimeError::new_err(failure.to_string()),
    }
}

fn recorded(value: Result<op::Value, RecordError>) -> PyResult<Value> {
    value.map(Value).map_err(value_error)
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
        let (key_dim, value_dim) = (head_dim, head_dim);
        let kv = KvShape { layers, kv_heads, key_dim, value_dim, block_tokens, tail: 0 };
        let rope = Rope { inv_freq, scale: rope_scale, interleave: false };
        Self::with(simd, AttentionConfig { heads, scale, rope, kv, mla: None })
    }

    #[staticmethod]
    #[pyo3(signature = (*, heads, kv_lora_rank, nope_dim, rope_dim, v_dim, layers, block_tokens, scale,
                        inv_freq, rope_scale, rope_interleave, hidden_tail, simd=None))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    fn latent(
        heads: usize,
        kv_lora_rank: usize,
        nope_dim: usize,
        rope_dim: usize,
        v_dim: usize,
        layers: usize,
        block_tokens: usize,
        scale: f32,
        inv_freq: Vec<f32>,
        rope_scale: f32,
        rope_interleave: bool,
        hidden_tail: usize,
        simd: Option<&str>,
    ) -> PyResult<Self> {
        let mla = MlaShape { heads, kv_lora_rank, nope_dim, rope_dim, v_dim };
        let kv = mla.kv_shape(layers, block_tokens, hidden_tail);
        let rope = Rope { inv_freq, scale: rope_scale, interleave: rope_interleave };
        Self::with(simd, AttentionConfig { heads, scale, rope, kv, mla: Some(mla) })
    }

    fn embed(&mut self, table: &Table) -> PyResult<Value> {
        recorded(self.0.embed(table.table.clone(), table.width))
    }

    fn rms_norm(&mut self, x: &Value, weight: Vec<f32>, eps: f32) -> PyResult<Value> {
        recorded(self.0.rms_norm(x.0, weight, eps))
    }

    #[pyo3(signature = (x, weight, residual=None))]
    fn linear(&mut self, x: &Value, weight: &Weight, residual: Option<&Value>) -> PyResult<Value> {
        recorded(self.0.linear(x.0, weight.0.clone(), residual.map(|r| r.0)))
    }

    fn rope_and_store_kv(&mut self, qkv: &Value, layer: usize) -> PyResult<Value> {
        recorded(self.0.rope_and_store_kv(qkv.0, layer))
    }

    fn paged_attention(&mut self, qkv: &Value, layer: usize) -> PyResult<Value> {
        recorded(self.0.paged_attention(qkv.0, layer))
    }

    fn mla_store(
        &mut self,
        q: &Value,
        latent: &Value,
        norm: Vec<f32>,
        eps: f32,
        layer: usize,
    ) -> PyResult<Value> {
        recorded(self.0.mla_store(q.0, latent.0, norm, eps, layer))
    }

    fn mla_attention(&mut self, q: &Value, kv_b: &HeadMatrices, layer: usize) -> PyResult<Value> {
        recorded(self.0.mla_attention(q.0, kv_b.0.clone(), layer))
    }

    fn silu_mul(&mut self, gate_up: &Value) -> PyResult<Value> {
        recorded(self.0.silu_mul(gate_up.0))
    }

    fn moe(&mut self, x: &Value, experts: &Experts, residual: &Value) -> PyResult<Value> {
        recorded(self.0.moe(x.0, experts.0.clone(), residual.0))
    }

    fn columns(&mut self, x: &Value, start: usize, stop: usize) -> PyResult<Value> {
        recorded(self.0.columns(x.0, start, stop))
    }

    fn concat(&mut self, a: &Value, b: &Value) -> PyResult<Value> {
        recorded(self.0.concat(a.0, b.0))
    }

    fn wanted_rows(&mut self, x: &Value) -> PyResult<Value> {
        recorded(self.0.wanted_rows(x.0))
    }

    fn keep_hidden(&mut self, x: &Value) -> PyResult<()> {
        self.0.keep_hidden(x.0).map_err(value_error)
    }

    #[pyo3(signature = (x, weight=None, eps=0.0))]
    fn pool_rows(&mut self, x: &Value, weight: Option<Vec<f32>>, eps: f32) -> PyResult<()> {
        self.0.pool_rows(x.0, weight.map(|weight| (weight, eps))).map_err(value_error)
    }

    fn hidden(&mut self) -> PyResult<Value> {
        recorded(self.0.hidden())
    }

    fn finish(&mut self) -> PyResult<()> {
        self.0.finish().map_err(value_error)
    }

    #[getter]
    fn out_width(&self) -> usize {
        self.0.out_width()
    }

    #[getter]
    fn kept_width(&self) -> usize {
        self.0.kept_width()
    }

    #[getter]
    fn pooled_width(&self) -> usize {
        self.0.pooled_width()
    }

    #[getter]
    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }

    #[getter]
    fn simd(&self) -> &'static str {
        self.0.level().name()
    }

    #[pyo3(signature = (*, tokens, positions, slots, seq_starts, context_lens, block_tables,
                        logit_rows, kv, out, kept=None, hidden=None, hidden_from=None,
                        first_keys=None, progress=None, layers_per_group=1, pool_rows=None,
                        pooled=None))]
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
        mut kept: Option<PyReadwriteArray2<'_, f32>>,
        hidden: Option<PyReadonlyArray2<'_, f32>>,
        hidden_from: Option<PyReadonlyArray1<'_, i32>>,
        first_keys: Option<PyReadonlyArray1<'_, i32>>,
        progress: Option<Py<PyAny>>,
        layers_per_group: usize,
        pool_rows: Option<PyReadonlyArray1<'_, i32>>,
        mut pooled: Option<PyReadwriteArray2<'_, f32>>,
    ) -> PyResult<()> {
        let draft = match (&hidden_from, &first_keys) {
            (None, None) => None,
            (Some(hidden_from), Some(first_keys)) => Some(Draft {
                hidden_from: hidden_from.as_slice()?,
                first_keys: first_keys.as_slice()?,
                hidden: hidden.as_ref().map_or(Ok(&[][..]), |hidden| hidden.as_slice())?,
            }),
            _ => return Err(PyValueError::new_err("hidden_from and first_keys go together")),
        };
        let step = Step {
            tokens: tokens.as_slice()?,
            positions: positions.as_slice()?,
            slots: slots.as_slice()?,
            seq_starts: seq_starts.as_slice()?,
            context_lens: context_lens.as_slice()?,
            block_tables: block_tables.as_slice()?,
            logit_rows: logit_rows.as_slice()?,
            pool_rows: pool_rows.as_ref().map_or(Ok(&[][..]), |rows| rows.as_slice())?,
            draft,
        };
        let kept = kept.as_mut().map_or(Ok(&mut [][..]), |kept| kept.as_slice_mut())?;
        let pooled = pooled.as_mut().map_or(Ok(&mut [][..]), |pooled| pooled.as_slice_mut())?;
        let to = Outputs { kv: kv.as_slice_mut()?, out: out.as_slice_mut()?, kept, pooled };
        if layers_per_group == 0 {
            return Err(PyValueError::new_err("layers_per_group is 0; it is at least 1"));
        }
        let (layers, per_group) = (self.0.layers(), layers_per_group);
        let mut raised = Ok(());
        let mut stored = |layer: usize| {
            let done = layer + 1;
            let Some(progress) = progress.as_ref() else { return };
            if raised.is_ok() && (done == layers || done.is_multiple_of(per_group)) {
                let groups = done.div_ceil(per_group);
                raised = Python::attach(|py| progress.call1(py, (groups,)).map(drop));
            }
        };
        py.detach(|| self.0.run(&step, to, &mut stored)).map_err(step_error)?;
        raised
    }
}

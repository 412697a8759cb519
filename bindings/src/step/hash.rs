//! Names of blocks that sequences have just filled.

use std::num::NonZeroUsize;

use headrace_router::core::blocks::{BlockHash, hash_blocks_le};
use headrace_router::core::secret::HashKey;
use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::slices::each_has;

#[pyfunction]
pub(crate) fn hash_next_blocks<'py>(
    py: Python<'py>,
    tokens: PyReadonlyArray2<'py, i32>,
    key: &[u8],
    parents: Vec<Bound<'py, PyBytes>>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let [blocks, width] = [tokens.shape()[0], tokens.shape()[1]];
    each_has(blocks, &[("parents", parents.len())])?;
    let Some(width) = NonZeroUsize::new(width) else {
        return Err(PyValueError::new_err("blocks of no tokens"));
    };
    let key = HashKey(crate::hash::exactly("key", key)?);
    let mut bytes = Vec::with_capacity(4 * width.get());
    let each = tokens.as_slice()?.chunks_exact(width.get()).zip(&parents);
    let hash = |(tokens, parent): (&[i32], &Bound<'py, PyBytes>)| {
        bytes.clear();
        tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        let parent = BlockHash(crate::hash::exactly("parent", parent.as_bytes())?);
        let names = hash_blocks_le(&key, parent, &bytes, width);
        let name = names.first().expect("the tokens of one block");
        Ok(PyBytes::new(py, &name.0))
    };
    each.map(hash).collect()
}

//! Block hashes and proofs.

use std::num::NonZeroUsize;

use headrace_router::core::blocks::{BlockHash, hash_blocks_le};
use headrace_router::core::secret::{AuthKey, HashKey, Side};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pyfunction]
#[pyo3(signature = (tokens, block_tokens, key, salt=None, parent=None))]
pub(crate) fn hash_blocks<'py>(
    py: Python<'py>,
    tokens: &[u8],
    block_tokens: NonZeroUsize,
    key: &[u8],
    salt: Option<&[u8]>,
    parent: Option<&[u8]>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let key = HashKey(exactly("key", key)?);
    if !tokens.len().is_multiple_of(4) {
        return Err(PyValueError::new_err("tokens must be 4 bytes each"));
    }
    let parent = match (salt, parent) {
        (Some(_), Some(_)) => {
            return Err(PyValueError::new_err("a parent already holds the salt: give one of them"));
        }
        (salt, None) => BlockHash::root(&key, salt.unwrap_or_default()),
        (None, Some(parent)) => BlockHash(exactly("parent", parent)?),
    };
    let hashes = py.detach(|| hash_blocks_le(&key, parent, tokens, block_tokens));
    Ok(hashes.iter().map(|hash| PyBytes::new(py, &hash.0)).collect())
}

#[pyfunction]
pub(crate) fn derive_hash_key<'py>(py: Python<'py>, secret: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &HashKey::derive(secret).0)
}

#[pyfunction]
pub(crate) fn auth_proof<'py>(
    py: Python<'py>,
    secret: &[u8],
    side: &str,
    challenge: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let side = match side {
        "worker" => Side::Worker,
        "router" => Side::Router,
        other => {
            return Err(PyValueError::new_err(format!("side is worker or router, not {other:?}")));
        }
    };
    Ok(PyBytes::new(py, &AuthKey::derive(secret).proof(side, challenge)))
}

pub(crate) fn exactly<const N: usize>(name: &str, bytes: &[u8]) -> PyResult<[u8; N]> {
    bytes.try_into().map_err(|_| {
        PyValueError::new_err(format!("{name} must have {N} bytes, not {}", bytes.len()))
    })
}

//! Masks on logits that lie in memory of the host.

use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray2, PyUntypedArrayMethods as _};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[pyfunction]
pub(crate) fn mask_logits(
    py: Python<'_>,
    mut logits: PyReadwriteArray2<'_, f32>,
    rows: PyReadonlyArray1<'_, i64>,
    masks: PyReadonlyArray2<'_, u32>,
) -> PyResult<()> {
    let ([count, tokens], [given, words]) =
        ([logits.shape()[0], logits.shape()[1]], [masks.shape()[0], masks.shape()[1]]);
    let (rows, masks) = (rows.as_slice()?, masks.as_slice()?);
    if words != tokens.div_ceil(32) || given != rows.len() {
        let text = format!("masks of {given} x {words} for {} rows of {tokens}", rows.len());
        return Err(PyValueError::new_err(text));
    }
    if let Some(row) = rows.iter().find(|row| usize::try_from(**row).map_or(true, |r| r >= count)) {
        return Err(PyValueError::new_err(format!("row {row}, of {count}")));
    }
    let logits = logits.as_slice_mut()?;
    py.detach(|| {
        for (row, mask) in rows.iter().zip(masks.chunks_exact(words)) {
            let start = *row as usize * tokens;
            let own = &mut logits[start..start + tokens];
            for (word, part) in mask.iter().zip(own.chunks_mut(32)) {
                match *word {
                    u32::MAX => {}
                    0 => part.fill(f32::NEG_INFINITY),
                    word => {
                        for (bit, logit) in part.iter_mut().enumerate() {
                            if (word >> bit) & 1 == 0 {
                                *logit = f32::NEG_INFINITY;
                            }
                        }
                    }
                }
            }
        }
    });
    Ok(())
}

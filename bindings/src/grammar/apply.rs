//! Masks on logits that lie in memory of the host.

use numpy::{
    IntoPyArray as _, PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray2,
    PyUntypedArrayMethods as _,
};
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
            for (word, part) in mask.iter().zip(logits[start..start + tokens].chunks_mut(32)) {
                apply(*word, part);
            }
        }
    });
    Ok(())
}

/// Most words of a mask are all zeros or nearly all ones, so what is walked is their zeros.
fn apply(word: u32, logits: &mut [f32]) {
    if word == 0 {
        logits.fill(f32::NEG_INFINITY);
        return;
    }
    let mut forbidden = !word;
    while forbidden != 0 {
        if let Some(logit) = logits.get_mut(forbidden.trailing_zeros() as usize) {
            *logit = f32::NEG_INFINITY;
        }
        forbidden &= forbidden - 1;
    }
}

/// Tokens that alone may be chosen in some rows of logits.
pub(crate) struct FewTokens<'a> {
    /// `[rows]`, a place in `starts`; -1 where all tokens may be.
    pub(crate) of: &'a [i64],
    /// Where in `ids` those of a place begin and end.
    pub(crate) starts: &'a [i64],
    pub(crate) ids: &'a [u32],
}

impl<'a> FewTokens<'a> {
    /// For `rows` rows of `columns` logits.
    pub(crate) fn checked(self, rows: usize, columns: usize) -> PyResult<Self> {
        let Self { of, starts, ids } = &self;
        let most = i64::try_from(ids.len()).unwrap_or(i64::MAX);
        let ordered = starts.iter().all(|start| (0..=most).contains(start)) && starts.is_sorted();
        let known = of.iter().all(|place| *place < 0 || (*place as usize) + 1 < starts.len());
        if of.len() != rows || !ordered || !known || ids.iter().any(|id| *id as usize >= columns) {
            let text = format!("a few tokens of {} rows, for {rows} of {columns}", of.len());
            return Err(PyValueError::new_err(text));
        }
        Ok(self)
    }

    /// Those of a row; `None` where all tokens may be chosen.
    pub(crate) fn of_row(&self, row: usize) -> Option<&'a [u32]> {
        let place = usize::try_from(self.of[row]).ok()?;
        Some(&self.ids[self.starts[place] as usize..self.starts[place + 1] as usize])
    }
}

/// Tokens, and their logits.
type Best<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<f32>>);

#[pyfunction]
pub(crate) fn argmax_of_few<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    of: PyReadonlyArray1<'py, i64>,
    starts: PyReadonlyArray1<'py, i64>,
    ids: PyReadonlyArray1<'py, u32>,
) -> PyResult<Best<'py>> {
    let (rows, columns) = logits.as_array().dim();
    let logits = logits.as_slice()?;
    let few = FewTokens { of: of.as_slice()?, starts: starts.as_slice()?, ids: ids.as_slice()? };
    let few = few.checked(rows, columns)?;
    let found = (0..rows).map(|row| {
        let own = few.of_row(row).unwrap_or_default();
        best_of(&logits[row * columns..(row + 1) * columns], own)
    });
    let (ids, best): (Vec<_>, Vec<_>) = found.unzip();
    Ok((ids.into_pyarray(py), best.into_pyarray(py)))
}

/// The best of these tokens, the first of them on a tie, and its logit; -1 of none. What is no number counts as best.
fn best_of(logits: &[f32], tokens: &[u32]) -> (i64, f32) {
    let mut best = (-1, f32::NEG_INFINITY);
    for token in tokens {
        let logit = logits[*token as usize];
        if logit.is_nan() {
            return (i64::from(*token), logit);
        }
        if best.0 < 0 || logit > best.1 {
            best = (i64::from(*token), logit);
        }
    }
    best
}

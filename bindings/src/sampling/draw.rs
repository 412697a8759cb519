//! Drawing tokens.

use headrace_kernels::sampling::race::{Draw, Scratch};
use headrace_kernels::simd::Level;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::grammar::FewTokens;

#[pyfunction]
#[pyo3(signature = (logits, tokens, *, best, temperature, top_p, min_p, key, key2, few=None))]
#[expect(clippy::too_many_arguments, reason = "named in Python")]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn race<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    tokens: PyReadonlyArray1<'py, u32>,
    best: PyReadonlyArray1<'py, f32>,
    temperature: PyReadonlyArray1<'py, f64>,
    top_p: PyReadonlyArray1<'py, f64>,
    min_p: PyReadonlyArray1<'py, f64>,
    key: PyReadonlyArray1<'py, u32>,
    key2: PyReadonlyArray1<'py, u32>,
    few: Option<(
        PyReadonlyArray1<'py, i64>,
        PyReadonlyArray1<'py, i64>,
        PyReadonlyArray1<'py, u32>,
    )>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let (rows, columns) = logits.as_array().dim();
    let (logits, tokens) = (logits.as_slice()?, tokens.as_slice()?);
    let (best, temperature) = (best.as_slice()?, temperature.as_slice()?);
    let (top_p, min_p) = (top_p.as_slice()?, min_p.as_slice()?);
    let (key, key2) = (key.as_slice()?, key2.as_slice()?);
    let lengths = [best.len(), temperature.len(), top_p.len(), min_p.len(), key.len(), key2.len()];
    if lengths != [rows; 6] || tokens.len() != columns || columns == 0 {
        let text = format!("race: {rows} rows of {columns} logits, {} tokens", tokens.len());
        return Err(PyValueError::new_err(format!("{text}, and numbers of {lengths:?} rows")));
    }
    let few = match &few {
        Some((of, starts, ids)) => Some(
            FewTokens { of: of.as_slice()?, starts: starts.as_slice()?, ids: ids.as_slice()? }
                .checked(rows, columns)?,
        ),
        None => None,
    };
    let drawn = py.detach(|| {
        let (level, mut scratch) = (Level::detect(), Scratch::default());
        let (mut own_row, mut own_tokens) = (Vec::new(), Vec::new());
        let draw = |(i, row): (usize, &[f32])| {
            let of_few = few.as_ref().and_then(|few| few.of_row(i));
            if let Some(columns) = of_few {
                own_row.clear();
                own_row.extend(columns.iter().map(|column| row[*column as usize]));
                own_tokens.clear();
                own_tokens.extend(columns.iter().map(|column| tokens[*column as usize]));
            }
            let (row, tokens): (&[f32], &[u32]) =
                if of_few.is_some() { (&own_row, &own_tokens) } else { (row, tokens) };
            let draw = Draw {
                row,
                tokens,
                best: best[i],
                temperature: temperature[i],
                top_p: top_p[i],
                min_p: min_p[i],
                keys: [key[i], key2[i]],
            };
            i64::from(tokens[draw.race(level, &mut scratch)])
        };
        logits.chunks_exact(columns).enumerate().map(draw).collect::<Vec<_>>()
    });
    Ok(drawn.into_pyarray(py))
}

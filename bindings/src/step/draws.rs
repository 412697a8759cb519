//! How tokens are drawn, by batch row.

use headrace_kernels::sampling::race::keys;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::slices::{Ints, Kept1, Kept2, checked_rows, columns, each_has, indices, open, shape_of};

type Array<'py, T> = Bound<'py, PyArray1<T>>;

columns! {
    /// Of `numbers`.
    Numbers of f64: temperature, top_p, min_p
}

#[pyfunction]
pub(crate) fn noise_keys<'py>(
    py: Python<'py>,
    seeds: PyReadonlyArray1<'py, u64>,
    positions: Ints<'py>,
) -> PyResult<(Array<'py, u32>, Array<'py, u32>)> {
    let (seeds, positions) = (seeds.as_slice()?, positions.as_slice()?);
    each_has(seeds.len(), &[("positions", positions.len())])?;
    let each = seeds.iter().zip(positions);
    let words = each.map(|(seed, position)| keys(*seed, position.cast_unsigned()));
    let (first, second): (Vec<_>, Vec<_>) = words.map(|[first, second]| (first, second)).unzip();
    Ok((first.into_pyarray(py), second.into_pyarray(py)))
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct SamplingColumns {
    numbers: Kept2<f64>,
    top_k: Kept1<i64>,
    seeds: Kept1<u64>,
    rows: usize,
}

#[pymethods]
impl SamplingColumns {
    #[new]
    #[pyo3(signature = (*, numbers, top_k, seeds))]
    fn new(
        numbers: Bound<'_, PyArray2<f64>>,
        top_k: Bound<'_, PyArray1<i64>>,
        seeds: Bound<'_, PyArray1<u64>>,
    ) -> PyResult<Self> {
        let [fields, rows] = shape_of("numbers", &numbers)?;
        let lengths = [top_k.len()?, seeds.len()?];
        if fields != Numbers::ROWS || lengths != [rows; 2] {
            let text = format!("numbers of {fields} x {rows}, but top_k and seeds of {lengths:?}");
            return Err(PyValueError::new_err(text));
        }
        Ok(Self { numbers: numbers.unbind(), top_k: top_k.unbind(), seeds: seeds.unbind(), rows })
    }

    /// The places of rows that draw, and whose highest logit is a number; `None` where all do.
    fn drawn<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        best: PyReadonlyArray1<'py, f32>,
    ) -> PyResult<Option<Array<'py, i64>>> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let best = best.as_slice()?;
        each_has(batch_rows.len(), &[("best", best.len())])?;
        let mut numbers = open(py, &self.numbers)?;
        let Numbers { temperature, .. } = Numbers::of(numbers.as_slice_mut()?);
        let each = batch_rows.iter().zip(best).enumerate();
        let draws = |(place, (row, best)): (usize, (&i64, &f32))| {
            (temperature[*row as usize] > 0.0 && best.is_finite()).then_some(place as i64)
        };
        let drawn: Vec<_> = each.filter_map(draws).collect();
        Ok((drawn.len() < batch_rows.len()).then(|| drawn.into_pyarray(py)))
    }

    fn draws<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        positions: Ints<'py>,
    ) -> PyResult<(
        Array<'py, f64>,
        Array<'py, i64>,
        Array<'py, f64>,
        Array<'py, f64>,
        Array<'py, u32>,
        Array<'py, u32>,
    )> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let positions = positions.as_slice()?;
        each_has(batch_rows.len(), &[("positions", positions.len())])?;
        let (mut numbers, mut top_k) = (open(py, &self.numbers)?, open(py, &self.top_k)?);
        let mut seeds = open(py, &self.seeds)?;
        let Numbers { temperature, top_p, min_p } = Numbers::of(numbers.as_slice_mut()?);
        let (top_k, seeds) = (top_k.as_slice_mut()?, seeds.as_slice_mut()?);
        each_has(self.rows, &[("top_k", top_k.len()), ("seeds", seeds.len())])?;
        let of =
            |column: &[f64]| -> Vec<f64> { indices(batch_rows).map(|row| column[row]).collect() };
        let (temperature, top_p, min_p) = (of(temperature), of(top_p), of(min_p));
        let top_k: Vec<i64> = batch_rows.iter().map(|row| top_k[*row as usize]).collect();
        let each = batch_rows.iter().zip(positions);
        let words = each.map(|(row, at)| keys(seeds[*row as usize], at.cast_unsigned()));
        let (key, key2): (Vec<_>, Vec<_>) = words.map(|[first, second]| (first, second)).unzip();
        Ok((
            temperature.into_pyarray(py),
            top_k.into_pyarray(py),
            top_p.into_pyarray(py),
            min_p.into_pyarray(py),
            key.into_pyarray(py),
            key2.into_pyarray(py),
        ))
    }
}

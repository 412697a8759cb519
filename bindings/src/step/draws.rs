//! How tokens are drawn, by batch row.

use headrace_kernels::race::keys;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::slices::{Ints, Kept1, Kept2, each_below, each_has, open, rows_of, shape_of};

type Array<'py, T> = Bound<'py, PyArray1<T>>;

const NUMBERS: usize = 3;

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
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
    numbers: Kept2<f64>, // temperature, top_p, min_p
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
        if fields != NUMBERS || lengths != [rows; 2] {
            let text = format!("numbers of {fields} x {rows}, but top_k and seeds of {lengths:?}");
            return Err(PyValueError::new_err(text));
        }
        Ok(Self { numbers: numbers.unbind(), top_k: top_k.unbind(), seeds: seeds.unbind(), rows })
    }

    /// The places of rows that draw, and whose highest logit is a number; `None` where all do.
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn drawn<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        best: PyReadonlyArray1<'py, f32>,
    ) -> PyResult<Option<Array<'py, i64>>> {
        let (batch_rows, best) = (batch_rows.as_slice()?, best.as_slice()?);
        each_below(self.rows, "batch row", batch_rows)?;
        each_has(batch_rows.len(), &[("best", best.len())])?;
        let mut numbers = open(py, &self.numbers)?;
        let [temperature, _, _] = rows_of::<NUMBERS, _>(numbers.as_slice_mut()?);
        let each = batch_rows.iter().zip(best).enumerate();
        let draws = |(place, (row, best)): (usize, (&i64, &f32))| {
            (temperature[*row as usize] > 0.0 && best.is_finite()).then_some(place as i64)
        };
        let drawn: Vec<_> = each.filter_map(draws).collect();
        Ok((drawn.len() < batch_rows.len()).then(|| drawn.into_pyarray(py)))
    }

    #[expect(clippy::type_complexity, reason = "named in Python")]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
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
        let (batch_rows, positions) = (batch_rows.as_slice()?, positions.as_slice()?);
        each_below(self.rows, "batch row", batch_rows)?;
        each_has(batch_rows.len(), &[("positions", positions.len())])?;
        let (mut numbers, mut top_k) = (open(py, &self.numbers)?, open(py, &self.top_k)?);
        let mut seeds = open(py, &self.seeds)?;
        let [temperature, top_p, min_p] = rows_of::<NUMBERS, _>(numbers.as_slice_mut()?);
        let (top_k, seeds) = (top_k.as_slice_mut()?, seeds.as_slice_mut()?);
        each_has(self.rows, &[("top_k", top_k.len()), ("seeds", seeds.len())])?;
        let of = |column: &[f64]| batch_rows.iter().map(|row| column[*row as usize]).collect();
        let [temperature, top_p, min_p]: [Vec<f64>; NUMBERS] =
            [of(temperature), of(top_p), of(min_p)];
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

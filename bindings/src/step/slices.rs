//! Arrays of Python as slices whose lengths and indices were looked at.

use numpy::{Element, Ix1, Ix2, PyArray, PyArrayMethods, PyReadonlyArray1, PyReadwriteArray};
use numpy::{PyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The dimensions of an array that is kept, whose rows lie side by side.
pub(super) fn shape_of<T: Element>(
    name: &str,
    array: &Bound<'_, PyArray2<T>>,
) -> PyResult<[usize; 2]> {
    if !array.is_c_contiguous() {
        return Err(PyValueError::new_err(format!("{name} must be C-contiguous")));
    }
    Ok([array.shape()[0], array.shape()[1]])
}

/// Fails unless there are `expected` of each column.
pub(super) fn each_has(expected: usize, columns: &[(&str, usize)]) -> PyResult<()> {
    match columns.iter().find(|(_, got)| *got != expected) {
        None => Ok(()),
        Some((name, got)) => {
            Err(PyValueError::new_err(format!("{name} has {got} items, not {expected}")))
        }
    }
}

/// Fails for an index that is not below `limit`; `name` says of what it is.
pub(super) fn each_below(limit: usize, name: &str, indices: &[i64]) -> PyResult<()> {
    let outside = |index: &&i64| usize::try_from(**index).map_or(true, |index| index >= limit);
    match indices.iter().find(outside) {
        None => Ok(()),
        Some(index) => Err(PyValueError::new_err(format!("{name} {index}, of {limit}"))),
    }
}

/// The parts of so many items each, one after the other; none of a negative number, and all of `of`.
pub(super) fn check_parts(name: &str, counts: &[i64], of: usize) -> PyResult<()> {
    let mut sum = 0_usize;
    for count in counts {
        let more = usize::try_from(*count).ok().and_then(|count| sum.checked_add(count));
        sum = more.ok_or_else(|| PyValueError::new_err(format!("{count} {name} of one row")))?;
    }
    if sum != of {
        return Err(PyValueError::new_err(format!("{of} {name}, but counts of {sum}")));
    }
    Ok(())
}

/// A kept array, to be read and written.
pub(super) fn open<'py, T: Element, D: numpy::ndarray::Dimension>(
    py: Python<'py>,
    array: &Py<PyArray<T, D>>,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    let array = array.bind(py).try_readwrite();
    array.map_err(|error| PyValueError::new_err(format!("an array of the step: {error}")))
}

/// Batch rows that an array of `limit` rows has.
pub(super) fn checked_rows<'a>(limit: usize, batch_rows: &'a Ints<'_>) -> PyResult<&'a [i64]> {
    let batch_rows = batch_rows.as_slice()?;
    each_below(limit, "batch row", batch_rows)?;
    Ok(batch_rows)
}

/// As indices, what [`each_below`] looked at.
pub(super) fn indices<'a>(checked: &'a [i64]) -> impl Iterator<Item = usize> + use<'a> {
    checked.iter().map(|index| *index as usize)
}

/// The rows of an array of Python by name, in their order.
macro_rules! columns {
    ($(#[$doc:meta])* $name:ident of $item:ty: $($row:ident),+ $(,)?) => {
        $(#[$doc])*
        struct $name<'a> {
            $($row: &'a mut [$item]),+
        }

        impl<'a> $name<'a> {
            const ROWS: usize = [$(stringify!($row)),+].len();

            fn of(values: &'a mut [$item]) -> Self {
                let [$($row),+] = $crate::step::slices::rows_of(values);
                Self { $($row),+ }
            }
        }
    };
}
pub(super) use columns;

/// The `N` rows of an array of `N` rows.
pub(super) fn rows_of<const N: usize, T>(values: &mut [T]) -> [&mut [T]; N] {
    let width = values.len() / N;
    let mut rest = values;
    std::array::from_fn(|_| {
        let (row, more) = std::mem::take(&mut rest).split_at_mut(width);
        rest = more;
        row
    })
}

pub(super) type Kept1<T> = Py<PyArray<T, Ix1>>;
pub(super) type Kept2<T> = Py<PyArray<T, Ix2>>;
pub(super) type Ints<'py> = PyReadonlyArray1<'py, i64>;
pub(super) type Flags<'py> = PyReadonlyArray1<'py, bool>;

//! The exchange of one layer of experts without Python: `SharedExchange` of `_core.pyi`.
//!
//! It is given to a recorded program, which posts and takes parcels by itself with the GIL released.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use headrace_kernels::moe::exchange::{Combine, Failure};
use headrace_kernels::moe::parcels::{ColumnMut, Home, Outgoing, Parcels, ROWS_APART};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::exchange::Exchange;
use super::rows::{RoomForRows, SentRows};
use super::{RankLost, SharedParcels, Steps};

#[pyclass(frozen, skip_from_py_object, module = "headrace._core")]
#[derive(Debug, Clone)]
pub(crate) struct SharedExchange(Arc<Layer>);

#[derive(Debug)]
struct Layer {
    parcels: Py<SharedParcels>,
    rank: usize,
    ranks: usize,
    combine: Combine,
    rows_apart: usize,
    home: RwLock<Arc<Home>>,
    /// Is told of a lost rank, and may raise what names another one.
    on_lost: Option<Py<PyAny>>,
    slots_ns: AtomicU64,
}

#[pymethods]
impl SharedExchange {
    #[new]
    #[pyo3(signature = (parcels, *, owners, slots, partial, on_lost=None, rows_apart=None))]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(
        parcels: Py<SharedParcels>,
        owners: PyReadonlyArray1<'_, i64>,
        slots: PyReadonlyArray1<'_, i32>,
        partial: bool,
        on_lost: Option<Py<PyAny>>,
        rows_apart: Option<usize>,
    ) -> PyResult<Self> {
        let (rank, ranks) = (parcels.get().rank, parcels.get().shared.layout().ranks());
        let home = Home { owners: owners.as_slice()?.to_vec(), slots: slots.as_slice()?.to_vec() };
        if home.owners.len() != home.slots.len() {
            let (owners, slots) = (home.owners.len(), home.slots.len());
            let text = format!("{owners} experts have ranks, {slots} have slots");
            return Err(PyValueError::new_err(text));
        }
        Ok(Self(Arc::new(Layer {
            parcels,
            rank,
            ranks,
            combine: if partial { Combine::Partial } else { Combine::Exact },
            rows_apart: rows_apart.unwrap_or(ROWS_APART),
            home: RwLock::new(Arc::new(home)),
            on_lost,
            slots_ns: AtomicU64::new(0),
        })))
    }

    fn follow(&self, other: &Self) {
        let home = other.home();
        *self.0.home.write().unwrap_or_else(PoisonError::into_inner) = home;
    }

    #[getter]
    fn slots_s(&self) -> f64 {
        Duration::from_nanos(self.0.slots_ns.load(Ordering::Relaxed)).as_secs_f64()
    }
}

impl SharedExchange {
    /// Has `work` done on the thread of the steps. What ends it is what Python would raise.
    fn attempt<T>(
        &self,
        work: impl FnOnce(&SharedParcels, &mut Steps) -> PyResult<T>,
    ) -> Result<T, Failure> {
        let parcels = self.0.parcels.get();
        let done = parcels.steps().and_then(|mut steps| work(parcels, &mut steps));
        done.map_err(|error| Failure::from(self.named(error)))
    }

    /// All ranks are to name the same lost one, which the group knows.
    fn named(&self, error: PyErr) -> PyErr {
        let Some(on_lost) = &self.0.on_lost else { return error };
        Python::attach(|py| {
            if !error.is_instance_of::<RankLost>(py) {
                return error;
            }
            match on_lost.call1(py, (error.value(py),)) {
                Ok(_) => error,
                Err(other) => other,
            }
        })
    }
}

impl Parcels for SharedExchange {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn ranks(&self) -> usize {
        self.0.ranks
    }

    fn combine(&self) -> Combine {
        self.0.combine
    }

    fn rows_apart(&self) -> usize {
        self.0.rows_apart
    }

    fn home(&self) -> Arc<Home> {
        self.0.home.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn post(&self, out: Outgoing<'_>) -> Result<(), Failure> {
        self.attempt(|parcels, Steps { peers, exchange, .. }| {
            peers.check_lost(&parcels.shared)?;
            let mut next = 0;
            let spans = out.counts.iter().enumerate().map(|(to, count)| {
                let first = next;
                next += count;
                // Rows of this rank stay where they are.
                (first, if to == self.0.rank { first } else { next })
            });
            exchange
                .post(&parcels.shared, &SentRows(out.columns), spans)
                .map_err(PyRuntimeError::new_err)
        })
    }

    fn has_come(&self, out: Outgoing<'_>) -> Result<bool, Failure> {
        self.attempt(|parcels, Steps { exchange, .. }| {
            let missing = exchange.look(&parcels.shared, &SentRows(out.columns));
            missing.map(|rank| rank.is_none()).map_err(|ended| parcels.publish(ended))
        })
    }

    fn counts(&self, out: Outgoing<'_>, into: &mut Vec<usize>) -> Result<(), Failure> {
        self.attempt(|parcels, steps| {
            let rows = SentRows(out.columns);
            parcels.wait_counted(steps, |exchange| exchange.look(&parcels.shared, &rows))?;
            into.clear();
            into.extend(steps.exchange.counts().map_err(PyRuntimeError::new_err)?);
            Ok(())
        })
    }

    fn take(&self, out: Outgoing<'_>, into: &mut [ColumnMut<'_>]) -> Result<(), Failure> {
        self.attempt(|parcels, steps| {
            steps.exchange.begin_to_take().map_err(PyRuntimeError::new_err)?;
            let (rows, mut room) = (SentRows(out.columns), RoomForRows(into));
            let take = |exchange: &mut Exchange| exchange.take(&parcels.shared, &rows, &mut room);
            parcels.wait_counted(steps, take)?;
            steps.exchange.done();
            Ok(())
        })
    }

    fn computed(&self, slots: Duration) {
        let ns = u64::try_from(slots.as_nanos()).unwrap_or(u64::MAX);
        self.0.slots_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

impl SharedParcels {
    /// [`Self::wait`] of a program, whose time is counted.
    fn wait_counted(
        &self,
        steps: &mut Steps,
        step: impl FnMut(&mut Exchange) -> Result<Option<usize>, super::Ended>,
    ) -> PyResult<()> {
        let now_ns = || u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
        let began_ns = now_ns();
        self.waits_since_ns.store(began_ns, Ordering::Relaxed);
        let done = self.wait(&mut steps.peers, &mut steps.exchange, step);
        self.waits_since_ns.store(0, Ordering::Relaxed);
        self.waited_ns.fetch_add(now_ns() - began_ns, Ordering::Relaxed);
        done
    }
}

//! Parcels between the ranks of a group on one host: `SharedParcels` of `_core.pyi`.

mod columns;
mod doorbell;
mod exchange;
mod layout;
mod native;
mod peers;
mod plan;
mod rows;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::{import_exception, prelude::*};

use columns::Columns;
use exchange::Exchange;
use layout::{Layout, Shared};
pub(crate) use native::SharedExchange;
use peers::Peers;
pub(crate) use plan::{order_of_sends, plan_sends};

import_exception!(headrace_kernels.moe.transport, RankLost);
import_exception!(headrace_kernels.moe.transport, StepAborted);

fn nothing_posted() -> PyErr {
    PyRuntimeError::new_err("nothing was posted")
}

/// How long a thread sleeps before it looks whether a peer has died and whether Python has a signal.
const LOOK: Duration = Duration::from_millis(20);

/// Why a round, or the group, is over.
#[derive(Debug)]
pub(crate) enum Ended {
    /// A rank ended the round.
    Aborted { rank: usize, reason: String },
    /// A rank is gone; the group is over.
    Lost { rank: usize, waited_for: String },
}

impl From<Ended> for PyErr {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Aborted { rank, reason } => StepAborted::new_err((rank, reason)),
            Ended::Lost { rank, waited_for } => RankLost::new_err((rank, waited_for)),
        }
    }
}

#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct SharedParcels {
    shared: Shared,
    rank: usize,
    timeout: Duration,
    round: AtomicU64,
    closed: AtomicBool,
    made: Instant,
    /// That programs waited.
    waited_ns: AtomicU64,
    /// After `made`, since when a program waits; 0 where none does.
    waits_since_ns: AtomicU64,
    /// Of the thread of the steps.
    steps: Mutex<Steps>,
}

#[derive(Debug)]
struct Steps {
    peers: Peers,
    exchange: Exchange,
    /// What Python posted.
    source: Option<Columns>,
}

#[pymethods]
impl SharedParcels {
    #[new]
    #[pyo3(signature = (memory, *, rank, ranks, slice_bytes, timeout_ms))]
    fn new(
        memory: PyBuffer<u8>,
        rank: usize,
        ranks: usize,
        slice_bytes: usize,
        timeout_ms: u64,
    ) -> PyResult<Self> {
        let layout = Layout::new(ranks, slice_bytes).map_err(PyValueError::new_err)?;
        if rank >= ranks {
            return Err(PyValueError::new_err(format!("rank {rank} of {ranks}")));
        }
        let shared = Shared::new(memory, layout).map_err(PyValueError::new_err)?;
        Ok(Self {
            steps: Mutex::new(Steps {
                peers: Peers::new(rank, ranks),
                exchange: Exchange::new(rank, ranks),
                source: None,
            }),
            shared,
            rank,
            timeout: Duration::from_millis(timeout_ms),
            round: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            made: Instant::now(),
            waited_ns: AtomicU64::new(0),
            waits_since_ns: AtomicU64::new(0),
        })
    }

    #[staticmethod]
    fn memory_bytes(ranks: usize, slice_bytes: usize) -> PyResult<usize> {
        Layout::new(ranks, slice_bytes).map(Layout::total_bytes).map_err(PyValueError::new_err)
    }

    fn join(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<Option<usize>> {
        let steps = &mut *self.steps()?;
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        if self.rank == 0 {
            self.shared.format();
        }
        loop {
            let joined = py.detach(|| {
                let joined = steps.peers.join(&self.shared);
                if matches!(joined, Ok(false)) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                joined
            });
            if joined.map_err(PyValueError::new_err)? {
                return Ok(None);
            }
            py.check_signals()?;
            if let Some(rank) = steps.peers.ended_before(&self.shared) {
                return Err(RankLost::new_err((rank, "its process ended while the group met")));
            }
            if Instant::now() >= deadline {
                return Ok(Some(steps.peers.first_absent(&self.shared)));
            }
        }
    }

    fn begin(&self, round_number: u64) -> PyResult<()> {
        let mut steps = self.steps()?;
        // Inside, zero is no round.
        let (last, round) = (self.round.load(Ordering::Relaxed), round_number.saturating_add(1));
        if round <= last {
            let last = last - 1;
            return Err(PyValueError::new_err(format!("round {round_number} after round {last}")));
        }
        self.round.store(round, Ordering::Relaxed);
        steps.source = None;
        steps.exchange.begin(&self.shared, round);
        Ok(steps.peers.check_lost(&self.shared)?)
    }

    fn post(
        &self,
        py: Python<'_>,
        columns: Vec<PyBuffer<u8>>,
        row_bytes: Vec<usize>,
        parcels: Vec<(usize, usize)>,
    ) -> PyResult<()> {
        let mut steps = self.steps()?;
        if parcels.len() != self.shared.layout().ranks() {
            let (got, ranks) = (parcels.len(), self.shared.layout().ranks());
            return Err(PyValueError::new_err(format!("{got} parcels for {ranks} ranks")));
        }
        let columns = Columns::new(columns, row_bytes).map_err(PyValueError::new_err)?;
        for &(start, end) in &parcels {
            if start > end || end > columns.rows() {
                let rows = columns.rows();
                return Err(PyValueError::new_err(format!("rows {start} to {end} of {rows}")));
            }
        }
        let Steps { peers, exchange, source } = &mut *steps;
        peers.check_lost(&self.shared)?;
        py.detach(|| exchange.post(&self.shared, &columns, parcels.into_iter()))
            .map_err(PyRuntimeError::new_err)?;
        *source = Some(columns);
        Ok(())
    }

    fn arrived(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let mut steps = self.steps()?;
        let Steps { peers, exchange, source } = &mut *steps;
        let source = source.as_ref().ok_or_else(nothing_posted)?;
        let look = |exchange: &mut Exchange| exchange.look(&self.shared, source);
        py.detach(|| self.wait(peers, exchange, look))?;
        exchange.counts().map(Iterator::collect).map_err(PyRuntimeError::new_err)
    }

    fn take(
        &self,
        py: Python<'_>,
        columns: Vec<PyBuffer<u8>>,
        row_bytes: Vec<usize>,
    ) -> PyResult<()> {
        let mut steps = self.steps()?;
        let mut columns = Columns::writable(columns, row_bytes).map_err(PyValueError::new_err)?;
        let Steps { peers, exchange, source } = &mut *steps;
        let posted = source.as_ref().ok_or_else(nothing_posted)?;
        let rows: usize = exchange.counts().map_err(PyValueError::new_err)?.sum();
        if columns.rows() != rows || !columns.is_like(posted) {
            let text = "columns as those posted, of as many rows as come";
            return Err(PyValueError::new_err(text));
        }
        let (to, from, own) = exchange.begin_to_take().map_err(PyValueError::new_err)?;
        columns.copy_from(to, posted, from, own);
        let take = |exchange: &mut Exchange| exchange.take(&self.shared, posted, &mut columns);
        py.detach(|| self.wait(peers, exchange, take))?;
        exchange.done();
        *source = None;
        Ok(())
    }

    #[getter]
    fn waited_s(&self) -> f64 {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed)).as_secs_f64()
    }

    #[getter]
    fn waits_s(&self) -> f64 {
        match self.waits_since_ns.load(Ordering::Relaxed) {
            0 => 0.0,
            since => self.made.elapsed().saturating_sub(Duration::from_nanos(since)).as_secs_f64(),
        }
    }

    fn abort(&self, reason: &str) {
        let round = self.round.load(Ordering::Relaxed);
        if round > 0 {
            self.shared.set_aborted(self.rank, round, reason);
            doorbell::ring_all(&self.shared);
        }
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::Relaxed) {
            self.shared.set_closed(self.rank);
            doorbell::ring_all(&self.shared);
        }
    }
}

impl SharedParcels {
    fn steps(&self) -> PyResult<MutexGuard<'_, Steps>> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(RankLost::new_err((self.rank, "it has left the group")));
        }
        match self.steps.try_lock() {
            Ok(steps) => Ok(steps),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(PyRuntimeError::new_err("one thread at a time may exchange parcels"))
            }
        }
    }

    /// Until `step` has nothing to wait for. What it waits for is a rank. Without the GIL, but for a look at signals.
    fn wait(
        &self,
        peers: &mut Peers,
        exchange: &mut Exchange,
        mut step: impl FnMut(&mut Exchange) -> Result<Option<usize>, Ended>,
    ) -> PyResult<()> {
        let mut since = Instant::now();
        let mut moved = exchange.moved();
        loop {
            let mut wait_a_while = || -> Result<Option<usize>, Ended> {
                let until = Instant::now() + LOOK;
                loop {
                    let waiting_for = step(exchange)?;
                    if waiting_for.is_none() {
                        return Ok(None);
                    }
                    let alarmed = peers.check(&self.shared, exchange.round())?;
                    if alarmed || Instant::now() >= until {
                        return Ok(waiting_for);
                    }
                    exchange.sleep(&self.shared, peers.alarms(), until);
                }
            };
            let waiting_for = match wait_a_while() {
                Ok(None) => return Ok(()),
                Ok(Some(rank)) => rank,
                Err(ended) => return Err(self.publish(ended)),
            };
            #[expect(
                clippy::redundant_closure_for_method_calls,
                reason = "the method itself is of one lifetime"
            )]
            Python::attach(|py| py.check_signals())?;
            if self.closed.load(Ordering::Relaxed) {
                return Err(RankLost::new_err((self.rank, "it has left the group")));
            }
            if exchange.moved() != moved {
                (moved, since) = (exchange.moved(), Instant::now());
            }
            if let Some(what) = peers.ended(&self.shared, waiting_for) {
                // What it sent before it ended counts: it is waited for only where that is not enough.
                if step(exchange)? == Some(waiting_for) {
                    peers.check(&self.shared, exchange.round())?;
                    let waited_for = format!("{what}, {}", exchange.place());
                    return Err(self.publish(Ended::Lost { rank: waiting_for, waited_for }));
                }
            } else if since.elapsed() >= self.timeout {
                let waited_for =
                    format!("{}, {:.1} s", exchange.place(), self.timeout.as_secs_f64());
                return Err(self.publish(Ended::Lost { rank: waiting_for, waited_for }));
            }
        }
    }

    /// All ranks are to name the same one: the first that was found.
    fn publish(&self, ended: Ended) -> PyErr {
        let Ended::Lost { rank, waited_for } = ended else { return ended.into() };
        let first = self.shared.set_lost(rank, &waited_for);
        doorbell::ring_all(&self.shared);
        first.unwrap_or(Ended::Lost { rank, waited_for }).into()
    }
}

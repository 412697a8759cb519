//! etcd for Python threads: each call waits, with the GIL released.

use std::sync::{Arc, Mutex, PoisonError};

use headrace_router::config::{EtcdAccess, EtcdVariables};
use headrace_router::fleet::etcd::{self, EtcdEntry, EtcdError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::errors::{ConfigError, EtcdCompacted, EtcdFailed};

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Etcd {
    client: Mutex<etcd::Etcd>,
    /// One thread for the connections: they answer pings also while no call waits.
    runtime: Arc<Runtime>,
}

type Key<'py> = Bound<'py, PyBytes>;

#[pymethods]
impl Etcd {
    #[new]
    #[pyo3(signature = (endpoints, /))]
    fn new(endpoints: Vec<String>) -> PyResult<Self> {
        let wrong = |error: &dyn ToString| ConfigError::new_err(error.to_string());
        if endpoints.is_empty() {
            return Err(wrong(&"an etcd without a HOST:PORT"));
        }
        let access = EtcdVariables::from_environment();
        let access = EtcdAccess::try_from(access).map_err(|error| wrong(&error))?;
        let mut threads = Builder::new_multi_thread();
        threads.worker_threads(1).thread_name("etcd").enable_all();
        Ok(Self {
            client: Mutex::new(etcd::Etcd::new(endpoints, &access)),
            runtime: Arc::new(threads.build()?),
        })
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        prefix: &[u8],
        limit: i64,
    ) -> PyResult<(Vec<(Key<'py>, Key<'py>)>, i64)> {
        let read = py.detach(|| {
            let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
            self.runtime.block_on(client.read(prefix, limit))
        });
        let (entries, revision) = read.map_err(|error| raised(&error))?;
        let pair = |entry: EtcdEntry| {
            let value = entry.value.unwrap_or_default();
            (PyBytes::new(py, &entry.key), PyBytes::new(py, &value))
        };
        Ok((entries.into_iter().map(pair).collect(), revision))
    }

    fn watch(&self, py: Python<'_>, prefix: &[u8], revision: i64) -> PyResult<EtcdWatch> {
        let watch = py.detach(|| {
            let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
            self.runtime.block_on(client.watch(prefix, revision))
        });
        Ok(EtcdWatch {
            watch: Mutex::new(watch.map_err(|error| raised(&error))?),
            runtime: Arc::clone(&self.runtime),
            closed: CancellationToken::new(),
        })
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct EtcdWatch {
    watch: Mutex<etcd::EtcdWatch>,
    runtime: Arc<Runtime>,
    closed: CancellationToken,
}

#[pymethods]
impl EtcdWatch {
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Key<'py>, Option<Key<'py>>)>> {
        let changes = py.detach(|| {
            let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            self.runtime.block_on(self.closed.run_until_cancelled(watch.next()))
        });
        let changes = changes.ok_or_else(|| EtcdFailed::new_err("the watch is closed"))?;
        let pair = |entry: EtcdEntry| {
            let value = entry.value.map(|value| PyBytes::new(py, &value));
            (PyBytes::new(py, &entry.key), value)
        };
        Ok(changes.map_err(|error| raised(&error))?.into_iter().map(pair).collect())
    }

    fn close(&self) {
        self.closed.cancel();
    }
}

fn raised(error: &EtcdError) -> PyErr {
    match error {
        EtcdError::Compacted => EtcdCompacted::new_err(error.to_string()),
        EtcdError::Unreachable { .. }
        | EtcdError::Tls { .. }
        | EtcdError::Denied { .. }
        | EtcdError::Answer { .. }
        | EtcdError::LeaseLost => EtcdFailed::new_err(error.to_string()),
    }
}

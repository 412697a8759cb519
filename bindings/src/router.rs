//! A router inside a Python process, on threads of its own.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use headrace_router::app::App;
use headrace_router::cli;
use headrace_router::config::{Config, RouterArgs};
use headrace_router::log::{LAST_LINES, flush, init_log};
use headrace_router::process::exit::{PUT_AWAY, put_away};
use headrace_router::process::runtime::Runtime;
use headrace_router::process::signals::OVERDUE;
use headrace_router::process::stopper::Stopper;
use headrace_router::server::Server;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pythonize::pythonize;

use crate::errors::{ConfigError, StartError, depythonize};

/// How often a waiting thread looks for Ctrl-C.
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// The whole program. Signals are the router's business then, so Python's own handler of Ctrl-C goes.
#[pyfunction]
pub(crate) fn router_main(py: Python<'_>, argv: Vec<String>) -> PyResult<u8> {
    default_interrupt(py)?;
    Ok(py.detach(|| cli::main(argv)))
}

/// The table of the router's flags, one dict for each.
#[pyfunction]
pub(crate) fn router_flags(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    Ok(pythonize(py, &cli::router_flags())?)
}

/// What a file of configuration says, one dict for each key.
#[pyfunction]
pub(crate) fn read_config(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let file = py.detach(move || cli::ConfigFile::read(path)).map_err(ConfigError::new_err)?;
    Ok(pythonize(py, &file.settings)?)
}

#[pyfunction]
pub(crate) fn check_router(py: Python<'_>, flags: Vec<String>, usage: &str) -> PyResult<()> {
    py.detach(move || cli::check_router(&flags, usage)).map_err(ConfigError::new_err)
}

#[pyfunction]
pub(crate) fn check_key_line(line: &str) -> PyResult<()> {
    headrace_router::config::check_key_line(line)
        .map_err(|error| ConfigError::new_err(error.to_string()))
}

/// Takes Python's handler of SIGINT away.
pub(crate) fn default_interrupt(py: Python<'_>) -> PyResult<()> {
    let signal = py.import("signal")?;
    signal.call_method1("signal", (signal.getattr("SIGINT")?, signal.getattr("SIG_DFL")?))?;
    Ok(())
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Router(Mutex<State>);

enum State {
    Configured(Box<Config>),
    Starting,
    Running(Arc<Running>),
}

/// Dropping it ends the server at once.
struct Running {
    address: String,
    worker_address: String,
    stopper: Stopper,
    ended: Arc<Ended>,
    /// Until it is put away: the last one to hold it waits for threads, and may not be one that serves.
    app: Mutex<Option<Arc<App>>>,
    runtime: Option<Runtime>,
}

/// Whether the server has ended.
#[derive(Default)]
struct Ended {
    flag: Mutex<bool>,
    changed: Condvar,
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (args, /))]
    fn new(args: &Bound<'_, PyAny>) -> PyResult<Self> {
        let args: RouterArgs = depythonize(args).map_err(ConfigError::new_err)?;
        let config =
            Config::try_from(args).map_err(|error| ConfigError::new_err(error.to_string()))?;
        // the first one in a process decides
        init_log(&config.log).map_err(|error| StartError::new_err(error.to_string()))?;
        Ok(Self(Mutex::new(State::Configured(Box::new(config)))))
    }

    fn start(&self, py: Python<'_>) -> PyResult<()> {
        let config = match self.replace(State::Starting) {
            State::Configured(config) => config,
            earlier @ (State::Starting | State::Running(_)) => {
                self.replace(earlier);
                return Err(PyRuntimeError::new_err("the router was started before"));
            }
        };
        match py.detach(|| Running::start((*config).clone())) {
            Ok(running) => {
                self.replace(State::Running(Arc::new(running)));
                Ok(())
            }
            Err(error) => {
                self.replace(State::Configured(config)); // the port may be free the next time
                Err(StartError::new_err(error))
            }
        }
    }

    #[getter]
    fn address(&self) -> PyResult<String> {
        Ok(self.running()?.address.clone())
    }

    #[getter]
    fn worker_address(&self) -> PyResult<String> {
        Ok(self.running()?.worker_address.clone())
    }

    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        self.running()?.wait(py, timeout_s)
    }

    #[pyo3(signature = (timeout_s=None))]
    fn stop(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let running = self.running()?;
        running.stopper.drain();
        let drained = running.wait(py, timeout_s);
        running.stopper.stop(); // out of time, or interrupted
        running.wait(py, Some(OVERDUE.as_secs_f64()))?;
        py.detach(|| running.put_away(PUT_AWAY));
        drained
    }
}

impl Router {
    fn replace(&self, state: State) -> State {
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *guard, state)
    }

    fn running(&self) -> PyResult<Arc<Running>> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Running(running) => Ok(Arc::clone(running)),
            State::Configured(_) | State::Starting => {
                Err(PyRuntimeError::new_err("the router was not started"))
            }
        }
    }
}

impl Running {
    fn start(config: Config) -> Result<Self, String> {
        let runtime = Runtime::start(config.per_core).map_err(|error| error.to_string())?;
        let server = runtime.block_on(Server::start(config)).map_err(|error| error.to_string())?;
        let ended = Arc::new(Ended::default());
        let running = Self {
            address: server.http_address().to_string(),
            worker_address: server.worker_address().to_string(),
            stopper: server.stopper(),
            ended: Arc::clone(&ended),
            app: Mutex::new(Some(Arc::clone(server.app()))),
            runtime: Some(runtime),
        };
        if let Some(runtime) = &running.runtime {
            runtime.spawn(async move {
                let _set_on_panic_too = SetOnDrop(ended);
                server.serve().await;
            });
        }
        Ok(running)
    }

    /// Puts away what the server held, for at most `timeout`, and writes the last lines of the log.
    fn put_away(&self, timeout: Duration) {
        if let Some(app) = self.app.lock().unwrap_or_else(PoisonError::into_inner).take() {
            put_away(app, timeout); // what is busy says so by being there
            flush(timeout.min(LAST_LINES));
        }
    }

    /// True once the server has ended, false after `timeout_s`. Ctrl-C gets through.
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let timeout = timeout_s.map(Duration::try_from_secs_f64).transpose();
        let timeout = timeout.map_err(|error| ConfigError::new_err(error.to_string()))?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if py.detach(|| self.ended.within(left.unwrap_or(SIGNAL_CHECK).min(SIGNAL_CHECK))) {
                return Ok(true);
            }
            py.check_signals()?;
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopper.stop();
        self.put_away(Duration::ZERO);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background(); // a plain drop would wait, and the caller may hold the GIL
        }
    }
}

impl Ended {
    fn within(&self, timeout: Duration) -> bool {
        let guard = self.flag.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(guard, timeout, |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

struct SetOnDrop(Arc<Ended>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        *self.0.flag.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changed.notify_all();
    }
}

//! The log of the process.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::LogConfig;

/// Sends the log to stderr. Without effect where the process has a log already.
pub fn init_log(log: &LogConfig) {
    let filter = EnvFilter::try_new(&log.filter).expect("checked by config");
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let lines = lines.with_ansi(std::io::stderr().is_terminal());
    let _ = if log.json { lines.json().try_init() } else { lines.try_init() };
}

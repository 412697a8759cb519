//! The engine against the one it stands in for, and against templates that mean harm.

mod attacks;
mod differences;
mod grammar;
mod oracle;
mod random;
mod same;

use std::thread;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};

use super::{Bound, Budget, ErrorKind, Limits, Program, Value};

/// Bounds small enough for a test that reaches them.
fn small() -> Limits {
    Limits {
        work: 20_000_000,
        memory: 8 << 20,
        output: 1 << 20,
        time: Duration::from_secs(60),
        ..Limits::of(0)
    }
}

/// Half the stack that rendering has in the pool, for builds without optimisation.
const STACK_BYTES: usize = 8 << 20;

/// Renders within `limits`; a failure with its kind, and in words.
fn within(
    limits: Limits,
    source: &str,
    given: &Map<String, Json>,
) -> Result<String, (ErrorKind, String)> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        let rendered = thread.spawn_scoped(scope, || here(limits, source, given)).unwrap();
        rendered.join().unwrap()
    })
}

fn here(
    limits: Limits,
    source: &str,
    given: &Map<String, Json>,
) -> Result<String, (ErrorKind, String)> {
    let program = Program::new(source).map_err(|why| (ErrorKind::Invalid, why))?;
    let budget = Budget::new(limits);
    let mut values = Vec::new();
    for (name, value) in given {
        let value = Value::from_json(value, &budget).map_err(|e| (e.kind(), e.to_string()))?;
        values.push((name.as_str(), value));
    }
    program.render(values, budget).map_err(|(error, budget)| match error.kind() {
        ErrorKind::Spent(bound) => (error.kind(), budget.describe(bound)),
        kind => (kind, error.to_string()),
    })
}

fn render(source: &str, given: &Map<String, Json>) -> Result<String, String> {
    within(Limits::of(0), source, given).map_err(|(_, why)| why)
}

fn object(value: Json) -> Map<String, Json> {
    value.as_object().cloned().unwrap_or_default()
}

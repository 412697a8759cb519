//! What a test sees of a router, and how it waits for that.

use std::time::Duration;

use headrace_router::app::App;
use serde_json::Value;
use tokio::time::{sleep, timeout};

/// Whatever a test waits for comes in this time, or it fails.
pub(crate) const IN_TIME: Duration = Duration::from_secs(60);

/// The `state` that `/workers` gives for a worker; empty if it is not there.
pub(crate) fn state_of(app: &App, worker: &str) -> String {
    of_worker(app, worker)["state"].as_str().unwrap_or_default().into()
}

/// What `/workers` says of a worker; null if it is not there.
pub(crate) fn of_worker(app: &App, worker: &str) -> Value {
    let workers = app.fleet.workers();
    let found = workers["workers"].as_array().unwrap().iter().find(|other| other["id"] == worker);
    found.cloned().unwrap_or_default()
}

/// The sum of all samples of a metric that have these labels.
pub(crate) fn metric(app: &App, name: &str, labels: &str) -> f64 {
    let text = app.render_metrics();
    let samples = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
    let values = samples.filter(|line| line.contains(labels));
    values.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// So much time goes by for the router, which first takes in all that has come. Nobody waits for it.
pub(crate) async fn passes(time: Duration) {
    tokio::time::pause();
    sleep(time).await;
    tokio::time::resume();
}

/// Waits for something that has no event of its own.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let looks = async {
        while !is_so() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    in_time(what, looks).await;
}

pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(IN_TIME, future).await.unwrap_or_else(|_| panic!("{what} did not come in time"))
}

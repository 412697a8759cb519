//! What the service manager is told while the server runs: that it serves, how it is, that it lives, that it ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::app::App;
use crate::config::{NotifyAddress, ServiceConfig};
use crate::process::notify::{Address, Notifier};

/// Between two lines for people. A guess: `systemctl status` is read by hand.
const STATUS: Duration = Duration::from_secs(5);

pub(super) fn notifier(service: &ServiceConfig) -> std::io::Result<Notifier> {
    Notifier::new(service.notify.as_ref().map(|address| match address {
        NotifyAddress::Path(path) => Address::Path(path.clone()),
        NotifyAddress::Abstract(name) => Address::Abstract(name.clone()),
    }))
}

/// Says for ever how it is, and that it lives: a task of the runtime that serves, so that a runtime which stands still says
/// nothing. Half of the manager's time is what it advises.
pub(super) async fn keep_told(app: Arc<App>, notifier: Arc<Notifier>) {
    if !notifier.is_heard() {
        return;
    }
    let signs = async {
        let Some(within) = app.config.service.watchdog else { return };
        let mut ticks = interval((within / 2).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            notifier.watchdog();
        }
    };
    let status = async {
        let mut ticks = interval(STATUS);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = String::new();
        loop {
            ticks.tick().await;
            let workers =
                if app.fleet.ready() { "workers are ready" } else { "no worker is ready" };
            let line =
                format!("{workers}, {} answers in flight", app.metrics.requests.streams.get());
            if line != last {
                notifier.status(&line);
                last = line;
            }
        }
    };
    tokio::join!(signs, status);
}

//! Files of keys and certificates are read again while the server runs: when somebody asks for it, and when a look from time
//! to time finds that they have changed. The file of configuration is read when somebody asks for it alone, as it may be
//! written in steps, and before the others. What cannot be used leaves everything as it was, and is said in the log and in
//! `/metrics`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};

use crate::app::App;
use crate::config::{Config, Reloaded};
use crate::connection::tls_port::TlsPort;
use crate::limits::key_ring::KeyRing;
use crate::metrics::{ByReload, Metrics};
use crate::net::tls::ServerTls;
use crate::process::notify::Notifier;

/// Between two looks. A guess: a key that was taken away should not work for long, and reading some small files takes less
/// than a ms.
const LOOK: Duration = Duration::from_secs(5);

/// The file of configuration in log and metrics.
const CONFIG: &str = "config";

/// Has the files read now. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ReloadRequest(Arc<Notify>);

impl ReloadRequest {
    /// Also says in the log what came of it where nothing has changed.
    pub fn ask(&self) {
        self.0.notify_one();
    }
}

/// Files, and what is made of them.
pub(super) struct Watched {
    /// In log and metrics.
    name: &'static str,
    source: Source,
    refused: bool,
}

/// The configuration as flags, variables and the file say it now; an error is for the log.
#[derive(Clone)]
pub struct ReadConfig(pub Arc<dyn Fn() -> Result<Config, String> + Send + Sync>);

impl fmt::Debug for ReadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadConfig(..)")
    }
}

#[derive(Clone)]
enum Source {
    Config(ReadConfig, Arc<App>),
    Tls(Arc<ServerTls>),
    Keys(Arc<KeyRing>),
}

impl Source {
    fn reload(&self, insist: bool) -> Reloaded {
        match self {
            Self::Config(..) if !insist => Reloaded::Same,
            Self::Config(read, app) => match (read.0)().and_then(|config| app.change(&config)) {
                Ok(()) => Reloaded::New,
                Err(problem) => Reloaded::Refused(problem),
            },
            Self::Tls(tls) => tls.reload(insist),
            Self::Keys(keys) if !keys.may_change() => Reloaded::Same,
            Self::Keys(keys) => keys.reload(insist),
        }
    }
}

impl Watched {
    /// All of a server.
    pub(super) fn of(
        app: &Arc<App>,
        config: Option<&ReadConfig>,
        clients: Option<&TlsPort>,
        operators: Option<&Arc<ServerTls>>,
    ) -> Vec<Self> {
        let of_clients = clients.map(|port| ("client_tls", Source::Tls(Arc::clone(&port.tls))));
        let of_operators = operators.map(|tls| ("admin_tls", Source::Tls(Arc::clone(tls))));
        let of_workers = app.fleet.tls().map(|tls| ("worker_tls", Source::Tls(Arc::clone(tls))));
        let may_change = app.keys.may_change() || config.is_some();
        let keys = may_change.then(|| ("keys", Source::Keys(Arc::clone(&app.keys))));
        let of_config = config.map(|read| (CONFIG, Source::Config(read.clone(), Arc::clone(app))));
        let all = of_config
            .into_iter()
            .chain(of_clients)
            .chain(of_operators)
            .chain(of_workers)
            .chain(keys);
        all.map(|(name, source)| Self { name, source, refused: false }).collect()
    }

    async fn look(&mut self, insist: bool, metrics: &Metrics) {
        let (name, source) = (self.name, self.source.clone());
        // a file system may let one wait
        let found = tokio::task::spawn_blocking(move || source.reload(insist)).await;
        let found = found.unwrap_or_else(|error| Reloaded::Refused(error.to_string()));
        let count = |outcome| metrics.edges.reloads.inc(ByReload { files: name, outcome });
        match found {
            Reloaded::Same => {}
            Reloaded::New => {
                count("loaded");
                self.refused = false;
                tracing::info!(files = name, "read again, and in use");
            }
            Reloaded::Refused(problem) => {
                count("refused");
                self.refused = true;
                tracing::error!(
                    files = name,
                    problem,
                    "refused: what was read before stays in use"
                );
            }
        }
    }
}

/// Looks at the files for ever.
pub(super) async fn keep_fresh(
    mut watched: Vec<Watched>,
    metrics: Arc<Metrics>,
    request: ReloadRequest,
    notifier: Arc<Notifier>,
) {
    if watched.is_empty() {
        return;
    }
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let insist = tokio::select! {
            _ = looks.tick() => false,
            () = request.0.notified() => true,
        };
        if insist {
            notifier.reloading();
        }
        for files in &mut watched {
            files.look(insist, &metrics).await;
            if insist && files.name == CONFIG && files.refused {
                break; // all or nothing: the others are what it names
            }
        }
        if insist {
            notifier.ready(); // again, whatever came of it: `systemctl reload` waits for it
        }
        let refused = watched.iter().filter(|files| files.refused).count();
        metrics.edges.reloads_refused.set(i64::try_from(refused).unwrap_or(i64::MAX));
    }
}

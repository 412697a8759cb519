//! Makes this router known in etcd, so that workers which watch the prefix dial it; withdraws that when it leaves.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::etcd::{Etcd, EtcdError, LeaseId};
use crate::config::Registration;
use crate::metrics::Metrics;

/// After the first failure; doubles from there.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// For the last word to etcd: without it the lease ends by itself.
const WITHDRAW: Duration = Duration::from_secs(1);

/// What is told of this router.
#[derive(Debug)]
pub(super) struct RouterRecord {
    pub(super) router: String,
    /// What workers dial.
    pub(super) address: String,
}

/// Keeps the entry until `leave`, then takes it back.
pub(super) async fn stay_registered(
    registration: Registration,
    entry: RouterRecord,
    metrics: Arc<Metrics>,
    leave: CancellationToken,
) {
    let mut registrar = Registrar {
        etcd: Etcd::new(registration.endpoints, &registration.access),
        key: format!("{}/{}", registration.prefix, entry.router),
        value: serde_json::json!({"address": entry.address, "router": entry.router}).to_string(),
        address: entry.address,
        ttl: registration.ttl,
        lease: None,
        pause: FIRST_PAUSE,
        metrics,
    };
    leave.run_until_cancelled(registrar.run()).await;
    registrar.withdraw().await;
}

struct Registrar {
    etcd: Etcd,
    key: String,
    value: String,
    address: String,
    ttl: Duration,
    lease: Option<LeaseId>,
    pause: Duration,
    metrics: Arc<Metrics>,
}

impl Registrar {
    /// Never ends by itself.
    async fn run(&mut self) {
        loop {
            match self.register().await {
                Ok(lease) => self.keep(lease).await,
                Err(error) => self.failed(&error, "this router is not registered").await,
            }
        }
    }

    async fn register(&mut self) -> Result<LeaseId, EtcdError> {
        let lease = self.etcd.grant(self.ttl).await?;
        self.lease = Some(lease); // to be revoked even if the rest fails
        self.etcd.put(&self.key, &self.value, lease).await?;
        tracing::info!(key = self.key, address = self.address, "registered in etcd");
        self.metrics.links.registered.set(1);
        self.pause = FIRST_PAUSE;
        Ok(lease)
    }

    /// Returns when the lease is over. While etcd cannot be asked, the lease may be alive or not: it is asked again.
    async fn keep(&mut self, lease: LeaseId) {
        sleep(self.ttl / 3).await;
        loop {
            match self.etcd.keep_alive(lease).await {
                Ok(true) => {
                    self.metrics.links.registered.set(1);
                    self.pause = FIRST_PAUSE;
                    sleep(self.ttl / 3).await;
                }
                Ok(false) => {
                    tracing::warn!(key = self.key, "discovery lease_lost: registering again");
                    self.metrics.links.discovery_errors.inc("lease_lost");
                    self.metrics.links.registered.set(0);
                    return;
                }
                Err(error) => {
                    self.metrics.links.registered.set(0);
                    self.failed(&error, "the lease is not kept alive; links go on").await;
                }
            }
        }
    }

    async fn failed(&mut self, error: &EtcdError, consequence: &str) {
        tracing::warn!(%error, "discovery {}: {consequence}", error.reason());
        self.metrics.links.discovery_errors.inc(error.reason());
        sleep(self.pause).await;
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }

    async fn withdraw(&mut self) {
        self.metrics.links.registered.set(0);
        let Some(lease) = self.lease.take() else { return };
        match timeout(WITHDRAW, self.etcd.revoke(lease)).await {
            Ok(Ok(())) => tracing::info!(key = self.key, "withdrawn from etcd"),
            Ok(Err(error)) => tracing::warn!(%error, "not withdrawn from etcd: the lease will end"),
            Err(_) => tracing::warn!("not withdrawn from etcd in time: the lease will end"),
        }
    }
}

//! Names of models: how many there may be, and when one without a worker is forgotten.

use std::time::Duration;

use tokio::time::Instant;

use super::{Registry, RegistryState};
use crate::core::frame::{Hello, Refuse, RefuseReason};
use crate::fleet::handshake::Misfit;
use crate::fleet::pool::WorkerPool;
use crate::metrics::Models;
use crate::net::lobby::Origin;

/// Names of models that are known, with or without workers.
const MODELS: usize = 256;
/// Those that the workers of one peer may bring where no secret has been proved.
const MODELS_OF_A_PEER: usize = 64;
/// A name is kept so long after its last worker has left: to its clients it is a model whose workers are away, rather than
/// none at all.
const KEPT: Duration = Duration::from_secs(600);

impl Registry {
    /// True if there is a name left for the model of this worker.
    ///
    /// # Errors
    /// There are as many as there may be.
    pub(super) fn may_name(
        &self,
        state: &RegistryState,
        hello: &Hello,
        peer: Origin,
    ) -> Result<(), Box<Refuse>> {
        if state.pools.contains_key(&hello.model) {
            return Ok(());
        }
        let (least, now) = (self.setup.config.deadlines.queue, Instant::now());
        let refuse = |expected: String, message| {
            let got = hello.model.clone();
            let misfit = Misfit { field: "model".into(), expected, got, message };
            Err(misfit.refuse(RefuseReason::TooManyModels, &self.setup.name))
        };
        if state.pools.len() >= MODELS && state.forgettable(now, least).is_none() {
            return refuse(
                format!("one of {MODELS} models"),
                "this router knows as many models as it can, and all have workers or had some until now",
            );
        }
        let theirs = |pool: &&WorkerPool| pool.workers().any(|worker| worker.peer == peer);
        if self.setup.auth.is_none()
            && state.pools.values().filter(theirs).count() >= MODELS_OF_A_PEER
        {
            return refuse(
                format!("one of {MODELS_OF_A_PEER} models of this host"),
                "workers of one host may bring no more models unless they prove a secret: give --secret-file",
            );
        }
        Ok(())
    }
}

impl RegistryState {
    /// Makes room for the name of a model that is new, if there is none left.
    pub(super) fn forget_one_for(
        &mut self,
        model: &str,
        now: Instant,
        least: Duration,
        counted: &Models,
    ) {
        if self.pools.len() < MODELS || self.pools.contains_key(model) {
            return;
        }
        if let Some(name) = self.forgettable(now, least) {
            self.pools.remove(&name);
            counted.forget(&name);
        }
    }

    /// The name that has been without a worker for longest, one that nobody has ever asked for before others. Where somebody
    /// has, an answer may still want to go on for as long as it may wait, `least`.
    fn forgettable(&self, now: Instant, least: Duration) -> Option<String> {
        let idle = |(name, pool): (&String, &WorkerPool)| {
            let idle = pool.idle(now)?;
            let never = pool.never_wanted();
            (never || idle > least).then(|| (never, idle, name.clone()))
        };
        self.pools.iter().filter_map(idle).max().map(|(_, _, name)| name)
    }

    /// Forgets models that nobody has served for long.
    pub(super) fn forget_idle(&mut self, now: Instant, counted: &Models) {
        self.pools.retain(|name, pool| {
            let stays = pool.idle(now).is_none_or(|idle| idle < KEPT);
            if !stays {
                counted.forget(name);
            }
            stays
        });
    }
}

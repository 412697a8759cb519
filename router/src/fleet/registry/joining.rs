//! Who may join now: not who comes and goes too often, nor who is here by another address; and what their links leave behind.

use super::groups::starts_anew;
use super::{Registry, RegistryState};
use crate::core::candidate::WorkerId;
use crate::core::circuit::HeldOff;
use crate::core::frame::{Hello, Refuse, RefuseReason};
use crate::fleet::handshake::Misfit;
use crate::fleet::pool::{PooledWorker, compare};
use crate::net::lobby::Origin;

/// Heartbeats after which a silent worker may be replaced: with the third that it misses it is asked, and the fourth is its
/// time to answer.
const GIVEN_UP: u32 = 4;

impl Registry {
    /// True if a worker with this Hello may join as things stand.
    ///
    /// # Errors
    /// What differs, or when to come back.
    pub(in crate::fleet) fn may_join(
        &self,
        hello: &Hello,
        peer: Origin,
    ) -> Result<(), Box<Refuse>> {
        self.may_come(&self.state(), hello, peer)
    }

    pub(super) fn may_come(
        &self,
        state: &RegistryState,
        hello: &Hello,
        peer: Origin,
    ) -> Result<(), Box<Refuse>> {
        if let Err(HeldOff { wait_ms, breaks }) =
            state.circuits.check(&hello.worker, self.clock_ms())
        {
            let message =
                format!("{breaks} of its links broke lately: dial again in {:.1} s", wait_ms / 1e3);
            return Err(self.not_now(RefuseReason::Circuit, Some(wait_ms), message));
        }
        match self.living(state, &hello.worker) {
            Some(other) if other.hello.epoch == hello.epoch => {
                let address = &other.address;
                let message = format!(
                    "this worker has a link to this router by another address, {address}: one is enough"
                );
                Err(self.not_now(RefuseReason::AlreadyJoined, None, message))
            }
            Some(other) if other.hello.epoch < hello.epoch && !starts_anew(&other.hello, hello) => {
                other.link.ping(); // what is dead and does not know it yet breaks by this
                let heartbeat = self.setup.config.fleet.heartbeat;
                let message = "a worker of this name is here and lives: give each worker its own name; one that was \
                    started anew gets it when the link of its former life has ended";
                let wait_ms = heartbeat.as_secs_f64() * 1e3;
                Err(self.not_now(RefuseReason::NameTaken, Some(wait_ms), message.into()))
            }
            Some(_) | None => {
                state.may_join(hello, &self.setup.name)?;
                state.may_group(hello, &self.setup.name)?;
                self.may_name(state, hello, peer)
            }
        }
    }

    /// Nothing about the worker is wrong. It is told when it may dial again, a ms late rather than early.
    fn not_now(&self, reason: RefuseReason, wait_ms: Option<f64>, message: String) -> Box<Refuse> {
        Box::new(Refuse {
            reason,
            router: self.setup.name.clone(),
            retry_after_ms: wait_ms.map(|ms| ms.ceil() as u32), // saturates
            field: String::new(),
            expected: String::new(),
            got: String::new(),
            message,
        })
    }

    /// The worker that has this name, if it lives as far as anybody knows: its requests are not given to whoever dials by
    /// its name. One that died is not here any more, as its socket was closed with it; one that cannot be reached is given up
    /// after some heartbeats.
    fn living<'a>(&self, state: &'a RegistryState, name: &str) -> Option<&'a PooledWorker> {
        let silent_ms = |other: &PooledWorker| self.now_ms().saturating_sub(other.link.heard_ms());
        let most_ms = (GIVEN_UP * self.setup.config.fleet.heartbeat).as_millis();
        state.named(name).filter(|other| u128::from(silent_ms(other)) <= most_ms)
    }

    /// The link of a worker ended; `orderly` where that was nobody's fault.
    pub(in crate::fleet) fn link_ended(&self, worker: &str, id: WorkerId, orderly: bool) {
        let opened = self.state().circuits.left(worker, id.0, orderly, self.clock_ms());
        if let Some(pause_ms) = opened {
            let pause_s = pause_ms / 1e3;
            tracing::warn!(worker, pause_s, "circuit open: it comes and goes, and is held off");
            self.metrics.links.circuits_opened.inc();
        }
    }
}

impl RegistryState {
    fn may_join(&self, hello: &Hello, router: &str) -> Result<(), Box<Refuse>> {
        let refuse = |reason, field: &str, expected: String, got: String, message| {
            let misfit = Misfit { field: field.into(), expected, got, message };
            Err(misfit.refuse(reason, router))
        };
        if let Some(old) = self.named(&hello.worker)
            && old.hello.epoch > hello.epoch
        {
            return refuse(
                RefuseReason::Superseded,
                "epoch",
                format!("{} or later", old.hello.epoch),
                hello.epoch.to_string(),
                "another worker with this name started later; give each worker its own name",
            );
        }
        let Some(pool) = self.pools.get(&hello.model) else {
            return Ok(());
        };
        let mut others = pool.workers().filter(|worker| worker.hello.worker != hello.worker);
        let Some(other) = others.next() else {
            return Ok(()); // it brings its own
        };
        let (expected, got) = (other.hello.pooled_width, hello.pooled_width);
        if expected != got {
            return refuse(
                RefuseReason::Mismatch,
                "pooled_width",
                expected.to_string(),
                got.to_string(),
                "workers of one model name must agree; give another model another name",
            );
        }
        for (field, expected, got) in compare(&pool.fingerprints, &hello.fingerprints) {
            if expected != got {
                return refuse(
                    RefuseReason::Mismatch,
                    &format!("fingerprints.{field}"),
                    expected,
                    got,
                    "workers of one model name must agree; give another model another name",
                );
            }
        }
        Ok(())
    }

    pub(in crate::fleet) fn named(&self, name: &str) -> Option<&PooledWorker> {
        let id = *self.names.get(name)?;
        self.pools.get(self.models.get(&id)?)?.dispatch.scheduler.member(id)
    }
}

//! Who may join now: not who comes and goes too often, nor who is here by another address; and what their links leave behind.

use super::{Registry, State};
use crate::core::candidate::WorkerId;
use crate::core::circuit::HeldOff;
use crate::core::frame::{Hello, Refuse};

impl Registry {
    /// True if a worker with this Hello may join as things stand.
    ///
    /// # Errors
    /// What differs, or when to come back.
    pub(in crate::fleet) fn may_join(&self, hello: &Hello) -> Result<(), Refuse> {
        self.may_come(&self.state(), hello)
    }

    pub(super) fn may_come(&self, state: &State, hello: &Hello) -> Result<(), Refuse> {
        if let Err(HeldOff { wait_ms, breaks }) =
            state.circuits.check(&hello.worker, self.clock_ms())
        {
            return Err(Refuse {
                field: "circuit".into(),
                expected: format!("{:.3}", wait_ms / 1e3),
                got: "0.000".into(),
                message: format!(
                    "{breaks} of its links broke lately: dial again in {:.1} s",
                    wait_ms / 1e3
                ),
            });
        }
        if let Some(other) = self.other_link(state, hello) {
            return Err(Refuse {
                field: "link".into(),
                expected: self.setup.name.clone(),
                got: other,
                message: "this worker has a link to this router by another address: one is enough"
                    .into(),
            });
        }
        state.may_join(hello)
    }

    /// The address of a link of the very same start of this worker, if it was heard of lately. Later than that the worker
    /// may have lost it, and be right to dial again.
    fn other_link(&self, state: &State, hello: &Hello) -> Option<String> {
        let other = state.named(&hello.worker).filter(|other| other.hello.epoch == hello.epoch)?;
        let silent_ms = self.now_ms().saturating_sub(other.link.heard_ms());
        let lives = u128::from(silent_ms) <= self.setup.config.fleet.heartbeat.as_millis();
        lives.then(|| other.address.clone())
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

//! What no frame looks after: silence, leases that end, snapshots that do not come.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Registry;
use crate::config::FleetConfig;
use crate::fleet::link::LinkError;
use crate::fleet::sweep_interval;

impl Registry {
    /// Looks after everything that no frame looks after: called again and again. `late`: the router itself was held up, so
    /// that its links may hold frames that nobody has read yet, and nobody's silence means anything.
    pub(in crate::fleet) fn sweep(self: &Arc<Self>, now: Instant, late: bool) {
        let FleetConfig { heartbeat_timeout, describe_timeout, .. } = self.setup.config.fleet;
        let now_ms = self.now_ms();
        let limit = self.silence_limit();
        let (mut links, mut without_snapshot) = (vec![], vec![]);
        let (mut fell_silent, mut lost) = (vec![], vec![]);
        {
            let mut state = self.state();
            let models: Vec<String> = state.pools.keys().cloned().collect();
            for pool in state.pools.values_mut() {
                if !late {
                    let (silent, groups) = pool.check_silence(now_ms, limit);
                    fell_silent.extend(silent);
                    lost.extend(groups);
                }
                let expired = pool.dispatch.scheduler.expire_leases(self.clock_ms());
                self.metrics.scheduling.leases_expired.inc_by(expired as u64);
                links.extend(pool.links());
                without_snapshot.extend(pool.without_snapshot(now, describe_timeout));
            }
            for model in models {
                self.dispatch_waiting(&mut state, &model);
            }
            state.forget_idle(now, &self.metrics.models);
        }
        for link in without_snapshot {
            link.close(LinkError::NoSnapshot(describe_timeout));
        }
        for link in fell_silent {
            self.metrics.links.suspects.inc();
            link.give_up_legs(LinkError::Silent(limit));
        }
        lost.into_iter().for_each(|lost| self.group_lost(lost));
        for link in links {
            let silent = Duration::from_millis(now_ms.saturating_sub(link.heard_ms()));
            if silent > heartbeat_timeout && !late {
                link.close(LinkError::Silent(silent));
            } else if silent > limit {
                link.ping();
            }
            link.sweep(now, self.setup.config.deadlines.stall, describe_timeout);
        }
    }

    /// Three heartbeats, less the time between two sweeps: noticed before the third one is over.
    fn silence_limit(&self) -> Duration {
        let heartbeat = self.setup.config.fleet.heartbeat;
        3 * heartbeat - sweep_interval(heartbeat)
    }
}

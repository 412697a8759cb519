//! What a worker says of its blocks. A long event is applied in pieces, many short ones in a row count as a long one, and a
//! link brings only so many blocks a second: its next frames wait in the socket, and are not missed meanwhile.

use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::Link;
use crate::core::events::{BlockEvents, Gap, Verdict};
use crate::core::frame::{Blocks, Frame};
use crate::core::scheduler::{Applying, Withdrawal};
use crate::fleet::pool::BLOCKS_AT_ONCE;
use crate::fleet::registry::Registry;

/// What a frame costs whatever is in it, in blocks; a guess, some 1.5 us.
const FRAME: usize = 32;

/// What frames may cost in a second, in blocks: a tenth of a core or so. A worker that computes a million tokens a second
/// fills 2^16.
const COST_A_SECOND: f64 = (1 << 21) as f64;
/// What they may cost besides after a rest: a snapshot of a million blocks goes without a wait.
const COST_AT_ONCE: f64 = (1 << 20) as f64;

/// How fast the frames of a link are taken in.
#[derive(Debug)]
pub(super) struct Pace {
    /// What they cost since the link last let others go first, in blocks.
    since: usize,
    /// What they may cost, as of `at_ms`. Negative while a frame cost more.
    allowed: f64,
    at_ms: f64,
}

impl Pace {
    pub(super) fn new(now_ms: f64) -> Self {
        Self { since: 0, allowed: COST_AT_ONCE, at_ms: now_ms }
    }

    /// After a frame of this cost: a link whose frames come without end gets no more of its thread than others do, and no
    /// more of the machine than its allowance.
    pub(super) async fn keep(&mut self, cost: usize, registry: &Registry) {
        self.since += cost;
        if self.since >= BLOCKS_AT_ONCE.get() {
            self.since = 0;
            registry.let_others_pass().await;
        }
        let wait = self.spend(cost, registry.clock_ms());
        if !wait.is_zero() {
            sleep(wait).await;
        }
    }

    /// [`Self::keep`] may sleep after a frame of this cost.
    pub(super) fn would_sleep(&self, cost: usize) -> bool {
        self.allowed < cost as f64
    }

    /// Takes `cost` from what is allowed; how long to wait until that was allowed.
    fn spend(&mut self, cost: usize, now_ms: f64) -> Duration {
        let earned = (now_ms - self.at_ms).max(0.0) / 1e3 * COST_A_SECOND;
        self.at_ms = now_ms;
        self.allowed = (self.allowed + earned).min(COST_AT_ONCE) - cost as f64;
        Duration::from_secs_f64((-self.allowed / COST_A_SECOND).max(0.0))
    }
}

/// What a frame costs, in blocks. One that drops all blocks sweeps some of those that were dropped before.
pub(super) fn cost(frame: &Frame) -> usize {
    let keys = |bytes: &[u8]| bytes.len() / size_of::<u64>();
    let its_own = if let Frame::Blocks(delta) = frame {
        let all = if delta.cleared { BLOCKS_AT_ONCE.get() } else { 0 };
        let runs = delta.stored.iter().map(|run| 1 + keys(&run.hashes));
        all + keys(&delta.removed) + runs.sum::<usize>()
    } else if let Frame::Snapshot(part) = frame {
        BLOCKS_AT_ONCE.get() + keys(&part.hashes)
    } else if let Frame::Step(step) = frame {
        step.outputs.len()
    } else {
        0
    };
    FRAME + its_own
}

/// Frees an event. One of very many runs takes as long as it took to read.
pub(super) fn give_back(delta: Blocks) {
    if delta.stored.len() > BLOCKS_AT_ONCE.get() {
        spawn_blocking(move || drop(delta));
    }
}

impl Link {
    /// Applies a block event, or drops all that is known of the worker's blocks and asks for them anew.
    pub(super) async fn block_event(&self, verdict: &Verdict<'_>, events: &mut BlockEvents) {
        let metrics = &self.registry.metrics;
        match verdict {
            Verdict::Apply(_) => {}
            Verdict::Ignore(ignored) => {
                metrics.scheduling.block_events_ignored.inc(ignored.as_str());
            }
            Verdict::Lost(gap) => {
                tracing::warn!(worker = self.worker, %gap, "its cached blocks are not known now");
                metrics.scheduling.blocks_lost.inc(gap.as_str());
            }
        }
        let mut applying = Applying::new(verdict);
        let mut applied = self.registry.blocks(self.id, &mut applying, events);
        while applied.is_none() {
            let _turn = self.registry.next_turn().await;
            applied = self.registry.blocks(self.id, &mut applying, events);
        }
        self.disbelieve(applied.and_then(|applied| applied.withdrawn), events);
    }

    pub(super) fn disbelieve(&self, withdrawn: Option<Withdrawal>, events: &mut BlockEvents) {
        let Some(why) = withdrawn else { return };
        let reason = why.as_str();
        tracing::warn!(worker = self.worker, reason, "no credit for its cache");
        self.registry.metrics.scheduling.blocks_lost.inc(reason);
        let gap = match why {
            Withdrawal::OverShare => return, // the same snapshot would not fit the next time either
            Withdrawal::OverCapacity => Gap::Capacity,
            Withdrawal::Silent => Gap::Silent,
            Withdrawal::Unknown | Withdrawal::Lost | Withdrawal::Overclaimed => Gap::Audit,
        };
        events.lose(gap, self.registry.clock_ms());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::frame::MAX_FRAME_BYTES;

    #[test]
    fn a_link_brings_no_more_than_its_allowance_and_keeps_what_a_rest_earns() {
        let (rate, burst) = (COST_A_SECOND as usize, COST_AT_ONCE as usize);
        let mut pace = Pace::new(0.0);
        assert_eq!(pace.spend(burst, 0.0), Duration::ZERO, "a snapshot");
        assert_eq!(pace.spend(rate, 0.0), Duration::from_secs(1));
        assert_eq!(pace.spend(rate / 2, 1_000.0), Duration::from_millis(500));
        assert_eq!(pace.spend(0, 1_500.0), Duration::ZERO, "it has waited");
        assert_eq!(pace.spend(burst, 3_600_000.0), Duration::ZERO, "an hour earns one snapshot");
        assert_eq!(pace.spend(rate, 3_600_000.0), Duration::from_secs(1), "and no more");
    }

    #[test]
    fn no_frame_has_to_wait_longer_than_a_few_seconds() {
        let most = MAX_FRAME_BYTES / size_of::<u64>() + FRAME;
        let mut pace = Pace::new(0.0);
        pace.spend(COST_AT_ONCE as usize, 0.0);
        assert!(pace.spend(most, 0.0) < Duration::from_secs(5));
    }

    #[test]
    fn the_frames_of_a_worker_at_work_never_wait() {
        let mut pace = Pace::new(0.0);
        for step in 0..10_000 {
            // every 5 ms the tokens of 1,024 rows and the blocks that they fill
            let cost = 2 * FRAME + 1_024 + 1_024 / 16;
            assert_eq!(pace.spend(cost, 5.0 * f64::from(step)), Duration::ZERO);
        }
    }
}

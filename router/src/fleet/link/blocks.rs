//! What a worker says of its blocks. A long event is applied in pieces, and many short ones in a row count as a long one.

use std::sync::atomic::Ordering::Relaxed;

use tokio::task::spawn_blocking;

use super::Link;
use crate::core::events::{BlockEvents, Gap, Verdict};
use crate::core::frame::{Blocks, Frame};
use crate::core::scheduler::{Applying, Withdrawal};
use crate::fleet::pool::BLOCKS_AT_ONCE;
use crate::fleet::registry::Registry;

/// What a frame costs whatever is in it, in blocks; a guess, some 1.5 us.
const FRAME: usize = 32;

/// What the frames of a link cost since it last let others go first, in blocks.
#[derive(Debug, Default)]
pub(super) struct Pace(usize);

impl Pace {
    /// After a frame of this cost: a link whose frames come without end gets no more of its thread than others do.
    pub(super) async fn keep(&mut self, cost: usize, registry: &Registry) {
        self.0 += cost;
        if self.0 >= BLOCKS_AT_ONCE.get() {
            self.0 = 0;
            registry.let_others_pass().await;
        }
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
            // its next frames wait in the socket meanwhile, so their absence is no silence
            self.heard_ms.store(self.registry.now_ms(), Relaxed);
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

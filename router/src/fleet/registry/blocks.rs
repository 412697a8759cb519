//! Block events on their way into the index. A frame may bring millions of blocks, and everybody waits for the lock: they
//! are applied in pieces, and others go first between two of them.

use std::sync::Arc;

use tokio::sync::SemaphorePermit;
use tokio::task::yield_now;

use super::Registry;
use crate::core::candidate::WorkerId;
use crate::core::events::BlockEvents;
use crate::core::scheduler::{Applied, Applying};

/// Looks at whether others still wait for the lock, with a round of this thread's other tasks between two of them: some
/// 100 us where there are none, enough for a thread to wake up. A bound, so that those who come one after the other cannot
/// keep a worker's events out for ever.
const LOOKS: u32 = 64;

impl Registry {
    /// Applies a piece of a block event; what the event showed, once all of it is applied.
    pub(in crate::fleet) fn blocks(
        self: &Arc<Self>,
        id: WorkerId,
        applying: &mut Applying<'_>,
        events: &BlockEvents,
    ) -> Option<Applied> {
        let Some(applied) = self.change(id, |pool| pool.blocks(id, applying, events)) else {
            self.metrics.scheduling.block_events_ignored.inc("unknown_worker"); // its link is about to close
            return Some(Applied::default());
        };
        if let Some(applied) = &applied {
            self.metrics.scheduling.blocks_removed_unknown.inc_by(applied.unknown_removed.into());
        }
        applied
    }

    /// A turn to apply the next piece. Others have them in between, in the order in which they asked.
    ///
    /// # Cancel safety
    /// A dropped call takes no turn.
    pub(in crate::fleet) async fn next_turn(&self) -> Option<SemaphorePermit<'_>> {
        self.let_others_pass().await;
        self.block_turn.acquire().await.ok() // it is never closed
    }

    /// Lets the other tasks of this thread go on, other threads have the lock, and other processes the core.
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub(in crate::fleet) async fn let_others_pass(&self) {
        std::thread::yield_now();
        for _ in 0..LOOKS {
            yield_now().await;
            if !self.state.is_wanted() {
                return;
            }
        }
    }
}

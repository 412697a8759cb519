//! What workers report, and what it changes in their pools.

use std::sync::Arc;

use super::Registry;
use crate::core::candidate::WorkerId;
use crate::core::frame::{GrammarTotals, GroupTotals, OtherPrompts, RequestId, Step, Transferred};
use crate::core::scheduler::{Given, LegOutput, Withdrawal};
use crate::metrics::Observations;

/// What the outputs of a step say of legs.
#[derive(Debug, Default)]
pub(in crate::fleet) struct Said {
    /// Those that got their first token, and how much of their prompts was cached.
    pub(in crate::fleet) begun: Vec<(RequestId, u32)>,
    /// What those got that had begun before.
    pub(in crate::fleet) given: Given,
    /// All that they got.
    pub(in crate::fleet) tokens: u64,
    /// Between the outputs of each leg.
    pub(in crate::fleet) gaps: Observations,
    /// Those that ended.
    pub(in crate::fleet) ended: Vec<(RequestId, LegOutput)>,
}

impl Registry {
    /// A report of a worker, with what it says of legs. `Some`: the worker is not believed any more.
    pub(in crate::fleet) fn step(
        self: &Arc<Self>,
        id: WorkerId,
        step: &Step,
        said: &Said,
    ) -> Option<Withdrawal> {
        let now_ms = self.clock_ms();
        self.change(id, |pool| {
            // first the step: what it computed belongs to the prompts that were still in flight in it
            let mut withdrawn = pool.step(id, step, said, now_ms);
            for (request, cached_tokens) in &said.begun {
                if let Some(begun) = pool.dispatch.scheduler.begun(*request, *cached_tokens, now_ms)
                {
                    self.metrics.scheduling.begun(&begun);
                    pool.first_token(id, begun.ttft_ms);
                    withdrawn = withdrawn.or(begun.withdrawn);
                }
            }
            for (request, output) in &said.ended {
                pool.dispatch.end(*request, *output, now_ms);
            }
            for why in pool.take_doubts() {
                self.metrics.scheduling.speed_doubted.inc(why.as_str());
            }
            withdrawn
        })
        .flatten()
    }

    /// A worker takes nothing new.
    pub(in crate::fleet) fn draining(self: &Arc<Self>, id: WorkerId) {
        let mates = self.change(id, |pool| {
            pool.set_draining(id);
            pool.mates(id)
        });
        self.drain_mates(mates.unwrap_or_default());
    }

    /// A worker gave the blocks of a cancelled request back.
    pub(in crate::fleet) fn freed(
        self: &Arc<Self>,
        id: WorkerId,
        request: RequestId,
        output: LegOutput,
    ) {
        let now_ms = self.clock_ms();
        self.change(id, |pool| {
            pool.dispatch.end(request, output, now_ms);
            pool.unstuck(id);
        });
    }

    /// A decode leg has lost its prefill worker and computes the prompt itself.
    pub(in crate::fleet) fn goes_alone(self: &Arc<Self>, id: WorkerId, request: RequestId) {
        let now_ms = self.clock_ms();
        self.change(id, |pool| pool.dispatch.scheduler.alone(request, now_ms));
    }

    /// A worker pulled KV from another one, or tried to.
    pub(in crate::fleet) fn transferred(self: &Arc<Self>, id: WorkerId, pull: &Transferred) {
        let now_ms = self.clock_ms();
        let Transferred { worker: from, bytes, ms, error, .. } = pull;
        self.metrics.transfers.pulled(pull);
        self.drains.transferred(id, pull);
        self.change(id, |pool| {
            pool.transferred(id, pull);
            match error {
                None => pool.dispatch.scheduler.transferred(id, from, *bytes, *ms, now_ms),
                Some(why) if why.blames_source() => {
                    pool.dispatch.scheduler.transfer_failed(id, from, now_ms);
                }
                Some(_) => {}
            }
        });
    }

    /// What a rank did for its group.
    pub(in crate::fleet) fn group_totals(self: &Arc<Self>, id: WorkerId, totals: &GroupTotals) {
        self.change(id, |pool| pool.group_totals(id, totals));
    }

    /// What a worker spent on grammars.
    pub(in crate::fleet) fn grammar_totals(self: &Arc<Self>, id: WorkerId, totals: &GrammarTotals) {
        self.change(id, |pool| pool.grammar_totals(id, totals));
    }

    /// What a worker has of other routers.
    pub(in crate::fleet) fn other_prompts(self: &Arc<Self>, id: WorkerId, told: &OtherPrompts) {
        self.change(id, |pool| pool.dispatch.scheduler.other_prompts(id, told));
    }

    /// A worker holds a request and gives no token: no new work until its next step, or until it gives a request up.
    pub(crate) fn stuck(self: &Arc<Self>, id: WorkerId) {
        self.change(id, |pool| pool.stuck(id));
    }
}

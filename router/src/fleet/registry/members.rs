//! Workers come and go: what the state of the registry knows of them, and what follows.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Registry, RegistryState};
use crate::core::candidate::WorkerId;
use crate::core::frame::{Hello, Refuse};
use crate::fleet::link::{Link, LinkError, SubmitQueue};
use crate::fleet::listen::Dial;
use crate::fleet::pool::{LostRank, PooledWorker, WorkerPool, document, for_newcomer};

/// What follows from the end of a worker, once the lock is gone.
#[derive(Debug, Default)]
struct Gone {
    /// Who is to describe the model now.
    asked_again: Option<(Arc<Link>, String)>,
    /// The group that ended with it.
    lost: Option<LostRank>,
}

impl Registry {
    /// Takes a worker in. An older link of the same worker, which nothing was heard of for some time, is closed.
    ///
    /// # Errors
    /// What differs.
    pub(in crate::fleet) fn join(
        self: &Arc<Self>,
        hello: Hello,
        dial: Dial,
    ) -> Result<(Arc<Link>, SubmitQueue), Box<Refuse>> {
        let mut state = self.state();
        self.may_come(&state, &hello, dial.peer)?;
        let mut gone = Vec::new();
        for link in state.replaced_by(&hello) {
            link.close(LinkError::Replaced);
            let Gone { asked_again, lost: _ } = state.remove(link.id, self.clock_ms());
            gone.push(Gone { asked_again, lost: None }); // a group is replaced whole
        }
        state.next_worker += 1;
        let id = WorkerId(state.next_worker);
        let submit_timeout = self.setup.config.deadlines.submit;
        let counted = self.metrics.models.of(&hello.model);
        let (link, submits) = Link::new(
            id,
            hello.worker.clone(),
            Arc::clone(self),
            Arc::clone(&counted),
            submit_timeout,
        );
        let fingerprint = document(&hello.fingerprints);
        let described = state.described(&fingerprint);
        let unasked = described.is_none() && !state.somebody_describes(&fingerprint);
        let index_room = state.index_room.take(hello.capacity.tiers());
        let model = hello.model.clone();
        let least = self.setup.config.deadlines.queue;
        state.forget_one_for(&model, Instant::now(), least, &self.metrics.models);
        let with_series = state.pools.values().map(WorkerPool::own_series).sum();
        state.models.insert(id, model.clone());
        state.names.insert(hello.worker.clone(), id);
        state.circuits.joined(&hello.worker, id.0, self.clock_ms());
        let rules = (&self.setup.config, state.seed);
        let pool = state
            .pools
            .entry(model.clone())
            .or_insert_with(|| WorkerPool::new(model, &hello, rules, counted));
        pool.adopt(&hello, described);
        let mut worker = PooledWorker::new(hello, dial, Arc::clone(&link), index_room);
        worker.asked = unasked;
        worker.series = for_newcomer(&worker.hello.worker, with_series);
        pool.join(worker);
        drop(state);
        if unasked {
            link.describe(fingerprint);
        }
        gone.into_iter().for_each(|gone| self.follow_up(gone));
        self.metrics.links.joined.inc();
        Ok((link, submits))
    }

    /// The link of this worker ended.
    pub(in crate::fleet) fn leave(self: &Arc<Self>, id: WorkerId) {
        let mut state = self.state();
        let model = state.models.get(&id).cloned();
        let gone = state.remove(id, self.clock_ms());
        if let Some(model) = model {
            self.dispatch_waiting(&mut state, &model);
        }
        drop(state);
        self.follow_up(gone);
    }

    /// Does what has to be done without the lock after a worker is gone.
    fn follow_up(self: &Arc<Self>, gone: Gone) {
        if let Some((link, fingerprint)) = gone.asked_again {
            link.describe(fingerprint);
        }
        if let Some(lost) = gone.lost {
            self.group_lost(lost);
        }
    }
}

impl RegistryState {
    /// Removes a worker. If it was to describe its model, another one is to do that now.
    fn remove(&mut self, id: WorkerId, now_ms: f64) -> Gone {
        let removed = self.models.remove(&id).and_then(|model| {
            let pool = self.pools.get_mut(&model)?;
            let (gone, lost) = pool.leave(id, now_ms)?;
            let asks = gone.asked && pool.engine.is_none();
            Some((gone, lost, asks.then(|| document(&pool.fingerprints))))
        });
        let Some((gone, lost, fingerprint)) = removed else { return Gone::default() };
        self.names.remove(&gone.hello.worker);
        self.index_room.give_back(gone.index_room);
        let asked_again = fingerprint.and_then(|fingerprint| {
            let mut pools = self.pools.values_mut();
            let next = pools
                .by_ref()
                .filter(|pool| document(&pool.fingerprints) == fingerprint)
                .find_map(WorkerPool::ask_somebody)?;
            Some((next, fingerprint))
        });
        Gone { asked_again, lost }
    }
}

//! All workers and the queue for them, under one short lock that is never held across an await. A mutex rather than a
//! task, so that a request is placed without a hop between tasks.

mod blocks;
mod groups;
mod joining;
mod names;
mod placing;
mod views;
mod waiting;

pub use self::placing::ServedModel;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Setup;
use super::budget::{DescriptionBytes, IndexRoom};
use super::drain::Drains;
use super::handshake::Misfit;
use super::link::{Description, Link, LinkError};
use super::listen::Dial;
use super::pool::{Described, LostRank, PooledWorker, WorkerPool, compare, document};
use crate::config::{FleetConfig, WorkerListen};
use crate::core::candidate::WorkerId;
use crate::core::circuit::{CircuitRule, Circuits};
use crate::core::frame::{Hello, Refuse, RefuseReason, RequestId, Step, Submit, Transferred};
use crate::core::scheduler::{Given, LegOutput, Withdrawal};
use crate::error::RouteError;
use crate::metrics::Metrics;
use crate::process::lock::{Held, Lock};
#[cfg(test)]
use crate::prompt::TokenizePool;
use crate::prompt::{ModelDoc, PromptEngine, PromptError};

/// For the tasks of all links to end.
const CLOSE: Duration = Duration::from_secs(2);

/// All workers, and what listens for more of them.
#[derive(Debug)]
pub struct Registry {
    pub(super) metrics: Arc<Metrics>,
    pub(super) setup: Setup,
    /// Of all links, and of what listens for them.
    pub(super) tasks: TaskTracker,
    /// All links end.
    pub(super) end: CancellationToken,
    /// No new request is taken, and workers are to look for other routers.
    pub(super) leaves: CancellationToken,
    /// Who waits in a queue waits no longer.
    cut_off: CancellationToken,
    pub(super) drains: Drains,
    pub(super) descriptions: DescriptionBytes,
    begin: Instant,
    last_request: AtomicU64,
    state: Lock<RegistryState>,
    /// A turn to apply a piece of a long block event: however many workers send such events, they are one thread's work.
    block_turn: Semaphore,
}

#[derive(Debug)]
pub(super) struct RegistryState {
    next_worker: u32,
    pub(super) pools: BTreeMap<String, WorkerPool>,
    /// Model of each worker.
    models: HashMap<WorkerId, String>,
    index_room: IndexRoom,
    seed: u64,
    /// Nothing is placed any more.
    cut: bool,
    /// Workers that come and go too often.
    pub(super) circuits: Circuits,
}

/// What the outputs of a step say of legs.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// Those that got their first token, and how much of their prompts was cached.
    pub(super) begun: Vec<(RequestId, u32)>,
    /// What those got that had begun before.
    pub(super) given: Given,
    /// All that they got.
    pub(super) tokens: u64,
    /// Those that ended.
    pub(super) ended: Vec<(RequestId, LegOutput)>,
}

/// What follows from the end of a worker, once the lock is gone.
#[derive(Debug, Default)]
struct Gone {
    /// Who is to describe the model now.
    asked_again: Option<(Arc<Link>, String)>,
    /// The group that ended with it.
    lost: Option<LostRank>,
}

impl RegistryState {
    pub(super) fn pool(&mut self, id: WorkerId) -> Option<&mut WorkerPool> {
        self.pools.get_mut(self.models.get(&id)?)
    }
}

impl Registry {
    pub(super) fn new(setup: Setup, metrics: Arc<Metrics>, seed: u64) -> Arc<Self> {
        let state = RegistryState {
            next_worker: 0,
            pools: BTreeMap::new(),
            models: HashMap::new(),
            index_room: IndexRoom::new(setup.config.fleet.limits.index_blocks),
            seed,
            cut: false,
            circuits: Circuits::new(CircuitRule::new(setup.config.fleet.circuit_breaks)),
        };
        let end = CancellationToken::new();
        let drains = Drains::default();
        let descriptions = DescriptionBytes::new(setup.config.fleet.limits.description_bytes);
        let state = Lock::new("what is known of the workers", state);
        Arc::new(Self {
            metrics,
            setup,
            tasks: TaskTracker::new(),
            leaves: end.child_token(),
            end,
            cut_off: CancellationToken::new(),
            drains,
            descriptions,
            begin: Instant::now(),
            last_request: AtomicU64::new(0),
            state,
            block_turn: Semaphore::new(1),
        })
    }

    /// Ms since the start.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The same, to the fraction: the scheduler's clock.
    pub(super) fn clock_ms(&self) -> f64 {
        self.at_ms(Instant::now())
    }

    /// A moment on that clock.
    pub(crate) fn at_ms(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.begin).as_secs_f64() * 1e3
    }

    /// For tests that keep its threads busy.
    #[cfg(test)]
    pub(crate) fn tokenize_pool(&self) -> &Arc<TokenizePool> {
        &self.setup.tokenize_pool
    }

    pub(super) fn state(&self) -> Held<'_, RegistryState> {
        self.state.lock()
    }

    /// Names for the legs of a request: of the one that answers, and of the one that computes its prompt if it comes to a
    /// split. Later ones are greater.
    pub(crate) fn new_legs(&self) -> (RequestId, RequestId) {
        let answer = self.last_request.fetch_add(2, Relaxed) + 2;
        (RequestId(answer), RequestId(answer - 1))
    }

    /// Answers may begin.
    ///
    /// # Errors
    /// `ShuttingDown`.
    pub(crate) fn takes_requests(&self) -> Result<(), RouteError> {
        if self.leaves.is_cancelled() { Err(RouteError::ShuttingDown) } else { Ok(()) }
    }

    /// Takes a worker in. An older link of the same worker, which nothing was heard of for some time, is closed.
    ///
    /// # Errors
    /// What differs.
    pub(super) fn join(
        self: &Arc<Self>,
        hello: Hello,
        dial: Dial,
    ) -> Result<(Arc<Link>, tokio::sync::mpsc::Receiver<Submit>), Box<Refuse>> {
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
        let (link, submits) = Link::new(id, hello.worker.clone(), Arc::clone(self), submit_timeout);
        let fingerprint = document(&hello.fingerprints);
        let described = state.described(&fingerprint);
        let unasked = described.is_none() && !state.somebody_describes(&fingerprint);
        let index_room = state.index_room.take(hello.capacity.tiers());
        let model = hello.model.clone();
        state.forget_one_for(&model, Instant::now(), self.setup.config.deadlines.queue);
        state.models.insert(id, model.clone());
        state.circuits.joined(&hello.worker, id.0, self.clock_ms());
        let (config, seed) = (&self.setup.config, state.seed);
        let pool = state
            .pools
            .entry(model.clone())
            .or_insert_with(|| WorkerPool::new(model, &hello, config, seed));
        pool.adopt(&hello, described);
        let mut worker = PooledWorker::new(hello, dial, Arc::clone(&link), index_room);
        worker.asked = unasked;
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
    pub(super) fn leave(self: &Arc<Self>, id: WorkerId) {
        let mut state = self.state();
        let model = state.models.get(&id).cloned();
        let gone = state.remove(id, self.clock_ms());
        if let Some(model) = model {
            self.dispatch_waiting(&mut state, &model);
        }
        drop(state);
        self.follow_up(gone);
    }

    /// A report of a worker, with what it says of legs. `Some`: the worker is not believed any more.
    pub(super) fn step(
        self: &Arc<Self>,
        id: WorkerId,
        step: &Step,
        said: &Said,
    ) -> Option<Withdrawal> {
        let now_ms = self.clock_ms();
        self.change(id, |pool| {
            // first the step: what it computed belongs to the prompts that were still in flight in it
            let mut withdrawn = pool.step(id, step, said.given, said.tokens, now_ms);
            for (request, cached_tokens) in &said.begun {
                if let Some(begun) = pool.dispatch.scheduler.begun(*request, *cached_tokens, now_ms)
                {
                    self.metrics.scheduling.begun(&begun);
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
    pub(super) fn draining(self: &Arc<Self>, id: WorkerId) {
        let mates = self.change(id, |pool| {
            pool.set_draining(id);
            pool.mates(id)
        });
        self.drain_mates(mates.unwrap_or_default());
    }

    /// A worker gave the blocks of a cancelled request back.
    pub(super) fn freed(self: &Arc<Self>, id: WorkerId, request: RequestId, output: LegOutput) {
        let now_ms = self.clock_ms();
        self.change(id, |pool| {
            pool.dispatch.end(request, output, now_ms);
            pool.unstuck(id);
        });
    }

    /// A decode leg has lost its prefill worker and computes the prompt itself.
    pub(super) fn goes_alone(self: &Arc<Self>, id: WorkerId, request: RequestId) {
        let now_ms = self.clock_ms();
        self.change(id, |pool| pool.dispatch.scheduler.alone(request, now_ms));
    }

    /// A worker pulled KV from another one, or tried to.
    pub(super) fn transferred(self: &Arc<Self>, id: WorkerId, pull: &Transferred) {
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

    /// A worker holds a request and gives no token: no new work until its next step, or until it gives a request up.
    pub(crate) fn stuck(self: &Arc<Self>, id: WorkerId) {
        self.change(id, |pool| pool.stuck(id));
    }

    /// The description of a model is complete.
    pub(super) fn described(self: &Arc<Self>, link: Arc<Link>, description: Description) {
        let Description { fingerprint, document, charge, .. } = description;
        let registry = Arc::clone(self);
        let pool = Arc::clone(&self.setup.tokenize_pool);
        let cache = Arc::clone(&self.setup.prefix_cache);
        let stretch_bytes = self.setup.config.tokenizer.stretch_bytes;
        tokio::spawn(async move {
            let read = move || -> Result<PromptEngine, PromptError> {
                PromptEngine::with_cache(ModelDoc::parse(&document)?, pool, cache, stretch_bytes)
            };
            match tokio::task::spawn_blocking(read).await {
                Ok(Ok(engine)) => {
                    registry.add_engine(&fingerprint, &(Arc::new(engine), Arc::new(charge)));
                }
                Ok(Err(error)) => link.close(LinkError::ModelOfNoUse(error)),
                Err(error) => link.close(LinkError::ModelUnread(error)),
            }
        });
    }

    fn add_engine(self: &Arc<Self>, fingerprint: &str, described: &Described) {
        let mut state = self.state();
        let mut changed = Vec::new();
        for pool in state.pools.values_mut() {
            // described twice if the first to be asked left in between: those who wait hold tokens of the first engine
            if pool.engine.is_none() && document(&pool.fingerprints) == fingerprint {
                pool.set_engine(described.clone());
                changed.push(pool.model.clone());
            }
        }
        for model in changed {
            self.dispatch_waiting(&mut state, &model);
        }
    }

    /// Looks after everything that no frame looks after: called again and again. `late`: the router itself was held up, so
    /// that its links may hold frames that nobody has read yet, and nobody's silence means anything.
    pub(super) fn sweep(self: &Arc<Self>, now: Instant, late: bool) {
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
            state.forget_idle(now);
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
        3 * heartbeat - super::sweep_interval(heartbeat)
    }

    /// Where workers dial in, with the port that was taken.
    #[must_use]
    pub fn address(&self) -> &WorkerListen {
        &self.setup.address
    }

    /// From now on no new request is taken. What runs goes on.
    pub fn shut_down(&self) {
        self.leaves.cancel();
    }

    /// All that still runs or waits ends with `ShuttingDown`, which its client is told, and nothing more is placed.
    pub(crate) fn cut(&self) {
        let links: Vec<Arc<Link>> = {
            let mut state = self.state();
            state.cut = true;
            state.pools.values().flat_map(WorkerPool::links).collect()
        };
        self.cut_off.cancel();
        for link in links {
            link.cut_legs();
        }
    }

    /// Hangs up on all workers; they dial again when a router is there again.
    pub(crate) async fn close(&self) {
        self.close_all();
        self.tasks.close();
        if timeout(CLOSE, self.tasks.wait()).await.is_err() {
            tracing::warn!("some links did not close in time");
        }
    }

    /// Ends all links, and lets none begin.
    pub(crate) fn close_all(&self) {
        self.end.cancel();
        let links: Vec<Arc<Link>> =
            self.state().pools.values().flat_map(WorkerPool::links).collect();
        for link in links {
            link.close(LinkError::Shutdown);
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
        let others = pool.workers().any(|worker| worker.hello.worker != hello.worker);
        if !others {
            return Ok(()); // it brings its own
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

    pub(super) fn named(&self, name: &str) -> Option<&PooledWorker> {
        let mut workers = self.pools.values().flat_map(WorkerPool::workers);
        workers.find(|worker| worker.hello.worker == name)
    }

    fn described(&self, fingerprint: &str) -> Option<Described> {
        let mut pools = self.pools.values();
        pools.find_map(|pool| {
            pool.described().filter(|_| document(&pool.fingerprints) == fingerprint)
        })
    }

    fn somebody_describes(&self, fingerprint: &str) -> bool {
        self.pools.values().any(|pool| {
            document(&pool.fingerprints) == fingerprint && pool.workers().any(|worker| worker.asked)
        })
    }

    /// Removes a worker. If it was to describe its model, another one is to do that now.
    fn remove(&mut self, id: WorkerId, now_ms: f64) -> Gone {
        let removed = self.models.remove(&id).and_then(|model| {
            let pool = self.pools.get_mut(&model)?;
            let (gone, lost) = pool.leave(id, now_ms)?;
            let asks = gone.asked && pool.engine.is_none();
            Some((gone, lost, asks.then(|| document(&pool.fingerprints))))
        });
        let Some((gone, lost, fingerprint)) = removed else { return Gone::default() };
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

//! The workers of one model, and the dispatch of their requests. The scheduler has the one list of them; beside what the
//! choice depends on it keeps a [`PooledWorker`] of each.

mod described;
mod groups;
mod pulls;
mod series;
mod snapshot;
mod worker;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

pub(super) use self::described::{WORKER_COUNTERS, WORKER_GAUGES};
pub(super) use self::groups::{GROUP_GAUGES, LostRank, RANK_COUNTERS};
use self::series::{FrameReport, WorkerSeries};
pub(super) use self::series::{for_newcomer, show as show_series};
pub(super) use self::snapshot::{PoolSnapshot, WorkerSnapshot};
pub(super) use self::worker::{PooledWorker, Status};
use super::ModelInfo;
use super::booking::{BookedPlace, PrefillPlace};
use super::budget::DescriptionCharge;
use super::link::Link;
use super::queue::Waiting;
use super::registry::Said;
use crate::config::{Config, RoutingConfig};
use crate::core::candidate::{GroupRank, WorkerId};
use crate::core::dispatch::Dispatch;
use crate::core::events::BlockEvents;
use crate::core::frame::{Fingerprints, GrammarTotals, Hello, Role, Step, Transferred};
use crate::core::scheduler::{
    Applied, Applying, Doubt, Joining, Placement, RoutingRules, Scheduler, Withdrawal, WorkerView,
};
use crate::metrics::ModelMetrics;
use crate::process::background;
use crate::prompt::PromptEngine;

/// Blocks that come or go under one hold of the registry's lock. A frame of a worker at work brings fewer. While the index
/// moves to a larger table they take 0.44 ms (p99; 0.05 ms p50), four times as many 1.5 to 7 (EPYC, a loop around the index, no file).
pub(super) const BLOCKS_AT_ONCE: NonZeroUsize = NonZeroUsize::new(1024).expect("more than 0");

/// A model's description as it is used, and its part of what all of them may take.
pub(super) type Described = (Arc<PromptEngine>, Arc<DescriptionCharge>);

/// See the head of this file.
#[derive(Debug)]
pub(super) struct WorkerPool {
    pub(super) model: String,
    pub(super) fingerprints: Fingerprints,
    pub(super) engine: Option<Arc<PromptEngine>>,
    /// Its description counts as long as it is known here.
    charge: Option<Arc<DescriptionCharge>>,
    /// Somebody asked for it.
    wanted: bool,
    /// Since when it has no worker.
    empty_since: Option<Instant>,
    /// How many workers take sequences so long, at most.
    contexts: BTreeMap<u32, usize>,
    /// What is counted of its requests.
    pub(super) metrics: Arc<ModelMetrics>,
    /// What is counted of its workers that have no series of their own, once there were some.
    others: Option<Box<WorkerSeries>>,
    pub(super) dispatch: Dispatch<Waiting, PooledWorker>,
    created: u64,
}

impl WorkerPool {
    pub(super) fn new(
        model: String,
        first: &Hello,
        (config, seed): (&Config, u64),
        metrics: Arc<ModelMetrics>,
    ) -> Self {
        let scheduler = Scheduler::new(rules(config, seed), first.fingerprints.block_tokens)
            .keeping_candidates(config.routing.decision_log.is_some());
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        Self {
            model,
            fingerprints: first.fingerprints.clone(),
            engine: None,
            charge: None,
            wanted: false,
            empty_since: None,
            contexts: BTreeMap::new(),
            metrics,
            others: None,
            dispatch: Dispatch::new(scheduler, config.routing.queue.clone()),
            created,
        }
    }

    /// What a worker tells of its grammars.
    pub(super) fn grammar_totals(&mut self, id: WorkerId, totals: &GrammarTotals) {
        if let Some(worker) = self.dispatch.scheduler.member_mut(id) {
            worker.grammars = totals.clone();
        }
    }

    /// The first worker brings the fingerprints of all; `described` is what is known for them.
    pub(super) fn adopt(&mut self, hello: &Hello, described: Option<Described>) {
        if self.is_empty() {
            self.fingerprints = hello.fingerprints.clone();
            self.dispatch.scheduler.set_block_tokens(hello.fingerprints.block_tokens);
        }
        (self.engine, self.charge) = described.unzip();
    }

    /// What is known of its fingerprints.
    pub(super) fn described(&self) -> Option<Described> {
        Some((self.engine.clone()?, self.charge.clone()?))
    }

    pub(super) fn join(&mut self, worker: PooledWorker) {
        self.empty_since = None;
        let hello = &worker.hello;
        *self.contexts.entry(hello.context_tokens).or_default() += 1;
        let joining = Joining {
            id: worker.link.id,
            name: hello.worker.as_str().into(),
            role: hello.role,
            kv_block_bytes: hello.kv_block_bytes,
            capacity: hello.capacity.clone(),
            index_room: worker.index_room,
            group: hello
                .group
                .as_ref()
                .map(|group| GroupRank { group: group.id.as_str().into(), rank: group.rank }),
            queue_rule: hello.queue_rule,
            step_prior: hello.step_prior,
        };
        let group = worker.hello.group.clone();
        self.dispatch.scheduler.join(joining, worker);
        if let Some(group) = group {
            self.regroup(&group);
        }
    }

    /// Forgets a worker. If the others of its group can do nothing without it, they are named.
    pub(super) fn leave(
        &mut self,
        id: WorkerId,
        now_ms: f64,
    ) -> Option<(PooledWorker, Option<LostRank>)> {
        let gone = self.dispatch.worker_left(id, now_ms)?;
        if let Entry::Occupied(mut context) = self.contexts.entry(gone.hello.context_tokens) {
            *context.get_mut() -= 1;
            if *context.get() == 0 {
                context.remove();
            }
        }
        self.clear_away();
        self.empty_since = self.is_empty().then(Instant::now);
        let lost = self.rank_lost(&gone, "its link ended");
        Some((gone, lost))
    }

    /// Everybody waits for the lock meanwhile, so large tables are given back by another thread.
    fn clear_away(&mut self) {
        if let Some(leftovers) = self.dispatch.scheduler.take_leftovers() {
            background::free(leftovers);
        }
    }

    fn is_empty(&self) -> bool {
        self.workers().next().is_none()
    }

    /// One of its workers has this further name for it.
    pub(super) fn has_alias(&self, name: &str) -> bool {
        self.workers().any(|worker| worker.hello.aliases.iter().any(|alias| alias == name))
    }

    /// The name of its model, and further ones.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let further = self.workers().flat_map(|worker| &worker.hello.aliases);
        std::iter::once(self.model.as_str()).chain(further.map(String::as_str))
    }

    /// Somebody asks for it: its name is not forgotten while an answer may want to go on.
    pub(super) fn want(&mut self) {
        self.wanted = true;
    }

    /// How long nobody has served it and nobody has waited for it; `None` while that is not so.
    pub(super) fn idle(&self, now: Instant) -> Option<Duration> {
        let idle = self.dispatch.nobody_waits() && self.dispatch.scheduler.legs() == 0;
        self.empty_since.filter(|_| idle).map(|since| now.saturating_duration_since(since))
    }

    /// Nobody has ever asked for it.
    pub(super) fn never_wanted(&self) -> bool {
        !self.wanted
    }

    pub(super) fn set_engine(&mut self, (engine, charge): Described) {
        self.charge = Some(charge);
        self.engine = Some(engine);
        let ids: Vec<WorkerId> = self.workers().map(|worker| worker.link.id).collect();
        for id in ids {
            self.change(id, |worker| worker.asked = false);
        }
    }

    /// A worker that can describe the model.
    pub(super) fn ask_somebody(&mut self) -> Option<Arc<Link>> {
        let worker = self.dispatch.scheduler.members_mut().next()?;
        worker.asked = true;
        Some(Arc::clone(&worker.link))
    }

    // ---- scheduling ----

    /// False once workers with another tokeniser took over the name: to them the tokens mean something else.
    pub(super) fn understands(&self, engine: &Arc<PromptEngine>) -> bool {
        self.engine.as_ref().is_some_and(|own| Arc::ptr_eq(own, engine))
    }

    /// A worker takes new work.
    pub(super) fn some_open(&self) -> bool {
        self.dispatch.scheduler.some_open()
    }

    /// A worker takes new work, or may do so soon.
    pub(super) fn some_may_open(&self) -> bool {
        let generates = |worker: &PooledWorker| worker.hello.role != Role::Prefill;
        self.workers().any(|worker| !worker.draining && generates(worker))
    }

    // ---- what workers say, and do not say ----

    /// Takes a report in; `Some` if the worker is not believed any more.
    pub(super) fn step(
        &mut self,
        id: WorkerId,
        step: &Step,
        said: &Said,
        now_ms: f64,
    ) -> Option<Withdrawal> {
        let mut preempted = 0;
        let mut others = self.others.take();
        self.change(id, |worker| {
            worker.silent = false;
            let is_new = worker.last.as_ref().is_none_or(|last| last.step != step.step);
            worker.times.note(step, said.tokens, is_new);
            preempted = worker.preempted_since(step.load.preemptions);
            let told = FrameReport {
                step,
                // the first frame may be a heartbeat that repeats an old step
                is_new: is_new && (worker.last.is_some() || said.tokens > 0),
                tokens: said.tokens,
                gaps: &said.gaps,
                preemptions: preempted,
            };
            let own = worker.series.as_deref_mut();
            own.unwrap_or_else(|| others.get_or_insert_default()).count(&told);
            if worker.stuck_at.is_some_and(|stuck| step.step > stuck) {
                worker.stuck_at = None;
            }
            worker.last = Some(Step { outputs: Vec::new(), ..*step });
        });
        self.others = others;
        self.metrics.preemptions.inc_by(preempted);
        self.dispatch.scheduler.step(id, step, said.given, now_ms)
    }

    /// A leg on this worker got its first token.
    pub(super) fn first_token(&mut self, id: WorkerId, ttft_ms: f64) {
        let worker = self.dispatch.scheduler.member_mut(id);
        let own = worker.and_then(|worker| worker.series.as_deref_mut());
        own.unwrap_or_else(|| self.others.get_or_insert_default()).first_token(ttft_ms);
    }

    /// Says whose word about its speed began, or ceased, to be doubted.
    pub(super) fn take_doubts(&mut self) -> Vec<Doubt> {
        let mut begun = Vec::new();
        for (id, doubt) in self.dispatch.scheduler.take_doubts() {
            let Some(worker) = self.dispatch.scheduler.member(id) else { continue };
            let worker = &worker.hello.worker;
            match doubt {
                Some(why) => {
                    let why = why.as_str();
                    tracing::warn!(
                        worker,
                        why,
                        "its speed is not what it says: it is measured here"
                    );
                }
                None => tracing::info!(worker, "what it says of its speed is believed again"),
            }
            begun.extend(doubt);
        }
        begun
    }

    /// Applies a piece of a block event as far as it may be believed; what it showed, once all of it is applied.
    pub(super) fn blocks(
        &mut self,
        id: WorkerId,
        applying: &mut Applying<'_>,
        events: &BlockEvents,
    ) -> Option<Applied> {
        let is_all = self.dispatch.scheduler.apply_piece(id, applying, BLOCKS_AT_ONCE);
        self.clear_away();
        if !is_all {
            return None;
        }
        self.change(id, |worker| {
            worker.snapshot |= events.live();
            worker.blocks_known = events.blocks();
        });
        Some(applying.applied())
    }

    /// A pull of KV by this worker ended.
    pub(super) fn transferred(&mut self, id: WorkerId, pull: &Transferred) {
        self.change(id, |worker| worker.pulls.note(pull));
    }

    pub(super) fn set_draining(&mut self, id: WorkerId) {
        self.change(id, |worker| worker.draining = true);
    }

    pub(super) fn stuck(&mut self, id: WorkerId) {
        self.change(id, |worker| {
            worker.stuck_at = Some(worker.last.as_ref().map_or(0, |step| step.step));
        });
    }

    /// Cancels are heard between two steps, so its engine goes round; idle, it has no step to show for that.
    pub(super) fn unstuck(&mut self, id: WorkerId) {
        self.change(id, |worker| worker.stuck_at = None);
    }

    /// Workers that have just become silent: nothing came from them for longer than `limit`; and the groups that have lost a
    /// rank by that.
    pub(super) fn check_silence(
        &mut self,
        now_ms: u64,
        limit: Duration,
    ) -> (Vec<Arc<Link>>, Vec<LostRank>) {
        let silence = |link: &Link| Duration::from_millis(now_ms.saturating_sub(link.heard_ms()));
        let changed =
            self.workers().filter(|worker| worker.silent != (silence(&worker.link) > limit));
        let changed: Vec<Arc<Link>> = changed.map(|worker| Arc::clone(&worker.link)).collect();
        let mut lost = Vec::new();
        for link in &changed {
            lost.extend(self.silence_changed(link.id));
        }
        let fell_silent = |link: &Arc<Link>| {
            self.dispatch.scheduler.member(link.id).is_some_and(|worker| worker.silent)
        };
        (changed.into_iter().filter(fell_silent).collect(), lost)
    }

    /// Changes what is known of a worker; the scheduler is told whether it takes new work now, and whether its group does.
    fn change(&mut self, id: WorkerId, change: impl FnOnce(&mut PooledWorker)) {
        let Some(worker) = self.dispatch.scheduler.member_mut(id) else { return };
        let before = (worker.silent, worker.takes_part());
        change(worker);
        match &worker.hello.group {
            Some(group) if (worker.silent, worker.takes_part()) != before => {
                let group = group.clone();
                self.regroup(&group);
            }
            Some(_) | None => self.tell_scheduler(id),
        }
    }

    fn tell_scheduler(&mut self, id: WorkerId) {
        let described = self.engine.is_some();
        let Some(worker) = self.dispatch.scheduler.member(id) else { return };
        let (status, link) = (worker.status(described), Arc::clone(&worker.link));
        if self.dispatch.scheduler.set_open(id, status == Status::Ready) {
            let (worker, model, state) = (&link.worker, &self.model, status.as_str());
            tracing::info!(worker, model, state, "worker");
        }
    }

    // ---- views ----

    pub(super) fn workers(&self) -> impl Iterator<Item = &PooledWorker> {
        self.dispatch.scheduler.members()
    }

    /// Workers that take new work, and go on to.
    pub(super) fn stay(&self) -> impl Iterator<Item = (&PooledWorker, WorkerView)> {
        self.dispatch.scheduler.views().filter(|(_, view)| view.open)
    }

    pub(super) fn links(&self) -> impl Iterator<Item = Arc<Link>> {
        self.workers().map(|worker| Arc::clone(&worker.link))
    }

    /// Workers that joined more than `limit` ago and have not said yet which blocks they hold.
    pub(super) fn without_snapshot(
        &self,
        now: Instant,
        limit: Duration,
    ) -> impl Iterator<Item = Arc<Link>> {
        let late = move |worker: &&PooledWorker| !worker.snapshot && now - worker.joined > limit;
        self.workers().filter(late).map(|worker| Arc::clone(&worker.link))
    }

    /// Longest sequence that all workers take; `None` without workers.
    pub(super) fn context_tokens(&self) -> Option<u32> {
        self.contexts.keys().next().copied()
    }

    /// Values of a pooled prompt, on which workers agree; 0 where they pool none.
    pub(super) fn pooled_width(&self) -> u32 {
        self.workers().next().map_or(0, |worker| worker.hello.pooled_width)
    }

    /// `None` while no worker is there that could serve it.
    pub(super) fn info(&self) -> Option<ModelInfo> {
        let conventions = self.engine.as_ref()?.conventions();
        let context_tokens = self.context_tokens()?;
        let dtypes: BTreeSet<&str> = self.workers().map(|w| w.hello.dtype.as_str()).collect();
        let dtypes = dtypes.into_iter().map(str::to_owned).collect();
        let (name, created) = (self.model.clone(), self.created);
        let aliases: BTreeSet<&String> = self.workers().flat_map(|w| &w.hello.aliases).collect();
        let aliases = aliases.into_iter().cloned().collect();
        Some(ModelInfo { name, aliases, context_tokens, dtypes, created, conventions })
    }
}

/// The place that decodes, and the one that computes the prompt where that is another worker.
pub(super) type BookedPlaces = (BookedPlace, Option<PrefillPlace>);

/// Where a placement is.
pub(super) fn places(workers: &Scheduler<PooledWorker>, placement: &Placement) -> BookedPlaces {
    let worker = |id| workers.member(id).expect("who was just chosen is there");
    let place = |id, request| BookedPlace { link: Arc::clone(&worker(id).link), request };
    let prefill = placement.prefill.map(|leg| PrefillPlace {
        place: place(leg.worker, leg.request),
        transfer: worker(leg.worker).hello.transfer.clone(),
    });
    (place(placement.worker, placement.request), prefill)
}

/// What a model's description is known by.
pub(super) fn document(fingerprints: &Fingerprints) -> String {
    format!("{}/{}", fingerprints.tokenizer, fingerprints.chat_template)
}

/// Name and both values of every field.
pub(super) fn compare(
    fleet: &Fingerprints,
    worker: &Fingerprints,
) -> [(&'static str, String, String); 6] {
    let text =
        |name, of: fn(&Fingerprints) -> &String| (name, of(fleet).clone(), of(worker).clone());
    [
        text("weights", |all| &all.weights),
        text("tokenizer", |all| &all.tokenizer),
        text("chat_template", |all| &all.chat_template),
        text("kv_layout", |all| &all.kv_layout),
        text("hash_scheme", |all| &all.hash_scheme),
        ("block_tokens", fleet.block_tokens.to_string(), worker.block_tokens.to_string()),
    ]
}

fn rules(config: &Config, seed: u64) -> RoutingRules {
    let RoutingConfig { shadow, worker_queue_ms, gather_ms, .. } = config.routing;
    RoutingRules { policy: config.policy, shadow, worker_queue_ms, gather_ms, seed }
}

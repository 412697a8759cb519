//! The workers of one model: their state as the registry sees it, and the dispatch of their requests.

mod described;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

pub(super) use self::described::WORKER_GAUGES;
use super::ModelInfo;
use super::booking::{Place, PrefillPlace};
use super::budget::Charge;
use super::link::Link;
use super::listen::Dial;
use super::lobby::Peer;
use super::pulls::Pulls;
use super::queue::Waiting;
use crate::config::{Config, RoutingConfig};
use crate::core::candidate::WorkerId;
use crate::core::dispatch::{Dispatch, Refusal};
use crate::core::events::BlockEvents;
use crate::core::frame::{Fingerprints, Hello, Role, Step, Transferred};
use crate::core::scheduler::{
    Applied, Applying, Doubt, Given, Joining, Placement, Rules, Scheduler, Withdrawal, WorkerView,
};
use crate::prompt::PromptEngine;

/// Blocks that come or go under one hold of the registry's lock. A frame of a worker at work brings fewer. While the index
/// moves to a larger table they take 0.44 ms (p99; 0.05 ms p50), four times as many 1.5 to 7 (EPYC, a loop around the index, no file).
pub(super) const BLOCKS_AT_ONCE: NonZeroUsize = NonZeroUsize::new(1024).expect("more than 0");

/// How a worker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// Its snapshot or its model's description is still to come.
    Joining,
    /// It takes new work.
    Ready,
    /// Silent, or without a token for a request that waits for one: no new work.
    Suspect,
    /// It finishes what it has.
    Draining,
}

impl Status {
    pub(super) const ALL: [Self; 4] = [Self::Joining, Self::Ready, Self::Suspect, Self::Draining];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
        }
    }
}

/// A worker, as far as no request depends on it.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) hello: Hello,
    pub(super) address: String,
    pub(super) link: Arc<Link>,
    /// Blocks that the index keeps for it, by tier.
    pub(super) index_room: [u32; 3],
    pub(super) peer: Peer,
    /// It was asked to describe its model.
    pub(super) asked: bool,
    joined: Instant,
    snapshot: bool,
    blocks_known: u64,
    silent: bool,
    /// A token was overdue when it had done this many steps.
    stuck_at: Option<u64>,
    draining: bool,
    /// It takes new work, as the scheduler was told.
    open: bool,
    last: Option<Step>,
    /// What it pulled from others.
    pulls: Pulls,
}

impl Worker {
    pub(super) fn new(hello: Hello, dial: Dial, link: Arc<Link>, index_room: [u32; 3]) -> Self {
        Self {
            hello,
            address: dial.address,
            peer: dial.peer,
            index_room,
            link,
            asked: false,
            joined: Instant::now(),
            snapshot: false,
            blocks_known: 0,
            silent: false,
            stuck_at: None,
            draining: false,
            open: false,
            last: None,
            pulls: Pulls::default(),
        }
    }

    /// It takes nothing new, for good.
    pub(super) fn leaves(&self) -> bool {
        self.draining
    }

    fn status(&self, described: bool) -> Status {
        if self.draining {
            Status::Draining
        } else if !described || !self.snapshot {
            Status::Joining
        } else if self.silent || self.stuck_at.is_some() {
            Status::Suspect
        } else {
            Status::Ready
        }
    }
}

/// A model's description as it is used, and its part of what all of them may take.
pub(super) type Described = (Arc<PromptEngine>, Arc<Charge>);

/// The workers of one model, in the order of their ids. What the choice depends on is in `dispatch`.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) model: String,
    pub(super) fingerprints: Fingerprints,
    pub(super) engine: Option<Arc<PromptEngine>>,
    /// Its description counts as long as it is known here.
    charge: Option<Arc<Charge>>,
    /// Somebody asked for it.
    wanted: bool,
    /// Since when it has no worker.
    empty_since: Option<Instant>,
    pub(super) dispatch: Dispatch<Waiting>,
    created: u64,
    workers: Vec<Worker>,
}

impl Pool {
    pub(super) fn new(model: String, first: &Hello, config: &Config, seed: u64) -> Self {
        let scheduler = Scheduler::new(rules(config, seed), first.fingerprints.block_tokens);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        Self {
            model,
            fingerprints: first.fingerprints.clone(),
            engine: None,
            charge: None,
            wanted: false,
            empty_since: None,
            dispatch: Dispatch::new(scheduler, config.routing.queue.clone()),
            created,
            workers: Vec::new(),
        }
    }

    /// The first worker brings the fingerprints of all; `described` is what is known for them.
    pub(super) fn adopt(&mut self, hello: &Hello, described: Option<Described>) {
        if self.workers.is_empty() {
            self.fingerprints = hello.fingerprints.clone();
            self.dispatch.scheduler.set_block_tokens(hello.fingerprints.block_tokens);
        }
        (self.engine, self.charge) = described.unzip();
    }

    /// What is known of its fingerprints.
    pub(super) fn described(&self) -> Option<Described> {
        Some((self.engine.clone()?, self.charge.clone()?))
    }

    pub(super) fn join(&mut self, worker: Worker) {
        self.empty_since = None;
        let hello = &worker.hello;
        self.dispatch.scheduler.join(Joining {
            id: worker.link.id,
            name: hello.worker.as_str().into(),
            role: hello.role,
            kv_block_bytes: hello.kv_block_bytes,
            capacity: hello.capacity.clone(),
            index_room: worker.index_room,
            group: hello.group.as_ref().map(|group| group.id.as_str().into()),
            step_prior: hello.step_prior,
        });
        self.workers.push(worker);
    }

    pub(super) fn leave(&mut self, id: WorkerId, now_ms: f64) -> Option<Worker> {
        let i = self.find(id)?;
        self.dispatch.worker_left(id, now_ms);
        let gone = self.workers.remove(i);
        self.empty_since = self.workers.is_empty().then(Instant::now);
        Some(gone)
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
        for i in 0..self.workers.len() {
            self.workers[i].asked = false;
            self.refresh(i);
        }
    }

    /// A worker that can describe the model.
    pub(super) fn ask_somebody(&mut self) -> Option<Arc<Link>> {
        let worker = self.workers.first_mut()?;
        worker.asked = true;
        Some(Arc::clone(&worker.link))
    }

    // ---- scheduling ----

    /// False once workers with another tokeniser took over the name: to them the tokens mean something else.
    pub(super) fn understands(&self, engine: &Arc<PromptEngine>) -> bool {
        self.engine.as_ref().is_some_and(|own| Arc::ptr_eq(own, engine))
    }

    /// Where a placement is.
    pub(super) fn places(&self, placement: &Placement) -> Option<Places> {
        places(&self.workers, placement)
    }

    /// Gives those who wait what room there is; `deliver` as for [`Dispatch::dispatch_waiting`].
    pub(super) fn dispatch_waiting(
        &mut self,
        now_ms: f64,
        mut deliver: impl FnMut(Waiting, Result<(Placement, Places), Refusal>) -> bool,
    ) {
        let may_open = self.some_may_open();
        let Self { dispatch, workers, .. } = self;
        dispatch.dispatch_waiting(may_open, now_ms, |waiting, placed| {
            let placed = placed.map(|placement| {
                let places = places(workers, &placement);
                (placement, places.expect("the scheduler knows the same workers"))
            });
            deliver(waiting, placed)
        });
    }

    /// A worker takes new work.
    pub(super) fn some_open(&self) -> bool {
        self.dispatch.scheduler.some_open()
    }

    /// A worker takes new work, or may do so soon.
    pub(super) fn some_may_open(&self) -> bool {
        let generates = |worker: &Worker| worker.hello.role != Role::Prefill;
        self.workers.iter().any(|worker| !worker.draining && generates(worker))
    }

    // ---- what workers say, and do not say ----

    /// Takes a report in; `Some` if the worker is not believed any more.
    pub(super) fn step(
        &mut self,
        id: WorkerId,
        step: &Step,
        given: Given,
        now_ms: f64,
    ) -> Option<Withdrawal> {
        let i = self.find(id)?;
        let worker = &mut self.workers[i];
        worker.silent = false;
        if worker.stuck_at.is_some_and(|stuck| step.step > stuck) {
            worker.stuck_at = None;
        }
        worker.last = Some(Step { outputs: Vec::new(), ..*step });
        self.refresh(i);
        self.dispatch.scheduler.step(id, step, given, now_ms)
    }

    /// Says whose word about its speed began, or ceased, to be doubted.
    pub(super) fn take_doubts(&mut self) -> Vec<Doubt> {
        let mut begun = Vec::new();
        for (id, doubt) in self.dispatch.scheduler.take_doubts() {
            let Some(i) = self.find(id) else { continue };
            let worker = &self.workers[i].hello.worker;
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
        let Some(i) = self.find(id) else { return Some(Applied::default()) };
        if !self.dispatch.scheduler.apply_piece(id, applying, BLOCKS_AT_ONCE) {
            return None;
        }
        self.workers[i].snapshot |= events.live();
        self.workers[i].blocks_known = events.blocks();
        self.refresh(i);
        Some(applying.applied())
    }

    /// A pull of KV by this worker ended.
    pub(super) fn transferred(&mut self, id: WorkerId, pull: &Transferred) {
        let Some(i) = self.find(id) else { return };
        self.workers[i].pulls.note(pull);
    }

    pub(super) fn set_draining(&mut self, id: WorkerId) {
        let Some(i) = self.find(id) else { return };
        self.workers[i].draining = true;
        self.refresh(i);
    }

    pub(super) fn stuck(&mut self, id: WorkerId) {
        let Some(i) = self.find(id) else { return };
        let worker = &mut self.workers[i];
        worker.stuck_at = Some(worker.last.as_ref().map_or(0, |step| step.step));
        self.refresh(i);
    }

    /// Cancels are heard between two steps, so its engine goes round; idle, it has no step to show for that.
    pub(super) fn unstuck(&mut self, id: WorkerId) {
        let Some(i) = self.find(id) else { return };
        self.workers[i].stuck_at = None;
        self.refresh(i);
    }

    /// Workers that have just become silent: nothing came from them for longer than `limit`.
    pub(super) fn check_silence(&mut self, now_ms: u64, limit: Duration) -> Vec<Arc<Link>> {
        let mut fell_silent = Vec::new();
        for i in 0..self.workers.len() {
            let worker = &mut self.workers[i];
            let silent = Duration::from_millis(now_ms.saturating_sub(worker.link.heard_ms()));
            let before = std::mem::replace(&mut worker.silent, silent > limit);
            if worker.silent && !before {
                fell_silent.push(Arc::clone(&worker.link));
            }
            self.refresh(i);
        }
        fell_silent
    }

    fn refresh(&mut self, i: usize) {
        let status = self.workers[i].status(self.engine.is_some());
        let open = status == Status::Ready;
        let worker = &mut self.workers[i];
        if worker.open != open {
            let name = &worker.hello.worker;
            tracing::info!(worker = name, model = self.model, state = status.as_str(), "worker");
            worker.open = open;
            self.dispatch.scheduler.set_open(worker.link.id, open);
        }
    }

    fn find(&self, id: WorkerId) -> Option<usize> {
        self.workers.binary_search_by_key(&id, |worker| worker.link.id).ok()
    }

    // ---- views ----

    pub(super) fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter()
    }

    /// The workers, and what the scheduler knows of each.
    pub(super) fn members(&self) -> impl Iterator<Item = (&Worker, WorkerView)> {
        let scheduler = &self.dispatch.scheduler;
        self.workers.iter().filter_map(|worker| Some((worker, scheduler.view(worker.link.id)?)))
    }

    /// Workers that take new work, and go on to.
    pub(super) fn stay(&self) -> impl Iterator<Item = (&Worker, WorkerView)> {
        self.members().filter(|(worker, _)| worker.open)
    }

    pub(super) fn links(&self) -> impl Iterator<Item = Arc<Link>> {
        self.workers.iter().map(|worker| Arc::clone(&worker.link))
    }

    /// Workers that joined more than `limit` ago and have not said yet which blocks they hold.
    pub(super) fn without_snapshot(
        &self,
        now: Instant,
        limit: Duration,
    ) -> impl Iterator<Item = Arc<Link>> {
        let late = move |worker: &&Worker| !worker.snapshot && now - worker.joined > limit;
        self.workers.iter().filter(late).map(|worker| Arc::clone(&worker.link))
    }

    pub(super) fn statuses(&self) -> impl Iterator<Item = Status> {
        self.workers.iter().map(|worker| worker.status(self.engine.is_some()))
    }

    /// Longest sequence that all workers take; `None` without workers.
    pub(super) fn context_tokens(&self) -> Option<u32> {
        self.workers.iter().map(|worker| worker.hello.context_tokens).min()
    }

    /// `None` while no worker is there that could serve it.
    pub(super) fn info(&self) -> Option<ModelInfo> {
        self.engine.as_ref()?;
        let context_tokens = self.context_tokens()?;
        Some(ModelInfo { name: self.model.clone(), context_tokens, created: self.created })
    }
}

/// The place that decodes, and the one that computes the prompt where that is another worker.
pub(super) type Places = (Place, Option<PrefillPlace>);

fn places(workers: &[Worker], placement: &Placement) -> Option<Places> {
    let find = |id: WorkerId| {
        let i = workers.binary_search_by_key(&id, |worker| worker.link.id).ok()?;
        Some(&workers[i])
    };
    let place = |worker: &Worker, request| Place { link: Arc::clone(&worker.link), request };
    let prefill = match &placement.prefill {
        None => None,
        Some(leg) => {
            let worker = find(leg.worker)?;
            let transfer = worker.hello.transfer.clone();
            Some(PrefillPlace { place: place(worker, leg.request), transfer })
        }
    };
    Some((place(find(placement.worker)?, placement.request), prefill))
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

fn rules(config: &Config, seed: u64) -> Rules {
    let RoutingConfig { shadow, worker_queue_ms, .. } = config.routing;
    Rules { policy: config.policy, shadow, worker_queue_ms, seed }
}

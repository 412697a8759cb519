//! The workers of one model: what they said of themselves, their state, and what is booked on them.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::ModelInfo;
use super::booking::Wanted;
use super::link::Link;
use super::queue::Queue;
use crate::core::events::BlockEvents;
use crate::core::frame::{Fingerprints, Hello, Load, Step};
use crate::core::policy::{Policy, PolicyName};
use crate::core::schedule::{Ask, Booked, NoPlace, Random, WorkerId, WorkerView, hash, schedule};
use crate::prompt::PromptEngine;

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
    /// It was asked to describe its model.
    pub(super) asked: bool,
    joined: Instant,
    snapshot: bool,
    blocks_known: u64,
    silent: bool,
    /// A token was overdue when it had done this many steps.
    stuck_at: Option<u64>,
    draining: bool,
    last: Option<Step>,
}

impl Worker {
    pub(super) fn new(hello: Hello, address: String, link: Arc<Link>, asked: bool) -> Self {
        Self {
            hello,
            address,
            link,
            asked,
            joined: Instant::now(),
            snapshot: false,
            blocks_known: 0,
            silent: false,
            stuck_at: None,
            draining: false,
            last: None,
        }
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

/// The workers of one model. `views[i]` is what the scheduler sees of `workers[i]`; both are in the order of their ids.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) model: String,
    pub(super) fingerprints: Fingerprints,
    pub(super) engine: Option<Arc<PromptEngine>>,
    pub(super) queue: Queue,
    created: u64,
    policy: Policy,
    workers: Vec<Worker>,
    views: Vec<WorkerView>,
}

impl Pool {
    pub(super) fn new(model: String, first: &Hello, policy: PolicyName) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        Self {
            model,
            fingerprints: first.fingerprints.clone(),
            engine: None,
            queue: Queue::default(),
            created,
            policy: Policy::new(policy),
            workers: Vec::new(),
            views: Vec::new(),
        }
    }

    /// The first worker brings the fingerprints of all; `engine` is what is known for them.
    pub(super) fn adopt(&mut self, hello: &Hello, engine: Option<Arc<PromptEngine>>) {
        if self.workers.is_empty() {
            self.fingerprints = hello.fingerprints.clone();
        }
        self.engine = engine;
    }

    pub(super) fn join(&mut self, worker: Worker) {
        self.views.push(WorkerView {
            id: worker.link.id,
            name_hash: hash(&worker.hello.worker),
            open: false,
            capacity: worker.hello.capacity.clone(),
            load: Load::default(),
            booked: Booked::default(),
            unreported: 0,
        });
        self.workers.push(worker);
    }

    pub(super) fn leave(&mut self, id: WorkerId) -> Option<Worker> {
        let i = self.find(id)?;
        self.views.remove(i);
        Some(self.workers.remove(i))
    }

    pub(super) fn set_engine(&mut self, engine: Arc<PromptEngine>) {
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
    pub(super) fn understands(&self, wanted: &Wanted) -> bool {
        self.engine.as_ref().is_some_and(|engine| Arc::ptr_eq(engine, &wanted.engine))
    }

    pub(super) fn place(
        &mut self,
        wanted: &Wanted,
        random: &mut Random,
    ) -> Result<(Arc<Link>, u64), NoPlace> {
        let ask = Ask {
            tokens: wanted.prompt_tokens as u64 + u64::from(wanted.max_tokens),
            session: wanted.session.as_deref(),
            excluded: &wanted.excluded,
        };
        let placement = schedule(&mut self.views, &ask, &mut self.policy, random)?;
        let i = self.find(placement.worker).expect("it was chosen among these");
        Ok((Arc::clone(&self.workers[i].link), placement.tokens))
    }

    pub(super) fn release(&mut self, id: WorkerId, tokens: &[u64]) {
        if let Some(i) = self.find(id) {
            for tokens in tokens {
                self.views[i].release(*tokens);
            }
        }
    }

    /// A worker takes new work.
    pub(super) fn some_open(&self) -> bool {
        self.views.iter().any(|view| view.open)
    }

    /// A worker takes new work, or may do so soon.
    pub(super) fn some_may_open(&self) -> bool {
        self.workers.iter().any(|worker| !worker.draining)
    }

    // ---- what workers say, and do not say ----

    pub(super) fn step(&mut self, id: WorkerId, step: &Step) {
        let Some(i) = self.find(id) else { return };
        let worker = &mut self.workers[i];
        worker.silent = false;
        if worker.stuck_at.is_some_and(|stuck| step.step > stuck) {
            worker.stuck_at = None;
        }
        worker.last = Some(step.clone());
        self.views[i].report(step.load);
        self.refresh(i);
    }

    pub(super) fn blocks(&mut self, id: WorkerId, events: &BlockEvents) {
        let Some(i) = self.find(id) else { return };
        self.workers[i].snapshot |= events.live(); // without it later, it goes on without credit
        self.workers[i].blocks_known = events.blocks();
        self.refresh(i);
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

    pub(super) fn check_silence(&mut self, now_ms: u64, limit: Duration) {
        for i in 0..self.workers.len() {
            let worker = &mut self.workers[i];
            let silent = Duration::from_millis(now_ms.saturating_sub(worker.link.heard_ms()));
            worker.silent = silent > limit;
            self.refresh(i);
        }
    }

    fn refresh(&mut self, i: usize) {
        let status = self.workers[i].status(self.engine.is_some());
        let open = status == Status::Ready;
        if self.views[i].open != open {
            let worker = &self.workers[i].hello.worker;
            tracing::info!(worker, model = self.model, state = status.as_str(), "worker");
        }
        self.views[i].open = open;
    }

    fn find(&self, id: WorkerId) -> Option<usize> {
        self.views.binary_search_by_key(&id, |view| view.id).ok()
    }

    // ---- views ----

    pub(super) fn members(&self) -> impl Iterator<Item = (&Worker, &WorkerView)> {
        self.workers.iter().zip(&self.views)
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

    pub(super) fn describe_workers(&self, now_ms: u64) -> impl Iterator<Item = serde_json::Value> {
        let described = self.engine.is_some();
        self.members().map(move |(worker, view)| {
            let (hello, load) = (&worker.hello, &view.load);
            serde_json::json!({
                "id": hello.worker,
                "role": hello.role,
                "state": worker.status(described).as_str(),
                "model": hello.model,
                "epoch": hello.epoch,
                "address": worker.address,
                "blocks_total": hello.capacity.blocks,
                "blocks_used": load.blocks_used,
                "blocks_cached": load.blocks_cached,
                "blocks_announced": worker.blocks_known,
                "running": load.running,
                "waiting": load.waiting,
                "booked_requests": view.booked.requests,
                "booked_tokens": view.booked.tokens,
                "in_flight": worker.link.in_flight(),
                "heartbeat_age_ms": now_ms.saturating_sub(worker.link.heard_ms()),
                "block_tokens": hello.fingerprints.block_tokens,
                "context_tokens": hello.context_tokens,
                "capacity": {
                    "sequences": hello.capacity.sequences,
                    "batched_tokens": hello.capacity.batched_tokens,
                    "waiting": hello.capacity.waiting,
                },
                "step": worker.last.as_ref().map(|step| serde_json::json!({
                    "number": step.step,
                    "ms": step.ms,
                    "prefill_tokens": step.prefill_tokens,
                    "decode_rows": step.decode_rows,
                    "kv_tokens": step.kv_tokens,
                    "waiting_tokens": step.waiting_tokens,
                    "drafted": step.drafted,
                    "accepted": step.accepted,
                })),
            })
        })
    }
}

type WorkerGauge = (&'static str, &'static str, fn(&Worker, &WorkerView, u64) -> f64);

/// One sample for each worker.
pub(super) const WORKER_GAUGES: [WorkerGauge; 9] = [
    ("headrace_worker_blocks", "KV blocks in the pool.", |worker, _, _| {
        worker.hello.capacity.blocks.into()
    }),
    ("headrace_worker_blocks_used", "KV blocks held by running requests.", |_, view, _| {
        view.load.blocks_used.into()
    }),
    ("headrace_worker_blocks_cached", "KV blocks held by the prefix cache only.", |_, view, _| {
        view.load.blocks_cached.into()
    }),
    ("headrace_worker_running", "Requests in the batch.", |_, view, _| view.load.running.into()),
    ("headrace_worker_waiting", "Requests that wait inside the worker.", |_, view, _| {
        view.load.waiting.into()
    }),
    ("headrace_worker_booked_requests", "Legs that this router has there.", |_, view, _| {
        view.booked.requests.into()
    }),
    ("headrace_worker_booked_tokens", "Their prompts and longest answers.", |_, view, _| {
        view.booked.tokens as f64
    }),
    ("headrace_worker_step_seconds", "Duration of the last step.", |worker, _, _| {
        worker.last.as_ref().map_or(0.0, |step| step.ms / 1e3)
    }),
    ("headrace_worker_heartbeat_age_seconds", "Since its last frame.", |worker, _, now_ms| {
        now_ms.saturating_sub(worker.link.heard_ms()) as f64 / 1e3
    }),
];

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

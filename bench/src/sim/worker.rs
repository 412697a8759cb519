//! One worker of the simulation: an engine, what is wrong with it, and what the router has heard of it.

use std::sync::Arc;

use headrace_router::core::blocks::HASH_SCHEME;
use headrace_router::core::candidate::{GroupRank, WorkerId};
use headrace_router::core::dispatch::Dispatch;
use headrace_router::core::events::{BlockEvents, Gap, Verdict};
use headrace_router::core::frame::{
    Blocks, Fingerprints, Hello, PROTOCOL, QueueRule, Role, Snapshot, Step,
};
use headrace_router::core::scheduler::{Given, Joining, Scheduler, Withdrawal};

use super::world::{Fleet, Lifecycle};
use crate::mock::engine::{Engine, EngineConfig, StepResult};
use crate::mock::fault::Mischief;
use crate::random::Random;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct SimWorker {
    pub(super) name: Arc<str>,
    pub(super) engine: Engine,
    pub(super) mischief: Mischief,
    config: EngineConfig,
    role: Role,
    rank: Option<GroupRank>,
    kv_block_bytes: u64,
    /// It says what its steps cost.
    priors: bool,
    /// Its link, while it has one.
    pub(super) link: Option<Link>,
    /// What an autoscaler made of it.
    pub(super) lifecycle: Lifecycle,
    /// Of the step that runs: its ms.
    pub(super) step_ms: Option<f64>,
    /// Of that, its own, and whether there is nothing in it.
    pub(super) own_ms: f64,
    pub(super) empty: bool,
    /// When that step ends.
    pub(super) step_ends_ms: f64,
    /// Counts its deaths and its freezes: what was due for an earlier life is of no use.
    pub(super) life: u64,
    /// Since when it has been frozen.
    pub(super) frozen_ms: Option<f64>,
    /// When it will next look for what others did.
    pub(super) rings_ms: f64,
}

/// The routers' side of it.
#[derive(Debug)]
pub(super) struct Link {
    /// The same at all routers.
    pub(super) id: WorkerId,
    /// By router.
    events: Vec<BlockEvents>,
}

impl SimWorker {
    pub(super) fn new(number: usize, fleet: &Fleet) -> Self {
        let config = &fleet.engine;
        let seed = Random::new(config.seed ^ (number as u64) << 32).next();
        let config = EngineConfig { seed, epoch: 1, ..config.clone() };
        let mut mischief = Mischief::new(number, config.seed);
        fleet.faults.iter().for_each(|fault| mischief.add(fault));
        Self {
            name: format!("w{number}").into(),
            engine: Engine::new(config.clone()),
            mischief,
            config,
            role: fleet.roles.of(number),
            rank: fleet.roles.rank_of(number).map(|(group, rank)| GroupRank {
                group: format!("group{group}").into(),
                rank: u32::try_from(rank).expect("few ranks"),
            }),
            kv_block_bytes: fleet.terms.block_bytes,
            priors: fleet.priors,
            link: None,
            lifecycle: Lifecycle::Running,
            step_ms: None,
            own_ms: 0.0,
            empty: false,
            step_ends_ms: 0.0,
            life: 0,
            frozen_ms: None,
            rings_ms: f64::INFINITY,
        }
    }

    /// Starts a step if there is work; says when it ends.
    pub(super) fn begin_step(&mut self, now_ms: f64) -> Option<f64> {
        let ms = self.engine.begin_step()? * self.mischief.slowdown(now_ms);
        (self.step_ms, self.own_ms) = (Some(ms), ms);
        self.step_ends_ms = now_ms + ms;
        Some(self.step_ends_ms)
    }

    /// Ends the step that runs; what the router gets of it.
    pub(super) fn end_step(&mut self, now_ms: f64) -> Option<StepResult> {
        let ms = self.step_ms.take()?;
        self.engine.claim_more(self.mischief.lie(now_ms));
        let waited_us = ((ms - self.own_ms) * 1e3).round() as u32; // saturates
        if std::mem::take(&mut self.empty) {
            let step = Step { waited_us, ..self.engine.empty_step(ms) };
            return Some(StepResult { blocks: None, step, freed: vec![], progress: vec![] });
        }
        let mut result = self.engine.end_step(ms);
        result.step.waited_us = waited_us;
        let blocks = result.blocks.take();
        result.blocks =
            blocks.and_then(|blocks| self.mischief.blocks(now_ms, blocks, &mut self.engine));
        Some(result)
    }

    /// Everything that it knew is gone; it will be another process.
    pub(super) fn die(&mut self) {
        self.config.epoch += 1;
        self.engine = Engine::new(self.config.clone());
        self.step_ms = None;
        self.life += 1;
    }

    /// Dials in: what follows on the link begins with the snapshot.
    pub(super) fn join(&mut self, id: WorkerId, routers: &mut [Dispatch<usize>], now_ms: f64) {
        let hello = self.hello();
        let events = routers.iter().map(|_| BlockEvents::new(&hello)).collect();
        self.link = Some(Link { id, events });
        for (number, router) in routers.iter_mut().enumerate() {
            let scheduler = &mut router.scheduler;
            scheduler.join(
                Joining {
                    id,
                    name: Arc::clone(&self.name),
                    role: hello.role,
                    kv_block_bytes: hello.kv_block_bytes,
                    index_room: hello.capacity.tiers(),
                    capacity: hello.capacity.clone(),
                    group: self.rank.clone(),
                    queue_rule: hello.queue_rule,
                    step_prior: hello.step_prior,
                },
                (),
            );
            self.send_snapshot(number, scheduler, now_ms);
            scheduler.set_open(id, true);
            self.send_step(&self.engine.heartbeat(), Given::default(), scheduler, now_ms);
        }
    }

    fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            worker: self.name.to_string(),
            epoch: self.config.epoch,
            role: self.role,
            model: "sim".into(),
            fingerprints: Fingerprints {
                weights: "sim".into(),
                tokenizer: "sim".into(),
                chat_template: "sim".into(),
                kv_layout: "sim".into(),
                hash_scheme: HASH_SCHEME.into(),
                block_tokens: self.config.block_tokens,
            },
            capacity: self.engine.capacity(),
            context_tokens: self.engine.context_tokens(),
            group: None,
            transfer: Vec::new(),
            nonce: Vec::new(),
            step_prior: self.priors.then(|| self.engine.cost()),
            kv_block_bytes: self.kv_block_bytes,
            dtype: "sim".into(),
            aliases: Vec::new(),
            pooled_width: 0,
            queue_rule: QueueRule::Halves,
        }
    }

    // ---- a router's side, as `fleet::link` and `fleet::pool` do it; routers go by their numbers ----

    /// A snapshot arrives.
    fn send_snapshot(&mut self, router: usize, scheduler: &mut Scheduler, now_ms: f64) {
        let (sequence, keys) = self.engine.snapshot();
        let snapshot = Snapshot {
            epoch: self.config.epoch,
            sequence: self.mischief.sequence(sequence),
            hashes: keys.iter().flat_map(|key| key.to_le_bytes()).collect(),
            last: true,
        };
        let Some(link) = &mut self.link else { return };
        let verdict = link.events[router].snapshot(&snapshot, now_ms).expect("whole keys");
        link.take_in(router, &verdict, scheduler, now_ms);
    }

    /// A block event arrives.
    pub(super) fn send_blocks(
        &mut self,
        blocks: &Blocks,
        router: usize,
        scheduler: &mut Scheduler,
        now_ms: f64,
    ) {
        let Some(link) = &mut self.link else { return };
        let verdict = link.events[router].delta(blocks, now_ms).expect("whole keys");
        link.take_in(router, &verdict, scheduler, now_ms);
        self.resync(router, scheduler, now_ms);
    }

    /// A report arrives, without what it says of requests.
    pub(super) fn send_step(
        &self,
        step: &Step,
        given: Given,
        scheduler: &mut Scheduler,
        now_ms: f64,
    ) -> Option<Withdrawal> {
        let link = self.link.as_ref()?;
        let withdrawn = scheduler.step(link.id, step, given, now_ms);
        scheduler.take_doubts(); // nobody is to be told
        withdrawn
    }

    /// A router does not believe it any more.
    pub(super) fn disbelieve(&mut self, router: usize, withdrawn: Option<Withdrawal>, now_ms: f64) {
        if let (Some(_), Some(link)) = (withdrawn, &mut self.link) {
            link.events[router].lose(Gap::Audit, now_ms);
        }
    }

    /// Sends its snapshot again if a router wants it.
    pub(super) fn resync(&mut self, router: usize, scheduler: &mut Scheduler, now_ms: f64) {
        if self.link.as_mut().is_some_and(|link| link.events[router].ask(now_ms).is_some()) {
            self.send_snapshot(router, scheduler, now_ms);
        }
    }
}

impl Link {
    fn take_in(
        &mut self,
        router: usize,
        verdict: &Verdict<'_>,
        scheduler: &mut Scheduler,
        now_ms: f64,
    ) {
        if scheduler.apply(self.id, verdict).withdrawn.is_some() {
            self.events[router].lose(Gap::Audit, now_ms);
        }
    }
}

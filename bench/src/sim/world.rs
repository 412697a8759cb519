//! Clients, router and workers, and the clock that takes them from one event to the next.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use headrace_router::config::Config;
use headrace_router::core::candidate::WorkerId;
use headrace_router::core::dispatch::{Dispatch, Refusal, Submitted};
use headrace_router::core::frame::RequestId;
use headrace_router::core::scheduler::{
    Placement, PlacementRequest, RoutingRules, Scheduler, Targets,
};

use self::legs::SimLeg;
pub(super) use self::scaling::{Lifecycle, targets};
use super::arrival::{Arrival, State};
use super::autoscale::{AutoscaleRules, Autoscaler};
use super::events::{Event, Events};
use super::predictions::Predictions;
use super::worker::SimWorker;
use crate::mock::engine::EngineConfig;
use crate::mock::exchange::{Exchange, Terms};
use crate::mock::fault::Fault;
use crate::mock::lockstep::RoundSums;
use crate::mock::worker::Roles;
use crate::random::Random;
use crate::report::sample::Sample;
use crate::report::{AutoscaleReport, Split};

mod legs;
mod rounds;
mod scaling;
mod workers;

/// Workers as they are asked for.
pub(super) struct Fleet {
    pub(super) roles: Roles,
    pub(super) engine: EngineConfig,
    /// What moving KV costs.
    pub(super) terms: Terms,
    pub(super) faults: Vec<Fault>,
    /// Workers say what their steps cost.
    pub(super) priors: bool,
    /// Routers that share the fleet.
    pub(super) routers: usize,
    /// Workers that come and go.
    pub(super) autoscale: Option<AutoscaleRules>,
    /// What they are counted for.
    pub(super) targets: Targets,
}

/// See the head of this file.
pub(super) struct World {
    now_ms: f64,
    seed: u64,
    events: Events,
    /// Each with a share of the requests.
    routers: Vec<Dispatch<usize>>,
    exchange: Exchange,
    workers: Vec<SimWorker>,
    arrivals: Vec<Arrival>,
    /// Legs that have not ended, by their names: those of a request's first try, then those of later ones.
    legs: BTreeMap<RequestId, SimLeg>,
    /// Requests that are neither answered nor failed.
    open: usize,
    last_worker: u32,
    last_try: u64,
    retries: u32,
    block_tokens: u32,
    heartbeat_ms: f64,
    heartbeat_timeout_ms: f64,
    queue_timeout_ms: f64,
    kv_lease_ms: u32,
    transfer_timeout_ms: u32,
    predictions: Predictions,
    split: Split,
    roles: Roles,
    rounds: RoundSums,
    autoscaler: Option<Autoscaler>,
    targets: Targets,
    decisions: Option<BufWriter<std::fs::File>>,
    log_error: Option<std::io::Error>,
}

impl World {
    /// # Errors
    /// The file for the decisions cannot be made.
    pub(super) fn new(
        config: &Config,
        fleet: &Fleet,
        arrivals: Vec<Arrival>,
        decisions: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let rules = RoutingRules {
            policy: config.policy,
            shadow: config.routing.shadow,
            worker_queue_ms: config.routing.worker_queue_ms,
            gather_ms: config.routing.gather_ms,
            seed: fleet.engine.seed,
        };
        let router = |number: usize| {
            let rules = RoutingRules { seed: rules.seed ^ (number as u64) << 8, ..rules.clone() };
            let scheduler = Scheduler::new(rules, fleet.engine.block_tokens)
                .keeping_candidates(decisions.is_some());
            Dispatch::new(scheduler, config.routing.queue.clone())
        };
        let workers = 0..fleet.roles.all();
        let whole_ms = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let log = |path: &Path| {
            let file = std::fs::File::create(path).with_context(|| path.display().to_string());
            file.map(BufWriter::new)
        };
        Ok(Self {
            now_ms: 0.0,
            seed: fleet.engine.seed,
            events: Events::default(),
            routers: (0..fleet.routers).map(router).collect(),
            exchange: Exchange::new(fleet.terms, fleet.roles.all(), 0),
            workers: workers.map(|n| SimWorker::new(n, fleet)).collect(),
            open: arrivals.len(),
            arrivals,
            legs: BTreeMap::new(),
            last_worker: 0,
            last_try: 0,
            retries: config.bounds.retries,
            heartbeat_ms: ms(config.fleet.heartbeat),
            heartbeat_timeout_ms: ms(config.fleet.heartbeat_timeout),
            block_tokens: fleet.engine.block_tokens,
            queue_timeout_ms: ms(config.deadlines.queue),
            kv_lease_ms: whole_ms(config.fleet.kv_lease),
            transfer_timeout_ms: whole_ms(config.fleet.transfer_timeout),
            predictions: Predictions::default(),
            split: Split::default(),
            roles: fleet.roles,
            rounds: RoundSums::default(),
            autoscaler: fleet.autoscale.map(Autoscaler::new),
            targets: fleet.targets,
            decisions: decisions.map(log).transpose()?,
            log_error: None,
        })
    }

    /// Runs until every request has ended; says when that was.
    ///
    /// # Errors
    /// The decisions could not be written.
    pub(super) fn run(&mut self) -> anyhow::Result<f64> {
        let there = match &self.autoscaler {
            Some(scaler) => {
                self.events.at(scaler.rules.every_ms, Event::Scales);
                scaler.rules.least
            }
            None => self.workers.len(),
        };
        for worker in &mut self.workers[there..] {
            worker.lifecycle = Lifecycle::Stopped;
        }
        for worker in 0..there {
            self.change(worker);
        }
        // those of one moment race each other through the router's front
        let race = |request: &usize| Random::new(self.seed ^ *request as u64).next();
        let mut order: Vec<usize> = (0..self.arrivals.len()).collect();
        order.sort_by_key(race);
        for request in order {
            self.events.at(self.arrivals[request].due_ms, Event::Arrives(request));
        }
        self.events.at(self.heartbeat_ms / 2.0, Event::Sweep);
        while self.open > 0 {
            let Some((at_ms, event)) = self.events.next() else { break };
            self.now_ms = at_ms;
            match event {
                Event::Arrives(request) => self.submit(request),
                Event::GivesUp { request, ticket } => self.give_up(request, ticket),
                Event::Gathered(router) => self.dispatch_waiting_at(router),
                Event::StepEnds { worker, life } => self.step_ends(worker, life),
                Event::Changes(worker) => self.change(worker),
                Event::Silent { worker, life } => self.silent(worker, life),
                Event::Lost { worker, life } => self.lost(worker, life),
                Event::News(worker) => self.hear(worker),
                Event::Scales => self.scale(),
                Event::Started { worker, life } => self.started(worker, life),
                Event::Sweep => self.sweep(),
            }
        }
        if let Some(file) = &mut self.decisions {
            file.flush()?;
        }
        self.log_error.take().map_or(Ok(self.now_ms), |error| Err(error.into()))
    }

    pub(super) fn samples(&self) -> Vec<Sample> {
        self.arrivals.iter().map(Arrival::sample).collect()
    }

    /// How far predictions were off.
    pub(super) fn predictions(&self) -> &Predictions {
        &self.predictions
    }

    /// Times that an engine took blocks from one answer for another.
    pub(super) fn preemptions(&self) -> u64 {
        self.workers.iter().map(|worker| worker.engine.preemptions()).sum()
    }

    /// What the autoscaler did until the end.
    pub(super) fn autoscaled(&self) -> Option<AutoscaleReport> {
        self.autoscaler.as_ref().map(|scaler| scaler.report(self.now_ms))
    }

    /// What became of requests on two workers.
    pub(super) fn split(&self) -> Split {
        self.split
    }

    /// What groups did.
    pub(super) fn rounds(&self) -> RoundSums {
        self.rounds
    }

    /// The router that has a request, which is by lot.
    fn router_of(&self, request: usize) -> usize {
        Random::new(self.seed ^ !(request as u64)).below(self.routers.len())
    }

    // ---- requests ----

    /// The router gets a request, the first time or again.
    fn submit(&mut self, request: usize) {
        self.last_try += 1;
        let ticket = self.last_try;
        let arrival = &self.arrivals[request];
        let generated = arrival.completion_tokens();
        let wanted = PlacementRequest {
            request: RequestId(2 * ticket),
            prefill_request: RequestId(2 * ticket + 1),
            name: request.to_string().into(),
            prompt_tokens: arrival.prompt_tokens + generated,
            max_tokens: arrival.limit() - generated,
            keys: arrival.keys_now(self.block_tokens),
            reuses: true,
            session: Some(arrival.session.clone()),
            tenant: 0,
            yields: false,
            priority: if arrival.begun() { i8::MAX } else { 0 },
            deadline_ms: None,
            excluded: arrival.excluded.clone(),
            resumes: arrival.begun(),
            explains: false,
        };
        let may_open = self.may_open();
        let router = self.router_of(request);
        match self.routers[router].submit(wanted, request, may_open, self.now_ms) {
            Submitted::Placed(placement, request) => self.deliver(request, &placement),
            Submitted::Refused(refusal, request) => self.refuse(request, &refusal),
            Submitted::Waits => {
                self.arrivals[request].state = State::Waits(ticket);
                let at_ms = self.now_ms + self.queue_timeout_ms;
                self.events.at(at_ms, Event::GivesUp { request, ticket });
                if let Some(at_ms) = self.routers[router].gathers_until_ms() {
                    self.events.at(at_ms, Event::Gathered(router));
                }
            }
        }
    }

    /// Elsewhere, from where the answer is. A worker that failed it may have it again once a token came in between.
    fn try_again(&mut self, request: usize, failed: WorkerId, why: &str) {
        let arrival = &mut self.arrivals[request];
        if std::mem::take(&mut arrival.got_on) {
            arrival.retries = 0;
            arrival.excluded.clear();
        }
        if arrival.retries >= self.retries {
            let kind = if arrival.begun() { "stream_error" } else { "502" };
            self.end(request, |arrival| arrival.fail(kind, why));
        } else {
            arrival.retries += 1;
            arrival.excluded.push(failed);
            arrival.state = State::Nowhere;
            self.submit(request);
        }
    }

    fn refuse(&mut self, request: usize, refusal: &Refusal) {
        let kind = match refusal {
            Refusal::NoneOpen | Refusal::AllExcluded => "503",
            Refusal::QueueFull { .. } | Refusal::TooLate { .. } => "429",
        };
        self.end(request, |arrival| arrival.fail(kind, format!("{refusal:?}")));
    }

    fn give_up(&mut self, request: usize, ticket: u64) {
        if matches!(self.arrivals[request].state, State::Waits(number) if number == ticket) {
            let router = self.router_of(request);
            self.routers[router].leave(RequestId(2 * ticket));
            self.end(request, |arrival| arrival.fail("429", "all workers are full"));
        }
    }

    fn end(&mut self, request: usize, change: impl FnOnce(&mut Arrival)) {
        change(&mut self.arrivals[request]);
        self.open -= 1;
    }

    /// Gives those who wait what room there is.
    fn dispatch_waiting(&mut self) {
        (0..self.routers.len()).for_each(|router| self.dispatch_waiting_at(router));
    }

    fn dispatch_waiting_at(&mut self, router: usize) {
        // a request that fails on arrival may make room at once
        while !self.routers[router].nobody_waits() {
            let mut delivered = Vec::new();
            let may_open = self.may_open();
            self.routers[router].dispatch_waiting(may_open, self.now_ms, |request, placed, _| {
                delivered.push((request, placed));
                true
            });
            if delivered.is_empty() {
                return;
            }
            for (request, placed) in delivered {
                match placed {
                    Ok(placement) => self.deliver(request, &placement),
                    Err(refusal) => self.refuse(request, &refusal),
                }
            }
        }
    }

    fn log(&mut self, placement: &Placement) {
        let Some(file) = &mut self.decisions else { return };
        let line = serde_json::to_string(&*placement.decision).map_err(std::io::Error::from);
        let written = line.and_then(|line| writeln!(file, "{line}"));
        if let Err(error) = written {
            self.log_error = Some(error);
            self.decisions = None;
        }
    }
}

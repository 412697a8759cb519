//! Clients, router and workers, and the clock that takes them from one event to the next.

use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use headrace_router::config::Config;
use headrace_router::core::candidate::WorkerId;
use headrace_router::core::dispatch::{Dispatch, Refusal, Submitted};
use headrace_router::core::frame::{Failed, RequestId};
use headrace_router::core::scheduler::{Output, Placement, Rules, Scheduler, Want};

use super::arrival::{Arrival, State};
use super::events::{Event, Events};
use super::worker::SimWorker;
use crate::mock::engine::{EngineConfig, Leg};
use crate::mock::fault::{Fault, Health};
use crate::random::Random;
use crate::sample::Sample;

/// Workers as they are asked for.
pub(super) struct Fleet {
    pub(super) workers: usize,
    pub(super) engine: EngineConfig,
    pub(super) faults: Vec<Fault>,
}

/// See the head of this file.
pub(super) struct World {
    now_ms: f64,
    seed: u64,
    events: Events,
    dispatch: Dispatch<usize>,
    workers: Vec<SimWorker>,
    arrivals: Vec<Arrival>,
    /// Request of each leg, by its name.
    legs: Vec<usize>,
    /// Requests that are neither answered nor failed.
    open: usize,
    last_worker: u32,
    last_ticket: u64,
    retries: u32,
    heartbeat_ms: f64,
    heartbeat_timeout_ms: f64,
    queue_timeout_ms: f64,
    prediction_errors: Vec<f64>,
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
        let rules = Rules {
            policy: config.policy,
            shadow: config.routing.shadow,
            worker_queue_ms: config.routing.worker_queue_ms,
            seed: fleet.engine.seed,
        };
        let scheduler = Scheduler::new(rules, fleet.engine.block_tokens);
        let workers = 0..fleet.workers;
        let log = |path: &Path| {
            let file = std::fs::File::create(path).with_context(|| path.display().to_string());
            file.map(BufWriter::new)
        };
        Ok(Self {
            now_ms: 0.0,
            seed: fleet.engine.seed,
            events: Events::default(),
            dispatch: Dispatch::new(scheduler, config.routing.queue.clone()),
            workers: workers.map(|n| SimWorker::new(n, &fleet.engine, &fleet.faults)).collect(),
            open: arrivals.len(),
            arrivals,
            legs: Vec::new(),
            last_worker: 0,
            last_ticket: 0,
            retries: config.bounds.retries,
            heartbeat_ms: ms(config.fleet.heartbeat),
            heartbeat_timeout_ms: ms(config.fleet.heartbeat_timeout),
            queue_timeout_ms: ms(config.deadlines.queue),
            prediction_errors: Vec::new(),
            decisions: decisions.map(log).transpose()?,
            log_error: None,
        })
    }

    /// Runs until every request has ended; says when that was.
    ///
    /// # Errors
    /// The decisions could not be written.
    pub(super) fn run(&mut self) -> anyhow::Result<f64> {
        for worker in 0..self.workers.len() {
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
                Event::StepEnds { worker, life } => self.step_ends(worker, life),
                Event::Changes(worker) => self.change(worker),
                Event::Silent { worker, life } => self.silent(worker, life),
                Event::Lost { worker, life } => self.lost(worker, life),
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

    /// Of each first token, how far its prediction was off, over what it took.
    pub(super) fn prediction_errors(&self) -> &[f64] {
        &self.prediction_errors
    }

    // ---- requests ----

    /// The router gets a request, the first time or again.
    fn submit(&mut self, request: usize) {
        let leg = RequestId(self.legs.len() as u64);
        self.legs.push(request);
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let arrival = &self.arrivals[request];
        let want = Want {
            request: leg,
            prefill_request: RequestId(u64::MAX - leg.0),
            name: request.to_string(),
            prompt_tokens: arrival.prompt_tokens,
            max_tokens: arrival.max_tokens,
            keys: Arc::clone(&arrival.keys),
            reuses: true,
            session: Some(arrival.session.clone()),
            tenant: 0,
            priority: 0,
            deadline_ms: None,
            excluded: arrival.excluded.clone(),
            patient: false,
        };
        let bytes =
            (size_of::<Want>() + 8 * want.keys.len()) as u64 + 4 * u64::from(arrival.prompt_tokens);
        let may_open = self.may_open();
        match self.dispatch.submit(want, ticket, bytes, request, may_open, self.now_ms) {
            Submitted::Placed(placement, request) => self.deliver(request, &placement),
            Submitted::Refused(refusal, request) => self.refuse(request, &refusal),
            Submitted::Waits => {
                self.arrivals[request].state = State::Waits(ticket);
                let at_ms = self.now_ms + self.queue_timeout_ms;
                self.events.at(at_ms, Event::GivesUp { request, ticket });
            }
        }
    }

    /// A leg reaches its worker.
    fn deliver(&mut self, request: usize, placement: &Placement) {
        self.log(placement);
        let place = self.workers.iter().position(|worker| {
            worker.link.as_ref().is_some_and(|link| link.id == placement.worker)
        });
        let place = place.expect("a worker without a link gets nothing");
        let arrival = &mut self.arrivals[request];
        arrival.state = State::Placed(place);
        let leg = Leg {
            request: placement.request,
            keys: Arc::clone(&arrival.keys),
            prompt_tokens: arrival.prompt_tokens,
            max_tokens: arrival.max_tokens,
            seed: request as u64,
            resumed: 0,
            hand_off: None,
            arrives: None,
        };
        match self.workers[place].engine.submit(leg) {
            Ok(()) => self.begin_step(place),
            Err(failed) => self.failed(request, placement, &failed),
        }
    }

    fn failed(&mut self, request: usize, placement: &Placement, failed: &Failed) {
        self.dispatch.end(placement.request, Output::default(), self.now_ms);
        if failed.retryable {
            self.try_again(request, placement.worker, &failed.message);
        } else {
            self.end(request, |arrival| arrival.fail("400", failed.message.clone()));
        }
    }

    /// Elsewhere, if nothing of the answer was sent yet.
    fn try_again(&mut self, request: usize, failed: WorkerId, why: &str) {
        let arrival = &mut self.arrivals[request];
        if arrival.begun() {
            self.end(request, |arrival| arrival.fail("stream_error", why));
        } else if arrival.retries >= self.retries {
            self.end(request, |arrival| arrival.fail("502", why));
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
            self.dispatch.leave(ticket);
            self.end(request, |arrival| arrival.fail("429", "all workers are full"));
        }
    }

    fn end(&mut self, request: usize, change: impl FnOnce(&mut Arrival)) {
        change(&mut self.arrivals[request]);
        self.open -= 1;
    }

    /// Gives those who wait what room there is.
    fn pump(&mut self) {
        // a request that fails on arrival may make room at once
        while !self.dispatch.queue().is_empty() {
            let mut delivered = Vec::new();
            let may_open = self.may_open();
            self.dispatch.pump(may_open, self.now_ms, |request, placed| {
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

    // ---- workers ----

    fn begin_step(&mut self, place: usize) {
        let worker = &mut self.workers[place];
        if let Some(ends_ms) = worker.begin_step(self.now_ms) {
            let life = worker.life;
            self.events.at(ends_ms, Event::StepEnds { worker: place, life });
        }
    }

    /// A step's frames reach the router. The next step begins before the router can answer.
    fn step_ends(&mut self, place: usize, life: u64) {
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        if worker.life != life {
            return;
        }
        let Some(result) = worker.end_step(now_ms) else { return };
        self.begin_step(place);
        let (worker, scheduler) = (&mut self.workers[place], &mut self.dispatch.scheduler);
        if let Some(blocks) = &result.blocks {
            worker.send_blocks(blocks, scheduler, now_ms);
        }
        worker.send_step(&result.step, scheduler, now_ms);
        for output in &result.step.outputs {
            let worker = &mut self.workers[place];
            let request = self.legs[output.request.0 as usize];
            let arrival = &mut self.arrivals[request];
            let tokens = u32::try_from(output.ids.len()).unwrap_or(u32::MAX);
            arrival.tokens(tokens, output.cached_tokens, &worker.name, now_ms);
            if let Some(cached) = output.cached_tokens {
                let begun = self.dispatch.scheduler.begun(output.request, cached, now_ms);
                if let Some(begun) = begun {
                    let off_ms = (begun.predicted_ttft_ms - begun.ttft_ms).abs();
                    self.prediction_errors.push(off_ms / begun.ttft_ms.max(1e-3));
                    worker.disbelieve(begun.withdrawn, now_ms);
                }
            }
        }
        for output in result.step.outputs.iter().filter(|output| output.finish.is_some()) {
            let request = self.legs[output.request.0 as usize];
            let tokens = self.arrivals[request].completion_tokens();
            self.dispatch.end(output.request, Output { tokens, complete: true }, now_ms);
            self.end(request, |arrival| arrival.state = State::Done);
        }
        self.workers[place].resync(&mut self.dispatch.scheduler, now_ms);
        self.pump();
    }

    /// A fault begins or ends, or the simulation does.
    fn change(&mut self, place: usize) {
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        let next_ms = worker.mischief.next_change_ms(now_ms);
        if next_ms.is_finite() {
            self.events.at(next_ms, Event::Changes(place));
        }
        match worker.mischief.health(now_ms) {
            Health::Dead => {
                worker.die();
                self.leave(place, "its worker died");
            }
            Health::Frozen if worker.frozen_ms.is_none() => {
                worker.frozen_ms = Some(now_ms);
                worker.life += 1;
                let life = worker.life;
                let silent_ms = now_ms + 3.0 * self.heartbeat_ms;
                self.events.at(silent_ms, Event::Silent { worker: place, life });
                let lost_ms = now_ms + self.heartbeat_timeout_ms;
                self.events.at(lost_ms, Event::Lost { worker: place, life });
            }
            Health::Frozen => {}
            Health::Working => self.wake(place),
        }
        self.pump();
    }

    /// A worker that can work does: it joins, or goes on where it was frozen.
    fn wake(&mut self, place: usize) {
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        if let Some(since_ms) = worker.frozen_ms.take() {
            worker.life += 1;
            if worker.step_ms.is_some() {
                worker.step_ends_ms += now_ms - since_ms; // its time stood still
                let life = worker.life;
                self.events.at(worker.step_ends_ms, Event::StepEnds { worker: place, life });
            }
        }
        let scheduler = &mut self.dispatch.scheduler;
        if let Some(link) = &worker.link {
            scheduler.set_open(link.id, true);
        } else {
            self.last_worker += 1;
            worker.join(WorkerId(self.last_worker), scheduler, now_ms);
        }
        self.begin_step(place);
    }

    fn silent(&mut self, place: usize, life: u64) {
        let worker = &self.workers[place];
        if let Some(link) = worker.link.as_ref().filter(|_| worker.life == life) {
            self.dispatch.scheduler.set_open(link.id, false);
        }
    }

    fn lost(&mut self, place: usize, life: u64) {
        if self.workers[place].life == life {
            let worker = &mut self.workers[place];
            worker.engine.cancel_all();
            worker.step_ms = None;
            self.leave(place, "its worker is silent");
            self.pump();
        }
    }

    /// The router loses a worker and all that it was to answer.
    fn leave(&mut self, place: usize, why: &str) {
        let Some(link) = self.workers[place].link.take() else { return };
        self.dispatch.worker_left(link.id, self.now_ms);
        for request in 0..self.arrivals.len() {
            if matches!(self.arrivals[request].state, State::Placed(on) if on == place) {
                self.try_again(request, link.id, why);
            }
        }
    }

    fn sweep(&mut self) {
        let now_ms = self.now_ms;
        let scheduler = &mut self.dispatch.scheduler;
        scheduler.expire_leases(now_ms);
        for worker in &mut self.workers {
            if worker.step_ms.is_none() && worker.mischief.health(now_ms) == Health::Working {
                let heartbeat = worker.engine.heartbeat();
                worker.send_step(&heartbeat, scheduler, now_ms);
                worker.resync(scheduler, now_ms);
            }
        }
        self.events.at(now_ms + self.heartbeat_ms / 2.0, Event::Sweep);
        self.pump();
    }

    fn may_open(&self) -> bool {
        self.workers.iter().any(|worker| worker.link.is_some())
    }
}

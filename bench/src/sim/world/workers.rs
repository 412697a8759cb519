//! What happens to workers: steps, faults, silence; and what the router makes of it.

use headrace_router::core::candidate::WorkerId;
use headrace_router::core::frame::{OtherPrompt, OtherPrompts, Step};
use headrace_router::core::scheduler::Given;

use super::World;
use crate::mock::fault::Health;
use crate::mock::kv_legs::KvLegs;
use crate::sim::events::Event;
use crate::sim::worker::SimWorker;

impl World {
    pub(super) fn begin_step(&mut self, place: usize) {
        if self.is_rank(place) {
            return self.begin_round(place);
        }
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        if worker.step_ms.is_some() || worker.mischief.health(now_ms) != Health::Working {
            return;
        }
        if let Some(ends_ms) = worker.begin_step(now_ms) {
            let life = worker.life;
            self.events.at(ends_ms, Event::StepEnds { worker: place, life });
        }
        self.began(place);
    }

    /// A step began, or there was nothing for it to do.
    pub(super) fn began(&mut self, place: usize) {
        let now_ms = self.now_ms;
        let SimWorker { engine, mischief, .. } = &mut self.workers[place];
        let mut kv_legs = KvLegs { engine, exchange: &mut self.exchange, worker: place, now_ms };
        let said = kv_legs.began(|| mischief.ills(now_ms));
        self.said(place, said);
    }

    /// A step's frames reach the router. The next step begins before the router can answer.
    pub(super) fn step_ends(&mut self, place: usize, life: u64) {
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        if worker.life != life {
            return;
        }
        let Some(mut result) = worker.end_step(now_ms) else { return };
        self.kv_legs(place, |kv_legs| kv_legs.ended(&result));
        self.begin_step(place);
        for (router, given) in self.given(&result.step.outputs).into_iter().enumerate() {
            if let Some(blocks) = &result.blocks {
                let scheduler = &mut self.routers[router].scheduler;
                self.workers[place].send_blocks(blocks, router, scheduler, now_ms);
            }
            self.report(place, router, &result.step, given);
        }
        for output in std::mem::take(&mut result.step.outputs) {
            self.take_in(place, &output);
        }
        for (number, router) in self.routers.iter_mut().enumerate() {
            self.workers[place].resync(number, &mut router.scheduler, now_ms);
        }
        self.dispatch_waiting();
    }

    /// A frame without outputs reaches a router.
    pub(super) fn report(&mut self, place: usize, router: usize, step: &Step, given: Given) {
        if self.routers.len() > 1
            && let Some(id) = self.workers[place].link.as_ref().map(|link| link.id)
        {
            let others = self.prompts_of_others(place, router);
            self.routers[router].scheduler.other_prompts(id, &others);
        }
        let (worker, now_ms) = (&mut self.workers[place], self.now_ms);
        let scheduler = &mut self.routers[router].scheduler;
        let withdrawn = worker.send_step(step, given, scheduler, now_ms);
        worker.disbelieve(router, withdrawn, now_ms);
    }

    fn prompts_of_others(&self, place: usize, router: usize) -> OtherPrompts {
        let (mut behind, mut others) = (0, OtherPrompts::default());
        for (request, tokens, left) in self.workers[place].engine.prompts() {
            match self.legs.get(&request) {
                Some(leg) if self.router_of(leg.request()) != router => {
                    others.add(OtherPrompt { behind, tokens, left, prompts: 1 });
                }
                _ => behind += 1,
            }
        }
        others
    }

    /// A fault begins or ends, or the simulation does.
    pub(super) fn change(&mut self, place: usize) {
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        let next_ms = worker.mischief.next_change_ms(now_ms);
        if next_ms.is_finite() {
            self.events.at(next_ms, Event::Changes(place));
        }
        match worker.mischief.health(now_ms) {
            Health::Dead => {
                for rank in self.ranks(place) {
                    self.workers[rank].die();
                    self.exchange.forget(rank, now_ms);
                    self.leave(rank, "its worker died");
                }
            }
            Health::Frozen if worker.frozen_ms.is_none() => {
                worker.frozen_ms = Some(now_ms);
                worker.life += 1;
                self.exchange.freeze(place, true);
                let life = worker.life;
                let silent_ms = now_ms + 3.0 * self.heartbeat_ms;
                self.events.at(silent_ms, Event::Silent { worker: place, life });
                let lost_ms = now_ms + self.heartbeat_timeout_ms;
                self.events.at(lost_ms, Event::Lost { worker: place, life });
            }
            Health::Frozen => {}
            Health::Working => {
                self.thaw(place);
                if self.all_work(place) {
                    self.ranks(place).for_each(|rank| self.wake(rank));
                }
            }
        }
        self.dispatch_waiting();
    }

    /// A worker goes on where it was frozen.
    fn thaw(&mut self, place: usize) {
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        if let Some(since_ms) = worker.frozen_ms.take() {
            worker.life += 1;
            self.exchange.freeze(place, false);
            self.events.at(now_ms, Event::News(place));
            if worker.step_ms.is_some() {
                worker.step_ends_ms += now_ms - since_ms; // its time stood still
                let life = worker.life;
                self.events.at(worker.step_ends_ms, Event::StepEnds { worker: place, life });
            }
        }
    }

    /// A worker that can work does: it joins, or is open again.
    fn wake(&mut self, place: usize) {
        let now_ms = self.now_ms;
        let worker = &mut self.workers[place];
        if let Some(link) = &worker.link {
            for router in &mut self.routers {
                router.scheduler.set_open(link.id, true);
            }
        } else {
            self.last_worker += 1;
            worker.join(WorkerId(self.last_worker), &mut self.routers, now_ms);
        }
        self.begin_step(place);
    }

    /// It gets no new work, and what it had goes on elsewhere.
    pub(super) fn silent(&mut self, place: usize, life: u64) {
        if self.workers[place].link.is_none() || self.workers[place].life != life {
            return;
        }
        for rank in self.ranks(place) {
            if let Some(link) = &self.workers[rank].link {
                let id = link.id;
                for router in &mut self.routers {
                    router.scheduler.set_open(id, false);
                }
                self.give_up_legs(rank, id, "its worker is silent", true);
            }
        }
        self.dispatch_waiting();
    }

    pub(super) fn lost(&mut self, place: usize, life: u64) {
        if self.workers[place].life == life {
            self.exchange.forget(place, self.now_ms);
            let worker = &mut self.workers[place];
            worker.engine.cancel_all();
            worker.step_ms = None;
            self.leave(place, "its worker is silent");
            self.dispatch_waiting();
        }
    }

    /// The router loses a worker and all that it was to answer.
    pub(super) fn leave(&mut self, place: usize, why: &str) {
        if let Some(link) = self.workers[place].link.take() {
            for router in &mut self.routers {
                router.worker_left(link.id, self.now_ms);
            }
            self.give_up_legs(place, link.id, why, false);
        }
        self.ring();
    }

    pub(super) fn sweep(&mut self) {
        let now_ms = self.now_ms;
        for number in 0..self.routers.len() {
            self.routers[number].scheduler.expire_leases(now_ms);
            for place in 0..self.workers.len() {
                let worker = &self.workers[place];
                if worker.step_ms.is_none() && worker.mischief.health(now_ms) == Health::Working {
                    let heartbeat = worker.engine.heartbeat();
                    self.report(place, number, &heartbeat, Given::default());
                    let scheduler = &mut self.routers[number].scheduler;
                    self.workers[place].resync(number, scheduler, now_ms);
                }
            }
        }
        self.events.at(now_ms + self.heartbeat_ms / 2.0, Event::Sweep);
        self.dispatch_waiting();
    }

    pub(super) fn may_open(&self) -> bool {
        self.workers.iter().any(|worker| worker.link.is_some())
    }
}

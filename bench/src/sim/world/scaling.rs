//! Workers that an autoscaler starts and stops.

use headrace_router::core::scheduler::Targets;

use super::World;
use crate::sim::events::Event;

/// What an autoscaler made of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sim) enum Lifecycle {
    /// It is not there.
    Stopped,
    /// It starts, and will take requests.
    Starting,
    /// It takes them, as far as it is able to.
    Running,
    /// It gets no new ones, and leaves once it has answered those that it has.
    Draining,
}

impl World {
    /// Asks the router what is needed, and starts or stops workers.
    pub(super) fn scale(&mut self) {
        self.let_go();
        let now_ms = self.now_ms;
        let asked = self.routers[0].asked(now_ms);
        let needed = self.routers[0].scheduler.roles().first().and_then(|fleet| {
            let needs = fleet.needs(&asked, self.targets)?;
            usize::try_from(needs.workers).ok()
        });
        let Some(scaler) = &mut self.autoscaler else { return };
        let target = scaler.target(needed, now_ms);
        self.events.at(now_ms + scaler.rules.every_ms, Event::Scales);
        while self.counted(&[Lifecycle::Starting, Lifecycle::Running]) < target && self.one_more() {
        }
        while self.counted(&[Lifecycle::Starting, Lifecycle::Running]) > target && self.one_less() {
        }
        self.let_go();
        self.dispatch_waiting();
    }

    fn counted(&self, which: &[Lifecycle]) -> usize {
        self.workers.iter().filter(|worker| which.contains(&worker.lifecycle)).count()
    }

    fn first(&self, which: Lifecycle) -> Option<usize> {
        self.workers.iter().position(|worker| worker.lifecycle == which)
    }

    /// One that drains goes on: it is there, and its cache with it. Else one starts. False if there is none.
    fn one_more(&mut self) -> bool {
        if let Some(place) = self.first(Lifecycle::Draining) {
            self.workers[place].lifecycle = Lifecycle::Running;
            self.set_open(place, true);
            return true;
        }
        let Some(place) = self.first(Lifecycle::Stopped) else { return false };
        self.workers[place].lifecycle = Lifecycle::Starting;
        let life = self.workers[place].life;
        if let Some(scaler) = &mut self.autoscaler {
            scaler.starts(self.now_ms);
            let there_ms = self.now_ms + scaler.rules.start_ms;
            self.events.at(there_ms, Event::Started { worker: place, life });
        }
        true
    }

    /// The last one drains; one that has not begun yet just ends. False if there is none.
    fn one_less(&mut self) -> bool {
        let last = |which| self.workers.iter().rposition(|worker| worker.lifecycle == which);
        if let Some(place) = last(Lifecycle::Starting) {
            self.stop(place);
            return true;
        }
        let Some(place) = last(Lifecycle::Running) else { return false };
        self.workers[place].lifecycle = Lifecycle::Draining;
        self.set_open(place, false);
        true
    }

    /// A worker that was started is there, unless it was stopped meanwhile.
    pub(super) fn started(&mut self, place: usize, life: u64) {
        let worker = &self.workers[place];
        if worker.lifecycle == Lifecycle::Starting && worker.life == life {
            self.workers[place].lifecycle = Lifecycle::Running;
            self.change(place);
        }
    }

    /// Those that drained leave.
    fn let_go(&mut self) {
        for place in 0..self.workers.len() {
            let worker = &self.workers[place];
            if worker.lifecycle != Lifecycle::Draining || worker.step_ms.is_some() {
                continue;
            }
            let booked =
                worker.link.as_ref().and_then(|link| self.routers[0].scheduler.view(link.id));
            if booked.is_none_or(|view| view.booked_requests == 0) {
                self.workers[place].die();
                self.exchange.forget(place, self.now_ms);
                self.leave(place, "it was not needed");
                self.stop(place);
            }
        }
    }

    fn stop(&mut self, place: usize) {
        self.workers[place].lifecycle = Lifecycle::Stopped;
        self.workers[place].life += 1;
        if let Some(scaler) = &mut self.autoscaler {
            scaler.stops(self.now_ms);
        }
    }

    fn set_open(&mut self, place: usize, open: bool) {
        if let Some(link) = &self.workers[place].link {
            let id = link.id;
            self.routers.iter_mut().for_each(|router| {
                router.scheduler.set_open(id, open);
            });
        }
    }
}

/// What the router scales for: the limits of a good answer.
pub(in crate::sim) fn targets(slo: Option<crate::report::sample::Slo>) -> Targets {
    Targets { ttft_ms: slo.and_then(|slo| slo.ttft_ms), tpot_ms: slo.and_then(|slo| slo.tpot_ms) }
}

//! Groups of ranks: their steps begin together, and each lasts as long as the longest.

use std::ops::Range;

use super::World;
use crate::mock::fault::Health;
use crate::sim::events::Event;

impl World {
    pub(super) fn is_rank(&self, place: usize) -> bool {
        self.roles.rank_of(place).is_some()
    }

    /// A worker and those that step with it.
    pub(super) fn ranks(&self, place: usize) -> Range<usize> {
        match self.roles.rank_of(place) {
            Some((group, _)) => self.roles.ranks_of(group),
            None => place..place + 1,
        }
    }

    pub(super) fn all_work(&self, place: usize) -> bool {
        let mut ranks = self.ranks(place).map(|rank| &self.workers[rank]);
        ranks.all(|worker| worker.mischief.health(self.now_ms) == Health::Working)
    }

    /// All ranks begin a step, if none is in one and one has something to do.
    pub(super) fn begin_round(&mut self, place: usize) {
        let (now_ms, ranks) = (self.now_ms, self.ranks(place));
        let ready = |rank: usize| {
            let worker = &self.workers[rank];
            worker.step_ms.is_none() && worker.link.is_some()
        };
        if !ranks.clone().all(ready) || !self.all_work(place) {
            return;
        }
        let begin = |rank: usize| {
            let worker = &mut self.workers[rank];
            let own_ms = worker.engine.begin_step();
            worker.empty = own_ms.is_none();
            let slowdown = worker.mischief.slowdown(now_ms);
            worker.own_ms = own_ms.unwrap_or(worker.engine.cost().fixed_ms) * slowdown;
            worker.own_ms
        };
        let own_ms: Vec<f64> = ranks.clone().map(begin).collect();
        if ranks.clone().any(|rank| !self.workers[rank].empty) {
            self.rounds.note(&own_ms);
            let ms = own_ms.into_iter().fold(0.0, f64::max);
            for rank in ranks.clone() {
                let worker = &mut self.workers[rank];
                worker.step_ms = Some(ms);
                worker.step_ends_ms = now_ms + ms;
                let life = worker.life;
                self.events.at(worker.step_ends_ms, Event::StepEnds { worker: rank, life });
            }
        } else {
            ranks.clone().for_each(|rank| self.workers[rank].empty = false);
        }
        ranks.for_each(|rank| self.began(rank));
    }
}

//! Faults on demand: what a worker does wrong, when, and what that makes of its frames. Pure.

mod written;

use std::ops::RangeInclusive;

use headrace_router::core::frame::{Blocks, StoredRun};

use super::engine::Engine;
use super::exchange::Ills;
use crate::random::Random;

/// Keys that do not exist, in each event of a worker that overclaims or removes what it never had.
const MADE_UP_KEYS: usize = 256;

/// One fault of some workers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fault {
    pub(crate) workers: RangeInclusive<usize>,
    pub(crate) kind: FaultKind,
    pub(crate) from_ms: f64,
    pub(crate) until_ms: f64,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FaultKind {
    /// Drops its link, its requests and its cache. With an end it comes back then, as a new process.
    Die,
    /// Neither reads nor writes nor computes; the link stays open.
    Freeze,
    /// Stands still in a phase of a step; its link lives. Of ranks only.
    Stall(Phase),
    /// Its Hello names another size of its group. Of ranks only.
    WrongSize,
    /// Its Hello names other weights. Of ranks only.
    WrongWeights,
    /// Each step takes so many times longer.
    Slow(f64),
    /// Each block event is lost with this probability.
    DropEvents(f64),
    /// All block events are lost.
    StopEvents,
    /// Says that it took this share more of each prompt from its cache than it did.
    Lie(f64),
    /// Loses each block that it stores with this probability, at once and without a word.
    Forget(f64),
    /// Stores blocks that do not exist, more and more.
    Overclaim,
    /// Numbers its events with a hole, once.
    Gap,
    /// Puts another epoch on one event.
    WrongEpoch,
    /// Says again what it stored.
    DuplicateStores,
    /// Removes blocks that it never had.
    UnknownRemoves,
    /// KV that is pulled from it takes so many times longer.
    SlowTransfer(f64),
    /// KV that is pulled from it is lost on the way with this probability.
    FailTransfer(f64),
}

/// Where in a step a rank stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Before all agree on the step.
    Agree,
    Dispatch,
    Combine,
    Draft,
}

/// What a worker may do at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Working,
    Frozen,
    Dead,
}

/// The faults of one worker.
#[derive(Debug, Clone)]
pub(crate) struct Mischief {
    number: usize,
    faults: Vec<(Fault, Once)>,
    random: Random,
    /// Numbers that were left out of the events.
    hole: u64,
}

/// Whether a fault that strikes once has struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Once {
    Due,
    Done,
}

impl Mischief {
    pub(crate) fn new(number: usize, seed: u64) -> Self {
        let random = Random::new(Random::new(seed ^ number as u64).next());
        Self { number, faults: Vec::new(), random, hole: 0 }
    }

    /// Takes in a fault that is meant for this worker.
    pub(crate) fn add(&mut self, fault: &Fault) {
        if fault.workers.contains(&self.number) {
            self.faults.push((fault.clone(), Once::Due));
        }
    }

    pub(crate) fn health(&self, now_ms: f64) -> Health {
        let suffers = |fault| self.active(now_ms).any(|kind| kind == fault);
        match (suffers(FaultKind::Die), suffers(FaultKind::Freeze)) {
            (true, _) => Health::Dead,
            (false, true) => Health::Frozen,
            (false, false) => Health::Working,
        }
    }

    /// When the health may change next; infinite where it will not.
    pub(crate) fn next_change_ms(&self, now_ms: f64) -> f64 {
        let times = self.faults.iter().flat_map(|(fault, _)| [fault.from_ms, fault.until_ms]);
        times.filter(|at| *at > now_ms).fold(f64::INFINITY, f64::min)
    }

    /// It does not come to rounds.
    pub(crate) fn stalls_before_round(&self, now_ms: f64) -> bool {
        self.active(now_ms).any(|kind| kind == FaultKind::Stall(Phase::Agree))
    }

    /// Rounds that it has come to do not end.
    pub(crate) fn stalls_in_round(&self, now_ms: f64) -> bool {
        let phases = [Phase::Dispatch, Phase::Combine, Phase::Draft].map(FaultKind::Stall);
        self.active(now_ms).any(|kind| phases.contains(&kind))
    }

    pub(crate) fn wrong_size(&self, now_ms: f64) -> bool {
        self.active(now_ms).any(|kind| kind == FaultKind::WrongSize)
    }

    pub(crate) fn wrong_weights(&self, now_ms: f64) -> bool {
        self.active(now_ms).any(|kind| kind == FaultKind::WrongWeights)
    }

    /// A group that starts anew starts new processes: what has no end ends with the old ones.
    pub(crate) fn cure(&mut self, now_ms: f64) {
        self.faults.retain(|(fault, _)| {
            let of_process = matches!(
                fault.kind,
                FaultKind::Die
                    | FaultKind::Freeze
                    | FaultKind::Stall(_)
                    | FaultKind::WrongSize
                    | FaultKind::WrongWeights
            );
            let frozen = matches!(fault.kind, FaultKind::Freeze | FaultKind::Stall(_));
            let ends = fault.until_ms.is_finite() && !frozen;
            !(of_process && !ends && fault.is_active(now_ms))
        });
    }

    /// How many times longer a step takes.
    pub(crate) fn slowdown(&self, now_ms: f64) -> f64 {
        let times = |kind| if let FaultKind::Slow(times) = kind { times } else { 1.0 };
        self.active(now_ms).map(times).product()
    }

    /// What befalls the next transfer from it.
    pub(crate) fn ills(&mut self, now_ms: f64) -> Ills {
        let times = |kind| if let FaultKind::SlowTransfer(times) = kind { times } else { 1.0 };
        let slow = self.active(now_ms).map(times).product();
        let odds = |kind| if let FaultKind::FailTransfer(odds) = kind { odds } else { 0.0 };
        let odds: f64 = self.active(now_ms).map(odds).fold(0.0, f64::max);
        Ills { slow, fails: odds > 0.0 && self.random.unit() < odds }
    }

    /// Share of each prompt that it says was cached and was not.
    pub(crate) fn lie(&self, now_ms: f64) -> f64 {
        let share = |kind| if let FaultKind::Lie(share) = kind { share } else { 0.0 };
        self.active(now_ms).map(share).sum()
    }

    /// The number that a snapshot must carry.
    pub(crate) fn sequence(&self, sequence: u64) -> u64 {
        sequence + self.hole
    }

    /// What becomes of an event on its way out; `None` if it is lost.
    pub(crate) fn blocks(
        &mut self,
        now_ms: f64,
        mut blocks: Blocks,
        engine: &mut Engine,
    ) -> Option<Blocks> {
        let mut lost = false;
        for (fault, once) in &mut self.faults {
            if !fault.is_active(now_ms) {
                continue;
            }
            match fault.kind {
                FaultKind::Die
                | FaultKind::Freeze
                | FaultKind::Stall(_)
                | FaultKind::WrongSize
                | FaultKind::WrongWeights
                | FaultKind::Slow(_)
                | FaultKind::Lie(_)
                | FaultKind::SlowTransfer(_)
                | FaultKind::FailTransfer(_) => {}
                FaultKind::DropEvents(probability) => lost |= self.random.unit() < probability,
                FaultKind::StopEvents => lost = true,
                FaultKind::Forget(probability) => {
                    for key in stored(&blocks).into_iter().rev() {
                        if self.random.unit() < probability {
                            engine.forget(key);
                        }
                    }
                }
                FaultKind::Overclaim => blocks.stored.push(made_up(&mut self.random)),
                FaultKind::Gap => {
                    self.hole += u64::from(*once == Once::Due);
                    *once = Once::Done;
                }
                FaultKind::WrongEpoch => {
                    blocks.epoch += u64::from(*once == Once::Due);
                    *once = Once::Done;
                }
                FaultKind::DuplicateStores => {
                    let again = blocks.stored.clone();
                    blocks.stored.extend(again);
                }
                FaultKind::UnknownRemoves => {
                    blocks.removed.extend(made_up(&mut self.random).hashes);
                }
            }
        }
        blocks.sequence += self.hole;
        (!lost).then_some(blocks)
    }

    fn active(&self, now_ms: f64) -> impl Iterator<Item = FaultKind> {
        let active = self.faults.iter().filter(move |(fault, _)| fault.is_active(now_ms));
        active.map(|(fault, _)| fault.kind)
    }
}

impl Fault {
    fn is_active(&self, now_ms: f64) -> bool {
        (self.from_ms..self.until_ms).contains(&now_ms)
    }
}

fn stored(blocks: &Blocks) -> Vec<u64> {
    let keys = blocks.stored.iter().flat_map(|run| run.hashes.chunks_exact(8));
    keys.map(|key| u64::from_le_bytes(key.try_into().expect("8 bytes"))).collect()
}

fn made_up(random: &mut Random) -> StoredRun {
    let hashes = (0..MADE_UP_KEYS).flat_map(|_| random.next().to_le_bytes()).collect();
    StoredRun { parent: None, hashes }
}

#[cfg(test)]
mod tests;

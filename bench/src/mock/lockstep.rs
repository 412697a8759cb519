//! Ranks of a group step together: a round begins when all of them have come to it and lasts as long as its longest step. Pure;
//! times are ms of the fleet's clock.

use serde::Serialize;

/// What a rank brings to a round: its own step, and when it came.
#[derive(Debug, Clone, Copy)]
struct Coming {
    own_ms: f64,
    at_ms: f64,
}

/// A round, as it is to one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Round {
    pub(crate) begins_ms: f64,
    /// Infinite where a rank stands still in it.
    pub(crate) ms: f64,
    /// Of that, the rank's own step.
    pub(crate) own_ms: f64,
}

/// What rounds cost, summed up.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RoundSums {
    pub(crate) rounds: u64,
    /// Of each round, `(max - mean) / mean` of the ranks' own steps.
    pub(crate) skew: f64,
    /// Time of all ranks in rounds, and what they waited in it.
    pub(crate) rank_ms: f64,
    pub(crate) waited_ms: f64,
}

impl RoundSums {
    pub(crate) fn note(&mut self, own_ms: &[f64]) {
        let most = own_ms.iter().copied().fold(0.0, f64::max);
        let sum: f64 = own_ms.iter().sum();
        if sum <= 0.0 || !sum.is_finite() {
            return;
        }
        let ranks = own_ms.len() as f64;
        self.rounds += 1;
        self.skew += most * ranks / sum - 1.0;
        self.rank_ms += most * ranks;
        self.waited_ms += most * ranks - sum;
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.rounds += other.rounds;
        self.skew += other.skew;
        self.rank_ms += other.rank_ms;
        self.waited_ms += other.waited_ms;
    }

    /// Means, if there was a round.
    pub(crate) fn report(&self) -> Option<RoundReport> {
        let rounds = self.rounds as f64;
        (self.rounds > 0).then(|| RoundReport {
            rounds: self.rounds,
            step_skew: self.skew / rounds,
            waited_share: self.waited_ms / self.rank_ms,
        })
    }
}

/// Of groups that step together: their rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct RoundReport {
    rounds: u64,
    /// Mean over the rounds of `(max - mean) / mean` of the ranks' own steps.
    step_skew: f64,
    /// Share of the ranks' time in rounds that they waited for one another.
    waited_share: f64,
}

/// The ranks of one group. Its epoch changes when it starts anew.
#[derive(Debug)]
pub(crate) struct Lockstep {
    epoch: u64,
    coming: Vec<Option<Coming>>,
    /// Of the round that all have come to: each rank fetches its own.
    begun: Vec<Option<Round>>,
    /// Ranks that stand still in it.
    still: Vec<usize>,
    /// Somebody wants a round and does not come to it.
    called: bool,
    idle: Vec<bool>,
    sums: RoundSums,
}

impl Lockstep {
    pub(crate) fn new(ranks: usize, epoch: u64) -> Self {
        Self {
            epoch,
            coming: vec![None; ranks],
            begun: vec![None; ranks],
            still: Vec::new(),
            called: false,
            idle: vec![true; ranks],
            sums: RoundSums::default(),
        }
    }

    /// Of its present start.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn sums(&self) -> RoundSums {
        self.sums
    }

    /// A rank comes to the next round with a step of its own, or an empty one. True if the round begins.
    pub(crate) fn come(&mut self, rank: usize, own_ms: f64, at_ms: f64) -> bool {
        self.coming[rank] = Some(Coming { own_ms, at_ms });
        let all: Option<Vec<Coming>> = self.coming.iter().copied().collect();
        let Some(all) = all else { return false };
        let longest = |of: fn(&Coming) -> f64| all.iter().map(of).fold(0.0, f64::max);
        let (ms, begins_ms) = (longest(|coming| coming.own_ms), longest(|coming| coming.at_ms));
        self.sums.note(&all.iter().map(|coming| coming.own_ms).collect::<Vec<_>>());
        for (begun, Coming { own_ms, .. }) in self.begun.iter_mut().zip(&all) {
            *begun = Some(Round { begins_ms, ms, own_ms: own_ms.min(ms) });
        }
        let coming = all.iter().enumerate();
        let still = coming.filter(|(_, coming)| coming.own_ms.is_infinite());
        self.still = still.map(|(rank, _)| rank).collect();
        self.coming.fill(None);
        self.called = false;
        true
    }

    /// The others are to come to a round. True if nobody had said so.
    pub(crate) fn call(&mut self) -> bool {
        !std::mem::replace(&mut self.called, true)
    }

    /// The round that began for a rank, once.
    pub(crate) fn fetch(&mut self, rank: usize) -> Option<Round> {
        self.begun[rank].take()
    }

    /// A rank waits for others, whether or not these have anything to do.
    pub(crate) fn gathers(&self) -> bool {
        self.called || self.coming.iter().any(Option::is_some)
    }

    /// Those that a round waits for, to begin or to end.
    pub(crate) fn missing(&self) -> Vec<usize> {
        if !self.still.is_empty() {
            return self.still.clone();
        }
        let ranks = self.coming.iter().enumerate();
        ranks.filter(|(_, coming)| coming.is_none()).map(|(rank, _)| rank).collect()
    }

    /// A rank's link ended, or began anew: it comes to no round until it says so.
    pub(crate) fn withdraw(&mut self, rank: usize) {
        (self.coming[rank], self.begun[rank], self.idle[rank]) = (None, None, true);
    }

    /// A rank has requests, or none. True if that makes all of them idle.
    pub(crate) fn set_idle(&mut self, rank: usize, idle: bool) -> bool {
        let was = std::mem::replace(&mut self.idle[rank], idle);
        idle && !was && self.all_idle()
    }

    pub(crate) fn all_idle(&self) -> bool {
        self.idle.iter().all(|idle| *idle)
    }

    /// The start of this `epoch` is over, and another one begins. False if that was known.
    pub(crate) fn start_anew(&mut self, epoch: u64, now: u64) -> bool {
        if epoch != self.epoch {
            return false;
        }
        self.epoch = now.max(epoch + 1);
        self.coming.fill(None);
        self.begun.fill(None);
        self.still.clear();
        self.called = false;
        self.idle.fill(true);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_begins_with_the_last_rank_and_lasts_as_long_as_the_longest_step() {
        let mut group = Lockstep::new(3, 7);
        assert!(!group.gathers());
        assert!(!group.come(1, 20.0, 5.0));
        assert!(group.gathers());
        assert_eq!(group.missing(), [0, 2]);
        assert!(!group.come(0, 4.0, 9.0));
        assert_eq!(group.fetch(0), None);
        assert!(group.come(2, 12.0, 6.0));
        let round = |own_ms| Some(Round { begins_ms: 9.0, ms: 20.0, own_ms });
        // one is at the next round before another has seen that this one began
        assert_eq!(group.fetch(1), round(20.0));
        assert!(!group.come(1, 1.0, 29.0));
        assert_eq!(
            [group.fetch(0), group.fetch(2), group.fetch(2)],
            [round(4.0), round(12.0), None]
        );
        let report = group.sums().report().unwrap();
        assert!((report.step_skew - 8.0 / 12.0).abs() < 1e-12, "{report:?}");
        assert!((report.waited_share - 24.0 / 60.0).abs() < 1e-12, "{report:?}");
    }

    #[test]
    fn a_rank_that_stands_still_makes_a_round_without_end() {
        let mut group = Lockstep::new(2, 1);
        group.come(0, f64::INFINITY, 0.0);
        assert!(group.come(1, 3.0, 0.0));
        assert_eq!(group.fetch(1).unwrap().ms, f64::INFINITY);
        assert_eq!(group.missing(), [0]);
        assert_eq!(group.sums(), RoundSums::default());
    }

    #[test]
    fn a_group_starts_anew_once_for_each_loss() {
        let mut group = Lockstep::new(2, 7);
        group.come(0, 1.0, 0.0);
        assert!(group.start_anew(7, 100));
        assert!(!group.start_anew(7, 200), "two ranks noticed it");
        assert_eq!((group.epoch(), group.gathers()), (100, false));
        assert!(group.start_anew(100, 100));
        assert_eq!(group.epoch(), 101, "epochs grow");
    }

    #[test]
    fn a_group_is_idle_when_its_last_rank_is() {
        let mut group = Lockstep::new(2, 1);
        group.set_idle(0, false);
        group.set_idle(1, false);
        assert!(!group.set_idle(0, true));
        assert!(group.set_idle(1, true));
        assert!(!group.set_idle(1, true), "it was");
    }
}

//! Which workers a choice among many has to look at: those that it could take, and those that are kept of it. A choice among
//! these alone is the same as one among all.
//!
//! Of each worker there is a floor of what it costs. A worker is estimated only where its floor is not above what another one
//! costs that was estimated, so that most never are.

mod pairs;

use self::pairs::Sources;
use super::{Kv, Named, TIE, Turns};
use crate::core::candidate::Ask;
use crate::core::decision::{KEPT, LeftOut};
use crate::core::estimate::{Estimate, Floor};

/// The workers of a model as one decision finds them, by their places in the order of their ids.
pub(in crate::core) trait Prospects {
    /// How many there are.
    fn len(&self) -> usize;
    /// What a worker can be chosen for.
    fn part(&self, place: usize) -> Part;
    /// It takes the KV of prompts that others compute.
    fn can_pull(&self, place: usize) -> bool;
    /// What turns go by.
    fn named(&self, place: usize) -> Named;
    /// What it costs at least; what it costs, once it was estimated.
    fn floor(&self, place: usize) -> Floor;
    /// What it costs.
    fn estimate(&mut self, place: usize) -> Estimate;
    /// What a pair with this decode worker costs at least beside the prompt, if each prefill worker has at least so many tokens of
    /// it to compute in its last step.
    fn decode_floor_ms(&self, decode: usize, last_tokens: f64) -> f64;
    /// Tokens of the prompt that a prefill worker computes in its last step.
    fn last_tokens(&self, prefill: usize) -> f64;
    /// What a pair costs in all.
    fn pair_ms(&mut self, prefill: usize, decode: usize) -> f64;
}

/// What a worker can be chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::core) struct Part {
    /// It generates.
    pub(in crate::core) decodes: bool,
    /// It cannot be chosen.
    pub(in crate::core) excluded: bool,
    /// It would be an option: open, or a prefill worker with a long queue.
    pub(in crate::core) is_option: bool,
}

/// What a choice has to look at.
#[derive(Debug, PartialEq)]
pub(in crate::core) struct Shortlist {
    /// The places of the workers, in order.
    pub(in crate::core) places: Vec<usize>,
    /// All others.
    pub(in crate::core) left_out: LeftOut,
}

impl Kv {
    /// `None` if the choice has to look at all: none can be taken, or some cost is no number.
    pub(in crate::core) fn shortlist(
        &self,
        prospects: &mut impl Prospects,
        ask: &Ask,
    ) -> Option<Shortlist> {
        let options = Options::of(prospects);
        let mut search = Search { prospects, latest_ms: f64::INFINITY, session: ask.session };
        search.run(self, options, ask.deadline_ms)
    }
}

/// What can be chosen, in the order of the ids.
struct Options {
    wholes: Vec<usize>,
    /// None where nobody can pull.
    prefills: Vec<usize>,
    first_puller: Option<usize>,
}

impl Options {
    fn of(prospects: &impl Prospects) -> Self {
        let (mut wholes, mut prefills) = (Vec::with_capacity(prospects.len()), Vec::new());
        for place in 0..prospects.len() {
            let part = prospects.part(place);
            if part.is_option {
                if part.decodes { &mut wholes } else { &mut prefills }.push(place);
            }
        }
        let first_puller = wholes.iter().copied().find(|whole| prospects.can_pull(*whole));
        if first_puller.is_none() {
            prefills.clear();
        }
        Self { wholes, prefills, first_puller }
    }
}

struct Search<'a, P> {
    prospects: &'a mut P,
    session: Option<u64>,
    /// The first token has to come by then.
    latest_ms: f64,
}

impl<P: Prospects> Search<'_, P> {
    fn run(&mut self, kv: &Kv, options: Options, deadline_ms: Option<f64>) -> Option<Shortlist> {
        let Options { wholes, prefills, first_puller } = options;
        let mut places = Vec::with_capacity(4 * KEPT);
        if let Some(deadline_ms) = deadline_ms {
            let all: Vec<_> = wholes.iter().chain(&prefills).copied().collect();
            let ttft_ms = |prospects: &mut P, place| Some(prospects.estimate(place).ttft_ms());
            let (soonest_ms, at) = self.least(&all, |floor| floor.ttft_ms, ttft_ms);
            places.extend(at);
            let in_time = soonest_ms <= deadline_ms;
            self.latest_ms = if in_time { deadline_ms } else { soonest_ms * (1.0 + TIE) };
        }
        let (alone_ms, alone) = self.best_alone(&wholes);
        let sources = Sources::of(self, &prefills);
        let pair = self.best_pair(&wholes, &sources);
        let least_ms = pair.map_or(alone_ms, |pair| alone_ms.min(pair.ms));
        if !least_ms.is_finite() {
            return None;
        }
        let enough_ms = least_ms * (1.0 + TIE);
        let turns = Turns { last: kv.last, session: self.session };
        let named = |prospects: &P, place: &usize| prospects.named(*place);
        let names: Vec<_> = wholes.iter().map(|place| named(self.prospects, place)).collect();
        let is_equal = |i: usize| self.is_equal(wholes[i], &sources, enough_ms);
        let whole = wholes[turns.next(&names, |name| *name, is_equal)?];
        if !self.is_enough_alone(whole, enough_ms) {
            let turns = Turns { last: kv.last_prefill, session: self.session };
            let names: Vec<_> = prefills.iter().map(|place| named(self.prospects, place)).collect();
            let is_equal =
                |i: usize| self.pair_ms(prefills[i], whole).is_some_and(|ms| ms <= enough_ms);
            places.push(prefills[turns.next(&names, |name| *name, is_equal)?]);
        }
        // what it is among, so that the least is the least, what it takes, and what it would name
        places.extend(
            alone.into_iter().chain([whole]).chain(first_puller.filter(|_| !prefills.is_empty())),
        );
        places.extend(pair.into_iter().flat_map(|pair| [pair.prefill, pair.decode]));
        for decodes in [false, true] {
            self.keep_best(decodes, &mut places);
        }
        places.sort_unstable();
        places.dedup();
        let left_out = self.left_out(&places)?;
        Some(Shortlist { places, left_out })
    }

    /// The least of some workers' values, and whose it is. A worker without a value is passed over; `floor` is what a value is at
    /// least.
    fn least(
        &mut self,
        places: &[usize],
        floor: impl Fn(Floor) -> f64,
        value: impl Fn(&mut P, usize) -> Option<f64>,
    ) -> (f64, Option<usize>) {
        let mut lowest = (f64::INFINITY, None);
        for &place in places {
            let floor = floor(self.prospects.floor(place));
            if floor < lowest.0 {
                lowest = (floor, Some(place));
            }
        }
        let mut least = (f64::INFINITY, None);
        for &place in lowest.1.iter().chain(places) {
            if floor(self.prospects.floor(place)) < least.0
                && let Some(value) = value(self.prospects, place)
                && value < least.0
            {
                least = (value, Some(place));
            }
        }
        least
    }

    fn best_alone(&mut self, wholes: &[usize]) -> (f64, Option<usize>) {
        let latest_ms = self.latest_ms;
        let in_time_ms = |prospects: &mut P, place| {
            let may_be = prospects.floor(place).ttft_ms <= latest_ms;
            let estimate = may_be.then(|| prospects.estimate(place))?;
            (estimate.ttft_ms() <= latest_ms).then(|| estimate.total_ms())
        };
        self.least(wholes, |floor| floor.total_ms, in_time_ms)
    }

    /// It is in time, and costs no more than this alone.
    fn is_enough_alone(&mut self, place: usize, enough_ms: f64) -> bool {
        let floor = self.prospects.floor(place);
        if floor.total_ms > enough_ms || floor.ttft_ms > self.latest_ms {
            return false;
        }
        let estimate = self.prospects.estimate(place);
        estimate.total_ms() <= enough_ms && estimate.ttft_ms() <= self.latest_ms
    }

    /// The same, or with a partner.
    fn is_equal(&mut self, whole: usize, sources: &Sources, enough_ms: f64) -> bool {
        self.is_enough_alone(whole, enough_ms) || self.is_enough_with_any(whole, sources, enough_ms)
    }

    /// Places of the best of a kind, those that can be chosen first: as many as are kept of a decision.
    fn keep_best(&mut self, decodes: bool, places: &mut Vec<usize>) {
        let mut free = KEPT;
        for excluded in [false, true] {
            let of_kind = |place: &usize| {
                let part = self.prospects.part(*place);
                part.decodes == decodes && part.excluded == excluded
            };
            let all: Vec<usize> = (0..self.prospects.len()).filter(of_kind).collect();
            if all.len() > free {
                places.extend(self.best(&all, free));
                return;
            }
            free -= all.len();
            places.extend(all);
            if free == 0 {
                return;
            }
        }
    }

    /// So many of `all` that cost least, the first ones of equals.
    fn best(&mut self, all: &[usize], most: usize) -> Vec<usize> {
        let mut lowest = Best::new(most);
        for &place in all {
            lowest.add(self.prospects.floor(place).total_ms, place);
        }
        let mut best = Best::new(most);
        for &(_, place) in &lowest.list {
            best.add(self.prospects.estimate(place).total_ms(), place);
        }
        for &place in all {
            if self.prospects.floor(place).total_ms <= best.most_ms()
                && !best.list.iter().any(|(_, other)| *other == place)
            {
                best.add(self.prospects.estimate(place).total_ms(), place);
            }
        }
        best.list.into_iter().map(|(_, place)| place).collect()
    }

    /// All but these, which are in order; `None` if the cost of some is no number.
    fn left_out(&mut self, kept: &[usize]) -> Option<LeftOut> {
        let (mut kept, mut able) = (kept.iter().peekable(), Vec::new());
        let (mut candidates, mut excluded) = (0, 0);
        for place in 0..self.prospects.len() {
            if self.prospects.floor(place).total_ms.is_nan() {
                return None;
            }
            if kept.next_if(|kept| **kept == place).is_some() {
                continue;
            }
            candidates += 1;
            if self.prospects.part(place).excluded {
                excluded += 1;
            } else {
                able.push(place);
            }
        }
        let total_ms = |prospects: &mut P, place| Some(prospects.estimate(place).total_ms());
        let (least_ms, _) = self.least(&able, |floor| floor.total_ms, total_ms);
        Some(LeftOut::new(candidates, excluded, least_ms))
    }
}

/// The least of some values, with their places: in order, the first places first of equals.
struct Best {
    most: usize,
    list: Vec<(f64, usize)>,
}

impl Best {
    fn new(most: usize) -> Self {
        Self { most, list: Vec::with_capacity(most + 1) }
    }

    /// Above this nothing is taken any more.
    fn most_ms(&self) -> f64 {
        if self.list.len() < self.most { f64::INFINITY } else { self.list[self.most - 1].0 }
    }

    fn add(&mut self, ms: f64, place: usize) {
        if let Some(last) = self.list.get(self.most - 1)
            && (ms > last.0 || (ms == last.0 && place > last.1))
        {
            return;
        }
        let is_before =
            |other: &(f64, usize)| other.0.total_cmp(&ms).then(other.1.cmp(&place)).is_lt();
        let at = self.list.partition_point(is_before);
        self.list.insert(at, (ms, place));
        self.list.truncate(self.most);
    }
}

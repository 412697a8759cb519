//! Which workers a choice among many has to look at: those that it could take, and those that are kept of it. A choice among
//! these alone is the same as one among all.
//!
//! Of each worker there is a floor of what it costs. A worker is estimated only where its floor is not above what another one
//! costs that was estimated, so that most never are.

mod pairs;

use self::pairs::PrefillFloors;
use super::{EqualsTurn, Kv, TIE, TurnName};
use crate::core::candidate::{Ask, Exclusion, WorkerId};
use crate::core::decision::{KEPT, LeftOut};
use crate::core::estimate::{CostFloors, Estimate, coarse};

/// Workers beside the kept ones of a kind that a choice may name or need: of the best so many, one at least is left out if any is.
const NAMED: usize = 6;

/// The workers of a model as one decision finds them, by their places in the order of their ids.
pub(in crate::core) trait Prospects {
    /// It takes the KV of prompts that others compute.
    fn can_pull(&self, place: usize) -> bool;
    /// What turns go by.
    fn named(&self, place: usize) -> TurnName;
    /// What each costs at least; what it costs, once it was estimated.
    fn floors(&self) -> &CostFloors;
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

/// Who can be chosen, by place and in order: those that only compute prompts, and the others.
#[derive(Debug, Default)]
pub(in crate::core) struct Eligible {
    able: [Vec<usize>; 2],
    excluded: [Vec<usize>; 2],
    /// Prefill workers with long queues, which are options: whoever wants one has to wait.
    long: Vec<usize>,
}

impl Eligible {
    /// Nobody yet.
    pub(in crate::core) fn clear(&mut self) {
        let lists = self.able.iter_mut().chain(&mut self.excluded);
        lists.chain([&mut self.long]).for_each(Vec::clear);
    }

    /// One more.
    #[inline]
    pub(in crate::core) fn add(&mut self, place: usize, decodes: bool, why: Option<Exclusion>) {
        let kind = usize::from(decodes);
        match why {
            None => self.able[kind].push(place),
            Some(why) => {
                self.excluded[kind].push(place);
                if why == Exclusion::Backlog && !decodes {
                    self.long.push(place);
                }
            }
        }
    }

    fn wholes(&self) -> &[usize] {
        &self.able[1]
    }

    /// Options to compute the prompt.
    fn prefills(&self) -> &[usize] {
        if self.long.is_empty() { &self.able[0] } else { &self.long }
    }
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
        eligible: &Eligible,
        ask: &Ask,
    ) -> Option<Shortlist> {
        let mut search =
            ShortlistSearch { prospects, eligible, latest_ms: f64::INFINITY, places: Vec::new() };
        let best = [false, true].map(|decodes| search.keep_best(decodes));
        search.run(self, ask, &best[1])?;
        let left_out = search.left_out(&best);
        let nonsense = search.prospects.floors().has_nonsense();
        (!nonsense).then_some(Shortlist { places: search.places, left_out })
    }
}

struct ShortlistSearch<'a, P> {
    prospects: &'a mut P,
    eligible: &'a Eligible,
    /// The first token has to come by then.
    latest_ms: f64,
    /// What was found.
    places: Vec<usize>,
}

/// The least that some worker costs, as far as it is known: between two bounds.
#[derive(Clone, Copy)]
struct LeastCost {
    ms: [f64; 2],
}

impl LeastCost {
    /// Whether a cost counts as equal; `None` if that is not known.
    fn equals(&self, ms: f64) -> Option<bool> {
        let [surely, at_most] = self.ms.map(|least_ms| ms <= least_ms * (1.0 + TIE));
        (surely == at_most).then_some(surely)
    }
}

impl<P: Prospects> ShortlistSearch<'_, P> {
    /// Finds all that the choice depends on, or names. `best`: some of the best that generate.
    fn run(&mut self, kv: &Kv, ask: &Ask, best: &[usize]) -> Option<()> {
        let wholes = self.eligible.wholes();
        let mut prefills = self.eligible.prefills();
        if !wholes.iter().any(|whole| self.prospects.can_pull(*whole)) {
            prefills = &[];
        }
        if prefills.is_empty() && ask.deadline_ms.is_none() {
            let least = self.about_least(best)?;
            if let Some(whole) = self.whose_turn(kv, ask.session, least) {
                self.places.push(whole);
                self.tidy();
                return Some(());
            }
        }
        if let Some(deadline_ms) = ask.deadline_ms {
            self.be_in_time(prefills, deadline_ms);
        }
        let (alone_ms, alone) = self.best_alone();
        let sources = PrefillFloors::of(self, prefills);
        let pair = self.best_pair(wholes, &sources);
        let least_ms = pair.map_or(alone_ms, |pair| alone_ms.min(pair.ms));
        if !least_ms.is_finite() {
            return None;
        }
        let enough_ms = least_ms * (1.0 + TIE);
        let whole = self.turn(wholes, kv.last, ask.session, |search, whole| {
            search.is_enough_alone(whole, enough_ms)
                || search.is_enough_with_any(whole, &sources, enough_ms)
        })?;
        if !self.is_enough_alone(whole, enough_ms) {
            let prefill =
                self.turn(prefills, kv.last_prefill, ask.session, |search, prefill| {
                    search.pair_ms(prefill, whole).is_some_and(|ms| ms <= enough_ms)
                })?;
            self.places.push(prefill);
        }
        // what it takes, what makes the least the least, and what it names
        self.places.push(whole);
        self.places.extend(alone);
        self.places.extend(pair.into_iter().flat_map(|pair| [pair.prefill, pair.decode]));
        self.tidy();
        Some(())
    }

    fn tidy(&mut self) {
        self.places.sort_unstable();
        self.places.dedup();
    }

    /// Whose turn it is of some workers.
    fn turn(
        &mut self,
        places: &[usize],
        last: Option<WorkerId>,
        session: Option<u64>,
        mut is_equal: impl FnMut(&mut Self, usize) -> bool,
    ) -> Option<usize> {
        let named = |search: &&mut Self, place: &usize| search.prospects.named(*place);
        let is_equal = |search: &mut &mut Self, i: usize| is_equal(search, places[i]);
        let next = EqualsTurn { last, session }.next(&mut &mut *self, places, named, is_equal);
        next.map(|i| places[i])
    }

    /// Whose turn it is where each is alone and none is late; `None` if the least has to be known better.
    fn whose_turn(&mut self, kv: &Kv, session: Option<u64>, least: LeastCost) -> Option<usize> {
        let mut is_known = true;
        let mut equals = |ms: f64| {
            is_known &= least.equals(ms).is_some();
            least.equals(ms) == Some(true)
        };
        let whole = self.turn(self.eligible.wholes(), kv.last, session, |search, place| {
            search.prospects.floors().total_ms(place) <= least.ms[1] * (1.0 + TIE)
                && equals(search.prospects.estimate(place).total_ms())
        });
        // the choice among the few knows the least of them only
        for &place in
            self.places.iter().filter(|place| self.eligible.wholes().binary_search(place).is_ok())
        {
            equals(self.prospects.estimate(place).total_ms());
        }
        whole.filter(|_| is_known)
    }

    /// What the cheapest worker alone costs, between the lowest floor and the best of those that the choice is among.
    fn about_least(&mut self, best: &[usize]) -> Option<LeastCost> {
        let wholes = self.eligible.wholes();
        let (mut lowest_ms, mut lowest) = (f64::INFINITY, *wholes.first()?);
        for &place in wholes {
            let floor_ms = self.prospects.floors().total_ms(place);
            if floor_ms < lowest_ms {
                (lowest_ms, lowest) = (floor_ms, place);
            }
        }
        let known = best
            .iter()
            .take(KEPT)
            .chain([&lowest])
            .map(|place| self.prospects.estimate(*place).total_ms());
        let least_ms = known.fold(f64::INFINITY, f64::min);
        least_ms.is_finite().then_some(LeastCost { ms: [lowest_ms.min(least_ms), least_ms] })
    }

    /// Only who gives the first token in time counts, or those that are soonest.
    fn be_in_time(&mut self, prefills: &[usize], deadline_ms: f64) {
        let all: Vec<_> = self.eligible.wholes().iter().chain(prefills).copied().collect();
        let (soonest_ms, at) = soonest(self.prospects, &all);
        self.places.extend(at);
        let in_time = soonest_ms <= deadline_ms;
        self.latest_ms = if in_time { deadline_ms } else { soonest_ms * (1.0 + TIE) };
    }

    fn best_alone(&mut self) -> (f64, Option<usize>) {
        let latest_ms = self.latest_ms;
        let in_time_ms = |prospects: &mut P, place| {
            let may_be = prospects.floors().ttft_ms(place) <= latest_ms;
            let estimate = may_be.then(|| prospects.estimate(place))?;
            (estimate.ttft_ms() <= latest_ms).then(|| estimate.total_ms())
        };
        least(self.prospects, self.eligible.wholes(), CostFloors::total_ms, in_time_ms)
    }

    /// It is in time, and costs no more than this alone.
    fn is_enough_alone(&mut self, place: usize, enough_ms: f64) -> bool {
        let floors = self.prospects.floors();
        if floors.total_ms(place) > enough_ms || floors.ttft_ms(place) > self.latest_ms {
            return false;
        }
        let estimate = self.prospects.estimate(place);
        estimate.total_ms() <= enough_ms && estimate.ttft_ms() <= self.latest_ms
    }

    /// Finds the best of a kind, those that can be chosen first: as many as are kept of a decision. Some more of those that can
    /// be chosen are among what it gives back, best first.
    fn keep_best(&mut self, decodes: bool) -> Vec<usize> {
        let kind = usize::from(decodes);
        let able = self.best(&self.eligible.able[kind], KEPT + NAMED);
        self.places.extend(able.iter().take(KEPT));
        let excluded = self.best(&self.eligible.excluded[kind], KEPT.saturating_sub(able.len()));
        self.places.extend(excluded);
        able
    }

    /// So many of `all` that cost least, the first ones of equals.
    fn best(&mut self, all: &[usize], most: usize) -> Vec<usize> {
        let mut lowest = BestPlaces::new(most);
        for &place in all {
            lowest.add(self.prospects.floors().total_ms(place), place);
        }
        let mut best = BestPlaces::new(most);
        for &(_, place) in &lowest.list {
            best.add(self.prospects.estimate(place).total_ms(), place);
        }
        for &place in all {
            if best.takes(self.prospects.floors().total_ms(place), place) && !lowest.has(place) {
                best.add(self.prospects.estimate(place).total_ms(), place);
            }
        }
        best.list.into_iter().map(|(_, place)| place).collect()
    }

    /// All but those that were found. `best`: the first of each kind that can be chosen.
    fn left_out(&mut self, best: &[Vec<usize>; 2]) -> LeftOut {
        let mut all = LeftOut::default();
        for (kind, best) in best.iter().enumerate() {
            let left = |list: &[usize]| {
                let found = self.places.iter().filter(|place| list.binary_search(place).is_ok());
                list.len() - found.count()
            };
            let excluded = left(&self.eligible.excluded[kind]);
            let candidates = left(&self.eligible.able[kind]) + excluded;
            let first = best.iter().find(|place| self.places.binary_search(place).is_err());
            let least_ms = first.map_or(0.0, |place| self.prospects.estimate(*place).total_ms());
            all = all.with(&LeftOut::new(candidates, excluded, least_ms));
        }
        all
    }
}

/// The soonest first token that some workers give; `None` if there are none, or some cost is no number.
pub(in crate::core) fn soonest_ms(prospects: &mut impl Prospects, places: &[usize]) -> Option<f64> {
    let (ms, place) = soonest(prospects, places);
    place.filter(|_| !prospects.floors().has_nonsense()).map(|_| ms)
}

fn soonest(prospects: &mut impl Prospects, places: &[usize]) -> (f64, Option<usize>) {
    least(prospects, places, CostFloors::ttft_ms, |prospects, place| {
        Some(prospects.estimate(place).ttft_ms())
    })
}

/// The least of some workers' values, and whose it is. A worker without a value is passed over; `floor` is what a value is at
/// least.
fn least<P: Prospects>(
    prospects: &mut P,
    places: &[usize],
    floor: impl Fn(&CostFloors, usize) -> f64,
    value: impl Fn(&mut P, usize) -> Option<f64>,
) -> (f64, Option<usize>) {
    let mut lowest = (f64::INFINITY, None);
    for &place in places {
        let floor = floor(prospects.floors(), place);
        if floor < lowest.0 {
            lowest = (floor, Some(place));
        }
    }
    let mut least = (f64::INFINITY, None);
    for &place in lowest.1.iter().chain(places) {
        if floor(prospects.floors(), place) < least.0
            && let Some(value) = value(prospects, place)
            && value < least.0
        {
            least = (value, Some(place));
        }
    }
    least
}

/// The least of some values, with their places: in order, the first places first of equals.
struct BestPlaces {
    most: usize,
    list: Vec<(f64, usize)>,
    /// That of the last one, once there are so many.
    last: (f64, usize),
}

impl BestPlaces {
    fn new(most: usize) -> Self {
        let last = if most > 0 { (f64::INFINITY, usize::MAX) } else { (f64::NEG_INFINITY, 0) };
        Self { most, list: Vec::with_capacity(most + 1), last }
    }

    /// It may be among them, if it costs so much at least.
    #[inline]
    fn takes(&self, floor_ms: f64, place: usize) -> bool {
        is_before((coarse(floor_ms), place), self.last)
    }

    fn has(&self, place: usize) -> bool {
        self.list.iter().any(|(_, other)| *other == place)
    }

    #[inline]
    fn add(&mut self, ms: f64, place: usize) {
        if self.takes(ms, place) {
            self.insert((coarse(ms), place));
        }
    }

    fn insert(&mut self, one: (f64, usize)) {
        let at = self.list.partition_point(|other| is_before(*other, one));
        self.list.insert(at, one);
        self.list.truncate(self.most);
        if self.list.len() == self.most {
            self.last = self.list[self.most - 1];
        }
    }
}

/// In the order in which a decision keeps its candidates.
#[inline]
fn is_before(one: (f64, usize), other: (f64, usize)) -> bool {
    one.0 < other.0 || (one.0 == other.0 && one.1 < other.1)
}

#[cfg(test)]
mod tests;

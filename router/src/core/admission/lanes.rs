//! Those that wait, by class and tenant: one *lane* for each pair, first come first served, and all lanes in order of
//! what their tenant got.
//!
//! A tenant's account is the KV block-seconds that it got. In each class it carries a *lift* on top: a lane that begins
//! to wait is lifted to the least account that waits in its class, so that nobody saves up service by being idle or by
//! being new. The lift belongs to the class because classes progress at different speeds: the accounts of those who
//! ask at high priority may be far ahead of the others'.

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map, btree_set};

use super::{Arrival, CLASSES, Total};

/// Idle tenants that are remembered. One that is forgotten begins anew.
const IDLE_TENANTS: usize = 4_096;

/// A lane in the order of its class: by account, then by age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LaneHead {
    pub(super) account: Total,
    pub(super) arrival: Arrival,
    pub(super) tenant: u64,
}

/// All lanes, in the order in which their first ones would go.
#[derive(Debug)]
pub(super) struct Lanes {
    ageing_ms: f64,
    now_ms: f64,
    tenants: HashMap<u64, Tenant>,
    /// Lanes by the class they belong to and the class their first one has climbed to.
    ranks: [[BTreeSet<LaneHead>; CLASSES]; CLASSES],
    /// When the first of a lane climbs next.
    climbs: BTreeSet<(Total, usize, u64)>,
    /// The least account that waited in each class at its last dispatch; never falls.
    clock: [f64; CLASSES],
    /// Tenants with nothing waiting, the idlest first.
    idle: BTreeSet<(u64, u64)>,
    last_turn: u64,
}

#[derive(Debug, Default)]
struct Tenant {
    /// KV blocks that its requests held, times the seconds.
    served: f64,
    lanes: [Lane; CLASSES],
    /// In `idle` under this number, unless one waits.
    idle: Option<u64>,
}

#[derive(Debug, Default)]
struct Lane {
    lift: f64,
    /// With their tokens.
    waiting: BTreeMap<Arrival, u64>,
    place: Option<Place>,
}

/// Where a lane is in `ranks` and `climbs`.
#[derive(Debug)]
struct Place {
    level: usize,
    head: LaneHead,
    climbs_ms: Option<Total>,
}

impl Lanes {
    pub(super) fn new(ageing_ms: f64) -> Self {
        Self {
            ageing_ms,
            now_ms: 0.0,
            tenants: HashMap::new(),
            ranks: Default::default(),
            climbs: BTreeSet::new(),
            clock: [0.0; CLASSES],
            idle: BTreeSet::new(),
            last_turn: 0,
        }
    }

    pub(super) fn join(&mut self, class: usize, id: u64, arrival: Arrival, tokens: u64) {
        let tenant = self.tenants.entry(id).or_default();
        if let Some(idle) = tenant.idle.take() {
            self.idle.remove(&(idle, id));
        }
        let lane = &mut tenant.lanes[class];
        if lane.waiting.is_empty() {
            lane.lift = lane.lift.max(self.clock[class] - tenant.served);
        }
        lane.waiting.insert(arrival, tokens);
        self.rank(class, id);
    }

    pub(super) fn leave(&mut self, class: usize, id: u64, arrival: Arrival) {
        let Some(tenant) = self.tenants.get_mut(&id) else { return };
        tenant.lanes[class].waiting.remove(&arrival);
        if tenant.lanes.iter().all(|lane| lane.waiting.is_empty()) {
            self.rest(id);
        }
        self.rank(class, id);
    }

    /// One of this class is about to be dispatched.
    pub(super) fn turn(&mut self, class: usize) {
        let heads = self.ranks[class].iter().filter_map(BTreeSet::first);
        if let Some(least) = heads.map(|head| head.account).min() {
            self.clock[class] = self.clock[class].max(least.0);
        }
    }

    pub(super) fn charge(&mut self, id: u64, block_seconds: f64) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.served += block_seconds;
            let is_idle = tenant.idle.is_some();
            if is_idle {
                self.rest(id);
            }
            for class in 0..CLASSES {
                self.rank(class, id);
            }
        } else if block_seconds > 0.0 {
            let lanes = self.clock.map(|clock| Lane { lift: clock, ..Lane::default() });
            self.tenants.insert(id, Tenant { served: block_seconds, lanes, idle: None });
            self.rest(id);
        }
    }

    /// Lets those climb whose time has come.
    pub(super) fn advance(&mut self, now_ms: f64) {
        self.now_ms = now_ms;
        while let Some(&(climbs_ms, class, id)) = self.climbs.first()
            && climbs_ms.0 <= now_ms
        {
            self.rank(class, id);
        }
    }

    pub(super) fn tenants(&self) -> usize {
        self.tenants.len()
    }

    pub(super) fn served(&self, id: u64) -> Option<f64> {
        self.tenants.get(&id).map(|tenant| tenant.served)
    }

    /// The lanes of a class whose first one has climbed to `level`, best first.
    pub(super) fn ranked(&self, class: usize, level: usize) -> btree_set::Iter<'_, LaneHead> {
        self.ranks[class][level].iter()
    }

    /// A lane that is not empty, oldest first, with the tokens of each.
    pub(super) fn lane(&self, class: usize, id: u64) -> btree_map::Iter<'_, Arrival, u64> {
        self.tenants[&id].lanes[class].waiting.iter()
    }

    pub(super) fn account(&self, class: usize, id: u64) -> f64 {
        let tenant = &self.tenants[&id];
        tenant.served + tenant.lanes[class].lift
    }

    pub(super) fn level(&self, class: usize, arrival: Arrival) -> usize {
        arrival.level(class, self.now_ms, self.ageing_ms)
    }

    pub(super) fn is_overdue(&self, arrival: Arrival) -> bool {
        arrival.is_overdue(self.now_ms, self.ageing_ms)
    }

    /// Puts a lane where it belongs now.
    fn rank(&mut self, class: usize, id: u64) {
        let Some(tenant) = self.tenants.get_mut(&id) else { return };
        let lane = &mut tenant.lanes[class];
        if let Some(place) = lane.place.take() {
            self.ranks[class][place.level].remove(&place.head);
            if let Some(climbs_ms) = place.climbs_ms {
                self.climbs.remove(&(climbs_ms, class, id));
            }
        }
        let Some((&arrival, _)) = lane.waiting.first_key_value() else { return };
        let level = arrival.level(class, self.now_ms, self.ageing_ms);
        let head = LaneHead { account: Total(tenant.served + lane.lift), arrival, tenant: id };
        self.ranks[class][level].insert(head);
        let climbs_ms = (level + 1 < CLASSES)
            .then(|| Total(arrival.climbs_ms(level + 1 - class, self.ageing_ms)));
        if let Some(climbs_ms) = climbs_ms {
            self.climbs.insert((climbs_ms, class, id));
        }
        lane.place = Some(Place { level, head, climbs_ms });
    }

    /// Takes note that a tenant has nothing waiting, and forgets the idlest where there are too many.
    fn rest(&mut self, id: u64) {
        let Some(tenant) = self.tenants.get_mut(&id) else { return };
        self.last_turn += 1;
        if let Some(before) = tenant.idle.replace(self.last_turn) {
            self.idle.remove(&(before, id));
        }
        self.idle.insert((self.last_turn, id));
        if self.idle.len() > IDLE_TENANTS
            && let Some((_, idlest)) = self.idle.pop_first()
        {
            self.tenants.remove(&idlest);
        }
    }
}

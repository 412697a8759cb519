//! Which worker gets a request: all that is known of one model's workers, and the choice. Choice and booking are one
//! step, so that a burst does not pile up on one worker before its first report.
//!
//! Workers say what they hold and how long their steps take; the caller passes that on, asks for placements, and says
//! what became of them. Time comes in as `now_ms`. Nothing else is read, so the same calls give the same decisions.

mod apply;
mod booking;
mod candidates;
mod claims;
mod credit;
mod demand;
mod groups;
mod holdings;
mod leftovers;
mod legs;
mod measured;
mod placement;
mod predictions;
mod view;
mod worker;

use std::collections::HashMap;
use std::sync::Arc;

use crate::core::candidate::{GroupRank, WorkerId};
use crate::core::cost::{StepFeatures, StepFit};
use crate::core::decision::{Chooser, Weighed};
use crate::core::frame::{
    Capacity, MOST_OTHER_PROMPTS, OtherPrompts, QueueRule, RequestId, Role, Step, StepCost,
};
use crate::core::policy::{Eligible, PolicyName};

pub use self::apply::{Applied, Applying};
use self::candidates::ProspectLists;
pub use self::claims::Doubt;
pub use self::credit::Withdrawal;
use self::demand::DemandRecord;
pub use self::demand::{Binding, Forecast, ModelDemand, Needs, RoleFleet, Targets, WaitingPrompts};
pub use self::holdings::Tier;
use self::holdings::{Holdings, Overlaps};
pub use self::leftovers::Leftovers;
use self::legs::BookedLeg;
pub use self::legs::{Begun, Ended, Given, LegDeadlines, LegOutput};
use self::measured::Measured;
pub use self::placement::{NotPlaced, Placement, PlacementRequest, PrefillLeg};
pub use self::view::{SourceView, WorkerView};
use self::worker::Worker;
use self::worker::list::Workers;

/// How to choose.
#[derive(Debug, Clone)]
pub struct RoutingRules {
    /// The policy that chooses.
    pub policy: PolicyName,
    /// Whose opinion is noted beside it.
    pub shadow: Option<PolicyName>,
    /// Under `kv`, a request waits in the router, where order, fairness and deadlines still apply to it, while every worker
    /// has more ms of prompts ahead than this. The other policies know nothing of ms.
    pub worker_queue_ms: f64,
    /// Under `kv`, a request that would wait in a worker anyway first waits so long in the router for those that come with it
    /// ([`Dispatch`](crate::core::dispatch::Dispatch)); 0: each is placed by itself.
    pub gather_ms: f64,
    /// Of the random choices.
    pub seed: u64,
}

/// A worker that joins.
#[derive(Debug, Clone)]
pub struct Joining {
    /// Later than all before.
    pub id: WorkerId,
    /// The worker's name.
    pub name: Arc<str>,
    /// What it does. Those that only compute prompts get prefill legs, the others whole requests and decode legs.
    pub role: Role,
    /// Bytes of one KV block; 0 if its KV cannot be moved.
    pub kv_block_bytes: u64,
    /// How many requests, tokens and blocks it takes.
    pub capacity: Capacity,
    /// Blocks that the index keeps for it, by tier: at most its capacity.
    pub index_room: [u32; 3],
    /// Its place in an expert-parallel group.
    pub group: Option<GroupRank>,
    /// How it shares its steps among prompts.
    pub queue_rule: QueueRule,
    /// What it says its steps cost.
    pub step_prior: Option<StepCost>,
}

/// See the head of this file. `W` is what the caller keeps of each worker: this is the one list of them.
#[derive(Debug)]
pub struct Scheduler<W = ()> {
    rules: RoutingRules,
    /// Decisions keep all their candidates.
    keeps_candidates: bool,
    block_tokens: u32,
    workers: Workers<W>,
    legs: HashMap<RequestId, BookedLeg>,
    /// Of legs whose blocks are booked.
    leases: LegDeadlines,
    holdings: Holdings,
    /// Those before the last worker left.
    left: Option<Holdings>,
    overlaps: Overlaps,
    /// Those of the decision before, whose memory is used again.
    weighed: Weighed,
    prospects: (ProspectLists, Eligible),
    chooser: Chooser,
    shadow: Option<Chooser>,
    demand: DemandRecord,
    /// Workers whose word about their speed began or ended to count, for the caller to tell.
    doubts: Vec<(WorkerId, Option<Doubt>)>,
}

/// Steps after which what is known of a worker says something of its peers, too. Before that it is mostly the guess that it
/// began with, and who begins with a peer's costs takes them for near the truth.
const TAUGHT: u64 = 50;
/// A worker that joins is not taken at its word to be so many times faster than what others of its model were measured at.
const FASTER: f64 = 2.0;

impl<W> Scheduler<W> {
    /// Without workers. `block_tokens` is that of the model's KV layout.
    #[must_use]
    pub fn new(rules: RoutingRules, block_tokens: u32) -> Self {
        Self {
            block_tokens: block_tokens.max(1),
            workers: Workers::default(),
            legs: HashMap::new(),
            leases: LegDeadlines::default(),
            holdings: Holdings::default(),
            left: None,
            overlaps: Overlaps::default(),
            weighed: Weighed::default(),
            prospects: Default::default(),
            chooser: Chooser::new(rules.policy, rules.seed),
            shadow: rules.shadow.map(|policy| Chooser::new(policy, rules.seed ^ 1)),
            demand: DemandRecord::default(),
            doubts: Vec::new(),
            keeps_candidates: false,
            rules,
        }
    }

    /// Decisions keep all their candidates, if `keeps`, so that they can be made again: for whoever writes them down.
    #[must_use]
    pub fn keeping_candidates(self, keeps: bool) -> Self {
        Self { keeps_candidates: keeps, ..self }
    }

    // ---- workers ----

    /// Takes a worker in. It gets no work before [`Self::set_open`], and no credit for blocks before
    /// [`Self::snapshot_complete`].
    pub fn join(&mut self, joining: Joining, member: W) {
        let peers = self.taught_by_others(joining.id);
        let fit = match (&joining.step_prior, peers) {
            (Some(own), Some(peers)) if is_much_faster(own, &peers, &joining.capacity) => {
                StepFit::guess(Some(peers)) // it may be, and the first steps show it
            }
            (own, peers) => StepFit::new(*own, peers),
        };
        let places = self.holdings.join(joining.index_room, joining.capacity.blocks);
        // the ranks of a group share one name, so that they are told by its address
        let mut joining = joining;
        if let Some(rank) = &mut joining.group {
            let groups = self.workers.iter().filter_map(|worker| worker.group.as_ref());
            let mut known = groups.map(|other| &other.group).filter(|group| **group == rank.group);
            rank.group = known.next().unwrap_or(&rank.group).clone();
        }
        self.workers.push(Worker::new(joining, member, fit, places));
        debug_assert!(self.workers.is_sorted_by_key(|worker| worker.id), "ids grow");
    }

    /// Forgets a worker and all legs on it, which are returned with what the caller kept of it. The other half of a split
    /// request stays booked.
    pub fn leave(&mut self, id: WorkerId, now_ms: f64) -> Option<(W, Vec<Ended>)> {
        let i = self.find(id)?;
        let worker = self.workers.remove(i);
        self.workers.iter_mut().for_each(|other| other.inbound.forget(id));
        let block_tokens = self.block_tokens;
        let lost = self.legs.extract_if(|_, leg| leg.worker == id);
        let ended = lost.map(|(_, leg)| {
            if leg.booked {
                self.holdings.unbook(&worker.places, leg.part, &leg.keys);
            }
            leg.ended(0, block_tokens, now_ms)
        });
        let ended = ended.collect();
        self.holdings.leave(worker.places);
        if self.workers.is_empty() {
            // nobody may come who sweeps the old ones
            self.left = Some(std::mem::take(&mut self.holdings));
        }
        Some((worker.member, ended))
    }

    /// The block size of the model changed with its first worker; only while no worker is there.
    pub fn set_block_tokens(&mut self, block_tokens: u32) {
        debug_assert!(self.workers.is_empty(), "blocks of two sizes");
        self.block_tokens = block_tokens.max(1);
    }

    /// How it chooses.
    pub(in crate::core) fn rules(&self) -> &RoutingRules {
        &self.rules
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Lets a worker have new work, or not. True if that was otherwise before.
    pub fn set_open(&mut self, id: WorkerId, open: bool) -> bool {
        self.worker(id).is_some_and(|worker| std::mem::replace(&mut worker.open, open) != open)
    }

    /// What the caller keeps of a worker.
    #[must_use]
    pub fn member(&self, id: WorkerId) -> Option<&W> {
        self.find(id).map(|i| &self.workers[i].member)
    }

    /// The same, to be changed.
    pub fn member_mut(&mut self, id: WorkerId) -> Option<&mut W> {
        self.find(id).map(|i| self.workers.member_mut(i))
    }

    /// What the caller keeps of all workers, in the order of their ids.
    pub fn members(&self) -> impl Iterator<Item = &W> {
        self.workers.iter().map(|worker| &worker.member)
    }

    /// The same, to be changed.
    pub fn members_mut(&mut self) -> impl Iterator<Item = &mut W> {
        self.workers.members_mut()
    }

    /// What is known of the others that is more than a guess.
    fn taught_by_others(&self, id: WorkerId) -> Option<StepCost> {
        let taught = |worker: &&Worker<W>| worker.id != id && worker.fit.steps() >= TAUGHT;
        let taught = self.workers.iter().filter(taught);
        taught.max_by_key(|worker| worker.fit.steps()).map(|worker| worker.fit.cost())
    }

    /// The word of a worker about its speed counts for nothing from now on, or counts again. What was learnt from it while
    /// it was believed is forgotten.
    fn doubt_changed(&mut self, i: usize) {
        let (id, doubt) = (self.workers[i].id, self.workers[i].claims.doubt());
        if doubt.is_some() {
            let peers = self.taught_by_others(id);
            self.workers[i].fit = StepFit::guess(peers);
            self.workers[i].accepted = 1.0;
            self.workers[i].measured = Measured::default();
        }
        self.doubts.push((id, doubt));
    }

    /// Whose word about its speed began (`Some`) or ceased to be doubted since the last call.
    pub fn take_doubts(&mut self) -> Vec<(WorkerId, Option<Doubt>)> {
        std::mem::take(&mut self.doubts)
    }

    /// A report of a worker, with what its outputs gave to requests that had begun before.
    #[must_use = "a withdrawn credit asks for a new snapshot"]
    pub fn step(
        &mut self,
        id: WorkerId,
        step: &Step,
        given: Given,
        now_ms: f64,
    ) -> Option<Withdrawal> {
        let i = self.find(id)?;
        let sets_the_pace = self.sets_the_pace(i, step);
        if self.workers[i].audit(step, given, now_ms) {
            self.doubt_changed(i);
        }
        let worker = &mut self.workers[i];
        let prompts_ms = worker.report(step, given, sets_the_pace, now_ms);
        self.demand.pressure.of(worker.role).computed(prompts_ms, now_ms);
        let silent = worker.credit.silent();
        if silent.is_some() {
            self.forget_blocks(i);
        }
        silent
    }

    /// A worker has these prompts of other routers.
    pub fn other_prompts(&mut self, id: WorkerId, told: &OtherPrompts) {
        let Some(worker) = self.worker(id) else { return };
        worker.tell_others(&told.prompts[..told.prompts.len().min(MOST_OTHER_PROMPTS)]);
    }

    /// In an expert-parallel group the slowest rank makes the step as long as it is; what the others report says nothing
    /// of them, unless they say how long they waited.
    fn sets_the_pace(&self, i: usize, step: &Step) -> bool {
        let worker = &self.workers[i];
        if worker.group.is_none() || step.waited_us > 0 {
            return true;
        }
        let own_ms = worker.predicted_ms(step);
        let others = self.workers.iter().filter(|other| other.steps_with(worker));
        others.map(Worker::running_ms).all(|ms| ms <= own_ms)
    }

    // ---- what workers hold ----

    /// A new snapshot begins: what was known of the worker's blocks counts for nothing.
    pub fn snapshot_begins(&mut self, id: WorkerId) {
        let Some(i) = self.find(id) else { return };
        self.workers[i].credit.withdraw(Withdrawal::Unknown);
        self.forget_blocks(i);
    }

    /// The snapshot is whole: from here on the worker gets credit.
    pub fn snapshot_complete(&mut self, id: WorkerId) {
        let Some(i) = self.find(id) else { return };
        let worker = &mut self.workers[i];
        worker.credit.restore(self.holdings.held(&worker.places));
    }

    /// Its events are not to be believed any more; it gets no credit until the next snapshot.
    pub fn withdraw(&mut self, id: WorkerId, why: Withdrawal) {
        let Some(i) = self.find(id) else { return };
        self.workers[i].credit.withdraw(why);
        self.forget_blocks(i);
    }

    /// Nothing that a worker said of its blocks counts any more: neither for placements nor against the worker, when
    /// those who wait there find less than it had said.
    fn forget_blocks(&mut self, i: usize) {
        let worker = &mut self.workers[i];
        worker.forgotten += 1;
        self.holdings.clear(&mut worker.places);
        self.forget_promises(i);
    }

    fn forget_promises(&mut self, i: usize) {
        for request in self.workers[i].unbegun() {
            if let Some(leg) = self.legs.get_mut(&request) {
                leg.held_blocks = 0;
            }
        }
    }

    /// A worker stored blocks.
    #[must_use = "a withdrawn credit asks for a new snapshot"]
    pub fn stored(&mut self, id: WorkerId, tier: Tier, keys: &[u64]) -> Option<Withdrawal> {
        let i = self.find(id)?;
        let worker = &mut self.workers[i];
        worker.credit.heard();
        if worker.credit.withdrawn() == Some(Withdrawal::OverShare) {
            return None; // until it sends a snapshot that fits
        }
        if self.holdings.store(&worker.places, tier, keys) {
            return None;
        }
        let why = match tier {
            _ if worker.places.room(tier) == worker.capacity_of(tier) => Withdrawal::OverCapacity,
            Tier::Device => Withdrawal::OverShare,
            Tier::Host | Tier::Disk => return None, // shown only, as far as there is room
        };
        self.withdraw(id, why);
        Some(why)
    }

    /// A worker evicted blocks. The number of them that it was not known to hold.
    pub fn removed(&mut self, id: WorkerId, tier: Tier, keys: &[u64]) -> u32 {
        let Some(i) = self.find(id) else { return 0 };
        let worker = &mut self.workers[i];
        worker.credit.heard();
        if keys.is_empty() {
            return 0;
        }
        let unknown = self.holdings.remove(&worker.places, tier, keys);
        if tier == Tier::Device {
            // what was promised to those who wait may be gone: then its absence is no lie
            for request in worker.unbegun() {
                let Some(leg) = self.legs.get_mut(&request) else { continue };
                leg.held_blocks =
                    self.holdings.still_held(&worker.places, &leg.keys, leg.held_blocks);
            }
        }
        unknown
    }

    /// A worker dropped all blocks of a tier.
    pub fn cleared(&mut self, id: WorkerId, tier: Tier) {
        let Some(i) = self.find(id) else { return };
        let worker = &mut self.workers[i];
        worker.credit.heard();
        self.holdings.clear_tier(&mut worker.places, tier);
        if tier == Tier::Device {
            self.forget_promises(i);
        }
    }

    fn find(&self, id: WorkerId) -> Option<usize> {
        self.workers.binary_search_by_key(&id, |worker| worker.id).ok()
    }

    fn worker(&mut self, id: WorkerId) -> Option<&mut Worker<W>> {
        let i = self.find(id)?;
        Some(&mut self.workers[i])
    }
}

/// In full steps of prompts, or in steps of many rows, by its own word.
fn is_much_faster(own: &StepCost, peers: &StepCost, capacity: &Capacity) -> bool {
    let prompts =
        StepFeatures { prefill_tokens: capacity.batched_tokens.into(), ..StepFeatures::default() };
    let rows: f64 = capacity.sequences.into();
    let answers = StepFeatures { rows, kv_tokens: 1_000.0 * rows, ..StepFeatures::default() };
    [prompts, answers].iter().any(|step| FASTER * own.step_ms(step) < peers.step_ms(step))
}

#[cfg(test)]
mod tests;

//! A worker is asked to leave: what its cache holds that is hot goes to others first, then what it runs may end.
//!
//! The router asks it for its hottest blocks ([`Drains::offered`]), shares them out (`core::migration`) and has each target
//! pull its share. What the targets hold in the end is read off the block index, not believed from what was sent. Requests go
//! on meanwhile; what is not done when the budget is over goes on elsewhere, like the requests of any worker that is lost.

mod orders;
mod progress;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use self::orders::Orders;
use self::progress::{DrainProgress, Migration, Outcome, Phase};
use super::link::{Link, LinkError};
use super::pool::WorkerPool;
use super::registry::Registry;
use crate::core::candidate::WorkerId;
use crate::core::frame::{self, Cancel, FailureKind, Frame, MigrationOrder, Offer, Transferred};
use crate::core::secret::PullKey;
use crate::process::lock::Lock;

/// For a worker to say what it offers.
const OFFER: Duration = Duration::from_secs(3);
/// After the budget, for the last words of a worker.
const GRACE: Duration = Duration::from_secs(5);
/// Between the end of a pull and the target's word that it holds the blocks: looked for so long, so far apart.
const ANNOUNCED: Duration = Duration::from_millis(500);
const ANNOUNCED_PAUSE: Duration = Duration::from_millis(25);
/// Look-ups in the index for which the whole router waits at a time: well below a ms.
const LOOKS_AT_ONCE: usize = 2_048;
/// Drains that are remembered, one for each name of a worker.
const REMEMBERED: usize = 256;

/// What was asked for.
#[derive(Debug, Clone, Copy)]
pub struct DrainOrder {
    /// For what runs to end.
    pub budget: Duration,
    /// Blocks to hand over at most.
    pub migration: u32,
}

/// Why a worker is not drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DrainError {
    /// No worker has this name.
    #[error("there is no such worker")]
    Unknown,
    /// It leaves already.
    #[error("the worker leaves already")]
    Already,
}

/// The drains that run, and the last one of each worker.
#[derive(Debug)]
pub(super) struct Drains(Lock<BTreeMap<String, Arc<DrainProgress>>>);

impl Default for Drains {
    fn default() -> Self {
        Self(Lock::new("the drains", BTreeMap::new()))
    }
}

impl Drains {
    fn all(&self) -> Vec<Arc<DrainProgress>> {
        self.0.lock().values().cloned().collect()
    }

    fn named(&self, worker: &str) -> Option<Arc<DrainProgress>> {
        self.0.lock().get(worker).cloned()
    }

    fn remember(&self, drain: &Arc<DrainProgress>) {
        let mut drains = self.0.lock();
        if drains.len() >= REMEMBERED && !drains.contains_key(&drain.worker) {
            let over =
                drains.iter().find(|(_, other)| other.is_over()).map(|(name, _)| name.clone());
            // all run at once: the one that is forgotten goes on all the same
            let name = over.or_else(|| drains.keys().next().cloned());
            drains.remove(&name.expect("there are many"));
        }
        drains.insert(drain.worker.clone(), Arc::clone(drain));
    }

    fn of(&self, id: WorkerId) -> Option<Arc<DrainProgress>> {
        self.all().into_iter().find(|drain| drain.id == id)
    }

    /// A leaving worker offers blocks. False if nobody asked it to.
    pub(super) fn offered(&self, id: WorkerId, offer: Offer) -> bool {
        self.of(id).is_some_and(|drain| drain.offered(offer))
    }

    /// A pull ended, perhaps one of a target.
    pub(super) fn transferred(&self, id: WorkerId, pull: &Transferred) {
        for drain in self.all() {
            drain.pulled(id, pull);
        }
    }

    /// A leaving worker did not finish a request, which goes on elsewhere.
    pub(super) fn moved(&self, id: WorkerId, kind: FailureKind) {
        if kind == FailureKind::Draining
            && let Some(drain) = self.of(id)
        {
            drain.moved(1);
        }
    }

    /// A worker's link ended, with so many legs on it: of one that leaves, or of a target.
    pub(super) fn left(&self, id: WorkerId, legs: usize) {
        for drain in self.all() {
            drain.left(id, legs);
        }
    }
}

impl Registry {
    /// Tells a worker, and the other ranks of its group, to hand its hottest blocks over, to finish what it has, and to leave; how that stands, as in
    /// [`Self::drain_state`].
    ///
    /// # Errors
    /// There is none of this name, or it leaves already.
    pub fn drain(self: &Arc<Self>, worker: &str, order: DrainOrder) -> Result<Value, DrainError> {
        let (drain, mates) = self.drain_alone(worker, order)?;
        for mate in mates {
            let _ = self.drain_alone(&mate.worker, order); // one that leaves already is told no more
        }
        Ok(drain)
    }

    /// The same without the other ranks of its group, who are named.
    pub(super) fn drain_alone(
        self: &Arc<Self>,
        worker: &str,
        order: DrainOrder,
    ) -> Result<(Value, Vec<Arc<Link>>), DrainError> {
        let (drain, link, asked) = self.begin_drain(worker, order)?;
        // those who wait may get other places, or none
        let mates = self.change(link.id, |pool| {
            pool.set_draining(link.id);
            pool.mates(link.id)
        });
        link.will_leave();
        tracing::info!(worker, budget = ?order.budget, blocks = asked, "draining");
        let migration = MigrationOrder { blocks: asked, pull_key: drain.pull_key };
        link.send(drain_frame(order.budget, Some(migration).filter(|order| order.blocks > 0)));
        let (registry, followed) = (Arc::clone(self), Arc::clone(&drain));
        tokio::spawn(async move {
            let end = registry.end.clone();
            end.run_until_cancelled(registry.follow_drain(&followed, &link, order, asked)).await;
        });
        Ok((drain.as_json(), mates.unwrap_or_default()))
    }

    /// Of several orders at once only one finds a worker that does not leave yet. And its drain is known before its link can
    /// end, so that it hears of that.
    fn begin_drain(
        &self,
        worker: &str,
        order: DrainOrder,
    ) -> Result<(Arc<DrainProgress>, Arc<Link>, u32), DrainError> {
        let mut state = self.state();
        let found = state.named(worker).ok_or(DrainError::Unknown)?;
        if found.leaves() {
            return Err(DrainError::Already);
        }
        let (link, source) = (Arc::clone(&found.link), &found.hello);
        let moves = source.kv_block_bytes > 0 && !source.transfer.is_empty();
        let asked = if moves { order.migration } else { 0 };
        let pull_key = PullKey(self.setup.random_bytes());
        let running = link.in_flight();
        let drain = DrainProgress::new(source, link.id, order.budget, asked, running, pull_key);
        let drain = Arc::new(drain);
        self.drains.remember(&drain);
        state.pool(link.id).expect("it was found").set_draining(link.id);
        Ok((drain, link, asked))
    }

    /// The body of `/workers/NAME/drain`; `None` if this worker was never drained.
    #[must_use]
    pub fn drain_state(&self, worker: &str) -> Option<Value> {
        self.drains.named(worker).map(|drain| drain.as_json())
    }

    /// From the order to the end of the link.
    async fn follow_drain(
        self: &Arc<Self>,
        drain: &Arc<DrainProgress>,
        link: &Arc<Link>,
        order: DrainOrder,
        asked: u32,
    ) {
        let deadline = drain.began + order.budget;
        if asked > 0 {
            let outcome = self.migration(drain, order).await;
            drain.migration_ended(outcome);
            // the pins go, and the worker may leave when it has nothing to do
            let left = deadline.saturating_duration_since(Instant::now());
            link.send(drain_frame(left, None));
        } else {
            let why = if order.migration > 0 { Outcome::CannotMove } else { Outcome::NotAsked };
            drain.migration_ended(why);
        }
        let in_time = drain.wait(deadline + GRACE, |state| state.has_left.then_some(())).await;
        if in_time.is_none() {
            tracing::warn!(worker = drain.worker, "it has not left in time: its link is closed");
            link.close(LinkError::DrainLate(order.budget));
            let soon = Instant::now() + GRACE;
            drain.wait(soon, |state| state.has_left.then_some(())).await;
        }
        let summary = drain.end(in_time.is_some());
        self.metrics.links.drains.inc(if in_time.is_some() { "left" } else { "late" });
        tracing::info!(worker = drain.worker, %summary, "drained");
    }

    async fn migration(self: &Arc<Self>, drain: &Arc<DrainProgress>, order: DrainOrder) -> Outcome {
        let until = drain.began + order.budget.min(OFFER);
        let offer = drain.wait(until, |state| match state.offer.take() {
            Some(offer) => Some(Some(offer)),
            None => state.has_left.then_some(None),
        });
        let offer = match offer.await {
            Some(Some(offer)) => offer,
            Some(None) => return Outcome::WorkerLost,
            None => return Outcome::NoOffer,
        };
        if offer.hits.is_empty() {
            return Outcome::NothingCached;
        }
        // half of the budget is the requests' alone; later than the lease nothing is there any more
        let lease = Duration::from_millis(offer.lease_ms.into());
        let limit = (order.budget / 2).min(lease);
        let orders = Orders::new(self, drain, &offer, limit).await;
        drain.begin_migration(&offer, orders.parts());
        if orders.is_empty() {
            let (kept, _) = self.kept(drain, &offer, every(&offer)).await;
            drain.migration_is(kept);
            return Outcome::NoSuccessor;
        }
        for (link, fetch) in orders.into_fetches() {
            link.send(Frame::Fetch(fetch));
        }
        let until = Instant::now() + limit;
        let pulled = drain.wait(until, |state| state.all_pulled().then_some(())).await;
        for (target, request) in drain.give_up_pulls() {
            let links: Vec<Arc<Link>> =
                self.state().pools.values().flat_map(WorkerPool::links).collect();
            if let Some(link) = links.iter().find(|link| link.id == target) {
                link.send(Frame::Cancel(Cancel { request }));
            }
        }
        self.until_announced(drain, &offer).await;
        self.metrics.links.blocks_handed_over.inc_by(drain.blocks_pulled() as u64);
        if pulled.is_some() { Outcome::Done } else { Outcome::Late }
    }

    /// Waits for the targets' own word of what they hold now, shortly, and takes note of it.
    async fn until_announced(&self, drain: &DrainProgress, offer: &Offer) {
        let until = Instant::now() + ANNOUNCED;
        let (mut kept, mut missing) = self.kept(drain, offer, every(offer)).await;
        while kept.blocks < drain.blocks_pulled() && Instant::now() < until {
            drain.migration_is(kept);
            sleep(ANNOUNCED_PAUSE).await;
            let (more, still_missing) = self.kept(drain, offer, missing).await;
            kept = Migration { blocks: kept.blocks + more.blocks, hits: kept.hits + more.hits };
            missing = still_missing;
        }
        drain.migration_is(kept);
    }

    /// What of these places of the offer is held by workers that stay, as the index has it: also what they had before. And
    /// the places of the rest. It looks at a few at a time, for all who use the index wait meanwhile.
    async fn kept(
        &self,
        drain: &DrainProgress,
        offer: &Offer,
        places: Vec<usize>,
    ) -> (Migration, Vec<usize>) {
        let (mut kept, mut missing) = (Migration::default(), Vec::new());
        let stay: Vec<WorkerId> = match self.state().pools.get(&drain.model) {
            Some(pool) => pool.stay().map(|(worker, _)| worker.link.id).collect(),
            None => return (kept, places),
        };
        for some in places.chunks((LOOKS_AT_ONCE / stay.len().max(1)).max(1)) {
            {
                let state = self.state();
                let pool = state.pools.get(&drain.model);
                let holds =
                    |id, key| pool.is_some_and(|pool| pool.dispatch.scheduler.holds(id, key));
                for &place in some {
                    let name = &offer.names[place * frame::NAME_BYTES..];
                    let key = u64::from_le_bytes(name[..8].try_into().expect("8 of 16 bytes"));
                    if stay.iter().any(|&id| holds(id, key)) {
                        kept.blocks += 1;
                        kept.hits += u64::from(offer.hits[place]);
                    } else {
                        missing.push(place);
                    }
                }
            }
            yield_now().await;
        }
        (kept, missing)
    }
}

/// All places of an offer.
fn every(offer: &Offer) -> Vec<usize> {
    (0..offer.hits.len()).collect()
}

fn drain_frame(budget: Duration, migration: Option<MigrationOrder>) -> Frame {
    let budget_ms = u64::try_from(budget.as_millis()).unwrap_or(u64::MAX);
    Frame::Drain(frame::Drain { budget_ms, migration })
}

/// How a phase is called in answers.
impl Phase {
    fn as_str(self) -> &'static str {
        match self {
            Self::Offering => "offering",
            Self::HandingOver => "handing_over",
            Self::Finishing => "finishing",
            Self::Done => "done",
        }
    }
}

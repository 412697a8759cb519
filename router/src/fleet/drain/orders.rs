//! Which target is to pull what: the frames that say so.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::super::link::Link;
use super::super::registry::Registry;
use super::progress::{DrainProgress, Pull};
use crate::core::frame::{Fetch, KvFrom, NAME_BYTES, Offer, RequestId, Role};
use crate::core::migration::{BlockShare, MigrationTarget, divide};

/// Workers that blocks are shared out to, at most: each pulls over a connection of its own.
const SUCCESSORS: usize = 16;

/// One `Fetch` for each target that gets something.
pub(super) struct Orders(Vec<(Arc<Link>, Fetch)>);

impl Orders {
    /// Successors are workers of the same model that stay, can pull and have room; if there are any of the same role, these.
    pub(super) async fn new(
        registry: &Registry,
        drain: &DrainProgress,
        offer: &Offer,
        limit: Duration,
    ) -> Self {
        let (links, targets): (Vec<Arc<Link>>, Vec<MigrationTarget>) =
            targets(registry, drain).into_iter().unzip();
        let (parents, hits) = (offer.parents.clone(), offer.hits.clone());
        // for a big offer this takes some 100 ms
        let shares = spawn_blocking(move || divide(&parents, &hits, &targets)).await;
        let shares = shares.expect("parents were checked when the offer came");
        let orders = shares.into_iter().map(|share| {
            let (request, _) = registry.new_legs(); // a fetch is named like a leg
            (Arc::clone(&links[share.target]), fetch(request, drain, offer, &share, limit))
        });
        Self(orders.collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What each target is to pull, for the progress.
    pub(super) fn parts(&self) -> Vec<Pull> {
        let part = |(link, fetch): &(Arc<Link>, Fetch)| {
            Pull::new(link.id, link.worker.clone(), fetch.request, fetch.offset.len())
        };
        self.0.iter().map(part).collect()
    }

    pub(super) fn into_fetches(self) -> Vec<(Arc<Link>, Fetch)> {
        self.0
    }
}

/// Who may take blocks, the least busy first.
fn targets(registry: &Registry, drain: &DrainProgress) -> Vec<(Arc<Link>, MigrationTarget)> {
    let mut found: Vec<(Arc<Link>, Role, MigrationTarget)> = Vec::new();
    if let Some(pool) = registry.state().pools.get(&drain.model) {
        for (worker, view) in pool.stay() {
            let (hello, used) = (&worker.hello, view.load.blocks_used);
            // half of what requests leave: its own hot blocks are worth as much
            let room = hello.capacity.blocks.saturating_sub(used) / 2;
            if hello.kv_block_bytes == drain.kv_block_bytes && room > 0 {
                found.push((Arc::clone(&worker.link), hello.role, MigrationTarget { room, used }));
            }
        }
    }
    if found.iter().any(|(_, role, _)| *role == drain.role) {
        found.retain(|(_, role, _)| *role == drain.role);
    }
    found.sort_by_key(|(_, _, target)| target.used);
    found.truncate(SUCCESSORS);
    found.into_iter().map(|(link, _, target)| (link, target)).collect()
}

fn fetch(
    request: RequestId,
    drain: &DrainProgress,
    offer: &Offer,
    share: &BlockShare,
    limit: Duration,
) -> Fetch {
    let mut names = Vec::with_capacity(share.blocks.len() * NAME_BYTES);
    let mut parents = Vec::with_capacity(share.blocks.len());
    for &block in &share.blocks {
        let at = block as usize * NAME_BYTES;
        names.extend_from_slice(&offer.names[at..at + NAME_BYTES]);
        let parent = u32::try_from(offer.parents[block as usize]).ok();
        // the share is ascending and holds every block's parent
        let place = parent.and_then(|parent| share.blocks.binary_search(&parent).ok());
        parents.push(place.map_or(-1, |place| i32::try_from(place).expect("a frame has fewer")));
    }
    Fetch {
        request,
        kv_from: KvFrom {
            worker: drain.worker.clone(),
            transfer: drain.transfer.clone(),
            timeout_ms: u32::try_from(limit.as_millis()).unwrap_or(u32::MAX),
            pull_key: drain.pull_key,
        },
        ticket: offer.ticket.clone(),
        names,
        parents,
        offset: share.blocks.clone(),
    }
}

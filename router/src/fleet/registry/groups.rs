//! Groups of ranks: who may join one, what a new start of it ends, and what the loss of a rank means for the others.

use std::sync::Arc;

use super::{Registry, RegistryState};
use crate::core::frame::{Group, Hello, Refuse, RefuseReason};
use crate::fleet::drain::DrainOrder;
use crate::fleet::handshake::Misfit;
use crate::fleet::link::{Link, LinkError};
use crate::fleet::pool::{LostRank, PooledWorker, WorkerPool};

impl Registry {
    /// The requests of all ranks go on elsewhere, since none of them can step.
    pub(super) fn group_lost(&self, lost: LostRank) {
        let LostRank { worker, group, why, orderly, mates } = lost;
        let Group { rank, size, epoch, .. } = group;
        // with the router all groups leave
        if orderly || self.end.is_cancelled() {
            tracing::info!(group = group.id, epoch, size, "group leaves as a whole");
        } else {
            tracing::warn!(
                group = group.id,
                epoch,
                size,
                rank,
                worker,
                why,
                "group lost with a rank"
            );
            self.metrics.links.groups_lost.inc();
        }
        for mate in mates {
            let (group, worker) = (group.id.clone(), worker.clone());
            mate.give_up_legs(LinkError::RankLost { group, rank, worker });
        }
    }

    /// A rank leaves: the others have nobody to step with.
    pub(super) fn drain_mates(self: &Arc<Self>, mates: Vec<Arc<Link>>) {
        let budget = self.setup.config.drain_timeout;
        for mate in mates {
            // those that leave already are told no more
            let _ = self.drain_alone(&mate.worker, DrainOrder { budget, migration: 0 });
        }
    }
}

impl RegistryState {
    /// True if nothing of its group speaks against a worker.
    ///
    /// # Errors
    /// What differs from the ranks that are here.
    pub(super) fn may_group(&self, hello: &Hello, router: &str) -> Result<(), Box<Refuse>> {
        let Some(group) = &hello.group else { return Ok(()) };
        for other in self.ranks_of(&group.id).filter(|other| other.hello.worker != hello.worker) {
            if let Some((reason, misfit)) = misfit(&other.hello, hello) {
                return Err(misfit.refuse(reason, router));
            }
        }
        Ok(())
    }

    /// Workers that make way for this one: that of its name, and ranks of earlier starts of its group.
    pub(super) fn replaced_by(&self, hello: &Hello) -> Vec<Arc<Link>> {
        let of_its_name = self.named(&hello.worker);
        let of_its_group = hello.group.iter().flat_map(|group| self.ranks_of(&group.id));
        let older = of_its_group
            .filter(|other| starts_anew(&other.hello, hello) && other.hello.worker != hello.worker);
        of_its_name.into_iter().chain(older).map(|other| Arc::clone(&other.link)).collect()
    }

    fn ranks_of(&self, group: &str) -> impl Iterator<Item = &PooledWorker> {
        let workers = self.pools.values().flat_map(WorkerPool::workers);
        workers.filter(move |worker| {
            worker.hello.group.as_ref().is_some_and(|other| other.id == group)
        })
    }
}

/// The worker is of a later start of the other one's group.
pub(super) fn starts_anew(other: &Hello, hello: &Hello) -> bool {
    let (Some(before), Some(now)) = (&other.group, &hello.group) else { return false };
    other.model == hello.model && before.id == now.id && before.epoch < now.epoch
}

/// Why a worker cannot be in a group with another rank of it that is here.
fn misfit(other: &Hello, hello: &Hello) -> Option<(RefuseReason, Misfit)> {
    let (before, now) = (other.group.as_ref()?, hello.group.as_ref()?);
    if before.epoch != now.epoch {
        let stale = other.model == hello.model && before.epoch > now.epoch;
        return stale.then(|| {
            let misfit = Misfit {
                field: "group.epoch".into(),
                expected: format!("{} or later", before.epoch),
                got: now.epoch.to_string(),
                message: "this group started again later: end the ranks of its former life",
            };
            (RefuseReason::Superseded, misfit)
        });
    }
    let differs = |field: &str, expected: String, got: String, message| {
        let misfit = Misfit { field: field.into(), expected, got, message };
        Some((RefuseReason::Mismatch, misfit))
    };
    const AGREE: &str =
        "the ranks of a group must agree: start all of them with the same arguments";
    if other.model != hello.model {
        return differs("model", other.model.clone(), hello.model.clone(), AGREE);
    }
    if other.role != hello.role {
        return differs("role", other.role.to_string(), hello.role.to_string(), AGREE);
    }
    if before.size != now.size {
        return differs("group.size", before.size.to_string(), now.size.to_string(), AGREE);
    }
    if before.rank == now.rank {
        let expected = format!("a rank other than {}, which {} is", before.rank, other.worker);
        const TWICE: &str =
            "two workers are the same rank of one start of a group: give each its own";
        return differs("group.rank", expected, now.rank.to_string(), TWICE);
    }
    None
}

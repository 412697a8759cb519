//! Ranks of expert-parallel groups: all of one start of a group take requests together, or none does.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{PooledWorker, WorkerPool};
use crate::core::candidate::WorkerId;
use crate::core::frame::{Group, GroupTotals, Step};
use crate::fleet::link::Link;

/// Weight of a step in the mean time of a rank's own work. A guess: some twenty steps count.
const RECENT_WEIGHT: f64 = 0.05;

/// What a rank did with its time.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct RankTimes {
    work_ms: f64,
    waited_ms: f64,
    tokens: u64,
    /// Of its own work in a step, of late.
    recent_ms: Option<f64>,
}

impl RankTimes {
    /// Takes a frame in; `is_new`: it tells of a step that no frame told of before.
    pub(super) fn note(&mut self, step: &Step, tokens: u64, is_new: bool) {
        self.tokens += tokens;
        if !is_new || !step.ms.is_finite() || step.ms <= 0.0 {
            return;
        }
        let waited_ms = (f64::from(step.waited_us) / 1e3).min(step.ms);
        let work_ms = step.ms - waited_ms;
        self.work_ms += work_ms;
        self.waited_ms += waited_ms;
        let recent_ms = self.recent_ms.get_or_insert(work_ms);
        *recent_ms += RECENT_WEIGHT * (work_ms - *recent_ms);
    }
}

/// A rank without which the others of its group can do nothing.
#[derive(Debug)]
pub(in crate::fleet) struct LostRank {
    pub(in crate::fleet) worker: String,
    pub(in crate::fleet) group: Group,
    pub(in crate::fleet) why: &'static str,
    /// The group was to leave.
    pub(in crate::fleet) orderly: bool,
    /// The others.
    pub(in crate::fleet) mates: Vec<Arc<Link>>,
}

impl PooledWorker {
    /// The other ranks can step with it.
    pub(super) fn takes_part(&self) -> bool {
        !self.silent && self.stuck_at.is_none() && !self.draining
    }

    /// It is a rank of this start of this group.
    pub(in crate::fleet) fn is_of(&self, group: &Group) -> bool {
        let own = self.hello.group.as_ref();
        own.is_some_and(|own| own.epoch == group.epoch && own.id == group.id)
    }
}

impl WorkerPool {
    fn ranks<'a>(&'a self, group: &'a Group) -> impl Iterator<Item = &'a PooledWorker> {
        self.workers().filter(|worker| worker.is_of(group))
    }

    /// The other ranks of a worker's group.
    pub(in crate::fleet) fn mates(&self, id: WorkerId) -> Vec<Arc<Link>> {
        let member = self.dispatch.scheduler.member(id);
        let Some(group) = member.and_then(|worker| worker.hello.group.as_ref()) else {
            return Vec::new();
        };
        let others = self.ranks(group).filter(|worker| worker.link.id != id);
        others.map(|worker| Arc::clone(&worker.link)).collect()
    }

    /// A rank came or went, or began or ceased to take part.
    pub(super) fn regroup(&mut self, group: &Group) {
        let all = |of: fn(&PooledWorker) -> bool| {
            self.ranks(group).filter(|worker| of(worker)).count() == group.size as usize
        };
        let (whole, together) = (all(|worker| !worker.silent), all(PooledWorker::takes_part));
        let ids: Vec<WorkerId> = self.ranks(group).map(|worker| worker.link.id).collect();
        for id in ids {
            if let Some(worker) = self.dispatch.scheduler.member_mut(id) {
                (worker.whole, worker.together) = (whole, together);
            }
            self.tell_scheduler(id);
        }
    }

    /// A worker is gone: if it was a rank of a whole group, the group is lost with it.
    pub(super) fn rank_lost(&mut self, gone: &PooledWorker, why: &'static str) -> Option<LostRank> {
        let group = gone.hello.group.as_ref()?;
        let mates = self.ranks(group).filter(|worker| worker.link.id != gone.link.id);
        let mates = mates.map(|worker| Arc::clone(&worker.link)).collect();
        self.regroup(group);
        gone.whole.then(|| LostRank {
            worker: gone.hello.worker.clone(),
            group: group.clone(),
            why,
            orderly: gone.draining,
            mates,
        })
    }

    /// A worker fell silent, or is heard again.
    pub(super) fn silence_changed(&mut self, id: WorkerId) -> Option<LostRank> {
        let worker = self.dispatch.scheduler.member(id)?;
        let lost = worker.whole && !worker.silent;
        let rank = worker.hello.group.clone().filter(|_| lost);
        let (name, draining) = (worker.hello.worker.clone(), worker.draining);
        self.change(id, |worker| worker.silent = !worker.silent);
        Some(LostRank {
            worker: name,
            group: rank?,
            why: "nothing is heard of it",
            orderly: draining,
            mates: self.mates(id),
        })
    }

    /// What a rank tells of its work for the group. A time that is none counts as nothing.
    pub(in crate::fleet) fn group_totals(&mut self, id: WorkerId, totals: &GroupTotals) {
        let sane = |seconds: f64| if seconds.is_finite() { seconds.max(0.0) } else { 0.0 };
        let totals = GroupTotals {
            held_ms: sane(totals.held_ms),
            gain_s: sane(totals.gain_s),
            cost_s: sane(totals.cost_s),
            spent_s: sane(totals.spent_s),
            ..*totals
        };
        if let Some(worker) = self.dispatch.scheduler.member_mut(id) {
            worker.totals = totals;
        }
    }
}

impl PooledWorker {
    fn rank(&self) -> u32 {
        self.hello.group.as_ref().map_or(0, |group| group.rank)
    }
}

/// A group as operators see it.
pub(in crate::fleet) struct GroupView<'a> {
    pub(in crate::fleet) group: &'a Group,
    pub(in crate::fleet) model: &'a str,
    /// Those that are there, in order.
    pub(in crate::fleet) ranks: Vec<&'a PooledWorker>,
}

impl<'a> GroupView<'a> {
    /// The groups of these workers of a model.
    pub(super) fn of(model: &'a str, workers: impl Iterator<Item = &'a PooledWorker>) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for worker in workers {
            let Some(group) = &worker.hello.group else { continue };
            match groups.iter_mut().find(|view| worker.is_of(view.group)) {
                Some(view) => view.ranks.push(worker),
                None => groups.push(Self { group, model, ranks: vec![worker] }),
            }
        }
        groups.iter_mut().for_each(|view| view.ranks.sort_by_key(|rank| rank.rank()));
        groups
    }

    /// `(max - mean) / mean` of what the ranks themselves do in a step; 0 where that is not known of all.
    fn step_skew(&self) -> f64 {
        let recent = self.ranks.iter().filter_map(|rank| rank.times.recent_ms);
        let recent: Vec<f64> = recent.collect();
        let mean = recent.iter().sum::<f64>() / recent.len().max(1) as f64;
        let most = recent.iter().copied().fold(0.0, f64::max);
        if mean > 0.0 && recent.len() == self.ranks.len() { (most - mean) / mean } else { 0.0 }
    }

    /// Share of the ranks' time in steps that went into waiting for one another.
    fn waited_share(&self) -> f64 {
        let waited: f64 = self.ranks.iter().map(|rank| rank.times.waited_ms).sum();
        let worked: f64 = self.ranks.iter().map(|rank| rank.times.work_ms).sum();
        if waited > 0.0 { waited / (waited + worked) } else { 0.0 }
    }

    /// What the dashboard shows of it.
    pub(in crate::fleet) fn as_tile(&self) -> Value {
        json!({
            "id": self.group.id,
            "model": self.model,
            "size": self.group.size,
            "present": self.ranks.len(),
            "whole": self.ranks.iter().all(|rank| rank.whole),
            "step_skew": self.step_skew(),
            "waited_share": self.waited_share(),
        })
    }

    /// Its entry in `/workers`.
    pub(in crate::fleet) fn as_json(&self) -> Value {
        let ranks = self.ranks.iter().map(|worker| {
            json!({
                "rank": worker.rank(),
                "worker": worker.hello.worker,
                "transport": worker.hello.group.as_ref().map(|group| &group.transport),
                "work_seconds": worker.times.work_ms / 1e3,
                "waited_seconds": worker.times.waited_ms / 1e3,
                "tokens": worker.times.tokens,
            })
        });
        json!({
            "id": self.group.id,
            "epoch": self.group.epoch,
            "model": self.model,
            "size": self.group.size,
            "present": self.ranks.len(),
            "whole": self.ranks.iter().all(|rank| rank.whole),
            "step_skew": self.step_skew(),
            "waited_share": self.waited_share(),
            "ranks": ranks.collect::<Vec<_>>(),
        })
    }
}

type GroupGauge = (&'static str, &'static str, fn(&GroupView<'_>) -> f64);

/// One sample for each group.
pub(in crate::fleet) const GROUP_GAUGES: [GroupGauge; 4] = [
    ("headrace_group_ranks", "Ranks of the group that have a link.", |view| {
        view.ranks.len() as f64
    }),
    ("headrace_group_whole", "1 if all its ranks are there and step.", |view| {
        f64::from(u8::from(view.ranks.iter().all(|rank| rank.whole)))
    }),
    (
        "headrace_group_step_skew",
        "(max - mean) / mean of the ranks' own work in a step, of late.",
        |view| view.step_skew(),
    ),
    (
        "headrace_group_waited_share",
        "Share of the ranks' time in steps that they waited for one another.",
        |view| view.waited_share(),
    ),
];

type RankCounter = (&'static str, &'static str, fn(&PooledWorker) -> f64);

/// One sample for each rank of a group; they begin anew with its link.
pub(in crate::fleet) const RANK_COUNTERS: [RankCounter; 12] = [
    ("headrace_rank_work_seconds_total", "What the rank itself did in steps.", |worker| {
        worker.times.work_ms / 1e3
    }),
    ("headrace_rank_waited_seconds_total", "What it waited for other ranks in steps.", |worker| {
        worker.times.waited_ms / 1e3
    }),
    ("headrace_rank_tokens_total", "Tokens that it generated for this router.", |worker| {
        worker.times.tokens as f64
    }),
    (
        "headrace_rank_held_rounds_total",
        "Rounds in which its prompts waited for those of other ranks.",
        |worker| worker.totals.held_rounds as f64,
    ),
    ("headrace_rank_held_seconds_total", "What its prompts waited there.", |worker| {
        worker.totals.held_ms / 1e3
    }),
    (
        "headrace_rank_expert_waves_total",
        "Waves of moves of experts; all ranks of a group count the same.",
        |worker| worker.totals.waves as f64,
    ),
    ("headrace_rank_expert_slots_total", "Slots of it that got another expert.", |worker| {
        worker.totals.slots as f64
    }),
    ("headrace_rank_expert_bytes_total", "Bytes of experts that it sent.", |worker| {
        worker.totals.bytes as f64
    }),
    (
        "headrace_rank_expert_refusals_total",
        "Plans of moves that a rank refused; all ranks of a group count the same.",
        |worker| worker.totals.refused as f64,
    ),
    (
        "headrace_rank_expert_gain_seconds_total",
        "What moves were predicted to save; all ranks of a group count the same.",
        |worker| worker.totals.gain_s,
    ),
    (
        "headrace_rank_expert_cost_seconds_total",
        "What moves were predicted to take; all ranks of a group count the same.",
        |worker| worker.totals.cost_s,
    ),
    (
        "headrace_rank_expert_spent_seconds_total",
        "What moves took between steps on this rank.",
        |worker| worker.totals.spent_s,
    ),
];

//! How a drain stands: told by the links of the leaving worker and of the targets, read by who asked for it.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::core::candidate::WorkerId;
use crate::core::frame::{
    Hello, Offer, RequestId, Role, TransferBackend, TransferFailure, Transferred,
};
use crate::core::secret::PullKey;
use crate::process::lock::{Held, Lock};

/// One drain. What stays as it was is public; the rest is behind a short lock.
#[derive(Debug)]
pub(super) struct DrainProgress {
    pub(super) worker: String,
    pub(super) id: WorkerId,
    pub(super) model: String,
    pub(super) role: Role,
    pub(super) transfer: Vec<String>,
    pub(super) kv_block_bytes: u64,
    /// What the ticket of its offer is bound to.
    pub(super) pull_key: PullKey,
    pub(super) began: Instant,
    budget: Duration,
    running: usize,
    state: Lock<DrainState>,
    changed: Notify,
}

/// The part of a drain's report that changes while it runs.
#[derive(Debug)]
pub(super) struct DrainState {
    pub(super) phase: Phase,
    pub(super) offer: Option<Offer>,
    /// Whether an offer is wanted, or came.
    asked: bool,
    pub(super) has_left: bool,
    in_time: Option<bool>,
    pulls: Vec<Pull>,
    offered: Migration,
    kept: Migration,
    outcome: Outcome,
    moved: usize,
    took: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Offering,
    HandingOver,
    Finishing,
    Done,
}

/// How the migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Running,
    Done,
    Late,
    NotAsked,
    CannotMove,
    NoOffer,
    NothingCached,
    NoSuccessor,
    WorkerLost,
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Late => "late",
            Self::NotAsked => "not_asked",
            Self::CannotMove => "cannot_move",
            Self::NoOffer => "no_offer",
            Self::NothingCached => "nothing_cached",
            Self::NoSuccessor => "no_successor",
            Self::WorkerLost => "worker_lost",
        }
    }
}

/// Blocks, and how often they were hit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Migration {
    pub(super) blocks: usize,
    pub(super) hits: u64,
}

/// What one target pulls.
#[derive(Debug)]
pub(super) struct Pull {
    target: WorkerId,
    worker: String,
    request: RequestId,
    blocks: usize,
    ended: Option<Ended>,
}

#[derive(Debug)]
struct Ended {
    backend: Option<TransferBackend>,
    blocks: u32,
    bytes: u64,
    ms: f64,
    error: Option<TransferFailure>,
}

impl Ended {
    fn failed(error: TransferFailure) -> Self {
        Self { backend: None, blocks: 0, bytes: 0, ms: 0.0, error: Some(error) }
    }
}

impl Pull {
    pub(super) fn new(target: WorkerId, worker: String, request: RequestId, blocks: usize) -> Self {
        Self { target, worker, request, blocks, ended: None }
    }
}

impl DrainState {
    pub(super) fn all_pulled(&self) -> bool {
        self.pulls.iter().all(|pull| pull.ended.is_some())
    }
}

impl DrainProgress {
    /// `running`: legs on the worker at this moment.
    pub(super) fn new(
        hello: &Hello,
        id: WorkerId,
        budget: Duration,
        asked: u32,
        running: usize,
        pull_key: PullKey,
    ) -> Self {
        let state = DrainState {
            phase: Phase::Offering,
            offer: None,
            asked: asked > 0,
            has_left: false,
            in_time: None,
            pulls: Vec::new(),
            offered: Migration::default(),
            kept: Migration::default(),
            outcome: Outcome::Running,
            moved: 0,
            took: None,
        };
        Self {
            worker: hello.worker.clone(),
            id,
            model: hello.model.clone(),
            role: hello.role,
            transfer: hello.transfer.clone(),
            kv_block_bytes: hello.kv_block_bytes,
            pull_key,
            began: Instant::now(),
            budget,
            running,
            state: Lock::new("a drain", state),
            changed: Notify::new(),
        }
    }

    fn state(&self) -> Held<'_, DrainState> {
        self.state.lock()
    }

    fn change<T>(&self, change: impl FnOnce(&mut DrainState) -> T) -> T {
        let result = change(&mut self.state());
        self.changed.notify_waiters();
        result
    }

    /// What `ready` gives as soon as it gives something; `None` once `until` is over.
    pub(super) async fn wait<T>(
        &self,
        until: Instant,
        mut ready: impl FnMut(&mut DrainState) -> Option<T>,
    ) -> Option<T> {
        loop {
            let changed = self.changed.notified(); // from here on no change is missed
            if let Some(result) = ready(&mut self.state()) {
                return Some(result);
            }
            timeout_at(until, changed).await.ok()?;
        }
    }

    // ---- what links tell ----

    /// False if this worker was not asked for an offer. A second or late one is of no use any more.
    pub(super) fn offered(&self, offer: Offer) -> bool {
        self.change(|state| {
            if state.asked && state.phase == Phase::Offering {
                state.offer.get_or_insert(offer);
            }
            state.asked
        })
    }

    pub(super) fn pulled(&self, target: WorkerId, pull: &Transferred) {
        self.change(|state| {
            let wanted = |own: &&mut Pull| own.request == pull.request && own.target == target;
            let Some(own) = state.pulls.iter_mut().find(wanted) else { return };
            own.ended.get_or_insert(Ended {
                backend: pull.backend,
                blocks: pull.blocks.min(u32::try_from(own.blocks).unwrap_or(u32::MAX)),
                bytes: pull.bytes,
                ms: if pull.ms.is_finite() { pull.ms.max(0.0) } else { 0.0 },
                error: pull.error,
            });
        });
    }

    pub(super) fn moved(&self, legs: usize) {
        self.change(|state| state.moved += legs);
    }

    pub(super) fn left(&self, id: WorkerId, legs: usize) {
        self.change(|state| {
            if id == self.id && !state.has_left {
                state.has_left = true;
                state.moved += legs;
            }
            for pull in state.pulls.iter_mut().filter(|pull| pull.target == id) {
                pull.ended.get_or_insert(Ended::failed(TransferFailure::Lost));
            }
        });
    }

    // ---- what the one who follows it notes ----

    pub(super) fn begin_migration(&self, offer: &Offer, pulls: Vec<Pull>) {
        self.change(|state| {
            state.phase = Phase::HandingOver;
            let hits = offer.hits.iter().map(|&hits| u64::from(hits)).sum();
            state.offered = Migration { blocks: offer.hits.len(), hits };
            state.pulls = pulls;
        });
    }

    /// Pulls that have not ended are given up; whose they are.
    pub(super) fn give_up_pulls(&self) -> Vec<(WorkerId, RequestId)> {
        self.change(|state| {
            let open = state.pulls.iter_mut().filter(|pull| pull.ended.is_none());
            open.map(|pull| {
                pull.ended = Some(Ended::failed(TransferFailure::Timeout));
                (pull.target, pull.request)
            })
            .collect()
        })
    }

    pub(super) fn blocks_pulled(&self) -> usize {
        let state = self.state();
        state.pulls.iter().filter_map(|p| p.ended.as_ref()).map(|end| end.blocks as usize).sum()
    }

    /// What of the offer those who stay hold now.
    pub(super) fn migration_is(&self, kept: Migration) {
        self.change(|state| state.kept = kept);
    }

    pub(super) fn migration_ended(&self, outcome: Outcome) {
        self.change(|state| {
            state.outcome = outcome;
            state.phase = Phase::Finishing;
        });
    }

    /// It is over; what there is to say of it.
    pub(super) fn end(&self, in_time: bool) -> Value {
        self.change(|state| {
            state.phase = Phase::Done;
            state.in_time = Some(in_time);
            state.took = Some(self.began.elapsed());
        });
        self.as_json()
    }

    pub(super) fn is_over(&self) -> bool {
        self.state().phase == Phase::Done
    }

    pub(super) fn as_json(&self) -> Value {
        let state = self.state();
        let DrainState { offered, kept, .. } = *state;
        let rate = (offered.hits > 0).then(|| kept.hits as f64 / offered.hits as f64);
        let moved = state.moved.min(self.running);
        let done = state.phase == Phase::Done;
        json!({
            "worker": self.worker,
            "phase": state.phase.as_str(),
            "budget_ms": u64::try_from(self.budget.as_millis()).unwrap_or(u64::MAX),
            "seconds": state.took.unwrap_or_else(|| self.began.elapsed()).as_secs_f64(),
            "left_in_time": state.in_time,
            "hand_over": {
                "outcome": state.outcome.as_str(),
                "blocks_offered": offered.blocks,
                "blocks_handed_over": state.pulls.iter().filter_map(|pull| pull.ended.as_ref()).map(|end| end.blocks).sum::<u32>(),
                "blocks_kept": kept.blocks,
                "hits_offered": offered.hits,
                "hits_kept": kept.hits,
                "hit_rate_kept": rate,
                "successors": state.pulls.iter().map(Pull::as_json).collect::<Vec<_>>(),
            },
            "requests": {
                "running": self.running,
                "finished": done.then(|| self.running - moved),
                "moved": moved,
            },
        })
    }
}

impl Pull {
    fn as_json(&self) -> Value {
        let ended = self.ended.as_ref();
        json!({
            "worker": self.worker,
            "blocks": self.blocks,
            "pulled": ended.map(|end| end.blocks),
            "bytes": ended.map(|end| end.bytes),
            "ms": ended.map(|end| end.ms),
            "backend": ended.and_then(|end| end.backend),
            "error": ended.and_then(|end| end.error),
        })
    }
}

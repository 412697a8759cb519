//! A worker as far as no request depends on it, and how it stands.

use std::sync::Arc;

use tokio::time::Instant;

use super::groups::RankTimes;
use super::pulls::Pulls;
use super::series::WorkerSeries;
use crate::core::frame::{GrammarTotals, GroupTotals, Hello, Step};
use crate::fleet::link::Link;
use crate::fleet::listen::Dial;
use crate::net::lobby::Origin;

/// How a worker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::fleet) enum Status {
    /// Its snapshot or its model's description is still to come.
    Joining,
    /// It takes new work.
    Ready,
    /// Silent, or without a token for a request that waits for one: no new work.
    Suspect,
    /// Another rank of its group is not there, or suspect.
    Incomplete,
    /// It finishes what it has.
    Draining,
}

impl Status {
    pub(in crate::fleet) const ALL: [Self; 5] =
        [Self::Joining, Self::Ready, Self::Suspect, Self::Incomplete, Self::Draining];

    pub(in crate::fleet) fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Incomplete => "incomplete",
            Self::Draining => "draining",
        }
    }
}

/// A worker, as far as no request depends on it. A copy is cheap.
#[derive(Debug, Clone)]
pub(in crate::fleet) struct PooledWorker {
    pub(in crate::fleet) hello: Arc<Hello>,
    pub(in crate::fleet) address: Arc<str>,
    pub(in crate::fleet) link: Arc<Link>,
    /// Blocks that the index keeps for it, by tier.
    pub(in crate::fleet) index_room: [u32; 3],
    pub(in crate::fleet) peer: Origin,
    /// It was asked to describe its model.
    pub(in crate::fleet) asked: bool,
    pub(super) joined: Instant,
    pub(super) snapshot: bool,
    pub(super) blocks_known: u64,
    pub(super) silent: bool,
    /// A token was overdue when it had done this many steps.
    pub(super) stuck_at: Option<u64>,
    pub(super) draining: bool,
    /// All ranks of its group are there and heard of.
    pub(super) whole: bool,
    /// And all of them take part in requests to come.
    pub(super) together: bool,
    pub(super) times: RankTimes,
    pub(super) totals: GroupTotals,
    pub(super) grammars: GrammarTotals,
    pub(super) last: Option<Step>,
    /// `None`: it is counted among others.
    pub(in crate::fleet) series: Option<Box<WorkerSeries>>,
    /// What it pulled from others.
    pub(super) pulls: Pulls,
}

impl PooledWorker {
    pub(in crate::fleet) fn new(
        hello: Hello,
        dial: Dial,
        link: Arc<Link>,
        index_room: [u32; 3],
    ) -> Self {
        Self {
            whole: false,
            together: hello.group.is_none(),
            times: RankTimes::default(),
            totals: GroupTotals::default(),
            grammars: GrammarTotals::default(),
            hello: Arc::new(hello),
            address: dial.address.into(),
            peer: dial.peer,
            index_room,
            link,
            asked: false,
            joined: Instant::now(),
            snapshot: false,
            blocks_known: 0,
            silent: false,
            stuck_at: None,
            draining: false,
            last: None,
            series: None,
            pulls: Pulls::default(),
        }
    }

    /// It takes nothing new, for good.
    pub(in crate::fleet) fn leaves(&self) -> bool {
        self.draining
    }

    /// How often it preempted since the frame before. A worker counts from its start, which may be long before it joined.
    pub(super) fn preempted_since(&self, preemptions: u64) -> u64 {
        let before = self.last.as_ref().map_or(preemptions, |last| last.load.preemptions);
        preemptions.saturating_sub(before)
    }

    pub(super) fn status(&self, described: bool) -> Status {
        if self.draining {
            Status::Draining
        } else if !described || !self.snapshot {
            Status::Joining
        } else if self.silent || self.stuck_at.is_some() {
            Status::Suspect
        } else if !self.together {
            Status::Incomplete
        } else {
            Status::Ready
        }
    }
}

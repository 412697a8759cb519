//! A mock worker as a rank of a group: its rounds, and what becomes of it when another rank is lost.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use headrace_router::core::frame::Group;
use tokio::time::timeout;

use super::lockstep::{Lockstep, Round};
use super::worker::{Worker, now_ms_since_1970};

impl Worker {
    pub(super) fn is_rank(&self) -> bool {
        self.place().is_some()
    }

    fn place(&self) -> Option<(usize, usize)> {
        self.fleet.roles.rank_of(self.number)
    }

    fn lockstep(&self) -> Option<(usize, MutexGuard<'_, Lockstep>)> {
        let (group, rank) = self.place()?;
        Some((rank, self.fleet.groups[group].lock().expect("no holder panics")))
    }

    /// As it stands in the Hello.
    pub(super) fn group(&self) -> Option<Group> {
        let (group, rank) = self.place()?;
        let size = self.fleet.roles.ep + usize::from(self.mischief.wrong_size(self.now_ms()));
        Some(Group {
            id: format!("{}group{group}", self.fleet.names),
            rank: u32::try_from(rank).expect("few ranks"),
            size: u32::try_from(size).expect("few ranks"),
            epoch: self.group_epoch,
            transport: "mock".into(),
        })
    }

    pub(super) fn weights(&self) -> &'static str {
        if self.mischief.wrong_weights(self.now_ms()) { "others" } else { "mock" }
    }

    /// It belongs to the present start of its group from now on.
    pub(super) fn enter_group(&mut self) {
        let epoch = self.lockstep().map(|(_, group)| group.epoch());
        self.group_epoch = epoch.unwrap_or(0);
    }

    /// Its group has started anew without it.
    pub(super) fn group_is_over(&self) -> bool {
        self.lockstep().is_some_and(|(_, group)| group.epoch() != self.group_epoch)
    }

    /// Comes to the next round with its own step, or with an empty one where others wait for it.
    pub(super) fn come_to_round(&mut self, own_ms: Option<f64>, at: Instant) -> bool {
        let now_ms = self.now_ms();
        let at_ms = at.saturating_duration_since(self.fleet.started).as_secs_f64() * 1e3;
        let empty_ms = self.engine.cost().fixed_ms / self.fleet.speed;
        let slowdown = self.mischief.slowdown(now_ms);
        let stalls = self.mischief.stalls_in_round(now_ms);
        let Some((rank, mut group)) = self.lockstep() else { return false };
        let own_ms = match own_ms {
            Some(ms) => ms,
            None if group.gathers() => empty_ms * slowdown,
            None => return false,
        };
        let first = !group.gathers();
        let begins = group.come(rank, if stalls { f64::INFINITY } else { own_ms }, at_ms);
        drop(group);
        if first || begins {
            self.ring_group();
        }
        true
    }

    /// It stands still before a round that it needs itself.
    pub(super) fn call_others(&self) {
        let called =
            !self.engine.is_idle() && self.lockstep().is_some_and(|(_, mut group)| group.call());
        if called {
            self.ring_group();
        }
    }

    pub(super) fn fetch_round(&self) -> Option<Round> {
        self.lockstep().and_then(|(rank, mut group)| group.fetch(rank))
    }

    /// Says whether it has requests; true when it may leave as far as the others are concerned.
    pub(super) fn may_leave(&self) -> bool {
        let idle = self.engine.is_idle();
        let Some((rank, mut group)) = self.lockstep() else { return idle };
        let last = group.set_idle(rank, idle);
        let all = group.all_idle();
        drop(group);
        if last {
            self.ring_group();
        }
        all
    }

    /// A round did not come to its beginning or its end in time: the group starts anew.
    pub(super) fn give_group_up(&self, why: &str) {
        let Some((_, mut group)) = self.lockstep() else { return };
        let missing = group.missing();
        if !group.start_anew(self.group_epoch, now_ms_since_1970()) {
            return;
        }
        drop(group);
        super::note(&format!("{}: {why} {missing:?}, so its group starts anew", self.name()));
        self.ring_group();
    }

    /// After its death, or after that of another rank: returns when the present start of its group is over.
    pub(super) async fn group_ends(&mut self) {
        if !self.is_rank() {
            return;
        }
        let bell = self.bell();
        let over = async {
            while !self.group_is_over() {
                bell.notified().await;
            }
        };
        if timeout(self.fleet.group_deadline, over).await.is_err() {
            self.give_group_up("it is lost; the group lacks ranks");
        }
        let now_ms = self.now_ms();
        self.mischief.cure(now_ms);
    }

    /// Waits until a fault begins or ends. A rank that stands still for longer than its group waits takes the group along, even
    /// where nobody has anything to do.
    pub(super) async fn until_change_or_loss(&mut self) {
        let (deadline, is_rank) = (self.fleet.group_deadline, self.is_rank());
        if !is_rank {
            return self.until_change().await;
        }
        if timeout(deadline, self.until_change()).await.is_err() {
            self.give_group_up("it stands still; the group lacks ranks");
        }
    }

    /// Its link ended: others need not count on it.
    pub(super) fn leave_rounds(&self) {
        if let Some((rank, mut group)) = self.lockstep()
            && group.epoch() == self.group_epoch
        {
            group.withdraw(rank);
        }
    }

    fn ring_group(&self) {
        let Some((group, _)) = self.place() else { return };
        for rank in self.fleet.roles.ranks_of(group) {
            self.fleet.bells[rank].notify_one();
        }
    }

    pub(super) fn group_deadline(&self) -> Duration {
        self.fleet.group_deadline
    }

    /// A moment of the fleet's clock, in ms.
    pub(super) fn moment(&self, at_ms: f64) -> Instant {
        self.fleet.started + Duration::from_secs_f64(at_ms / 1e3)
    }

    pub(super) fn agrees(&self) -> bool {
        !self.mischief.stalls_before_round(self.now_ms())
    }
}

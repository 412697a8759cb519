//! What became of the other ranks: whether they joined, aborted, left, or died.

use super::Ended;
use super::layout::Shared;

/// The processes of a group.
#[derive(Debug)]
pub(crate) struct Peers {
    rank: usize,
    joined: bool,
    processes: Vec<Option<process::Watch>>,
    alarms: u64,
}

impl Peers {
    pub(crate) fn new(rank: usize, ranks: usize) -> Self {
        Self { rank, joined: false, processes: (0..ranks).map(|_| None).collect(), alarms: 0 }
    }

    /// Joins once the first rank has made the group; whether all have joined.
    ///
    /// # Errors
    /// If this rank does not fit the group.
    pub(crate) fn join(&mut self, shared: &Shared) -> Result<bool, String> {
        if !shared.ready()? {
            return Ok(false);
        }
        if !self.joined {
            if !shared.set_joined(self.rank, std::process::id()) {
                return Err(format!("the group has a rank {} already", self.rank));
            }
            self.joined = true;
        }
        for (rank, watch) in self.processes.iter_mut().enumerate() {
            if watch.is_none()
                && let Some(process) = shared.process(rank)
            {
                *watch = Some(process::Watch::new(process));
            }
        }
        Ok(self.processes.iter().all(Option::is_some))
    }

    /// A rank that joined and is gone, where any is.
    pub(crate) fn ended_before(&self, shared: &Shared) -> Option<usize> {
        (0..self.processes.len()).find(|&rank| self.ended(shared, rank).is_some())
    }

    pub(crate) fn first_absent(&self, shared: &Shared) -> usize {
        (0..self.processes.len()).find(|&rank| shared.process(rank).is_none()).unwrap_or(0)
    }

    /// Why nothing more comes from a rank, where that is known.
    pub(crate) fn ended(&self, shared: &Shared, rank: usize) -> Option<&'static str> {
        if shared.closed(rank) {
            return Some("it left the group");
        }
        let watch = self.processes[rank].as_ref()?;
        watch.ended().then_some("its process has ended")
    }

    /// The alarms that were looked at.
    pub(crate) fn alarms(&self) -> u64 {
        self.alarms
    }

    /// Whether there was an alarm: a rank may have left.
    ///
    /// # Errors
    /// If the group is over, or the round is.
    pub(crate) fn check(&mut self, shared: &Shared, round: u64) -> Result<bool, Ended> {
        let alarms = shared.alarms();
        if alarms == self.alarms {
            return Ok(false);
        }
        self.check_lost(shared)?;
        for rank in 0..self.processes.len() {
            // A rank that aborted a later round has left this one too.
            let aborted = shared.aborted(rank);
            if aborted >= round {
                let reason = shared.abort_reason(rank, aborted);
                return Err(Ended::Aborted { rank, reason });
            }
        }
        self.alarms = alarms;
        Ok(true)
    }

    /// # Errors
    /// If the group is over.
    pub(crate) fn check_lost(&self, shared: &Shared) -> Result<(), Ended> {
        shared.lost().map_or(Ok(()), Err)
    }
}

#[cfg(target_os = "linux")]
mod process {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fd::OwnedFd;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    /// A process, whoever has its number later.
    #[derive(Debug)]
    pub(super) struct Watch(Option<OwnedFd>);

    impl Watch {
        pub(super) fn new(process: u32) -> Self {
            let pid = Pid::from_raw(process.cast_signed());
            Self(pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
        }

        pub(super) fn ended(&self) -> bool {
            let Some(process) = &self.0 else {
                return true; // nobody had the number when it was looked up
            };
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut fds = [PollFd::new(process, PollFlags::IN)];
            poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod process {
    use rustix::process::{Pid, test_kill_process};

    /// The number of a process.
    #[derive(Debug)]
    pub(super) struct Watch(u32);

    impl Watch {
        pub(super) fn new(process: u32) -> Self {
            Self(process)
        }

        pub(super) fn ended(&self) -> bool {
            Pid::from_raw(self.0.cast_signed()).is_none_or(|pid| test_kill_process(pid).is_err())
        }
    }
}

//! Steps of a rank: each is part of a round of its group.

use std::time::{Duration, Instant};

use tokio::io::AsyncWrite;

use super::{Alarm, Brought, Session};

impl<W: AsyncWrite + Unpin> Session<'_, W> {
    /// Comes to the next round, or sees that it has begun.
    pub(super) fn begin_round(&mut self, start: Instant) -> anyhow::Result<()> {
        if self.round.is_none() {
            if !self.worker.agrees() {
                self.worker.call_others();
                return Ok(()); // they wait in vain
            }
            let (ms, said) = self.worker.begin_step(start);
            self.say(said)?;
            if !self.worker.come_to_round(ms, start) {
                return Ok(()); // nobody has anything to do
            }
            let empty = ms.is_none();
            self.round = Some(Brought { since: Instant::now(), empty, waited_ms: 0.0 });
        }
        let Some(round) = self.worker.fetch_round() else { return Ok(()) };
        if let Some(brought) = &mut self.round {
            brought.waited_ms = round.ms - round.own_ms;
        }
        if !round.ms.is_finite() {
            return Ok(()); // a rank stands still in it: the deadline will tell
        }
        let begins = self.worker.moment(round.begins_ms);
        let end = begins + Duration::from_secs_f64(round.ms / 1e3);
        let alarm = self.worker.alarm(end).map_or(Alarm::Late, Alarm::At);
        self.step = Some((round.ms, end, alarm));
        Ok(())
    }

    /// Until when the round has to begin or, where a rank stands still in it, to end.
    pub(super) fn round_deadline(&self) -> Option<Instant> {
        let waits = self.round.as_ref().filter(|_| self.step.is_none());
        waits.map(|brought| brought.since + self.worker.group_deadline())
    }
}

//! What waits for a thread: the shortest goes first, and every so often whoever has waited longest. Pure: the time is an
//! argument.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Who waits this long may not be passed by shorter ones for ever. A guess: some pieces of a long text.
pub(super) const AGED: Duration = Duration::from_millis(250);

/// Of so many turns one belongs to whoever has waited longest, if that is longer than [`AGED`]. So a short text waits for
/// at most one piece of a long one in five turns, and a long one gets a fifth of the turns however many short ones come.
pub(super) const TURNS: u32 = 5;

/// Jobs that wait for a turn.
#[derive(Debug)]
pub(super) struct Queue<W> {
    /// By ticket, which is the order of arrival.
    jobs: BTreeMap<u64, TokenizeJob<W>>,
    /// Bytes left to do, ticket.
    by_size: BTreeSet<(usize, u64)>,
    bytes: usize,
    /// Since the last one that belonged to whoever had waited longest.
    turns: u32,
}

/// How much may wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueBounds {
    pub(super) jobs: usize,
    /// Of all jobs together, in bytes of text. A single job is taken whatever its size.
    pub(super) bytes: usize,
}

/// Something to do, perhaps in several turns.
#[derive(Debug)]
pub(super) struct TokenizeJob<W> {
    /// Names it as long as it lives; who comes later has a greater one.
    pub(super) ticket: u64,
    pub(super) since: Instant,
    pub(super) work: W,
    /// Bytes of text still to be gone through.
    pub(super) left: usize,
    /// Bytes of text that it holds in memory.
    pub(super) held: usize,
}

/// Why a job was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PoolFull {
    Jobs,
    Bytes,
}

impl QueueBounds {
    /// Whether a job that holds `new` bytes may wait beside `jobs` others with `bytes`.
    ///
    /// # Errors
    /// Which bound it would pass.
    pub(super) fn admit(self, jobs: usize, bytes: usize, new: usize) -> Result<(), PoolFull> {
        if jobs >= self.jobs {
            return Err(PoolFull::Jobs);
        }
        if jobs > 0 && bytes.saturating_add(new) > self.bytes {
            return Err(PoolFull::Bytes);
        }
        Ok(())
    }
}

impl<W> Queue<W> {
    pub(super) fn new() -> Self {
        Self { jobs: BTreeMap::new(), by_size: BTreeSet::new(), bytes: 0, turns: 0 }
    }

    /// Takes a job in, new or after a turn.
    pub(super) fn put(&mut self, job: TokenizeJob<W>) {
        self.by_size.insert((job.left, job.ticket));
        self.bytes += job.held;
        self.jobs.insert(job.ticket, job);
    }

    /// Whose turn it is.
    pub(super) fn pop(&mut self, now: Instant) -> Option<TokenizeJob<W>> {
        let (&oldest, job) = self.jobs.first_key_value()?;
        let &(_, shortest) = self.by_size.first()?;
        let aged = now.saturating_duration_since(job.since) >= AGED;
        self.turns += 1;
        if aged && self.turns >= TURNS {
            self.turns = 0;
            return self.remove(oldest);
        }
        self.remove(shortest)
    }

    /// Takes a job out, wherever it stands. `None` if it does not wait here.
    pub(super) fn remove(&mut self, ticket: u64) -> Option<TokenizeJob<W>> {
        let job = self.jobs.remove(&ticket)?;
        self.by_size.remove(&(job.left, ticket));
        self.bytes -= job.held;
        Some(job)
    }

    /// Takes all jobs out.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = TokenizeJob<W>> + use<W> {
        self.by_size.clear();
        self.bytes = 0;
        std::mem::take(&mut self.jobs).into_values()
    }

    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Bytes of text held by those who wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn job(ticket: u64, left: usize, since: Instant) -> TokenizeJob<()> {
        TokenizeJob { ticket, since, work: (), left, held: left }
    }

    /// Tickets in the order in which they are served, each for one turn of `piece` bytes, `turn` apart.
    fn serve(queue: &mut Queue<()>, mut now: Instant, turn: Duration, piece: usize) -> Vec<u64> {
        let mut served = Vec::new();
        while let Some(mut job) = queue.pop(now) {
            served.push(job.ticket);
            now += turn;
            job.left = job.left.saturating_sub(piece);
            if job.left > 0 {
                queue.put(job);
            }
        }
        served
    }

    #[test]
    fn the_shortest_goes_first_and_equals_in_order() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        for (ticket, left) in [(1, 300), (2, 5), (3, 70), (4, 5), (5, 0)] {
            queue.put(job(ticket, left, now));
        }
        assert_eq!(serve(&mut queue, now, Duration::ZERO, 1_000), [5, 2, 4, 3, 1]);
    }

    #[test]
    fn short_ones_go_between_the_pieces_of_a_long_one() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        queue.put(job(1, 1_000, now));
        let mut long = queue.pop(now).unwrap();
        queue.put(job(2, 10, now)); // comes while the first piece is worked on
        long.left -= 100;
        queue.put(long);
        assert_eq!(queue.pop(now).unwrap().ticket, 2);
        assert_eq!(queue.pop(now).unwrap().ticket, 1);
    }

    #[test]
    fn a_short_one_waits_for_one_piece_however_many_long_ones_have_aged() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        for ticket in 0..100 {
            queue.put(job(ticket, 1_000_000, now));
        }
        let mut later = now + 100 * AGED;
        for short in 1_000..1_050 {
            queue.put(job(short, 10, later));
            let before = (0..).find(|_| {
                let mut job = queue.pop(later).unwrap();
                let is_short = job.ticket == short;
                later += Duration::from_millis(30);
                job.left -= 10;
                if job.left > 0 {
                    queue.put(job);
                }
                is_short
            });
            assert!(before <= Some(1), "{before:?} pieces went before a short one");
        }
    }

    #[test]
    fn a_long_one_gets_every_fifth_turn_while_short_ones_never_end() {
        let (mut queue, mut now) = (Queue::new(), Instant::now());
        queue.put(job(0, 1_000_000, now));
        let mut served = 0;
        for ticket in 1..=1_000 {
            queue.put(job(ticket, 1, now));
            let job = queue.pop(now).unwrap();
            now += AGED;
            if job.ticket == 0 {
                served += 1;
                queue.put(job);
            }
        }
        assert_eq!(served, 1_000 / TURNS);
    }

    #[test]
    fn who_has_not_waited_long_is_passed_by_however_many_shorter_ones() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        queue.put(job(0, 1_000, now));
        let mut next = |ticket, now| {
            queue.put(job(ticket, 1, now));
            queue.pop(now).unwrap().ticket
        };
        let almost = now + AGED - Duration::from_nanos(1);
        let tickets = 1..=u64::from(3 * TURNS);
        assert!(tickets.clone().eq(tickets.map(|ticket| next(ticket, almost))));
        assert_eq!(next(100, now + AGED), 0);
    }

    #[test]
    fn the_bounds_are_in_jobs_and_in_bytes_and_a_single_job_always_fits() {
        let bounds = QueueBounds { jobs: 3, bytes: 100 };
        assert_eq!(bounds.admit(0, 0, 500), Ok(()));
        assert_eq!(bounds.admit(1, 500, 1), Err(PoolFull::Bytes));
        assert_eq!(bounds.admit(2, 90, 10), Ok(()));
        assert_eq!(bounds.admit(2, 90, 11), Err(PoolFull::Bytes));
        assert_eq!(bounds.admit(2, 90, usize::MAX), Err(PoolFull::Bytes));
        assert_eq!(bounds.admit(3, 0, 0), Err(PoolFull::Jobs));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_the_sums_are_right(ops in prop::collection::vec((0_u8..4, 0_u64..20, 0_usize..50), 0..200)) {
            let (mut queue, mut now) = (Queue::new(), Instant::now());
            let mut inside = HashMap::new();
            for (op, ticket, left) in ops {
                now += Duration::from_millis(left as u64 * 10);
                match op {
                    0 | 1 if !inside.contains_key(&ticket) => {
                        queue.put(job(ticket, left, now));
                        inside.insert(ticket, left);
                    }
                    2 => {
                        prop_assert_eq!(queue.remove(ticket).map(|job| job.left), inside.remove(&ticket));
                    }
                    _ => {
                        let popped = queue.pop(now);
                        prop_assert_eq!(popped.is_none(), inside.is_empty());
                        if let Some(job) = popped {
                            prop_assert_eq!(inside.remove(&job.ticket), Some(job.left));
                        }
                    }
                }
                prop_assert_eq!(queue.len(), inside.len());
                prop_assert_eq!(queue.bytes(), inside.values().sum::<usize>());
                prop_assert_eq!(queue.by_size.len(), inside.len());
            }
            let mut rest: Vec<u64> = queue.drain().map(|job| job.ticket).collect();
            rest.sort_unstable();
            let mut expected: Vec<u64> = inside.into_keys().collect();
            expected.sort_unstable();
            prop_assert_eq!(rest, expected);
            prop_assert!(queue.by_size.is_empty() && queue.bytes() == 0);
        }
    }
}

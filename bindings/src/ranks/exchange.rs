//! One exchange after the other: what of each parcel was sent, and what has come.
//!
//! A parcel goes in pieces, each in front of it what it belongs to. A channel holds two: whoever sends waits for the first
//! to be taken before the third is written, and takes pieces meanwhile, so two ranks with long parcels never wait for each
//! other. Pieces of a round that is over are passed by.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use super::Ended;
use super::columns::{Source, Target};
use super::doorbell::{Patience, ring};
use super::layout::{SLOTS, Shared};

/// What stands in front of a piece.
#[derive(Debug, Clone, Copy)]
struct Head {
    round: u64,
    exchange: u64,
    rows: u64,  // of the parcel
    bytes: u64, // of the parcel
    start: u64, // of the piece in the parcel
    len: u64,
}

/// A parcel on its way out.
#[derive(Debug, Clone, Copy)]
struct Outgoing {
    first: usize,
    rows: usize,
    bytes: usize,
    sent: usize,
    all: bool, // also a parcel without bytes is a piece
}

/// A parcel on its way in.
#[derive(Debug, Clone, Copy, Default)]
struct Incoming {
    rows: Option<usize>,
    taken: usize,
    all: bool,
}

/// For a person, whose rounds begin with zero.
fn place(exchange: u64, round: u64) -> String {
    format!("exchange {exchange} of round {}", round.saturating_sub(1))
}

#[derive(Debug)]
pub(crate) struct Exchange {
    rank: usize,
    round: u64,  // from 1
    number: u64, // in the round, from 1
    /// Bytes of a row that is sent, and so of one that comes; `None` between two exchanges.
    row_bytes: Option<usize>,
    /// It is known what comes from each rank.
    taking: bool,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    /// The first row of each rank in what is received.
    firsts: Vec<usize>,
    moved: u64,
    patience: Patience,
}

impl Exchange {
    pub(crate) fn new(rank: usize, ranks: usize) -> Self {
        Self {
            rank,
            round: 0,
            number: 0,
            row_bytes: None,
            taking: false,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            firsts: Vec::new(),
            moved: 0,
            patience: Patience::new(rank, ranks),
        }
    }

    pub(crate) fn round(&self) -> u64 {
        self.round
    }

    /// Pieces that this rank has sent or taken so far.
    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Where the ranks are, for a person.
    pub(crate) fn place(&self) -> String {
        place(self.number, self.round)
    }

    pub(crate) fn begin(&mut self, shared: &Shared, round: u64) {
        self.done();
        (self.round, self.number) = (round, 0);
        for from in 0..shared.layout().ranks() {
            while self.next_head(shared, from).is_some_and(|head| head.round < round) {
                self.pass(shared, from);
            }
        }
    }

    pub(crate) fn done(&mut self) {
        (self.row_bytes, self.taking) = (None, false);
        self.outgoing.clear();
        self.incoming.clear();
    }

    /// Sends each rank its rows, from the first to the last, which is not among them. The same source is given to `look` and
    /// `take`.
    ///
    /// # Errors
    /// If the exchange before is not over.
    pub(crate) fn post(
        &mut self,
        shared: &Shared,
        source: &impl Source,
        parcels: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), &'static str> {
        if self.row_bytes.is_some() {
            return Err("the exchange before is not over");
        }
        if self.round == 0 {
            return Err("no round has begun");
        }
        self.number += 1;
        let width = source.row_bytes();
        self.outgoing.clear();
        self.outgoing.extend(parcels.enumerate().map(|(to, (first, end))| {
            let (rows, all) = (end - first, to == self.rank);
            Outgoing { first, rows, bytes: rows * width, sent: 0, all }
        }));
        self.incoming.clear();
        self.incoming.resize(self.outgoing.len(), Incoming::default());
        self.incoming[self.rank] =
            Incoming { rows: Some(self.outgoing[self.rank].rows), taken: 0, all: true };
        self.row_bytes = Some(width);
        self.send(shared, source);
        Ok(())
    }

    /// Whom this rank waits for, before it knows how many rows come from each. Sends meanwhile.
    ///
    /// # Errors
    /// If a rank is in another exchange.
    pub(crate) fn look(
        &mut self,
        shared: &Shared,
        source: &impl Source,
    ) -> Result<Option<usize>, Ended> {
        self.send(shared, source);
        for from in 0..self.incoming.len() {
            if self.incoming[from].rows.is_none()
                && let Some(head) = self.due_head(shared, from)?
            {
                self.incoming[from].rows = Some(head.rows as usize);
            }
        }
        Ok(self.incoming.iter().position(|parcel| parcel.rows.is_none()))
    }

    /// Rows from each rank, once `look` waits for none.
    ///
    /// # Errors
    /// If nothing was posted.
    pub(crate) fn counts(&self) -> Result<impl Iterator<Item = usize>, &'static str> {
        if self.row_bytes.is_none() {
            return Err("nothing was posted");
        }
        if self.incoming.iter().any(|parcel| parcel.rows.is_none()) {
            return Err("nothing has come");
        }
        Ok(self.incoming.iter().filter_map(|parcel| parcel.rows))
    }

    /// What comes is to be taken from now on. Where the rows from this rank itself go, and which they are: first row
    /// there, first row here, and their number.
    ///
    /// # Errors
    /// If nothing was posted.
    pub(crate) fn begin_to_take(&mut self) -> Result<(usize, usize, usize), &'static str> {
        let mut firsts = std::mem::take(&mut self.firsts);
        firsts.clear();
        let mut next = 0;
        firsts.extend(self.counts()?.map(|count| {
            next += count;
            next - count
        }));
        self.firsts = firsts;
        self.taking = true;
        let own = self.outgoing[self.rank];
        Ok((self.firsts[self.rank], own.first, own.rows))
    }

    /// Whom this rank waits for, before all has come and gone.
    ///
    /// # Errors
    /// If a rank is in another exchange.
    pub(crate) fn take(
        &mut self,
        shared: &Shared,
        source: &impl Source,
        target: &mut impl Target,
    ) -> Result<Option<usize>, Ended> {
        self.send(shared, source);
        for from in 0..self.incoming.len() {
            while !self.incoming[from].all {
                let Some(head) = self.due_head(shared, from)? else { break };
                self.take_piece(shared, target, from, head)?;
            }
        }
        let missing = self.incoming.iter().position(|parcel| !parcel.all);
        Ok(missing.or_else(|| self.outgoing.iter().position(|parcel| !parcel.all)))
    }

    fn take_piece(
        &mut self,
        shared: &Shared,
        target: &mut impl Target,
        from: usize,
        head: Head,
    ) -> Result<(), Ended> {
        let width = self.row_bytes.expect("something was posted before pieces are taken");
        let parcel = &mut self.incoming[from];
        let rows = parcel.rows.expect("rows are known before pieces are taken");
        let bytes = rows * width;
        let (start, len) = (head.start as usize, head.len as usize);
        let fits = start == parcel.taken
            && len <= shared.layout().piece_bytes().min(bytes - start)
            && (len > 0 || bytes == 0);
        if !fits {
            let waited_for = format!("{}: a piece of {len} bytes at {start}", self.place());
            return Err(Ended::Lost { rank: from, waited_for });
        }
        let piece = (from, self.rank, shared.taken(from, self.rank).load(Relaxed));
        target.receive(shared, piece, (self.firsts[from], rows), (start, len));
        parcel.taken += len;
        parcel.all = parcel.taken == bytes;
        self.pass(shared, from);
        Ok(())
    }

    /// Pieces that there is room for.
    fn send(&mut self, shared: &Shared, source: &impl Source) {
        for (to, parcel) in self.outgoing.iter_mut().enumerate() {
            while !parcel.all {
                let piece = shared.sent(self.rank, to).load(Relaxed); // this rank alone writes it
                if piece - shared.taken(self.rank, to).load(Acquire) >= SLOTS {
                    break;
                }
                let len = (parcel.bytes - parcel.sent).min(shared.layout().piece_bytes());
                source.send(
                    shared,
                    (self.rank, to, piece),
                    (parcel.first, parcel.rows),
                    (parcel.sent, len),
                );
                let head = [
                    self.round,
                    self.number,
                    parcel.rows as u64,
                    parcel.bytes as u64,
                    parcel.sent as u64,
                    len as u64,
                ];
                shared.write_head(self.rank, to, piece, head);
                shared.sent(self.rank, to).store(piece + 1, Release);
                ring(shared, to);
                self.moved += 1;
                parcel.sent += len;
                parcel.all = parcel.sent == parcel.bytes;
            }
        }
    }

    /// The next piece from a rank, where it is of this exchange. Older rounds are passed by.
    fn due_head(&mut self, shared: &Shared, from: usize) -> Result<Option<Head>, Ended> {
        while let Some(head) = self.next_head(shared, from) {
            if head.round < self.round {
                self.pass(shared, from);
                continue;
            }
            if (head.round, head.exchange) == (self.round, self.number) {
                return self.of_our_form(from, head).map(Some);
            }
            let Head { round, exchange, .. } = head;
            // Ahead because the round was aborted, which is seen first, or because ranks do not count alike.
            if let Some(ended) = self.left_the_round(shared, from, round) {
                return Err(ended);
            }
            let waited_for = format!(
                "{}: it is in {}, ranks do not compute the same",
                self.place(),
                place(exchange, round)
            );
            return Err(Ended::Lost { rank: from, waited_for });
        }
        Ok(None)
    }

    fn of_our_form(&self, from: usize, head: Head) -> Result<Head, Ended> {
        let width = self.row_bytes.unwrap_or(0) as u64;
        if head.rows.checked_mul(width) == Some(head.bytes) {
            return Ok(head);
        }
        let waited_for = format!(
            "{}: {} rows of {} bytes together, each of which has {width} here",
            self.place(),
            head.rows,
            head.bytes
        );
        Err(Ended::Lost { rank: from, waited_for })
    }

    /// The abort that ended this round, where `from` is in a later one.
    fn left_the_round(&self, shared: &Shared, from: usize, round: u64) -> Option<Ended> {
        if round == self.round {
            return None;
        }
        let mut ranks = (0..shared.layout().ranks()).cycle().skip(from).take(self.incoming.len());
        ranks.find_map(|rank| {
            let aborted = shared.aborted(rank);
            (aborted >= self.round)
                .then(|| Ended::Aborted { rank, reason: shared.abort_reason(rank, aborted) })
        })
    }

    fn next_head(&self, shared: &Shared, from: usize) -> Option<Head> {
        let piece = shared.taken(from, self.rank).load(Relaxed); // this rank alone writes it
        if shared.sent(from, self.rank).load(Acquire) == piece {
            return None;
        }
        let [round, exchange, rows, bytes, start, len] = shared.read_head(from, self.rank, piece);
        Some(Head { round, exchange, rows, bytes, start, len })
    }

    /// The next piece from a rank is done with.
    fn pass(&mut self, shared: &Shared, from: usize) {
        let taken = shared.taken(from, self.rank);
        taken.store(taken.load(Relaxed) + 1, Release);
        ring(shared, from);
        self.moved += 1;
    }

    /// Until a piece that is due comes, room for one that is to go, or something else that rings.
    pub(crate) fn sleep(&mut self, shared: &Shared, alarms: u64, until: Instant) {
        let rank = self.rank;
        let taking = self.taking;
        let (incoming, outgoing) = (&self.incoming, &self.outgoing);
        let done = || {
            let comes = incoming.iter().enumerate().any(|(from, parcel)| {
                let open = if taking { !parcel.all } else { parcel.rows.is_none() };
                open && shared.sent(from, rank).load(Acquire)
                    != shared.taken(from, rank).load(Relaxed)
            });
            let goes = outgoing.iter().enumerate().any(|(to, parcel)| {
                !parcel.all
                    && shared.sent(rank, to).load(Relaxed) - shared.taken(rank, to).load(Acquire)
                        < SLOTS
            });
            comes || goes || shared.alarms() != alarms
        };
        self.patience.wait(shared, until, done);
    }
}

//! One worker's block events: a snapshot, then deltas without a gap. A break withdraws what this worker is believed to
//! hold, and nothing else, until it has sent a new snapshot.

#[cfg(test)]
mod tests;

use crate::core::frame::{Blocks, Hello, Resync, Snapshot, StoredRun};

/// Pause after the first request for a snapshot, if the next one follows soon.
const FIRST_PAUSE_MS: f64 = 1_000.0;
/// Longest pause between two requests for a snapshot. Events without a break for as long make the next break a first one.
const LONGEST_PAUSE_MS: f64 = 60_000.0;

/// Follows the events of one link: [`snapshot`](Self::snapshot) and [`delta`](Self::delta) say what to do with each
/// frame, [`ask`](Self::ask) when to send a [`Resync`].
#[derive(Debug)]
pub struct BlockEvents {
    epoch: u64,
    /// Which tiers the worker announced blocks for.
    tiers: [bool; 3],
    state: State,
    /// Blocks that are held, by tier.
    blocks: [u64; 3],
    /// Why a new snapshot is needed; `None` while none is missing and while the first is still to come.
    lost: Option<Gap>,
    /// No request for a snapshot before this.
    ask_at_ms: f64,
    pause_ms: f64,
}

#[derive(Debug)]
enum State {
    /// The first snapshot is still to come.
    Waiting,
    /// Some parts of this snapshot came.
    Filling { sequence: u64 },
    /// All up to this delta is known.
    Live { sequence: u64, since_ms: f64 },
    /// Nothing may be believed and nothing has been asked for yet.
    Lost,
    /// A snapshot was asked for; what the worker sent before it heard of that is still coming.
    Asked,
}

/// What to do with an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// It may be believed.
    Apply(Change<'a>),
    /// It changes nothing.
    Ignore(Ignored),
    /// Nothing that the worker said of its blocks may be believed any more: drop it.
    Lost(Gap),
}

/// What an event changes. Keys are 8 bytes each, see [`keys_le`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<'a> {
    /// Part of a snapshot.
    Snapshot {
        /// All that was believed before goes, in all tiers.
        first: bool,
        /// Blocks on the device.
        keys: &'a [u8],
        /// From here on the worker may be given credit.
        last: bool,
    },
    /// Blocks came and went, in this order: cleared, removed, stored.
    Delta {
        /// 0 device, 1 host, 2 disk.
        tier: u8,
        /// All blocks of the tier went.
        cleared: bool,
        /// Keys of blocks that went.
        removed: &'a [u8],
        /// Runs of blocks that came.
        stored: &'a [StoredRun],
    },
}

/// Why an event changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ignored {
    /// Not of the epoch of the Hello. If it should have been, the next event shows the gap.
    Epoch,
    /// Its number, or a later one, was there before.
    Replayed,
    /// A delta before the first snapshot.
    Early,
    /// Sent before the worker heard that its snapshot is wanted again.
    Resyncing,
    /// Of a tier that the worker announced no blocks for.
    Tier,
}

impl Ignored {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Epoch, Self::Replayed, Self::Early, Self::Resyncing, Self::Tier];

    /// As a word, for metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Epoch => "epoch",
            Self::Replayed => "replayed",
            Self::Early => "early",
            Self::Resyncing => "resyncing",
            Self::Tier => "tier",
        }
    }
}

/// Why what a worker said of its blocks is worth nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Gap {
    /// Deltas are missing.
    #[error("block events {got} after {last}")]
    Sequence {
        /// The one before.
        last: u64,
        /// Number of the event that came.
        got: u64,
    },
    /// A delta stands where the rest of a snapshot should.
    #[error("block events {got} inside snapshot {snapshot}")]
    Part {
        /// Sequence of the snapshot.
        snapshot: u64,
        /// Sequence of the delta.
        got: u64,
    },
    /// More blocks than the worker announced. Only the holder of the blocks can tell, see [`BlockEvents::lose`].
    #[error("more blocks than the announced capacity")]
    Capacity,
    /// It does not find in its cache what it said is there. Only the audit can tell, see [`BlockEvents::lose`].
    #[error("cached tokens are not what the events promise")]
    Audit,
    /// It computes prompts whose blocks it does not announce. Only who sees the prompts can tell, see
    /// [`BlockEvents::lose`].
    #[error("prompts were computed and no blocks announced")]
    Silent,
}

impl Gap {
    /// As a word, for metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sequence { .. } => "sequence",
            Self::Part { .. } => "part",
            Self::Capacity => "capacity",
            Self::Audit => "audit",
            Self::Silent => "silent",
        }
    }
}

/// A list of block keys whose bytes are no multiple of 8: not a worker of ours, or one that lost its mind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a list of block keys has {0} bytes, no multiple of 8")]
pub struct OddKeys(pub usize);

/// The keys in a list of the wire.
pub fn keys_le(bytes: &[u8]) -> impl ExactSizeIterator<Item = u64> + '_ {
    bytes.as_chunks::<8>().0.iter().map(|key| u64::from_le_bytes(*key))
}

impl BlockEvents {
    /// Of the worker that said this Hello.
    #[must_use]
    pub fn new(hello: &Hello) -> Self {
        Self {
            epoch: hello.epoch,
            tiers: [true, hello.capacity.host_blocks > 0, hello.capacity.disk_blocks > 0],
            state: State::Waiting,
            blocks: [0; 3],
            lost: None,
            ask_at_ms: 0.0,
            pause_ms: 0.0,
        }
    }

    /// When the worker started, as it said in the Hello.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// All of a snapshot and every delta since have been let pass: the worker may be given credit.
    #[must_use]
    pub fn live(&self) -> bool {
        matches!(self.state, State::Live { .. })
    }

    /// Blocks that the worker said it holds, in all tiers, by their number alone.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks.iter().sum()
    }

    /// What to do with a part of a snapshot. The first part replaces all before, whether it was asked for or not.
    ///
    /// # Errors
    /// It is malformed; nothing changed.
    pub fn snapshot<'a>(
        &mut self,
        part: &'a Snapshot,
        now_ms: f64,
    ) -> Result<Verdict<'a>, OddKeys> {
        let count = count(&part.hashes)?;
        if part.epoch != self.epoch {
            return Ok(Verdict::Ignore(Ignored::Epoch));
        }
        let first = match self.state {
            State::Waiting | State::Asked => true,
            State::Lost => return Ok(Verdict::Ignore(Ignored::Resyncing)),
            // where it is another snapshot, the rest of the one before will not come
            State::Filling { sequence } if part.sequence >= sequence => part.sequence > sequence,
            State::Live { sequence, .. } if part.sequence > sequence => true,
            State::Filling { .. } | State::Live { .. } => {
                return Ok(Verdict::Ignore(Ignored::Replayed));
            }
        };
        if first {
            self.blocks = [0; 3];
        }
        self.blocks[0] += count;
        self.state = if part.last {
            self.lost = None;
            State::Live { sequence: part.sequence, since_ms: now_ms }
        } else {
            self.ask_at_ms = self.ask_at_ms.max(now_ms + self.pause_ms); // the rest is in flight
            State::Filling { sequence: part.sequence }
        };
        Ok(Verdict::Apply(Change::Snapshot { first, keys: &part.hashes, last: part.last }))
    }

    /// What to do with a delta.
    ///
    /// # Errors
    /// It is malformed; nothing changed.
    pub fn delta<'a>(&mut self, delta: &'a Blocks, now_ms: f64) -> Result<Verdict<'a>, OddKeys> {
        let removed = count(&delta.removed)?;
        let stored = delta.stored.iter().try_fold(0, |sum, run| Ok(sum + count(&run.hashes)?))?;
        if delta.epoch != self.epoch {
            return Ok(Verdict::Ignore(Ignored::Epoch));
        }
        let got = delta.sequence;
        let last = match &mut self.state {
            State::Waiting => return Ok(Verdict::Ignore(Ignored::Early)),
            State::Lost | State::Asked => return Ok(Verdict::Ignore(Ignored::Resyncing)),
            State::Filling { sequence } | State::Live { sequence, .. } if got <= *sequence => {
                return Ok(Verdict::Ignore(Ignored::Replayed));
            }
            State::Filling { sequence } => {
                let gap = Gap::Part { snapshot: *sequence, got };
                return Ok(self.break_off(gap, now_ms));
            }
            State::Live { sequence, .. } => sequence,
        };
        if got - *last > 1 {
            let gap = Gap::Sequence { last: *last, got };
            return Ok(self.break_off(gap, now_ms));
        }
        *last = got;
        let tier = usize::from(delta.tier);
        if self.tiers.get(tier) != Some(&true) {
            return Ok(Verdict::Ignore(Ignored::Tier));
        }
        let before = if delta.cleared { 0 } else { self.blocks[tier] };
        self.blocks[tier] = before.saturating_sub(removed) + stored;
        Ok(Verdict::Apply(Change::Delta {
            tier: delta.tier,
            cleared: delta.cleared,
            removed: &delta.removed,
            stored: &delta.stored,
        }))
    }

    /// The caller found out by itself that the worker may not be believed. As after [`Verdict::Lost`], its credit goes
    /// and [`ask`](Self::ask) will ask for the snapshot. Without effect while none is there to be lost.
    pub fn lose(&mut self, gap: Gap, now_ms: f64) {
        match self.state {
            State::Live { .. } | State::Filling { .. } => {
                self.break_off(gap, now_ms);
            }
            State::Waiting | State::Lost | State::Asked => {}
        }
    }

    /// The request to send now, if a snapshot is missing and the pause after the last request is over; the pause
    /// doubles with each one. To be called after each frame of the worker: its heartbeats are clock enough.
    pub fn ask(&mut self, now_ms: f64) -> Option<Resync> {
        let gap = self.lost?;
        if now_ms < self.ask_at_ms {
            return None;
        }
        self.pause_ms = (2.0 * self.pause_ms).clamp(FIRST_PAUSE_MS, LONGEST_PAUSE_MS);
        self.ask_at_ms = now_ms + self.pause_ms;
        if matches!(self.state, State::Lost) {
            self.state = State::Asked;
        }
        Some(Resync { reason: gap.to_string() })
    }

    fn break_off(&mut self, gap: Gap, now_ms: f64) -> Verdict<'static> {
        if let State::Live { since_ms, .. } = self.state
            && now_ms - since_ms >= LONGEST_PAUSE_MS
        {
            self.pause_ms = 0.0;
            self.ask_at_ms = now_ms;
        }
        self.state = State::Lost;
        self.blocks = [0; 3];
        self.lost = Some(gap);
        Verdict::Lost(gap)
    }
}

fn count(keys: &[u8]) -> Result<u64, OddKeys> {
    if keys.len().is_multiple_of(8) { Ok(keys.len() as u64 / 8) } else { Err(OddKeys(keys.len())) }
}

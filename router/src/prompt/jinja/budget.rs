//! What one rendering may cost: work, memory, output, nesting and time. Whatever a template does is charged here first.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::error::{Error, ErrorKind};

/// The bounds of one rendering.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Units of work, each about a nanosecond of a slow core.
    pub(crate) work: u64,
    /// Bytes allocated, those given back included, so that no more can ever be live.
    pub(crate) memory: usize,
    /// Bytes of rendered text.
    pub(crate) output: usize,
    /// Statements, expressions and macro calls inside each other.
    pub(crate) levels: u32,
    /// From the first statement to the last.
    pub(crate) time: Duration,
}

impl Limits {
    /// The bounds for a chat of so many bytes. New memory is what a rendering slows others down with most: the kernel clears
    /// it, and cannot be interrupted while it does. So a short chat gets no more than a template may need for itself.
    pub(crate) fn of(bytes: usize) -> Self {
        let memory = bytes.saturating_mul(MEMORY_PER_BYTE).saturating_add(MEMORY);
        let memory = memory.min(MOST_MEMORY);
        Self { work: WORK, memory, output: OUTPUT, levels: LEVELS, time: TIME }
    }
}

/// At most about a second of one core where the prices below were measured, whatever it is spent on. 10,000 messages take
/// some hundredths of it.
const WORK: u64 = 1_000_000_000;

/// Room for a template's own lists and names, whatever the chat.
const MEMORY: usize = 32 << 20;

/// Times the chat's own size: room for the values made of it (up to six times its size where messages are short), and to take
/// its text apart and join it again some five times.
const MEMORY_PER_BYTE: usize = 12;

/// The longest body is 16 MiB of text.
const MOST_MEMORY: usize = 256 << 20;

/// Above any context window times any token's length that makes sense.
pub(crate) const OUTPUT: usize = 64 << 20;

/// The parser stops at 150 levels of source; a macro that walks a tool's schema takes about ten for each level of it.
const LEVELS: u32 = 1_000;

/// Five times what the work may take: only a machine that is busy with other things gets here.
const TIME: Duration = Duration::from_secs(5);

/// Lists and objects inside each other, as deep as `serde_json` reads them. Whoever walks or drops a value recurses as deep.
pub(crate) const NESTED: u16 = 128;

/// Units between two looks at the clock: some 0.5 ms. Each of them lets others have the core, so on a busy machine a rendering
/// gets one such stretch for each of theirs: shorter ones would let it run out of time.
const CLOCK: u64 = 1 << 19;

/// Units for evaluating one expression or statement, and for visiting one item of a list.
const STEP: u64 = 40;
const ITEM: u64 = 20;

/// Which bound a rendering passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bound {
    Work,
    Memory,
    Output,
    Levels,
    Nested,
    Time,
}

/// What is left for one rendering.
#[derive(Debug)]
pub(crate) struct Budget {
    limits: Limits,
    work: Cell<u64>,
    memory: Cell<usize>,
    output: Cell<usize>,
    levels: Cell<u32>,
    /// The work left at which the clock is read next.
    look: Cell<u64>,
    started: Instant,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            work: Cell::new(limits.work),
            memory: Cell::new(limits.memory),
            output: Cell::new(limits.output),
            levels: Cell::new(limits.levels),
            look: Cell::new(limits.work.saturating_sub(CLOCK)),
            started: Instant::now(),
        }
    }

    /// Charges units of work.
    pub(crate) fn work(&self, units: u64) -> Result<(), Error> {
        let Some(left) = self.work.get().checked_sub(units) else {
            return Err(ErrorKind::Spent(Bound::Work).into());
        };
        self.work.set(left);
        if left < self.look.get() { self.clock(left) } else { Ok(()) }
    }

    /// Whoever woke up for this core has it first: without that, Linux lets a long rendering finish its slice of some
    /// milliseconds, whatever its priority, and streams wait.
    #[cold]
    fn clock(&self, left: u64) -> Result<(), Error> {
        self.look.set(left.saturating_sub(CLOCK));
        std::thread::yield_now();
        match self.started.elapsed() > self.limits.time {
            true => Err(ErrorKind::Spent(Bound::Time).into()),
            false => Ok(()),
        }
    }

    pub(crate) fn step(&self) -> Result<(), Error> {
        self.work(STEP)
    }

    /// Charges a visit to each of `count` items.
    pub(crate) fn items(&self, count: usize) -> Result<(), Error> {
        self.work(ITEM.saturating_mul(count as u64))
    }

    /// Charges copying, comparing or searching so many bytes.
    pub(crate) fn bytes(&self, count: usize) -> Result<(), Error> {
        self.work(count as u64 / 2)
    }

    /// Charges looking at so many bytes character by character.
    pub(crate) fn chars(&self, count: usize) -> Result<(), Error> {
        self.work((count as u64).saturating_mul(6))
    }

    /// Charges an allocation, before it is made.
    pub(crate) fn memory(&self, bytes: usize) -> Result<(), Error> {
        let Some(left) = self.memory.get().checked_sub(bytes) else {
            return Err(ErrorKind::Spent(Bound::Memory).into());
        };
        self.memory.set(left);
        self.work(bytes as u64 / 8)
    }

    /// Charges an allocation for `count` things of `bytes` each.
    pub(crate) fn room(&self, count: usize, bytes: usize) -> Result<(), Error> {
        self.memory(count.saturating_mul(bytes))
    }

    /// Charges text that the template writes.
    pub(crate) fn output(&self, bytes: usize) -> Result<(), Error> {
        let Some(left) = self.output.get().checked_sub(bytes) else {
            return Err(ErrorKind::Spent(Bound::Output).into());
        };
        self.output.set(left);
        Ok(())
    }

    /// Goes one level deeper; [`Self::up`] comes back.
    pub(crate) fn down(&self) -> Result<(), Error> {
        match self.levels.get().checked_sub(1) {
            Some(left) => self.levels.set(left),
            None => return Err(ErrorKind::Spent(Bound::Levels).into()),
        }
        self.step()
    }

    pub(crate) fn up(&self) {
        self.levels.set(self.levels.get() + 1);
    }

    /// The bound in words, with its number.
    pub(crate) fn describe(&self, bound: Bound) -> String {
        describe(bound, &self.limits)
    }
}

fn describe(bound: Bound, limits: &Limits) -> String {
    match bound {
        Bound::Work => "the chat template takes too long for these messages".to_owned(),
        Bound::Memory => {
            let mib = limits.memory >> 20;
            format!("the chat template takes more than {mib} MiB of memory for these messages")
        }
        Bound::Output if limits.output.is_multiple_of(1 << 20) => {
            format!("the chat as text is longer than {} MiB", limits.output >> 20)
        }
        Bound::Output => format!("the chat as text is longer than {} bytes", limits.output),
        Bound::Levels => {
            format!("the chat template passes its recursion limit of {} levels", limits.levels)
        }
        Bound::Nested => format!("values are nested too deeply, in more than {NESTED} levels"),
        Bound::Time => format!("the chat template took longer than {:?}", limits.time),
    }
}

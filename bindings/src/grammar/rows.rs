//! The answers with a grammar that have a batch row. A thread owns where they stand; the steps send it what to do.
//!
//! `begin` before the model runs and `masks` after it: in between, the thread fills the masks. Those that take longer than a
//! step can wait are put off (`turns.rs` of the router's grammars): their answers get no token in this step.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use headrace_router::request::grammar::{
    Follower, MaskBudget, MaskSpending, MaskTurn, Masked, mask_order,
};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods as _, PyReadonlyArray1};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::vocabulary::AnswerRules;

/// Commands that wait: one step sends a few, and waits for the answer of most.
const COMMANDS: usize = 1024;

/// Regular expressions within others are walked by recursion.
const STACK_BYTES: usize = 64 << 20;

/// Of one sequence: its batch row, and the drafts behind its newest token.
struct Asked {
    row: usize,
    drafts: Vec<u32>,
}

/// Masks of tokens, `[rows, words]`; behind which of the listed tokens each row's begin, `[rows + 1]`; these tokens; and whether
/// each answer was put off.
type MaskArrays<'py> = (
    Bound<'py, PyArray2<u32>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<u32>>,
    Bound<'py, PyArray1<bool>>,
);

/// The tokens of a mask are listed where it allows at most one in so many: then it is quicker to look at these alone than to
/// take the others their logits. A guess.
const FEW: usize = 16;

struct Masks {
    /// `[rows, words]`
    bits: Vec<u32>,
    /// `[rows + 1]`, places in `few`
    starts: Vec<i64>,
    few: Vec<u32>,
    /// `[answers]`
    put_off: Vec<bool>,
    us: u64,
}

/// Masks that are being filled.
struct Filling {
    masks: Receiver<Masks>,
    /// A step waits for them.
    late: Arc<AtomicBool>,
}

/// What a batch row has.
struct Row {
    follower: Box<Follower>,
    turn: MaskTurn,
}

enum Command {
    Take { row: usize, follower: Box<Follower>, tokens: Vec<u32> },
    Leave { row: usize },
    Fill { asked: Vec<Asked>, late: Arc<AtomicBool>, reply: SyncSender<Masks> },
    Advance { tokens: Vec<(usize, Vec<u32>)>, reply: SyncSender<Vec<bool>> },
    CountAllowed { drafts: Vec<Asked>, reply: SyncSender<Vec<i64>> },
    Error { row: usize, reply: SyncSender<Option<String>> },
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct GrammarRows {
    tokens: usize,
    rows: usize,
    budget: MaskBudget,
    commands: Mutex<Option<SyncSender<Command>>>,
    filling: Mutex<Option<Filling>>,
    masks: AtomicU64,
    mask_us: AtomicU64,
    late: AtomicU64,
    wait_us: AtomicU64,
    put_off: AtomicU64,
}

#[pymethods]
impl GrammarRows {
    #[new]
    #[pyo3(signature = (tokens, rows, *, work_beside=u64::MAX, work_late=u64::MAX))]
    fn new(tokens: usize, rows: usize, work_beside: u64, work_late: u64) -> Self {
        Self {
            tokens,
            rows,
            budget: MaskBudget { beside: work_beside, late: work_late },
            commands: Mutex::new(None),
            filling: Mutex::new(None),
            masks: AtomicU64::new(0),
            mask_us: AtomicU64::new(0),
            late: AtomicU64::new(0),
            wait_us: AtomicU64::new(0),
            put_off: AtomicU64::new(0),
        }
    }

    fn take(&self, row: usize, rules: &AnswerRules, tokens: Vec<u32>) -> PyResult<()> {
        if row >= self.rows {
            return Err(PyValueError::new_err(format!("batch row {row}, of {}", self.rows)));
        }
        let follower = rules.follower(self.tokens).ok_or_else(|| {
            PyValueError::new_err(format!("a marker of reasoning is not of {} tokens", self.tokens))
        })?;
        self.send(Command::Take { row, follower: Box::new(follower), tokens })
    }

    fn leave(&self, row: usize) -> PyResult<()> {
        self.send(Command::Leave { row })
    }

    fn begin(
        &self,
        rows: PyReadonlyArray1<'_, i64>,
        counts: PyReadonlyArray1<'_, i64>,
        drafts: PyReadonlyArray1<'_, i32>,
    ) -> PyResult<()> {
        let asked = asked(rows.as_slice()?, counts.as_slice()?, drafts.as_slice()?)?;
        let (reply, masks) = sync_channel(1);
        let late = Arc::new(AtomicBool::new(false));
        self.send(Command::Fill { asked, late: Arc::clone(&late), reply })?;
        *lock(&self.filling) = Some(Filling { masks, late });
        Ok(())
    }

    fn masks<'py>(&self, py: Python<'py>) -> PyResult<MaskArrays<'py>> {
        let filling = lock(&self.filling).take();
        let filling = filling.ok_or_else(|| PyRuntimeError::new_err("no masks were begun"))?;
        filling.late.store(true, Ordering::Relaxed);
        let filling = filling.masks;
        let masks = match filling.try_recv() {
            Ok(masks) => masks, // as a rule; others keep the GIL for milliseconds
            Err(_) => {
                let began = Instant::now();
                let masks = py.detach(move || filling.recv()).map_err(|_| gone())?;
                self.late.fetch_add(1, Ordering::Relaxed);
                self.wait_us.fetch_add(us_since(began), Ordering::Relaxed);
                masks
            }
        };
        let rows = masks.starts.len() - 1;
        self.masks.fetch_add(rows as u64, Ordering::Relaxed);
        self.mask_us.fetch_add(masks.us, Ordering::Relaxed);
        let put_off = masks.put_off.iter().filter(|put_off| **put_off).count() as u64;
        self.put_off.fetch_add(put_off, Ordering::Relaxed);
        let bits = masks.bits.into_pyarray(py).reshape([rows, self.tokens.div_ceil(32)])?;
        let lists = (masks.starts.into_pyarray(py), masks.few.into_pyarray(py));
        Ok((bits, lists.0, lists.1, masks.put_off.into_pyarray(py)))
    }

    fn advance<'py>(
        &self,
        py: Python<'py>,
        rows: PyReadonlyArray1<'py, i64>,
        counts: PyReadonlyArray1<'py, i64>,
        ids: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let (rows, counts, ids) = (rows.as_slice()?, counts.as_slice()?, ids.as_slice()?);
        let mut rest = ids.iter();
        let mut tokens = Vec::with_capacity(rows.len());
        for (row, count) in rows.iter().zip(counts) {
            let count = usize::try_from(*count).map_err(out_of_range)?;
            let own = rest.by_ref().take(count).map(|id| u32::try_from(*id));
            let own: Result<Vec<u32>, _> = own.collect();
            let row = usize::try_from(*row).map_err(out_of_range)?;
            tokens.push((row, own.map_err(out_of_range)?));
        }
        let (reply, ended) = sync_channel(1);
        self.send(Command::Advance { tokens, reply })?;
        Ok(py.detach(move || ended.recv()).map_err(|_| gone())?.into_pyarray(py))
    }

    fn count_allowed<'py>(
        &self,
        py: Python<'py>,
        rows: PyReadonlyArray1<'py, i64>,
        counts: PyReadonlyArray1<'py, i64>,
        drafts: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let mut rest = drafts.as_slice()?.iter();
        let mut asked = Vec::new();
        for (row, count) in rows.as_slice()?.iter().zip(counts.as_slice()?) {
            let count = usize::try_from(*count).map_err(out_of_range)?;
            let own = rest.by_ref().take(count).map(|id| u32::try_from(*id));
            let own: Result<Vec<u32>, _> = own.collect();
            let row = usize::try_from(*row).map_err(out_of_range)?;
            asked.push(Asked { row, drafts: own.map_err(out_of_range)? });
        }
        let (reply, allowed) = sync_channel(1);
        self.send(Command::CountAllowed { drafts: asked, reply })?;
        Ok(py.detach(move || allowed.recv()).map_err(|_| gone())?.into_pyarray(py))
    }

    fn error(&self, py: Python<'_>, row: usize) -> PyResult<Option<String>> {
        let (reply, error) = sync_channel(1);
        self.send(Command::Error { row, reply })?;
        py.detach(move || error.recv()).map_err(|_| gone())
    }

    /// Masks made, microseconds that took, steps that waited for them, microseconds that they waited, and answers that were
    /// put off, once for each step.
    fn times(&self) -> (u64, u64, u64, u64, u64) {
        let of = |value: &AtomicU64| value.load(Ordering::Relaxed);
        (of(&self.masks), of(&self.mask_us), of(&self.late), of(&self.wait_us), of(&self.put_off))
    }
}

impl GrammarRows {
    fn send(&self, command: Command) -> PyResult<()> {
        let mut commands = lock(&self.commands);
        if commands.is_none() {
            let (sender, inbox) = sync_channel(COMMANDS);
            let (rows, model_tokens, budget) = (self.rows, self.tokens, self.budget);
            let builder = thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
            let spawned = builder.spawn(move || follow(&inbox, rows, model_tokens, budget));
            spawned.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            *commands = Some(sender);
        }
        let sender = commands.as_ref().ok_or_else(gone)?;
        // full only if the steps do not wait for answers, which they do
        sender.try_send(command).map_err(|_| gone())
    }
}

/// The thread. It ends when the last handle drops.
fn follow(inbox: &Receiver<Command>, rows: usize, model_tokens: usize, budget: MaskBudget) {
    let mut followers: Vec<Option<Row>> = (0..rows).map(|_| None).collect();
    for command in inbox {
        // whoever asked may be gone
        match command {
            Command::Take { row, mut follower, tokens } => {
                follower.advance_later(tokens);
                followers[row] = Some(Row { follower, turn: MaskTurn::default() });
            }
            Command::Leave { row } => {
                if let Some(place) = followers.get_mut(row) {
                    *place = None;
                }
            }
            Command::Fill { asked, late, reply } => {
                reply.send(fill(&mut followers, &asked, model_tokens, budget, &late)).ok();
            }
            Command::Advance { tokens, reply } => {
                let ended = tokens.iter().map(|(row, tokens)| {
                    at(&mut followers, *row).is_some_and(|row| row.follower.advance(tokens))
                });
                reply.send(ended.collect()).ok();
            }
            Command::CountAllowed { drafts, reply } => {
                let counts = drafts.iter().map(|one| match at(&mut followers, one.row) {
                    Some(row) => row.follower.count_allowed(&one.drafts) as i64,
                    None => one.drafts.len() as i64,
                });
                reply.send(counts.collect()).ok();
            }
            Command::Error { row, reply } => {
                let row = at(&mut followers, row);
                reply.send(row.and_then(|row| row.follower.error())).ok();
            }
        }
    }
}

fn at(followers: &mut [Option<Row>], row: usize) -> Option<&mut Row> {
    followers.get_mut(row)?.as_mut()
}

fn fill(
    followers: &mut [Option<Row>],
    asked: &[Asked],
    tokens: usize,
    budget: MaskBudget,
    late: &AtomicBool,
) -> Masks {
    let began = Instant::now();
    let words = tokens.div_ceil(32);
    let mut firsts = Vec::with_capacity(asked.len()); // row of the masks of each answer
    let mut rows = 0;
    for one in asked {
        firsts.push(rows);
        rows += one.drafts.len() + 1;
    }
    relieve(followers, asked);
    let mut bits = vec![u32::MAX; rows * words];
    let (mut dead, mut put_off) = (vec![false; rows], vec![false; asked.len()]);
    let turns: Vec<MaskTurn> = asked
        .iter()
        .map(|one| at(followers, one.row).map(|row| row.turn).unwrap_or_default())
        .collect();
    let is_late = || late.load(Ordering::Relaxed);
    let mut spending = MaskSpending::new(budget);
    for (nth, place) in mask_order(&turns, budget).into_iter().enumerate() {
        let (one, first) = (&asked[place], firsts[place]);
        let stop = first + one.drafts.len() + 1;
        let Some(Row { follower, turn }) = at(followers, one.row) else { continue };
        if nth > 0 && !spending.has_more(is_late()) {
            turn.put_off(0);
            put_off[place] = true;
            dead[first..stop].fill(true);
            continue;
        }
        // It is its turn, whatever it takes: the others have the budget none the less.
        let is_due = nth == 0 && turn.waited > 0;
        let mut work = 0;
        let mut began_late = is_late();
        let mut spend = |more| {
            work += more;
            if !is_due {
                spending.spend(more, began_late);
            }
            began_late = is_late();
            if is_due { work < budget.late } else { spending.has_more(began_late) }
        };
        let own = &mut bits[first * words..stop * words];
        match follower.fill_masks(&one.drafts, own, &mut dead[first..stop], &mut spend) {
            Masked::Filled => turn.filled(work),
            Masked::PutOff => {
                turn.put_off(work);
                put_off[place] = true;
            }
        }
    }
    let (mut starts, mut few) = (Vec::with_capacity(rows + 1), Vec::new());
    starts.push(0);
    for (row, dead) in bits.chunks_exact_mut(words).zip(dead) {
        if dead {
            row.fill(0);
        } else if row.iter().map(|word| word.count_ones() as usize).sum::<usize>() <= tokens / FEW {
            few.extend(listed(row));
        }
        starts.push(few.len() as i64);
    }
    Masks { bits, starts, few, put_off, us: us_since(began) }
}

/// Where all grammars hold more than they may, the largest one of the step gives way, with its answer.
fn relieve(followers: &mut [Option<Row>], asked: &[Asked]) {
    let mut of_step: Vec<usize> = asked.iter().map(|one| one.row).collect();
    let exhausted = |followers: &[Option<Row>], of_step: &[usize]| {
        let mut rows = of_step.iter().filter_map(|row| followers.get(*row)?.as_ref());
        rows.any(|row| row.follower.is_memory_exhausted())
    };
    while exhausted(followers, &of_step) {
        let bytes = |row: &usize| {
            let row = followers.get(*row).and_then(Option::as_ref);
            row.map_or(0, |row| row.follower.bytes())
        };
        let Some(at) = (0..of_step.len()).max_by_key(|at| bytes(&of_step[*at])) else { return };
        let row = of_step.swap_remove(at);
        if let Some(row) = self::at(followers, row) {
            row.follower.give_way();
        }
    }
}

/// The tokens that a mask allows, lowest first.
fn listed(mask: &[u32]) -> impl Iterator<Item = u32> {
    mask.iter().enumerate().flat_map(|(place, word)| {
        let (mut rest, first) = (*word, 32 * place as u32);
        std::iter::from_fn(move || {
            let bit = (rest != 0).then(|| rest.trailing_zeros())?;
            rest &= rest - 1;
            Some(first + bit)
        })
    })
}

fn us_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Each of `rows` has so many rows of logits, all but the first behind a draft; what stands for the first means nothing.
fn asked(rows: &[i64], counts: &[i64], drafts: &[i32]) -> PyResult<Vec<Asked>> {
    let mut rest = drafts.iter();
    let mut found = Vec::with_capacity(rows.len());
    for (row, count) in rows.iter().zip(counts) {
        let count = usize::try_from(*count).map_err(out_of_range)?;
        let own: Vec<u32> = rest.by_ref().take(count).map(|id| id.cast_unsigned()).collect();
        if own.len() != count || count == 0 {
            return Err(PyValueError::new_err(format!("{} rows, but {count} of one", own.len())));
        }
        let row = usize::try_from(*row).map_err(out_of_range)?;
        found.push(Asked { row, drafts: own[1..].to_vec() });
    }
    Ok(found)
}

fn out_of_range(error: std::num::TryFromIntError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn gone() -> PyErr {
    PyRuntimeError::new_err("the thread of the grammars is gone")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

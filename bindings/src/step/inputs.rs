//! What steps know of the sequences with a batch row: `InputBatch` of Python, whose arrays these are.

mod drafts;

use std::collections::{HashMap, HashSet};

use numpy::PyUntypedArrayMethods;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::answers::{Cut, CutArrays};
use super::slices::{
    Flags, Ints, Kept1, Kept2, check_parts, checked_rows, columns, each_below, each_has, indices,
    open, shape_of,
};

type Array<'py, T> = Bound<'py, PyArray1<T>>;
type Table<'py> = Bound<'py, PyArray2<i32>>;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct InputColumns {
    facts: Kept2<i64>,
    flags: Kept2<bool>,
    newest: Kept1<i32>,
    stops: Kept2<i64>,
    drafts: Kept2<i32>,
    blocks: Kept2<i32>,
    rows: usize,
    most_stops: usize,
    most_drafts: usize,
    most_blocks: usize,
    block_tokens: i64,
}

columns! {
    /// Of `facts`.
    Facts of i64: prompt_len, limit, computed, total, drafted, keys_from, keys_to, filled
}

columns! {
    /// Of `flags`.
    RowFlags of bool: answers, ended, penalised
}

/// The blocks of all batch rows.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    table: &'a [i32], // [rows, most]
    most: usize,
    block_tokens: i64,
}

impl Blocks<'_> {
    fn at(&self, row: usize, position: i64) -> PyResult<i64> {
        let place = usize::try_from(position.div_euclid(self.block_tokens));
        match place.ok().filter(|place| *place < self.most) {
            Some(place) => Ok(self.table[row * self.most + place].into()),
            None => {
                let text = format!("position {position} has no place in {} blocks", self.most);
                Err(PyValueError::new_err(text))
            }
        }
    }

    fn slot(&self, row: usize, position: i64) -> PyResult<i64> {
        let offset = position.rem_euclid(self.block_tokens);
        Ok(self.at(row, position)? * self.block_tokens + offset)
    }

    /// The first blocks of some batch rows, for `tokens` tokens.
    fn table_of<'py>(
        &self,
        py: Python<'py>,
        batch_rows: &[i64],
        tokens: i64,
    ) -> PyResult<Table<'py>> {
        let width = (tokens + self.block_tokens - 1).div_euclid(self.block_tokens);
        let width = usize::try_from(width).unwrap_or(0).min(self.most);
        let mut table = Vec::with_capacity(batch_rows.len() * width);
        for row in indices(batch_rows) {
            table.extend_from_slice(&self.table[row * self.most..][..width]);
        }
        table.into_pyarray(py).reshape([batch_rows.len(), width])
    }
}

#[pymethods]
impl InputColumns {
    #[new]
    #[pyo3(signature = (*, facts, flags, newest, stops, drafts, blocks, block_tokens))]
    fn new(
        facts: Bound<'_, PyArray2<i64>>,
        flags: Bound<'_, PyArray2<bool>>,
        newest: Bound<'_, PyArray1<i32>>,
        stops: Bound<'_, PyArray2<i64>>,
        drafts: Bound<'_, PyArray2<i32>>,
        blocks: Bound<'_, PyArray2<i32>>,
        block_tokens: u32,
    ) -> PyResult<Self> {
        let [rows, most_blocks] = shape_of("blocks", &blocks)?;
        let [of_facts, of_flags] = [shape_of("facts", &facts)?, shape_of("flags", &flags)?];
        let [of_stops, of_drafts] = [shape_of("stops", &stops)?, shape_of("drafts", &drafts)?];
        let same = [of_facts[1], of_flags[1], newest.len(), of_stops[0], of_drafts[0]];
        if same != [rows; 5] || [of_facts[0], of_flags[0]] != [Facts::ROWS, RowFlags::ROWS] {
            let text = format!(
                "facts of {of_facts:?}, flags of {of_flags:?}, and newest, stops and drafts of {:?} rows, but blocks \
                 of {rows}",
                &same[2..]
            );
            return Err(PyValueError::new_err(text));
        }
        if block_tokens == 0 {
            return Err(PyValueError::new_err("blocks of no tokens"));
        }
        Ok(Self {
            facts: facts.unbind(),
            flags: flags.unbind(),
            newest: newest.unbind(),
            stops: stops.unbind(),
            drafts: drafts.unbind(),
            blocks: blocks.unbind(),
            rows,
            most_stops: of_stops[1],
            most_drafts: of_drafts[1],
            most_blocks,
            block_tokens: block_tokens.into(),
        })
    }

    fn live<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
    ) -> PyResult<Option<Array<'py, bool>>> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let mut flags = open(py, &self.flags)?;
        let flags = RowFlags::of(flags.as_slice_mut()?);
        let live: Vec<bool> = indices(batch_rows).map(|row| !flags.ended[row]).collect();
        let all = live.iter().all(|live| *live);
        Ok((!all).then(|| live.into_pyarray(py)))
    }

    fn grow<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        places: Ints<'py>,
        blocks: Ints<'py>,
        keys_from: Ints<'py>,
    ) -> PyResult<()> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let places = places.as_slice()?;
        let (new, keys_from) = (blocks.as_slice()?, keys_from.as_slice()?);
        each_below(self.most_blocks, "place of a block", places)?;
        each_has(
            batch_rows.len(),
            &[("places", places.len()), ("blocks", new.len()), ("keys_from", keys_from.len())],
        )?;
        let (mut facts, mut blocks) = (open(py, &self.facts)?, open(py, &self.blocks)?);
        let (facts, blocks) = (Facts::of(facts.as_slice_mut()?), blocks.as_slice_mut()?);
        for (i, row) in indices(batch_rows).enumerate() {
            let block = i32::try_from(new[i])
                .map_err(|_| PyValueError::new_err(format!("block {} is none", new[i])))?;
            blocks[row * self.most_blocks + places[i] as usize] = block;
            facts.filled[row] = places[i] + 1;
            facts.keys_from[row] = facts.keys_from[row].max(keys_from[i]);
        }
        Ok(())
    }

    /// Everything about a batch but the tokens of prompts.
    #[pyo3(signature = (batch_rows, *, counts, drafts, scores, on_device))]
    fn build<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        counts: Ints<'py>,
        drafts: Ints<'py>,
        scores: Flags<'py>,
        on_device: bool,
    ) -> PyResult<Built<'py>> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let known = counts.as_slice()?;
        let (most, scores) = (drafts.as_slice()?, scores.as_slice()?);
        each_has(
            batch_rows.len(),
            &[("counts", known.len()), ("drafts", most.len()), ("scores", scores.len())],
        )?;
        let (mut facts, mut newest) = (open(py, &self.facts)?, open(py, &self.newest)?);
        let (mut drafts, mut blocks) = (open(py, &self.drafts)?, open(py, &self.blocks)?);
        let (facts, newest) = (Facts::of(facts.as_slice_mut()?), newest.as_slice_mut()?);
        each_has(self.rows, &[("newest", newest.len())])?;
        let drafts = drafts.as_slice_mut()?;
        let blocks = self.blocks_of(blocks.as_slice_mut()?);

        let of = batch_rows.len();
        let mut batch = Rows::with_capacity(of);
        let (mut seq_starts, mut context_lens) = (vec![0], Vec::with_capacity(of));
        let mut prompt_lens = Vec::with_capacity(of);
        let (mut sampled, mut sampled_rows) = (Vec::with_capacity(of), Vec::with_capacity(of));
        let (mut sampled_of, mut totals) = (Vec::with_capacity(of), Vec::with_capacity(of));
        let (mut logit_rows, mut prompts) = (Vec::with_capacity(of), Vec::new());
        let mut longest = 0;
        for (place, row) in indices(batch_rows).enumerate() {
            let (first, total) = (facts.computed[row], facts.total[row]);
            if known[place] < 1 || first < 0 {
                let text = format!("{} rows from position {first} on", known[place]);
                return Err(PyValueError::new_err(text));
            }
            let stop = first.saturating_add(known[place]);
            let has_newest = known[place] == 1 && stop == total && total > facts.prompt_len[row];
            let drafted = if has_newest { most[place].min(facts.drafted[row]).max(0) } else { 0 };
            let context = stop.saturating_add(drafted);
            // so many rows have a place, and a number of 32 bits
            blocks.at(row, context - 1)?;
            let start = batch.tokens.len();
            let guesses = &drafts[row * self.most_drafts..][..self.most_drafts];
            let token = if has_newest && on_device { -1 - row as i32 } else { newest[row] };
            if drafted > guesses.len() as i64 {
                let text = format!("{drafted} drafts, where {} are kept", guesses.len());
                return Err(PyValueError::new_err(text));
            }
            for position in first..context {
                batch.positions.push(position as i32);
                batch.slots.push(blocks.slot(row, position)?);
            }
            batch.tokens.resize(start + known[place] as usize, token);
            batch.tokens.extend_from_slice(&guesses[..drafted as usize]);
            if !has_newest {
                prompts.push((place, first, stop, start));
            }
            if stop == total && total < facts.limit[row] {
                sampled.push(place as i64);
                sampled_of.push(row as i64);
                totals.push(total);
                sampled_rows.push(1 + drafted);
                let last = start as i64 + known[place] - 1;
                logit_rows.extend((last..=last + drafted).map(|row| row as i32));
            }
            longest = longest.max(context);
            seq_starts.push(batch.tokens.len() as i32);
            context_lens.push(context as i32);
            prompt_lens.push(facts.prompt_len[row] as i32);
        }
        let row_drafts: Vec<i32> =
            logit_rows.iter().map(|row| batch.tokens[*row as usize]).collect();
        let scored = scores.iter().enumerate().filter(|(_, scores)| **scores);
        let batch = (
            batch.tokens.into_pyarray(py),
            batch.positions.into_pyarray(py),
            batch.slots.into_pyarray(py),
            seq_starts.into_pyarray(py),
            context_lens.into_pyarray(py),
            blocks.table_of(py, batch_rows, longest)?,
            logit_rows.into_pyarray(py),
            prompt_lens.into_pyarray(py),
        );
        let sampled = (
            sampled.into_pyarray(py),
            sampled_of.into_pyarray(py),
            sampled_rows.into_pyarray(py),
            totals.into_pyarray(py),
            row_drafts.into_pyarray(py),
        );
        Ok((batch, sampled, prompts, scored.map(|(place, _)| place).collect()))
    }

    fn ends<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        most: usize,
    ) -> PyResult<(Array<'py, i64>, Bound<'py, PyArray2<i64>>)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let (mut facts, mut stops) = (open(py, &self.facts)?, open(py, &self.stops)?);
        let (facts, stops) = (Facts::of(facts.as_slice_mut()?), stops.as_slice_mut()?);
        let most = most.min(self.most_stops);
        let limits: Vec<i64> = indices(batch_rows).map(|row| facts.limit[row]).collect();
        let mut own = Vec::with_capacity(batch_rows.len() * most);
        for row in indices(batch_rows) {
            own.extend_from_slice(&stops[row * self.most_stops..][..most]);
        }
        Ok((limits.into_pyarray(py), own.into_pyarray(py).reshape([batch_rows.len(), most])?))
    }

    /// The tokens of a step go to its sequences. Returns what they got, and the places of those with penalties.
    ///
    /// Those at `put_off`, places in `sampled_of`, got none and go on: the row of their newest token is computed again.
    #[pyo3(signature = (batch_rows, known, *, sampled_of, rows, drafts, ids, put_off, most_stops, more_stops))]
    fn settle<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        known: Ints<'py>,
        sampled_of: Ints<'py>,
        rows: Ints<'py>,
        drafts: PyReadonlyArray1<'py, i32>,
        ids: Ints<'py>,
        put_off: Vec<usize>,
        most_stops: usize,
        more_stops: HashMap<i64, HashSet<i64>>,
    ) -> PyResult<(CutArrays<'py>, Vec<usize>)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let known = known.as_slice()?;
        let (sampled_of, of_each) = (sampled_of.as_slice()?, rows.as_slice()?);
        let (ids, drafts) = (ids.as_slice()?, drafts.as_slice()?);
        each_below(self.rows, "batch row", sampled_of)?;
        each_has(batch_rows.len(), &[("known", known.len())])?;
        each_has(sampled_of.len(), &[("rows", of_each.len())])?;
        each_has(ids.len(), &[("drafts", drafts.len())])?;
        check_parts("ids", of_each, ids.len())?;
        let (mut facts, mut flags) = (open(py, &self.facts)?, open(py, &self.flags)?);
        let (mut newest, mut stops) = (open(py, &self.newest)?, open(py, &self.stops)?);
        let (facts, flags) =
            (Facts::of(facts.as_slice_mut()?), RowFlags::of(flags.as_slice_mut()?));
        let (newest, stops) = (newest.as_slice_mut()?, stops.as_slice_mut()?);
        each_has(self.rows, &[("newest", newest.len())])?;
        for (row, known) in indices(batch_rows).zip(known) {
            facts.computed[row] += known;
            facts.drafted[row] = 0;
        }
        let most_stops = most_stops.min(self.most_stops);
        let mut cut = Cut::with_capacity(sampled_of.len(), ids.len());
        let (mut penalised, mut start) = (Vec::new(), 0);
        for (place, row) in indices(sampled_of).enumerate() {
            let own = start..start + of_each[place] as usize; // which was checked
            start = own.end;
            let few = &stops[row * self.most_stops..][..most_stops];
            let more = if more_stops.is_empty() { None } else { more_stops.get(&(row as i64)) };
            let is_stop =
                |id: &i64| more.map_or_else(|| few.contains(id), |more| more.contains(id));
            let left = facts.limit[row].saturating_sub(facts.total[row]);
            let (last, goes_on) = cut.push(&ids[own.clone()], &drafts[own], left, is_stop);
            let count = cut.counts[place];
            facts.total[row] += count;
            facts.computed[row] += (count - 1).max(0); // the rows of accepted drafts
            if let Some(id) = last {
                newest[row] = id as i32;
            }
            flags.ended[row] = !goes_on || count == 0;
            if flags.penalised[row] {
                penalised.push(place);
            }
        }
        for place in put_off {
            let row = *sampled_of.get(place).ok_or_else(|| {
                PyValueError::new_err(format!("place {place}, of {}", sampled_of.len()))
            })? as usize; // which was checked
            if cut.counts[place] > 0 {
                return Err(PyValueError::new_err(format!("the one at {place} has a token")));
            }
            facts.computed[row] -= 1;
            flags.ended[row] = false;
        }
        Ok((cut.into_arrays(py), penalised))
    }

    fn after<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
    ) -> PyResult<(Array<'py, i64>, Array<'py, i64>, Array<'py, i64>, Array<'py, i64>)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let mut facts = open(py, &self.facts)?;
        let facts = Facts::of(facts.as_slice_mut()?);
        let of = |column: &[i64]| -> Array<'py, i64> {
            indices(batch_rows).map(|row| column[row]).collect::<Vec<_>>().into_pyarray(py)
        };
        Ok((of(facts.computed), of(facts.drafted), of(facts.keys_from), of(facts.keys_to)))
    }

    /// Who can draft after a step, and how many tokens.
    fn drafting<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        most: i64,
    ) -> PyResult<(Array<'py, i64>, Array<'py, i64>)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let (mut facts, mut flags) = (open(py, &self.facts)?, open(py, &self.flags)?);
        let (facts, flags) =
            (Facts::of(facts.as_slice_mut()?), RowFlags::of(flags.as_slice_mut()?));
        let (mut places, mut each) = (Vec::new(), Vec::new());
        for (place, row) in indices(batch_rows).enumerate() {
            let (after, total) = (facts.computed[row], facts.total[row]);
            let answered = total > facts.prompt_len[row];
            if flags.ended[row] || !flags.answers[row] || !answered || total - after != 1 {
                continue;
            }
            let room = facts.filled[row] * self.block_tokens - after;
            places.push(place as i64);
            each.push((facts.limit[row] - total - 1).min(room).min(most).max(0));
        }
        Ok((places.into_pyarray(py), each.into_pyarray(py)))
    }

    #[pyo3(signature = (batch_rows, *, seq_starts, positions, tokens, drafts, follows=None))]
    fn follow<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        seq_starts: PyReadonlyArray1<'py, i32>,
        positions: PyReadonlyArray1<'py, i32>,
        tokens: PyReadonlyArray1<'py, i32>,
        drafts: Ints<'py>,
        follows: Option<Flags<'py>>,
    ) -> PyResult<drafts::Followed<'py>> {
        let follows = follows.as_ref().map(|follows| follows.as_slice()).transpose()?;
        let step = drafts::StepRows {
            batch_rows: batch_rows.as_slice()?,
            seq_starts: seq_starts.as_slice()?,
            positions: positions.as_slice()?,
            tokens: tokens.as_slice()?,
            drafts: drafts.as_slice()?,
            follows,
        };
        drafts::follow(self, py, &step)
    }

    /// Rows of successive positions of some sequences, for a pass that drafts.
    fn draft_rows<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        starts: Ints<'py>,
        stops: Ints<'py>,
    ) -> PyResult<drafts::DraftRows<'py>> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let (starts, stops) = (starts.as_slice()?, stops.as_slice()?);
        each_has(batch_rows.len(), &[("starts", starts.len()), ("stops", stops.len())])?;
        let mut blocks = open(py, &self.blocks)?;
        let blocks = self.blocks_of(blocks.as_slice_mut()?);
        drafts::draft_rows(py, blocks, batch_rows, starts, stops)
    }

    /// What was drafted for some sequences: the first `made` of the guesses of each.
    fn keep_drafts<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        guesses: PyReadonlyArray2<'py, i64>,
        made: Ints<'py>,
    ) -> PyResult<()> {
        let [each, width] = [guesses.shape()[0], guesses.shape()[1]];
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let made = made.as_slice()?;
        let guesses = guesses.as_slice()?;
        each_has(batch_rows.len(), &[("guesses", each), ("made", made.len())])?;
        let fits = width <= self.most_drafts;
        if !fits || made.iter().any(|made| usize::try_from(*made).map_or(true, |made| made > width))
        {
            let text =
                format!("made {made:?} of {width} guesses, where {} are kept", self.most_drafts);
            return Err(PyValueError::new_err(text));
        }
        let (mut facts, mut drafts) = (open(py, &self.facts)?, open(py, &self.drafts)?);
        let (facts, drafts) = (Facts::of(facts.as_slice_mut()?), drafts.as_slice_mut()?);
        for (place, row) in indices(batch_rows).enumerate() {
            let own = &guesses[place * width..][..width];
            let to = &mut drafts[row * self.most_drafts..][..width];
            to.iter_mut().zip(own).for_each(|(to, guess)| *to = *guess as i32);
            facts.drafted[row] = made[place];
        }
        Ok(())
    }
}

impl InputColumns {
    fn blocks_of<'a>(&self, table: &'a [i32]) -> Blocks<'a> {
        Blocks { table, most: self.most_blocks, block_tokens: self.block_tokens }
    }
}

type Built<'py> = (BatchArrays<'py>, SampledArrays<'py>, Vec<(usize, i64, i64, usize)>, Vec<usize>);

/// `Batch` of Python: tokens, positions, slots, seq_starts, context_lens, block_tables, logit_rows, prompt_lens.
type BatchArrays<'py> = (
    Array<'py, i32>,
    Array<'py, i32>,
    Array<'py, i64>,
    Array<'py, i32>,
    Array<'py, i32>,
    Table<'py>,
    Array<'py, i32>,
    Array<'py, i32>,
);

/// Places, batch rows, rows and totals of the sequences that are sampled; the tokens of their rows.
type SampledArrays<'py> =
    (Array<'py, i64>, Array<'py, i64>, Array<'py, i64>, Array<'py, i64>, Array<'py, i32>);

/// The rows of a batch.
struct Rows {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i64>,
}

impl Rows {
    fn with_capacity(rows: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(rows),
            positions: Vec::with_capacity(rows),
            slots: Vec::with_capacity(rows),
        }
    }
}

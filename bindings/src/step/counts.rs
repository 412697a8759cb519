//! What the engine counts of running sequences: `RowCounts` of Python, whose arrays these are.

use numpy::{IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::slices::{
    Flags, Ints, Kept1, Kept2, check_parts, checked_rows, columns, each_below, each_has, indices,
    open, shape_of,
};

type Array<'py, T> = Bound<'py, PyArray1<T>>;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CountColumns {
    counts: Kept2<i64>,
    facts: Kept2<i64>,
    flags: Kept2<bool>,
    requests: Kept1<u64>,
    recent: Kept2<i32>,
    rows: usize,
    width: usize, // of a row of `recent`
    block_tokens: i64,
}

columns! {
    /// Of `counts`.
    Counts of i64:
    total, computed, pending_rows, pending_tokens, pending_drafts, drafts, keys_from, keys_to, published, held,
    blocks_in_table, listed,
}

columns! {
    /// Of `facts`.
    Facts of i64: prompt_len, limit, link, epoch
}

columns! {
    /// Of `flags`.
    RowFlags of bool: exports_kv, plain, taken
}

impl Counts<'_> {
    /// Tokens once the steps in flight have ended, at least.
    fn length(&self, row: usize) -> i64 {
        self.total[row] + self.pending_tokens[row]
    }

    /// Tokens whose KV there is then.
    fn reached(&self, row: usize) -> i64 {
        self.computed[row] + self.pending_rows[row]
    }
}

/// The first multiple of `block` that is not below `tokens`, in blocks.
fn blocks_for(tokens: i64, block: i64) -> i64 {
    (tokens + block - 1).div_euclid(block)
}

#[pymethods]
impl CountColumns {
    #[new]
    #[pyo3(signature = (*, counts, facts, flags, requests, recent, block_tokens))]
    fn new(
        counts: Bound<'_, numpy::PyArray2<i64>>,
        facts: Bound<'_, numpy::PyArray2<i64>>,
        flags: Bound<'_, numpy::PyArray2<bool>>,
        requests: Bound<'_, PyArray1<u64>>,
        recent: Bound<'_, numpy::PyArray2<i32>>,
        block_tokens: u32,
    ) -> PyResult<Self> {
        let [rows, width] = shape_of("recent", &recent)?;
        let shapes =
            [shape_of("counts", &counts)?, shape_of("facts", &facts)?, shape_of("flags", &flags)?];
        let requests_len = requests.len()?;
        if shapes != [[Counts::ROWS, rows], [Facts::ROWS, rows], [RowFlags::ROWS, rows]]
            || requests_len != rows
        {
            let text = format!(
                "counts, facts and flags of {shapes:?} and {requests_len} requests, but recent of {rows} rows"
            );
            return Err(PyValueError::new_err(text));
        }
        if block_tokens == 0 || width == 0 || !width.is_multiple_of(block_tokens as usize) {
            let text = format!("recent has {width} tokens a row, and blocks have {block_tokens}");
            return Err(PyValueError::new_err(text));
        }
        Ok(Self {
            counts: counts.unbind(),
            facts: facts.unbind(),
            flags: flags.unbind(),
            requests: requests.unbind(),
            recent: recent.unbind(),
            rows,
            width,
            block_tokens: block_tokens.into(),
        })
    }

    fn plan<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
    ) -> PyResult<(Option<Array<'py, i64>>, Vec<i64>, Array<'py, i64>, i64)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let (mut counts, mut facts) = (open(py, &self.counts)?, open(py, &self.facts)?);
        let (counts, facts) =
            (Counts::of(counts.as_slice_mut()?), Facts::of(facts.as_slice_mut()?));
        let (mut decodes, mut prefills, mut full, mut most) =
            (Vec::new(), Vec::new(), Vec::new(), 0);
        decodes.reserve_exact(batch_rows.len());
        for row in indices(batch_rows) {
            let (length, reached) = (counts.length(row), counts.reached(row));
            if length - reached > 1 {
                prefills.push(row as i64);
            }
            let ends = counts.pending_tokens[row] > 0 && length >= facts.limit[row];
            if length - reached != 1 || ends {
                continue;
            }
            decodes.push(row as i64);
            let last = (reached + counts.pending_drafts[row]).min(facts.limit[row] - 1);
            let missing = last.div_euclid(self.block_tokens) + 1 - counts.held[row];
            if missing > 0 {
                full.push(row as i64);
                most = most.max(missing);
            }
        }
        let decodes = (decodes.len() < batch_rows.len()).then(|| decodes.into_pyarray(py));
        Ok((decodes, prefills, full.into_pyarray(py), most))
    }

    fn hold(&self, py: Python<'_>, batch_rows: Ints<'_>) -> PyResult<()> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let mut counts = open(py, &self.counts)?;
        let counts = Counts::of(counts.as_slice_mut()?);
        indices(batch_rows).for_each(|row| counts.held[row] += 1);
        Ok(())
    }

    fn lookahead<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        rows_left: i64,
        most: i64,
    ) -> PyResult<(Array<'py, i64>, Array<'py, i64>, Array<'py, i64>, i64)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let mut counts = open(py, &self.counts)?;
        let (mut facts, mut flags) = (open(py, &self.facts)?, open(py, &self.flags)?);
        let counts = Counts::of(counts.as_slice_mut()?);
        let facts = Facts::of(facts.as_slice_mut()?);
        let flags = RowFlags::of(flags.as_slice_mut()?);
        let mut drafts: Vec<i64> = Vec::with_capacity(batch_rows.len());
        for row in indices(batch_rows) {
            let there = counts.drafts[row];
            let left = facts.limit[row] - counts.length(row) - 1;
            let in_flight = counts.pending_rows[row] != 0;
            drafts.push(if in_flight { (there + 1).min(left).max(0) } else { there });
        }
        let mut each = most;
        while each > 0 && drafts.iter().map(|wanted| *wanted.min(&each)).sum::<i64>() > rows_left {
            each -= 1;
        }
        let (mut lacking, mut growing, mut greatest) = (Vec::new(), Vec::new(), 0);
        for (place, row) in indices(batch_rows).enumerate() {
            drafts[place] = drafts[place].min(each);
            let last = counts.length(row) + counts.pending_drafts[row] + drafts[place] + most;
            if last <= counts.held[row] * self.block_tokens && !flags.exports_kv[row] {
                continue;
            }
            lacking.push(place as i64);
            if flags.exports_kv[row] {
                continue;
            }
            let wanted = last.min(facts.limit[row]);
            let missing = blocks_for(wanted, self.block_tokens) - counts.held[row];
            if missing > 0 {
                growing.push(row as i64);
                greatest = greatest.max(missing);
            }
        }
        Ok((drafts.into_pyarray(py), lacking.into_pyarray(py), growing.into_pyarray(py), greatest))
    }

    fn with_room<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        drafts: Ints<'py>,
    ) -> PyResult<Array<'py, i64>> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let drafts = drafts.as_slice()?;
        each_has(batch_rows.len(), &[("drafts", drafts.len())])?;
        let (mut counts, mut flags) = (open(py, &self.counts)?, open(py, &self.flags)?);
        let (counts, flags) =
            (Counts::of(counts.as_slice_mut()?), RowFlags::of(flags.as_slice_mut()?));
        let room = |row: usize| {
            let before = counts.length(row) + counts.pending_drafts[row];
            if flags.exports_kv[row] { 0 } else { counts.held[row] * self.block_tokens - before }
        };
        let fits =
            indices(batch_rows).zip(drafts).map(|(row, drafts)| (*drafts).min(room(row)).max(0));
        Ok(fits.collect::<Vec<_>>().into_pyarray(py))
    }

    fn decoding<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
    ) -> PyResult<(
        Array<'py, i64>,
        Array<'py, i64>,
        Array<'py, i64>,
        Array<'py, bool>,
        Array<'py, bool>,
        Vec<usize>,
    )> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let mut counts = open(py, &self.counts)?;
        let (mut facts, mut flags) = (open(py, &self.facts)?, open(py, &self.flags)?);
        let counts = Counts::of(counts.as_slice_mut()?);
        let facts = Facts::of(facts.as_slice_mut()?);
        let flags = RowFlags::of(flags.as_slice_mut()?);
        let starts: Vec<i64> = indices(batch_rows).map(|row| counts.reached(row)).collect();
        let epochs: Vec<i64> = indices(batch_rows).map(|row| facts.epoch[row]).collect();
        let each = || indices(batch_rows).zip(&starts);
        let decodes: Vec<bool> =
            each().map(|(row, start)| start + 1 > facts.prompt_len[row]).collect();
        let chooses: Vec<bool> = each().map(|(row, start)| start + 1 < facts.limit[row]).collect();
        let places = indices(batch_rows).enumerate();
        let special =
            places.filter(|(_, row)| !flags.plain[*row]).map(|(place, _)| place).collect();
        let ones = vec![1_i64; batch_rows.len()];
        Ok((
            epochs.into_pyarray(py),
            starts.into_pyarray(py),
            ones.into_pyarray(py),
            decodes.into_pyarray(py),
            chooses.into_pyarray(py),
            special,
        ))
    }

    #[pyo3(signature = (batch_rows, *, starts, counts, drafts, chooses, decodes))]
    fn begin<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        starts: Ints<'py>,
        counts: Ints<'py>,
        drafts: Ints<'py>,
        chooses: Flags<'py>,
        decodes: Flags<'py>,
    ) -> PyResult<(
        Array<'py, i64>,
        Array<'py, i64>,
        Array<'py, i64>,
        Vec<i64>,
        Vec<usize>,
        usize,
        i64,
    )> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let (starts, new) = (starts.as_slice()?, counts.as_slice()?);
        let (drafts, chooses, decodes) =
            (drafts.as_slice()?, chooses.as_slice()?, decodes.as_slice()?);
        each_has(
            batch_rows.len(),
            &[
                ("starts", starts.len()),
                ("counts", new.len()),
                ("drafts", drafts.len()),
                ("chooses", chooses.len()),
                ("decodes", decodes.len()),
            ],
        )?;
        let (mut counts, mut flags) = (open(py, &self.counts)?, open(py, &self.flags)?);
        let (counts, flags) =
            (Counts::of(counts.as_slice_mut()?), RowFlags::of(flags.as_slice_mut()?));
        let (mut grown, mut places, mut keys_from) = (Vec::new(), Vec::new(), Vec::new());
        let (mut others, mut exports) = (Vec::new(), Vec::new());
        let mut kv_tokens = 0;
        for (place, row) in indices(batch_rows).enumerate() {
            match counts.held[row] - counts.blocks_in_table[row] {
                1 => {
                    grown.push(row as i64);
                    places.push(counts.blocks_in_table[row]);
                    keys_from.push(counts.keys_from[row]);
                    counts.blocks_in_table[row] = counts.held[row];
                }
                more if more > 1 => others.push(row as i64),
                _ => {}
            }
            if flags.exports_kv[row] {
                exports.push(place);
            }
            counts.pending_rows[row] += new[place];
            counts.pending_tokens[row] += i64::from(chooses[place]);
            counts.pending_drafts[row] += drafts[place];
            kv_tokens += starts[place] + new[place] + drafts[place];
        }
        let decode_rows = decodes.iter().filter(|decodes| **decodes).count();
        Ok((
            grown.into_pyarray(py),
            places.into_pyarray(py),
            keys_from.into_pyarray(py),
            others,
            exports,
            decode_rows,
            kv_tokens,
        ))
    }

    fn still_there<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        epochs: Ints<'py>,
        places: Ints<'py>,
        counts: Ints<'py>,
    ) -> PyResult<(Option<Array<'py, bool>>, Vec<i64>)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let epochs = epochs.as_slice()?;
        let (places, new) = (places.as_slice()?, counts.as_slice()?);
        each_below(batch_rows.len(), "place", places)?;
        each_has(batch_rows.len(), &[("epochs", epochs.len())])?;
        each_has(places.len(), &[("counts", new.len())])?;
        let mut counts = open(py, &self.counts)?;
        let (mut facts, mut flags) = (open(py, &self.facts)?, open(py, &self.flags)?);
        let counts = Counts::of(counts.as_slice_mut()?);
        let facts = Facts::of(facts.as_slice_mut()?);
        let flags = RowFlags::of(flags.as_slice_mut()?);
        let is_there = |(row, epoch): (usize, &i64)| flags.taken[row] && facts.epoch[row] == *epoch;
        let there: Vec<bool> = indices(batch_rows).zip(epochs).map(is_there).collect();
        let (width, mut to_list) = (self.width as i64, Vec::new());
        for (place, count) in indices(places).zip(new) {
            let row = batch_rows[place] as usize;
            if there[place] && counts.total[row] + count - counts.listed[row] > width {
                to_list.push(row as i64);
            }
        }
        let all = there.iter().all(|there| *there);
        Ok(((!all).then(|| there.into_pyarray(py)), to_list))
    }

    #[pyo3(signature = (batch_rows, *, there, counts, chooses, drafts, computed, drafted, keys_from, keys_to,
                        places, new_tokens, ids))]
    fn take_in<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        there: Option<Flags<'py>>,
        counts: Ints<'py>,
        chooses: Flags<'py>,
        drafts: Ints<'py>,
        computed: Ints<'py>,
        drafted: Ints<'py>,
        keys_from: Ints<'py>,
        keys_to: Ints<'py>,
        places: Ints<'py>,
        new_tokens: Ints<'py>,
        ids: Ints<'py>,
    ) -> PyResult<()> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let new = counts.as_slice()?;
        let there = there.as_ref().map(|there| there.as_slice()).transpose()?;
        let (chooses, drafts) = (chooses.as_slice()?, drafts.as_slice()?);
        let (computed, drafted) = (computed.as_slice()?, drafted.as_slice()?);
        let (keys_from, keys_to) = (keys_from.as_slice()?, keys_to.as_slice()?);
        let (places, new_tokens) = (places.as_slice()?, new_tokens.as_slice()?);
        let mut ids = ids.as_slice()?;
        each_below(batch_rows.len(), "place", places)?;
        each_has(
            batch_rows.len(),
            &[
                ("there", there.map_or(batch_rows.len(), <[bool]>::len)),
                ("counts", new.len()),
                ("chooses", chooses.len()),
                ("drafts", drafts.len()),
                ("computed", computed.len()),
                ("drafted", drafted.len()),
                ("keys_from", keys_from.len()),
                ("keys_to", keys_to.len()),
            ],
        )?;
        each_has(places.len(), &[("new_tokens", new_tokens.len())])?;
        check_parts("ids", new_tokens, ids.len())?;
        let (mut counts, mut recent) = (open(py, &self.counts)?, open(py, &self.recent)?);
        let (counts, recent) = (Counts::of(counts.as_slice_mut()?), recent.as_slice_mut()?);
        let is_there = |place: usize| there.is_none_or(|there| there[place]);
        for (place, count) in indices(places).zip(new_tokens) {
            let (own, rest) = ids.split_at(*count as usize); // which was checked
            ids = rest;
            if !is_there(place) {
                continue;
            }
            let row = batch_rows[place] as usize;
            let ring = &mut recent[row * self.width..][..self.width];
            for (at, id) in (counts.total[row]..).zip(own) {
                ring[at.rem_euclid(self.width as i64) as usize] = *id as i32;
            }
            counts.total[row] += count;
        }
        for (place, row) in indices(batch_rows).enumerate().filter(|(place, _)| is_there(*place)) {
            counts.computed[row] = computed[place];
            counts.drafts[row] = drafted[place];
            counts.pending_rows[row] -= new[place];
            counts.pending_tokens[row] -= i64::from(chooses[place]);
            counts.pending_drafts[row] -= drafts[place];
            counts.keys_from[row] = counts.keys_from[row].max(keys_from[place]);
            counts.keys_to[row] = keys_to[place];
        }
        Ok(())
    }

    fn filled<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        prompts_only: bool,
    ) -> PyResult<(Array<'py, i64>, Array<'py, i64>, Vec<bool>)> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let mut counts = open(py, &self.counts)?;
        let (mut facts, mut flags) = (open(py, &self.facts)?, open(py, &self.flags)?);
        let counts = Counts::of(counts.as_slice_mut()?);
        let facts = Facts::of(facts.as_slice_mut()?);
        let flags = RowFlags::of(flags.as_slice_mut()?);
        let (mut due, mut places, mut next) = (Vec::new(), Vec::new(), Vec::new());
        for row in indices(batch_rows) {
            let most = if prompts_only { facts.prompt_len[row] } else { i64::MAX };
            let full = counts.computed[row].min(most).div_euclid(self.block_tokens);
            let published = counts.published[row];
            if full == published {
                continue;
            }
            due.push(row as i64);
            places.push(published);
            let in_ring = counts.total[row] - published * self.block_tokens <= self.width as i64;
            let follows = full == published + 1 && published > 0;
            next.push(follows && in_ring && !flags.exports_kv[row]);
        }
        Ok((due.into_pyarray(py), places.into_pyarray(py), next))
    }

    /// The tokens of one full block of each, which are in `recent`.
    fn block_at<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        places: Ints<'py>,
    ) -> PyResult<Bound<'py, numpy::PyArray2<i32>>> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let places = places.as_slice()?;
        each_has(batch_rows.len(), &[("places", places.len())])?;
        let mut recent = open(py, &self.recent)?;
        let recent = recent.as_slice_mut()?;
        let block_tokens = self.block_tokens as usize;
        let blocks = (self.width / block_tokens) as i64;
        let mut tokens = Vec::with_capacity(batch_rows.len() * block_tokens);
        for (row, place) in indices(batch_rows).zip(places) {
            let start = row * self.width + place.rem_euclid(blocks) as usize * block_tokens;
            tokens.extend_from_slice(&recent[start..][..block_tokens]);
        }
        tokens.into_pyarray(py).reshape([batch_rows.len(), block_tokens])
    }

    #[pyo3(signature = (batch_rows, places, there, *, finish, counts, drafted, accepted))]
    fn told<'py>(
        &self,
        py: Python<'py>,
        batch_rows: Ints<'py>,
        places: Ints<'py>,
        there: Option<Flags<'py>>,
        finish: PyReadonlyArray1<'py, i8>,
        counts: Ints<'py>,
        drafted: Ints<'py>,
        accepted: Ints<'py>,
    ) -> PyResult<(Option<Array<'py, bool>>, Array<'py, i64>, Array<'py, u64>, Option<i64>, [i64; 2])>
    {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let places = places.as_slice()?;
        let there = there.as_ref().map(|there| there.as_slice()).transpose()?;
        let (finish, new) = (finish.as_slice()?, counts.as_slice()?);
        each_below(batch_rows.len(), "place", places)?;
        each_has(batch_rows.len(), &[("there", there.map_or(batch_rows.len(), <[bool]>::len))])?;
        each_has(places.len(), &[("finish", finish.len()), ("counts", new.len())])?;
        let (mut facts, mut flags) = (open(py, &self.facts)?, open(py, &self.flags)?);
        let mut requests = open(py, &self.requests)?;
        let facts = Facts::of(facts.as_slice_mut()?);
        let flags = RowFlags::of(flags.as_slice_mut()?);
        let requests = requests.as_slice_mut()?;
        each_has(self.rows, &[("requests", requests.len())])?;
        let mut plain = Vec::with_capacity(places.len());
        let (mut links, mut told) =
            (Vec::with_capacity(places.len()), Vec::with_capacity(places.len()));
        for (i, place) in indices(places).enumerate() {
            let row = batch_rows[place] as usize;
            let is_there = there.is_none_or(|there| there[place]);
            plain.push(is_there && flags.plain[row] && finish[i] == 0 && new[i] > 0);
            links.push(facts.link[row]);
            told.push(requests[row]);
        }
        let all = plain.iter().all(|plain| *plain);
        let only = links.first().copied().filter(|first| links.iter().all(|link| link == first));
        let plain = (!all).then(|| plain.into_pyarray(py));
        let sums = [drafted.as_slice()?.iter().sum(), accepted.as_slice()?.iter().sum()];
        Ok((plain, links.into_pyarray(py), told.into_pyarray(py), only, sums))
    }

    fn prompt_tokens(&self, py: Python<'_>, batch_rows: Ints<'_>) -> PyResult<i64> {
        let batch_rows = checked_rows(self.rows, &batch_rows)?;
        let (mut counts, mut facts) = (open(py, &self.counts)?, open(py, &self.facts)?);
        let (counts, facts) =
            (Counts::of(counts.as_slice_mut()?), Facts::of(facts.as_slice_mut()?));
        let remaining = |row: usize| {
            let (total, remaining) = (counts.total[row], counts.total[row] - counts.computed[row]);
            if remaining <= 1 && total > facts.prompt_len[row] { 0 } else { remaining }
        };
        Ok(indices(batch_rows).map(remaining).sum())
    }
}

//! A layer whose experts are on several ranks, exchanged by the program itself.
//!
//! Rows of this rank that ask its own slots stay where they are. Where slots have many rows to compute, they do so in two
//! parts: the rows of other ranks, whose results are waited for there, and own rows, while parcels are on their way. With few
//! rows reading the weights is what takes the time, so all rows are computed at once. Results are apart, one by one, until the
//! sum of a row adds them in its order: no bit depends on which of them were computed together, or when.

use std::time::{Duration, Instant};

use super::exchange::{Combine, Received, combine};
use super::parcels::{Cells, CellsMut, Column, ColumnMut, Outgoing, Parcels};
use super::router::Chosen;
use super::sends::{Asking, Sends, order_into, slots_of_own_rows, starts};
use super::slots::{Asked, Results, Sink};
use super::{Moe, named};
use crate::product;
use crate::simd::Level;
use crate::step::{StepError, below};

/// Memory that calls reuse. It grows to what the largest step needs, and no further.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    plan: Sends,
    own_slots: Vec<i32>,
    /// Rows of other ranks; where all are computed at once, own rows come behind them.
    received: Received,
    counts: Vec<usize>,
    /// What the slots made of `received`.
    results: Results,
    /// What they made of own rows by themselves.
    own: Results,
    /// Results in the order of the sends.
    order: Vec<i64>,
    sums: Vec<f32>,
    own_sums: Vec<f32>,
    returned: Vec<f32>,
}

impl Moe<'_> {
    /// Computes `y` with other ranks.
    pub(super) fn by_parcels(
        &mut self,
        parcels: &dyn Parcels,
        level: Level,
        linear: &mut product::Scratch,
        scratch: &mut super::Scratch,
    ) -> Result<(), StepError> {
        let (experts, x) = (self.experts, self.x);
        let (hidden, top_k) = (experts.hidden(), experts.router.routing().top_k);
        let (rank, mode, home) = (parcels.rank(), parcels.combine(), parcels.home());
        let super::Scratch { chosen: Chosen { ids, weights }, shared, slots, apart, .. } = scratch;
        let Scratch { plan, own_slots, received, counts, results, own, order, .. } = apart;

        let (owners, places) = (&home.owners, &home.slots);
        let asking = Asking { ids, weights, top_k, owners, slots: places, ranks: parcels.ranks() };
        plan.replan(asking, mode).map_err(|text| StepError::Exchange(text.into()))?;
        slots_of_own_rows(asking, rank, own_slots);
        below("slots of own rows", named(own_slots), experts.slots().count())?;
        let columns = [
            Column { cells: Cells::F32(x), width: hidden, order: Some(&plan.rows) },
            Column { cells: Cells::I32(&plan.slots), width: top_k, order: None },
            Column { cells: Cells::F32(&plan.weights), width: top_k, order: None },
        ];
        let out = Outgoing { columns: &columns, counts: &plan.counts };
        parcels.post(out).map_err(StepError::Exchange)?;
        self.shared(level, linear, shared);

        let mut spent = Duration::ZERO;
        let mut compute = |asked: Asked<'_>, results: &mut Results| {
            let began = Instant::now();
            experts.slots().compute(level, asked, linear, slots, Sink::Apart(results));
            spent += began.elapsed();
        };
        let enough = parcels.rows_apart().saturating_mul(experts.slots().count());
        let many = |slots: &[i32]| named(slots).count() >= enough;
        let own_rows = Asked { x, slots: own_slots, weights, top_k };
        let own_many = many(own_slots);
        let own_first = own_many && !parcels.has_come(out).map_err(StepError::Exchange)?;
        if own_first {
            compute(own_rows, own);
        }

        parcels.counts(out, counts).map_err(StepError::Exchange)?;
        let rows = counts.iter().sum::<usize>();
        received.resize(rows, hidden, top_k);
        let mut room = [
            ColumnMut { cells: CellsMut::F32(&mut received.x), width: hidden },
            ColumnMut { cells: CellsMut::I32(&mut received.slots), width: top_k },
            ColumnMut { cells: CellsMut::F32(&mut received.weights), width: top_k },
        ];
        parcels.take(out, &mut room).map_err(StepError::Exchange)?;
        below("received slots", named(&received.slots), experts.slots().count())?;
        let own_apart = own_first || rows == 0 || (own_many && many(&received.slots));
        if !own_apart {
            received.append(own_rows);
        }
        compute(received.asked(top_k), results);

        let answers = &results.places[..rows * top_k];
        let (cells, order, back) = match mode {
            Combine::Exact => {
                let back = order_into(answers, top_k, counts, order);
                let back = back.map_err(|text| StepError::Exchange(text.into()))?;
                (&results.y, Some(&order[..]), back)
            }
            Combine::Partial => {
                sum(&results.y, answers, hidden, &mut apart.sums, rows);
                (&apart.sums, None, counts.clone())
            }
        };
        let columns = [Column { cells: Cells::F32(cells), width: hidden, order }];
        let out = Outgoing { columns: &columns, counts: &back };
        parcels.post(out).map_err(StepError::Exchange)?;
        if own_apart && !own_first {
            compute(own_rows, own);
        }
        parcels.computed(spent);

        let mut came = Vec::new();
        parcels.counts(out, &mut came).map_err(StepError::Exchange)?;
        check_answers(&came, &plan.answers, rank)?;
        apart.returned.resize(came.iter().sum::<usize>() * hidden, 0.0);
        let cells = CellsMut::F32(&mut apart.returned);
        let mut room = [ColumnMut { cells, width: hidden }];
        parcels.take(out, &mut room).map_err(StepError::Exchange)?;

        let (own_y, own_places) = if own_apart {
            (&own.y, &own.places[..])
        } else {
            (&results.y, &results.places[rows * top_k..])
        };
        let first = starts(&plan.answers)[rank];
        let terms = Terms {
            hidden,
            places: &plan.places,
            width: Sends::answers_of_a_row(top_k, parcels.ranks(), mode),
            own: (first, first + plan.answers[rank]),
            returned: &apart.returned,
        };
        match mode {
            // An expert's place in its row is the same in both.
            Combine::Exact => terms.add(self.y, |row, column| {
                &own_y[own_places[row * top_k + column] as usize * hidden..][..hidden]
            }),
            Combine::Partial => {
                sum(own_y, own_places, hidden, &mut apart.own_sums, self.y.len() / hidden);
                let sums = &apart.own_sums;
                terms.add(self.y, |row, _| &sums[row * hidden..][..hidden]);
            }
        }
        Ok(())
    }
}

/// What is added to the rows of this rank.
struct Terms<'a> {
    hidden: usize,
    /// `[rows, width]`, as [`Sends::places`].
    places: &'a [i32],
    width: usize,
    /// From where to where `places` are results of this rank.
    own: (usize, usize),
    /// All others, rank after rank.
    returned: &'a [f32],
}

impl Terms<'_> {
    /// Adds to each row of `y` its results in their order. `own` gives that of a row and column that was computed here.
    fn add<'o>(&self, y: &mut [f32], own: impl Fn(usize, usize) -> &'o [f32]) {
        let (first, end) = self.own;
        let rows = y.chunks_exact_mut(self.hidden).zip(self.places.chunks_exact(self.width));
        for (row, (y, places)) in rows.enumerate() {
            for (column, place) in places.iter().enumerate() {
                let Ok(place) = usize::try_from(*place) else { continue };
                let term = if (first..end).contains(&place) {
                    own(row, column)
                } else {
                    let at = if place < first { place } else { place - (end - first) };
                    &self.returned[at * self.hidden..][..self.hidden]
                };
                for (y, term) in y.iter_mut().zip(term) {
                    *y += term;
                }
            }
        }
    }
}

/// The sum of each row's results, in their order.
fn sum(results: &[f32], places: &[i32], hidden: usize, sums: &mut Vec<f32>, rows: usize) {
    sums.clear();
    sums.resize(rows * hidden, 0.0);
    combine(results, places, hidden, sums);
}

fn check_answers(came: &[usize], due: &[usize], own: usize) -> Result<(), StepError> {
    let wrong = |rank: &usize| *rank != own && came[*rank] != due[*rank];
    match (0..due.len()).find(wrong) {
        None => Ok(()),
        Some(rank) => {
            let (came, due) = (came[rank], due[rank]);
            let text = format!("rank {rank} returned {came} results where {due} are due");
            Err(StepError::Exchange(text.into()))
        }
    }
}

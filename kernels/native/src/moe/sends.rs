//! Which rows go to which rank, and in which order results come back. A *send* is a row on its way to a rank.

use super::exchange::Combine;

/// What a row's experts are, and where they are.
#[derive(Debug, Clone, Copy)]
pub struct Asking<'a> {
    /// `[rows, top_k]`, experts of the group.
    pub ids: &'a [i32],
    /// `[rows, top_k]`.
    pub weights: &'a [f32],
    /// Experts of a row.
    pub top_k: usize,
    /// The rank that has each expert.
    pub owners: &'a [i64],
    /// Its slot there.
    pub slots: &'a [i32],
    /// Of the group.
    pub ranks: usize,
}

/// The sends of all rows, rank after rank, rows ascending.
#[derive(Debug, Default, PartialEq)]
pub struct Sends {
    /// Of each send.
    pub rows: Vec<i64>,
    /// Sends to each rank.
    pub counts: Vec<usize>,
    /// `[sends, top_k]`; slots of that rank, `-1` where another one has the expert.
    pub slots: Vec<i32>,
    /// `[sends, top_k]`.
    pub weights: Vec<f32>,
    /// `[rows, answers]`: where results are among those that come back, rank after rank, in the order of the sends.
    pub places: Vec<i32>,
    /// Results that come back from each rank.
    pub answers: Vec<usize>,
}

impl Sends {
    /// # Errors
    /// If lengths do not fit, or an expert or a rank is not of the group.
    pub fn plan(asking: Asking<'_>, combine: Combine) -> Result<Self, String> {
        let mut plan = Self::default();
        plan.replan(asking, combine)?;
        Ok(plan)
    }

    /// [`Self::plan`] in the memory of an earlier one.
    ///
    /// # Errors
    /// As [`Self::plan`]; the plan is of no use then.
    pub fn replan(&mut self, asking: Asking<'_>, combine: Combine) -> Result<(), String> {
        let Asking { ids, weights, top_k, owners, slots, ranks } = asking;
        if top_k == 0 || !ids.len().is_multiple_of(top_k) || weights.len() != ids.len() {
            return Err(format!(
                "{} ids and {} weights in rows of {top_k}",
                ids.len(),
                weights.len()
            ));
        }
        if owners.len() != slots.len() {
            return Err(format!("{} experts have ranks, {} have slots", owners.len(), slots.len()));
        }
        if let Some(rank) = owners.iter().find(|&&rank| !(0..ranks as i64).contains(&rank)) {
            return Err(format!("rank {rank} of {ranks}"));
        }
        if let Some(id) =
            ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= owners.len()))
        {
            return Err(format!("expert {id} of {}", owners.len()));
        }
        let rows = ids.len() / top_k;
        let owner = |id: i32| owners[id as usize] as usize;
        let mut counts = vec![0; ranks];
        let mut pairs = vec![0; ranks];
        let mut last = vec![usize::MAX; ranks]; // the row that was sent to each rank last
        for (row, ids) in ids.chunks_exact(top_k).enumerate() {
            for &id in ids {
                let rank = owner(id);
                pairs[rank] += 1;
                if std::mem::replace(&mut last[rank], row) != row {
                    counts[rank] += 1;
                }
            }
        }
        let sends = counts.iter().sum::<usize>();
        let answers = match combine {
            Combine::Exact => pairs,
            Combine::Partial => counts.clone(),
        };
        let width = Self::answers_of_a_row(top_k, ranks, combine);
        let plan = self;
        refill(&mut plan.rows, sends, 0);
        refill(&mut plan.slots, sends * top_k, -1);
        refill(&mut plan.weights, sends * top_k, 0.0);
        refill(&mut plan.places, rows * width, -1);
        (plan.counts, plan.answers) = (counts, answers);
        let mut next_send = starts(&plan.counts);
        let mut next_answer = starts(&plan.answers);
        let mut send_of = vec![0; ranks];
        last.fill(usize::MAX);
        for (row, ids) in ids.chunks_exact(top_k).enumerate() {
            let places = &mut plan.places[row * width..][..width];
            let mut goes = 0;
            for (column, &id) in ids.iter().enumerate() {
                let rank = owner(id);
                if std::mem::replace(&mut last[rank], row) != row {
                    let send = next_send[rank];
                    next_send[rank] += 1;
                    send_of[rank] = send;
                    plan.rows[send] = row as i64;
                    let weights = &weights[row * top_k..][..top_k];
                    plan.weights[send * top_k..][..top_k].copy_from_slice(weights);
                    if combine == Combine::Partial {
                        places[goes] = send as i32;
                        goes += 1;
                    }
                }
                plan.slots[send_of[rank] * top_k + column] = slots[id as usize];
                if combine == Combine::Exact {
                    places[column] = next_answer[rank] as i32;
                    next_answer[rank] += 1;
                }
            }
            // Sends to later ranks have higher numbers.
            places[..goes].sort_unstable();
        }
        Ok(())
    }

    /// Results that come back for each row at most.
    pub fn answers_of_a_row(top_k: usize, ranks: usize, combine: Combine) -> usize {
        match combine {
            Combine::Exact => top_k,
            Combine::Partial => top_k.min(ranks),
        }
    }
}

fn refill<T: Copy>(vec: &mut Vec<T>, len: usize, value: T) {
    vec.clear();
    vec.resize(len, value);
}

/// The slots of `rank` that rows ask, `[rows, top_k]`; `-1` where they do not go there.
///
/// # Panics
/// If an expert is not of the group, which [`Sends::plan`] finds.
pub fn slots_of_own_rows(asking: Asking<'_>, rank: usize, into: &mut Vec<i32>) {
    let Asking { ids, owners, slots, .. } = asking;
    let slot =
        |id: &i32| if owners[*id as usize] == rank as i64 { slots[*id as usize] } else { -1 };
    into.clear();
    into.extend(ids.iter().map(slot));
}

/// Where the parcels of each rank begin, among all of them.
pub(crate) fn starts(counts: &[usize]) -> Vec<usize> {
    let ends = counts.iter().scan(0, |end, count| {
        *end += count;
        Some(*end)
    });
    ends.zip(counts).map(|(end, count)| end - count).collect()
}

/// Results of received rows in the order of the sends: the rows of them, and how many go back to each rank.
///
/// `counts` are the received rows of each rank, `places` the results of each received row.
///
/// # Errors
/// If there are not as many rows.
pub fn in_order_of_sends(
    places: &[i32],
    width: usize,
    counts: &[usize],
) -> Result<(Vec<i64>, Vec<usize>), String> {
    let mut order = Vec::with_capacity(places.len());
    let back = order_into(places, width, counts, &mut order)?;
    Ok((order, back))
}

/// [`in_order_of_sends`], whose rows replace those of `order`.
pub(crate) fn order_into(
    places: &[i32],
    width: usize,
    counts: &[usize],
    order: &mut Vec<i64>,
) -> Result<Vec<usize>, String> {
    if counts.iter().sum::<usize>() * width != places.len() {
        return Err(format!("{} places in rows of {width}, of {counts:?} rows", places.len()));
    }
    let mut rest = places;
    order.clear();
    let back = counts.iter().map(|count| {
        let (part, others) = rest.split_at(count * width);
        rest = others;
        let before = order.len();
        order.extend(part.iter().filter(|&&place| place >= 0).map(|&place| i64::from(place)));
        order.len() - before
    });
    Ok(back.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Experts 0 and 1 are on rank 0, 2 and 3 on rank 1, 4 on rank 2.
    const OWNERS: [i64; 5] = [0, 0, 1, 1, 2];
    const SLOTS: [i32; 5] = [0, 1, 0, 1, 0];

    fn plan(ids: &[i32], combine: Combine) -> Sends {
        let weights: Vec<f32> = (0..ids.len()).map(|i| i as f32).collect();
        let asking =
            Asking { ids, weights: &weights, top_k: 2, owners: &OWNERS, slots: &SLOTS, ranks: 3 };
        Sends::plan(asking, combine).expect("these fit")
    }

    #[test]
    fn a_row_is_sent_once_to_each_rank_that_has_some_of_its_experts() {
        let found = plan(&[0, 1, 1, 2, 3, 4], Combine::Exact);
        assert_eq!(found.rows, [0, 1, 1, 2, 2]);
        assert_eq!(found.counts, [2, 2, 1]);
        assert_eq!(found.slots, [0, 1, 1, -1, -1, 0, 1, -1, -1, 0]);
        assert_eq!(found.weights, [0.0, 1.0, 2.0, 3.0, 2.0, 3.0, 4.0, 5.0, 4.0, 5.0]);
    }

    #[test]
    fn results_come_back_rank_after_rank() {
        let exact = plan(&[0, 1, 1, 2, 3, 4], Combine::Exact);
        assert_eq!(exact.places, [0, 1, 2, 3, 4, 5]);
        assert_eq!(exact.answers, [3, 2, 1]);
        let partial = plan(&[2, 0, 4, 1], Combine::Partial);
        assert_eq!(partial.places, [0, 2, 1, 3]); // by rank, whatever the order of experts
        assert_eq!(partial.answers, [2, 1, 1]);
    }

    #[test]
    fn what_is_not_of_the_group_is_refused() {
        for ids in [[5, 0], [-1, 0]] {
            let asking = Asking {
                ids: &ids,
                weights: &[0.0; 2],
                top_k: 2,
                owners: &OWNERS,
                slots: &SLOTS,
                ranks: 3,
            };
            assert!(Sends::plan(asking, Combine::Exact).is_err());
            assert!(
                Sends::plan(Asking { ids: &[0, 1], ranks: 2, ..asking }, Combine::Exact).is_err()
            );
            assert!(
                Sends::plan(Asking { ids: &[0, 1], top_k: 0, ..asking }, Combine::Exact).is_err()
            );
        }
    }

    #[test]
    fn results_go_back_in_the_order_of_sends() {
        let (order, back) = in_order_of_sends(&[3, -1, 0, 2, -1, -1], 2, &[2, 0, 1]).expect("fits");
        assert_eq!((order, back), (vec![3, 0, 2], vec![3, 0, 0]));
        assert!(in_order_of_sends(&[0], 2, &[1]).is_err());
    }
}

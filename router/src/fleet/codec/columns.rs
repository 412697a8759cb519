//! The outputs of a step written from columns: for workers, which have them so, and for whom an object for each sequence
//! would cost more than the step.

use super::msgpack::{put_array_len, put_nil, put_uint};

/// How an `Output` of a row begins and ends: request and ids, four fields that a plain row has not, drafted and accepted,
/// and one more that it has not.
const FIELDS: usize = 9;
const ABSENT: usize = 4;
/// The most bytes of a row beside its ids.
const ROW_BYTES: usize = 32;
const ID_BYTES: usize = 5;

/// The outputs of some requests, a row each. A row of `special` is written already.
#[derive(Debug, Clone, Copy)]
pub struct OutputColumns<'a, B> {
    /// `[rows]`
    pub requests: &'a [u64],
    /// `[rows]`: how many of `ids` are the row's; none of a special one.
    pub counts: &'a [u32],
    /// Row after row.
    pub ids: &'a [u32],
    /// `[rows]`
    pub drafted: &'a [u32],
    /// `[rows]`
    pub accepted: &'a [u32],
    /// Place of the row, and the `Output` as msgpack; places ascend.
    pub special: &'a [(usize, B)],
}

/// Columns that do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ColumnsError {
    /// A column is longer or shorter than the others.
    #[error("{rows} requests, but counts, drafted and accepted of {got:?} rows")]
    Lengths {
        /// Of the first column.
        rows: usize,
        /// Of the others.
        got: [usize; 3],
    },
    /// More or fewer ids than the counts say.
    #[error("{got} ids, but counts of {expected}")]
    Ids {
        /// The sum of the counts.
        expected: u64,
        /// How many there are.
        got: usize,
    },
    /// A special row that is not there, out of order, or has ids in the columns.
    #[error("special row {place} of {rows} is out of order, not there, or has ids")]
    Special {
        /// The row that its sender names.
        place: usize,
        /// How many rows there are.
        rows: usize,
    },
}

impl<B: AsRef<[u8]>> OutputColumns<'_, B> {
    /// The array of outputs, as it stands in a `Step`.
    ///
    /// # Errors
    /// [`ColumnsError`], before a byte is written.
    pub fn encode(&self) -> Result<Vec<u8>, ColumnsError> {
        self.check()?;
        let rows = self.requests.len();
        let special: usize = self.special.iter().map(|(_, bytes)| bytes.as_ref().len()).sum();
        let mut out = Vec::with_capacity(rows * ROW_BYTES + self.ids.len() * ID_BYTES + special);
        let mut special = self.special.iter().peekable();
        let mut ids = self.ids;
        put_array_len(&mut out, rows);
        for row in 0..rows {
            if let Some((_, bytes)) = special.next_if(|(place, _)| *place == row) {
                out.extend_from_slice(bytes.as_ref());
                continue;
            }
            let (own, rest) = ids.split_at(self.counts[row] as usize);
            ids = rest;
            put_array_len(&mut out, FIELDS);
            put_uint(&mut out, self.requests[row]);
            put_array_len(&mut out, own.len());
            for id in own {
                put_uint(&mut out, u64::from(*id));
            }
            for _ in 0..ABSENT {
                put_nil(&mut out);
            }
            put_uint(&mut out, u64::from(self.drafted[row]));
            put_uint(&mut out, u64::from(self.accepted[row]));
            put_nil(&mut out);
        }
        Ok(out)
    }

    fn check(&self) -> Result<(), ColumnsError> {
        let rows = self.requests.len();
        let got = [self.counts.len(), self.drafted.len(), self.accepted.len()];
        if got != [rows; 3] {
            return Err(ColumnsError::Lengths { rows, got });
        }
        let expected = self.counts.iter().copied().map(u64::from).sum();
        if expected != self.ids.len() as u64 {
            return Err(ColumnsError::Ids { expected, got: self.ids.len() });
        }
        let mut from = 0;
        for &(place, _) in self.special {
            if place < from || self.counts.get(place) != Some(&0) {
                return Err(ColumnsError::Special { place, rows });
            }
            from = place + 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ColumnsError, OutputColumns};
    use crate::core::frame::{Finish, Frame, Load, Output, RequestId, Step};
    use crate::fleet::codec;

    fn output(request: u64, ids: &[u32], drafted: u32, accepted: u32) -> Output {
        Output {
            request: RequestId(request),
            ids: ids.to_vec(),
            logprobs: None,
            finish: None,
            cached_tokens: None,
            prompt_logprobs: None,
            drafted,
            accepted,
            pooled: None,
        }
    }

    fn step(outputs: Vec<Output>) -> Vec<u8> {
        let step = Step {
            step: 9,
            ms: 1.5,
            waited_us: 0,
            prefill_tokens: 0,
            prefill_context: 0,
            decode_rows: 3,
            kv_tokens: 70_000,
            waiting_tokens: 0,
            drafted: 2,
            accepted: 1,
            load: Load { blocks_used: 1, blocks_cached: 2, running: 3, waiting: 0, preemptions: 0 },
            outputs,
        };
        let mut body = Vec::new();
        codec::encode(&Frame::Step(step), &mut body).unwrap();
        body
    }

    /// Of one output: what stands in the array of a step that has no other.
    fn alone(output: Output) -> Vec<u8> {
        let (empty, whole) = (step(Vec::new()), step(vec![output]));
        whole[empty.len()..].to_vec() // after the array's own byte, which is the last of `empty`
    }

    const PLAIN: OutputColumns<'_, Vec<u8>> = OutputColumns {
        requests: &[7, u64::MAX],
        counts: &[1, 2],
        ids: &[300, 70_000, u32::MAX],
        drafted: &[0, 200],
        accepted: &[0, 1],
        special: &[],
    };

    #[test]
    fn columns_are_written_as_their_outputs_would_be() {
        let mut last = output(1 << 40, &[5], 1, 0);
        last.finish = Some(Finish::Stop);
        last.cached_tokens = Some(16);
        let special = [(1, alone(last.clone()))];
        let columns = OutputColumns {
            requests: &[7, 1 << 40, u64::MAX],
            counts: &[1, 0, 2],
            ids: PLAIN.ids,
            drafted: &[0, 9, 200],
            accepted: &[0, 9, 1],
            special: &special,
        };
        let rows = [output(7, &[300], 0, 0), last, output(u64::MAX, &[70_000, u32::MAX], 200, 1)];
        let mut body = step(Vec::new());
        body.pop(); // the empty array
        body.extend(columns.encode().unwrap());
        assert_eq!(body, step(rows.to_vec()));
    }

    #[test]
    fn many_rows_have_a_longer_length() {
        let requests: Vec<u64> = (0..70_000).collect();
        let (ones, none) = (vec![1; 70_000], vec![0; 70_000]);
        let columns = OutputColumns::<Vec<u8>> {
            requests: &requests,
            counts: &ones,
            ids: &none,
            drafted: &none,
            accepted: &none,
            special: &[],
        };
        let rows = requests.iter().map(|request| output(*request, &[0], 0, 0)).collect();
        let mut body = step(Vec::new());
        body.pop();
        body.extend(columns.encode().unwrap());
        assert_eq!(body, step(rows));
    }

    #[test]
    fn columns_that_do_not_fit_together_are_refused_by_name() {
        let short = OutputColumns { accepted: &[0], ..PLAIN };
        assert_eq!(short.encode(), Err(ColumnsError::Lengths { rows: 2, got: [2, 2, 1] }));
        let fewer = OutputColumns { ids: &[1, 2], ..PLAIN };
        assert_eq!(fewer.encode(), Err(ColumnsError::Ids { expected: 3, got: 2 }));
        let huge = OutputColumns { counts: &[u32::MAX, u32::MAX], ..PLAIN };
        assert_eq!(huge.encode(), Err(ColumnsError::Ids { expected: 8_589_934_590, got: 3 }));
        let nil = vec![0xc0];
        let counts: &[u32] = &[0, 3];
        for (place, special) in [
            (1, vec![(1, nil.clone())]),                   // it has ids
            (2, vec![(2, nil.clone())]),                   // it is not there
            (0, vec![(0, nil.clone()), (0, nil.clone())]), // twice
        ] {
            let columns = OutputColumns { counts, special: &special, ..PLAIN };
            assert_eq!(columns.encode(), Err(ColumnsError::Special { place, rows: 2 }));
        }
    }
}

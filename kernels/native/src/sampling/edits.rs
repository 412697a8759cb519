//! What requests change about logits before a token is chosen: bias, penalties, and tokens that may not come.

/// The changes of a step. A place counts through all rows, one row after the other.
///
/// They are made kind after kind, in the order of the fields; within a kind in the order in which they are listed.
#[derive(Debug, Clone, Default)]
pub struct Edits<'a> {
    /// Places, and what is added there.
    pub added: (&'a [i64], &'a [f32]),
    /// Places, the factor of repetition there, and what is subtracted after it.
    pub penalised: (&'a [i64], &'a [f32], &'a [f32]),
    /// Places that become minus infinity.
    pub forbidden: &'a [i64],
    /// Rows of which only some columns stay what they are.
    pub kept: Vec<(usize, &'a [i64])>,
}

/// What is wrong with [`Edits`] for some logits.
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
pub enum EditError {
    /// Numbers are missing, or too many.
    #[error("edits: as many numbers as places are expected")]
    Lengths,
    /// There is no such place, row or column.
    #[error("edits: {0} is outside of the logits")]
    Outside(i64),
}

impl Edits<'_> {
    /// Changes rows of `width` logits.
    /// # Errors
    /// Where the edits are not for these logits; then nothing has changed.
    pub fn apply(&self, logits: &mut [f32], width: usize) -> Result<(), EditError> {
        self.check(logits.len(), width)?;
        for (place, amount) in self.added.0.iter().zip(self.added.1) {
            logits[*place as usize] += amount;
        }
        let (places, repetition, subtract) = self.penalised;
        for ((place, repetition), subtract) in places.iter().zip(repetition).zip(subtract) {
            let logit = &mut logits[*place as usize];
            let seen = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            *logit = seen - subtract;
        }
        for place in self.forbidden {
            logits[*place as usize] = f32::NEG_INFINITY;
        }
        for (row, columns) in &self.kept {
            let row = &mut logits[row * width..][..width];
            let kept: Vec<f32> = columns.iter().map(|column| row[*column as usize]).collect();
            row.fill(f32::NEG_INFINITY);
            for (column, logit) in columns.iter().zip(kept) {
                row[*column as usize] = logit;
            }
        }
        Ok(())
    }

    fn check(&self, len: usize, width: usize) -> Result<(), EditError> {
        let (added, (places, repetition, subtract)) = (self.added, self.penalised);
        if added.0.len() != added.1.len() || [repetition.len(), subtract.len()] != [places.len(); 2]
        {
            return Err(EditError::Lengths);
        }
        for places in [added.0, places, self.forbidden] {
            all_below(len, places)?;
        }
        for (row, columns) in &self.kept {
            if width == 0 || *row >= len / width {
                return Err(EditError::Outside(i64::try_from(*row).unwrap_or(i64::MAX)));
            }
            all_below(width, columns)?;
        }
        Ok(())
    }
}

fn all_below(limit: usize, places: &[i64]) -> Result<(), EditError> {
    let outside = |place: &&i64| usize::try_from(**place).map_or(true, |place| place >= limit);
    places.iter().find(outside).map_or(Ok(()), |place| Err(EditError::Outside(*place)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: f32 = f32::NEG_INFINITY;

    #[test]
    fn kinds_of_edits_follow_each_other() {
        let mut logits = [1.0, -2.0, 3.0, 0.5, 4.0, -1.0];
        let edits = Edits {
            added: (&[0, 0, 5], &[1.0, 2.0, -1.0]),
            penalised: (&[0, 1, 5], &[2.0; 3], &[0.5, 0.0, 0.25]),
            forbidden: &[2],
            kept: vec![(1, &[2, 0])],
        };
        assert_eq!(edits.apply(&mut logits, 3), Ok(()));
        assert_eq!(logits, [1.5, -4.0, NONE, 0.5, NONE, -4.25]);
    }

    #[test]
    fn edits_of_other_logits_change_nothing() {
        let columns: &[i64] = &[3];
        for (edits, error) in [
            (Edits { added: (&[0, 6], &[1.0, 1.0]), ..Edits::default() }, EditError::Outside(6)),
            (Edits { forbidden: &[0, -1], ..Edits::default() }, EditError::Outside(-1)),
            (Edits { added: (&[0], &[]), ..Edits::default() }, EditError::Lengths),
            (Edits { penalised: (&[0], &[1.0], &[]), ..Edits::default() }, EditError::Lengths),
            (Edits { kept: vec![(2, &[])], ..Edits::default() }, EditError::Outside(2)),
            (Edits { kept: vec![(0, columns)], ..Edits::default() }, EditError::Outside(3)),
        ] {
            let mut logits = [1.0; 6];
            assert_eq!(edits.apply(&mut logits, 3), Err(error));
            assert_eq!(logits, [1.0; 6]);
        }
    }
}

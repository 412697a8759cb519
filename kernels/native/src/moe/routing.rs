//! Which experts a row goes to, and with what weight (`noaux_tc`).
//!
//! Scores are sigmoids. With the expert's bias they choose: first whole groups, by the sum of their two best, then
//! the best experts of those groups; where two are equal, the lower number. Weights are the scores without the bias. Where
//! any expert's score is no finite number the row still gets its experts, and all of their weights are NaN.

/// How rows choose experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts that a row can choose from.
    pub experts: usize,
    /// Experts of a row.
    pub top_k: usize,
    /// Equal groups that the experts are in.
    pub groups: usize,
    /// Groups of a row.
    pub top_groups: usize,
    /// Whether the weights of a row sum to `scale`.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// Why a routing is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RoutingError {
    /// Groups do not divide the experts.
    #[error("{experts} experts in {groups} groups: groups must be equal and not empty")]
    Groups {
        /// Experts of the layer.
        experts: usize,
        /// Groups that were to divide them.
        groups: usize,
    },
    /// A choice is not among what there is.
    #[error("{what} is {got}, must be in 1..={most}")]
    Choice {
        /// Name of the number that is wrong.
        what: &'static str,
        /// The number as it was given.
        got: usize,
        /// The greatest that can be.
        most: usize,
    },
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    biased: Vec<f32>,
    groups: Vec<f32>,
    kept: Vec<bool>,
    chosen: Vec<bool>,
}

impl Routing {
    /// Whether rows can be routed so.
    /// # Errors
    /// Where they cannot.
    pub fn check(&self) -> Result<(), RoutingError> {
        let Self { experts, top_k, groups, top_groups, .. } = *self;
        if experts == 0 || groups == 0 || !experts.is_multiple_of(groups) {
            return Err(RoutingError::Groups { experts, groups });
        }
        let within = |what, got, most| {
            if (1..=most).contains(&got) {
                Ok(())
            } else {
                Err(RoutingError::Choice { what, got, most })
            }
        };
        within("top_groups", top_groups, groups)?;
        within("top_k", top_k, top_groups * (experts / groups))
    }

    /// Calls `to` with the experts of a row, in ascending order, and their weights.
    /// # Panics
    /// If there are not `experts` scores and biases.
    pub fn route(
        &self,
        scores: &[f32],
        bias: &[f32],
        scratch: &mut Scratch,
        mut to: impl FnMut(usize, f32),
    ) {
        assert!(scores.len() == self.experts && bias.len() == self.experts, "one for each expert");
        let Scratch { biased, groups, kept, chosen } = scratch;
        biased.clear();
        biased.extend(scores.iter().zip(bias).map(|(score, bias)| score + bias));
        let sound = biased.iter().all(|score| score.is_finite());
        if !sound {
            for score in biased.iter_mut().filter(|score| !score.is_finite()) {
                *score = f32::NEG_INFINITY; // never better than a number
            }
        }
        let group = self.experts / self.groups;
        groups.clear();
        groups.extend(biased.chunks_exact(group).map(best_two));
        greatest(groups, self.top_groups, |_| true, kept);
        greatest(biased, self.top_k, |expert| kept[expert / group], chosen);
        let weights = || scores.iter().zip(&*chosen).enumerate().filter(|(_, (_, is))| **is);
        let factor = if !sound {
            f32::NAN
        } else if self.normalise {
            self.scale / (weights().fold(0.0, |sum, (_, (score, _))| sum + score) + 1e-20)
        } else {
            self.scale
        };
        for (expert, (score, _)) in weights() {
            to(expert, score * factor);
        }
    }
}

fn best_two(scores: &[f32]) -> f32 {
    let Some((first, rest)) = scores.split_first() else { return 0.0 };
    let Some((second, rest)) = rest.split_first() else { return *first };
    let (mut best, mut next) = if second > first { (second, first) } else { (first, second) };
    for score in rest {
        if score > best {
            (best, next) = (score, best);
        } else if score > next {
            next = score;
        }
    }
    best + next
}

/// Marks the `count` greatest scores of those allowed, of which there are that many; first come, first served.
fn greatest(scores: &[f32], count: usize, allowed: impl Fn(usize) -> bool, marks: &mut Vec<bool>) {
    marks.clear();
    marks.resize(scores.len(), count == scores.len());
    if count == scores.len() {
        return;
    }
    for _ in 0..count {
        let mut best: Option<(usize, f32)> = None;
        for (i, score) in scores.iter().enumerate() {
            if !marks[i] && allowed(i) && best.is_none_or(|(_, best)| *score > best) {
                best = Some((i, *score));
            }
        }
        let Some((best, _)) = best else { return };
        marks[best] = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(routing: Routing, scores: &[f32], bias: &[f32]) -> Vec<(usize, f32)> {
        let mut chosen = Vec::new();
        routing.route(scores, bias, &mut Scratch::default(), |expert, w| chosen.push((expert, w)));
        chosen
    }

    const PLAIN: Routing =
        Routing { experts: 6, top_k: 2, groups: 1, top_groups: 1, normalise: false, scale: 1.0 };

    #[test]
    fn the_bias_chooses_and_does_not_weigh() {
        let scores = [0.5, 0.1, 0.2, 0.3, 0.9, 0.4];
        let bias = [0.0, 2.0, 0.0, 0.0, -1.0, 0.0];
        assert_eq!(route(PLAIN, &scores, &bias), [(0, 0.5), (1, 0.1)]);
    }

    #[test]
    fn among_equals_the_lower_number_is_chosen() {
        assert_eq!(route(PLAIN, &[0.5; 6], &[0.0; 6]), [(0, 0.5), (1, 0.5)]);
        assert_eq!(route(PLAIN, &[0.1, 0.5, 0.2, 0.5, 0.5, 0.0], &[0.0; 6]), [(1, 0.5), (3, 0.5)]);
    }

    #[test]
    fn groups_are_chosen_by_their_two_best() {
        let routing = Routing { groups: 3, top_groups: 1, ..PLAIN };
        // The best expert is alone in its group.
        let scores = [0.9, 0.0, 0.5, 0.6, 0.5, 0.5];
        assert_eq!(route(routing, &scores, &[0.0; 6]), [(2, 0.5), (3, 0.6)]);
    }

    #[test]
    fn a_masked_expert_is_not_chosen_even_if_all_others_are_negative() {
        let routing = Routing { groups: 2, top_groups: 1, ..PLAIN };
        let bias = [-3.0, -3.0, -3.0, -4.0, -4.0, -4.0];
        let chosen = route(routing, &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], &bias);
        assert_eq!(chosen, [(1, 0.2), (2, 0.3)]);
    }

    #[test]
    fn normalised_weights_sum_to_the_scale() {
        let routing = Routing { normalise: true, scale: 2.5, ..PLAIN };
        let chosen = route(routing, &[0.0, 0.25, 0.0, 0.0, 0.75, 0.0], &[0.0; 6]);
        assert_eq!(chosen, [(1, 0.625), (4, 1.875)]);
        let all = Routing { top_k: 6, normalise: true, scale: 6.0, ..PLAIN };
        assert_eq!(route(all, &[0.5; 6], &[0.0; 6]), [0, 1, 2, 3, 4, 5].map(|e| (e, 1.0)));
    }

    #[test]
    fn no_number_shows_in_all_weights_whether_its_expert_is_chosen_or_not() {
        let groups = Routing { groups: 3, top_groups: 2, top_k: 3, ..PLAIN };
        let all = Routing { top_k: 6, normalise: true, ..PLAIN };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for routing in [PLAIN, groups, all] {
                for place in 0..6 {
                    let mut row = [[0.1, 0.5, 0.2, 0.3, 0.9, 0.4], [0.0; 6]];
                    for which in 0..2 {
                        let was = std::mem::replace(&mut row[which][place], bad);
                        let chosen = route(routing, &row[0], &row[1]);
                        assert_eq!(chosen.len(), routing.top_k);
                        assert!(chosen.iter().all(|(_, weight)| weight.is_nan()), "{bad}");
                        assert!(chosen.is_sorted_by(|a, b| a.0 < b.0));
                        row[which][place] = was;
                    }
                }
                assert_eq!(route(routing, &[bad; 6], &[0.0; 6]).len(), routing.top_k);
            }
        }
    }

    #[test]
    fn what_cannot_be_routed_is_named() {
        let cases = [
            (
                Routing { experts: 0, ..PLAIN },
                "0 experts in 1 groups: groups must be equal and not empty",
            ),
            (
                Routing { groups: 4, ..PLAIN },
                "6 experts in 4 groups: groups must be equal and not empty",
            ),
            (Routing { top_k: 7, ..PLAIN }, "top_k is 7, must be in 1..=6"),
            (Routing { top_k: 0, ..PLAIN }, "top_k is 0, must be in 1..=6"),
            (Routing { groups: 3, top_k: 3, ..PLAIN }, "top_k is 3, must be in 1..=2"),
            (Routing { top_groups: 2, ..PLAIN }, "top_groups is 2, must be in 1..=1"),
        ];
        for (routing, text) in cases {
            assert_eq!(routing.check().map_err(|error| error.to_string()), Err(text.to_owned()));
        }
        assert_eq!(PLAIN.check(), Ok(()));
    }
}

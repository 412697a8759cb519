//! Whose masks are filled in a step that has not the work for all: in turns, so that nobody waits for ever, and those whose
//! masks are cheap before those whose masks are not, so that the latter are no burden to the former.

/// Work of a step's masks, in the units of [`MASK_WORK`](super::MASK_WORK).
#[derive(Debug, Clone, Copy)]
pub struct MaskBudget {
    /// As long as the model computes.
    pub beside: u64,
    /// Once the step waits for its masks.
    pub late: u64,
}

/// What is known of an answer's masks.
#[derive(Debug, Clone, Copy, Default)]
pub struct MaskTurn {
    /// Steps in a row in which it was put off.
    pub waited: u32,
    /// Work of its masks, which is forgotten slowly: a cheap one after a dear one makes nobody cheap.
    cost: u64,
}

impl MaskTurn {
    /// Its masks are there, and were so much work.
    pub fn filled(&mut self, work: u64) {
        self.waited = 0;
        self.cost = work.max(self.cost - self.cost / 8);
    }

    /// They are not, though so much was done for them.
    pub fn put_off(&mut self, work: u64) {
        self.waited = self.waited.saturating_add(1);
        self.cost = self.cost.max(work);
    }
}

/// In which order masks are filled. Whoever was put off for longest is first; then those whose masks would cost half of the
/// budget if all were like them; then the others. Among equals it is whoever was put off for longer.
#[must_use]
pub fn mask_order(turns: &[MaskTurn], budget: MaskBudget) -> Vec<usize> {
    let share = budget.late / 2 / (turns.len() as u64).max(1);
    let mut order: Vec<usize> = (0..turns.len()).collect();
    order.sort_by_key(|place| {
        let turn = turns[*place];
        (turn.cost > share, std::cmp::Reverse(turn.waited))
    });
    let longest = order.iter().copied().enumerate().max_by_key(|(at, place)| {
        (turns[*place].waited, std::cmp::Reverse(*at)) // the first of those that wait as long
    });
    if let Some((at, _)) = longest.filter(|(_, place)| turns[*place].waited > 0) {
        order[..=at].rotate_right(1);
    }
    order
}

/// What a step has spent.
#[derive(Debug)]
pub struct MaskSpending {
    left: MaskBudget,
}

impl MaskSpending {
    /// Of a step that has so much.
    #[must_use]
    pub fn new(left: MaskBudget) -> Self {
        Self { left }
    }

    /// So much was done, which began while the step waited for its masks (`late`), or before.
    pub fn spend(&mut self, work: u64, late: bool) {
        let beside = !late && self.left.beside > 0;
        let left = if beside { &mut self.left.beside } else { &mut self.left.late };
        *left = left.saturating_sub(work);
    }

    /// More may be begun.
    #[must_use]
    pub fn has_more(&self, late: bool) -> bool {
        self.left.late > 0 || (!late && self.left.beside > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: MaskBudget = MaskBudget { beside: 0, late: 800 };

    fn turns(of: &[(u32, u64)]) -> Vec<MaskTurn> {
        of.iter().map(|(waited, cost)| MaskTurn { waited: *waited, cost: *cost }).collect()
    }

    #[test]
    fn cheap_masks_come_first_and_of_equals_whoever_waited_longer() {
        let four = turns(&[(0, 101), (0, 100), (0, 900), (0, 0)]);
        assert_eq!(mask_order(&four, BUDGET), [1, 3, 0, 2]);
        let waiting = turns(&[(1, 900), (0, 5), (2, 900), (1, 5)]);
        assert_eq!(mask_order(&waiting, BUDGET), [2, 3, 1, 0]);
    }

    #[test]
    fn whoever_was_put_off_for_longest_is_first_and_nobody_is_who_was_not() {
        assert_eq!(mask_order(&turns(&[(0, 1), (0, 1), (0, 1)]), BUDGET), [0, 1, 2]);
        assert_eq!(mask_order(&turns(&[(3, 1), (0, 1), (3, 900)]), BUDGET), [0, 1, 2]);
        assert_eq!(mask_order(&turns(&[(3, 1), (0, 1), (4, 900)]), BUDGET), [2, 0, 1]);
        assert!(mask_order(&[], BUDGET).is_empty());
    }

    /// How often each of these is served in so many steps, all of whose work is late.
    fn served(costs: &[u64], steps: usize) -> Vec<usize> {
        let (mut turns, mut served) =
            (vec![MaskTurn::default(); costs.len()], vec![0; costs.len()]);
        for _ in 0..steps {
            let mut spending = MaskSpending::new(BUDGET);
            for (nth, place) in mask_order(&turns, BUDGET).into_iter().enumerate() {
                if nth > 0 && !spending.has_more(true) {
                    turns[place].put_off(0);
                    continue;
                }
                if turns[place].waited == 0 || nth > 0 {
                    spending.spend(costs[place], true);
                }
                turns[place].filled(costs[place]);
                served[place] += 1;
            }
        }
        served
    }

    #[test]
    fn dear_masks_take_turns_and_are_no_burden_to_cheap_ones() {
        let mut costs = vec![1000; 63];
        costs.push(1);
        let got = served(&costs, 640);
        assert!(got[63] >= 600, "in nearly every step, once the others are known: {}", got[63]);
        let dear = &got[..63];
        assert!(dear.iter().max() <= dear.iter().min().map(|least| least + 2).as_ref(), "{dear:?}");
        assert!(*dear.iter().min().unwrap() >= 10, "{dear:?}");
    }

    #[test]
    fn a_dear_mask_is_remembered() {
        let mut turn = MaskTurn::default();
        turn.filled(800);
        turn.filled(1);
        assert_eq!(turn.cost, 700);
        turn.filled(750);
        assert_eq!(turn.cost, 750);
        turn.put_off(900);
        assert_eq!((turn.cost, turn.waited), (900, 1));
        turn.put_off(3);
        assert_eq!((turn.cost, turn.waited), (900, 2));
        turn.filled(3);
        assert_eq!(turn.waited, 0);
    }

    #[test]
    fn what_is_spent_beside_the_model_leaves_the_rest_to_the_wait() {
        let mut spending = MaskSpending::new(MaskBudget { beside: 10, late: 10 });
        spending.spend(30, false);
        assert!(spending.has_more(false) && spending.has_more(true));
        spending.spend(9, true);
        assert!(spending.has_more(true));
        spending.spend(1, false);
        assert!(!spending.has_more(false) && !spending.has_more(true));
        let mut beside = MaskSpending::new(MaskBudget { beside: 10, late: 0 });
        assert!(beside.has_more(false) && !beside.has_more(true));
        beside.spend(10, false);
        assert!(!beside.has_more(false));
    }
}

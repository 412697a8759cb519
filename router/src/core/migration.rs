//! Who gets which of the blocks that a leaving worker offers. Pure: a tree of blocks, their hits, and the targets' room.

use std::cmp::Reverse;

/// A worker that may take blocks over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationTarget {
    /// Blocks that it may take.
    pub room: u32,
    /// Blocks that its requests hold: of two with equal shares the one with fewer goes first.
    pub used: u32,
}

/// Blocks for one target: places in the offer, ascending, so that parents stand before children.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockShare {
    /// Place in the list of targets.
    pub target: usize,
    /// Places in the offer.
    pub blocks: Vec<u32>,
}

/// Splits the offered tree among the targets so that hits are spread evenly. A block never goes without all blocks before it
/// (it would be of no use), so what is common to two shares goes to both. Without room, the least hit blocks are left out.
/// Takes about as long as there are blocks times targets, however long the chains are.
///
/// `parents[i]` is the place of the block before block `i`, and less than `i`; -1 at a root.
///
/// # Panics
/// A parent does not stand before its child, or `hits` has another length.
#[must_use]
pub fn divide(parents: &[i32], hits: &[u32], targets: &[MigrationTarget]) -> Vec<BlockShare> {
    assert_eq!(parents.len(), hits.len());
    if targets.is_empty() {
        return Vec::new();
    }
    let tree = Tree::new(parents, hits);
    let mut shares_so_far: Vec<TargetShare> = targets
        .iter()
        .map(|target| TargetShare { target, given: vec![false; hits.len()], blocks: 0, hits: 0 })
        .collect();
    for unit in tree.units(targets.len()) {
        // most even first; whoever has no room for all of it, after all who have
        let mut order: Vec<usize> = (0..shares_so_far.len()).collect();
        order.sort_by_key(|&i| (shares_so_far[i].hits, shares_so_far[i].target.used, i));
        let fits = order.iter().copied().find(|&i| {
            tree.lacking_before(&unit, &shares_so_far[i].given) + unit.blocks.len()
                <= shares_so_far[i].room()
        });
        let roomiest =
            || order.iter().copied().max_by_key(|&i| (shares_so_far[i].room(), Reverse(i)));
        let Some(chosen) = fits.or_else(roomiest) else { continue };
        let blocks = tree.with_lacking(&unit, &shares_so_far[chosen].given);
        shares_so_far[chosen].take(&blocks, unit.hits);
    }
    let shares = shares_so_far.into_iter().enumerate().map(|(target, share_so_far)| BlockShare {
        target,
        blocks: (0..).zip(share_so_far.given).filter_map(|(i, given)| given.then_some(i)).collect(),
    });
    shares.filter(|share| !share.blocks.is_empty()).collect()
}

struct Tree<'a> {
    parents: &'a [i32],
    /// Hits of each block and of all below it.
    below: Vec<u64>,
    children: Vec<Vec<usize>>,
    roots: Vec<usize>,
    /// Blocks before each.
    depth: Vec<usize>,
    /// An earlier block on the way to the root of each, so far away that from any block few of these ways lead to any other
    /// before it; itself at a root.
    jump: Vec<usize>,
}

/// A subtree that goes to one target.
struct Unit {
    /// Ascending; the first one is its root.
    blocks: Vec<usize>,
    hits: u64,
}

impl<'a> Tree<'a> {
    fn new(parents: &'a [i32], hits: &[u32]) -> Self {
        let mut below: Vec<u64> = hits.iter().map(|&n| n.into()).collect();
        let (mut children, mut roots) = (vec![Vec::new(); parents.len()], Vec::new());
        for block in (0..parents.len()).rev() {
            match usize::try_from(parents[block]) {
                Ok(parent) => {
                    assert!(parent < block, "parents stand before children");
                    below[parent] += below[block];
                    children[parent].push(block);
                }
                Err(_) => roots.push(block),
            }
        }
        let (mut depth, mut jump) = (vec![0; parents.len()], Vec::with_capacity(parents.len()));
        for (block, &parent) in parents.iter().enumerate() {
            let Ok(parent) = usize::try_from(parent) else {
                jump.push(block);
                continue;
            };
            depth[block] = depth[parent] + 1;
            // two equal jumps become one of twice the length (Myers 1983: skew-binary numbers)
            let (once, twice) = (jump[parent], jump[jump[parent]]);
            let equal = depth[parent] - depth[once] == depth[once] - depth[twice];
            jump.push(if equal { twice } else { parent });
        }
        Self { parents, below, children, roots, depth, jump }
    }

    /// Subtrees of about equal weight, the most hit first: one with more than an even share is split where it
    /// forks.
    fn units(&self, targets: usize) -> Vec<Unit> {
        let total: u64 = self.roots.iter().map(|&root| self.below[root]).sum();
        let even = total.div_ceil(targets as u64);
        let (mut pending, mut tops) = (self.roots.clone(), Vec::new());
        while let Some(block) = pending.pop() {
            match self.branches(block) {
                Some(branches) if self.below[block] > even => pending.extend(branches),
                Some(_) | None => tops.push(block),
            }
        }
        tops.sort_by_key(|&top| (Reverse(self.below[top]), top));
        let mut units: Vec<Unit> =
            tops.iter().map(|&top| Unit { blocks: Vec::new(), hits: self.below[top] }).collect();
        let mut unit_of: Vec<Option<usize>> = vec![None; self.parents.len()];
        for (unit, &top) in tops.iter().enumerate() {
            unit_of[top] = Some(unit);
        }
        for block in 0..self.parents.len() {
            let parent = usize::try_from(self.parents[block]).ok();
            unit_of[block] = unit_of[block].or_else(|| unit_of[parent?]);
            if let Some(unit) = unit_of[block] {
                units[unit].blocks.push(block);
            }
        }
        units
    }

    /// Where the chain that begins with a block forks for the first time; `None` if it never does.
    fn branches(&self, mut block: usize) -> Option<&[usize]> {
        loop {
            match self.children[block].as_slice() {
                [] => return None,
                [only] => block = *only,
                several => return Some(several),
            }
        }
    }

    fn parent(&self, block: usize) -> Option<usize> {
        usize::try_from(self.parents[block]).ok()
    }

    /// How many blocks before a unit are not among the given ones, which hold all blocks before each of them.
    fn lacking_before(&self, unit: &Unit, given: &[bool]) -> usize {
        let Some(last) = self.parent(unit.blocks[0]) else { return 0 };
        let mut block = last;
        while !given[block] {
            let jump = self.jump[block];
            match self.parent(block) {
                None => return self.depth[last] + 1,
                Some(parent) => block = if given[jump] { parent } else { jump },
            }
        }
        self.depth[last] - self.depth[block]
    }

    /// The blocks before a unit that are not among the given ones, then the unit; ascending.
    fn with_lacking(&self, unit: &Unit, given: &[bool]) -> Vec<usize> {
        let before =
            std::iter::successors(self.parent(unit.blocks[0]), |&block| self.parent(block));
        let mut blocks: Vec<usize> = before.take_while(|&block| !given[block]).collect();
        blocks.reverse();
        blocks.extend(&unit.blocks);
        blocks
    }
}

/// What one target gets.
struct TargetShare<'a> {
    target: &'a MigrationTarget,
    given: Vec<bool>,
    blocks: usize,
    hits: u64,
}

impl TargetShare<'_> {
    fn room(&self) -> usize {
        (self.target.room as usize).saturating_sub(self.blocks)
    }

    /// Takes blocks that it lacks, in order, as long as there is room: what is left out has nothing below it that is in.
    fn take(&mut self, blocks: &[usize], hits: u64) {
        for &block in blocks {
            if !self.given[block] {
                if self.room() == 0 {
                    return;
                }
                self.given[block] = true;
                self.blocks += 1;
            }
        }
        self.hits += hits;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn targets(rooms: &[u32]) -> Vec<MigrationTarget> {
        rooms.iter().map(|&room| MigrationTarget { room, used: 0 }).collect()
    }

    #[test]
    fn two_chains_go_to_two_heirs() {
        let shares = divide(&[-1, 0, -1, 2], &[5, 5, 4, 4], &targets(&[10, 10]));
        let blocks: Vec<_> = shares.iter().map(|share| share.blocks.clone()).collect();
        assert_eq!(blocks, [vec![0, 1], vec![2, 3]]);
    }

    #[test]
    fn a_common_prefix_goes_to_both() {
        // 0 - 1 - 2
        //      \- 3
        let shares = divide(&[-1, 0, 1, 1], &[9, 9, 5, 4], &targets(&[10, 10]));
        let blocks: Vec<_> = shares.iter().map(|share| share.blocks.clone()).collect();
        assert_eq!(blocks, [vec![0, 1, 2], vec![0, 1, 3]]);
    }

    #[test]
    fn without_room_the_hottest_go_first_and_parents_before_children() {
        let shares = divide(&[-1, -1, 1], &[1, 7, 7], &targets(&[1]));
        assert_eq!(shares, [BlockShare { target: 0, blocks: vec![1] }]);
        assert!(divide(&[-1], &[1], &targets(&[0])).is_empty());
        assert!(divide(&[-1], &[1], &[]).is_empty());
        assert!(divide(&[], &[], &targets(&[5])).is_empty());
    }

    #[test]
    fn of_equal_heirs_the_one_with_less_to_do_goes_first() {
        let targets = [MigrationTarget { room: 9, used: 5 }, MigrationTarget { room: 9, used: 1 }];
        assert_eq!(divide(&[-1], &[1], &targets), [BlockShare { target: 1, blocks: vec![0] }]);
    }

    /// A chain with a leaf at each of its blocks, shared out to targets some of whom never have room for another leaf.
    #[test]
    fn long_chains_with_many_forks_are_no_longer_work_than_short_ones() {
        let half = 200_000;
        let parents: Vec<i32> = (-1..half - 1).chain(0..half).collect();
        let hits = vec![1; parents.len()];
        let mut rooms = vec![130_000; 15];
        rooms.push(400_000);
        let (done, shares) = std::sync::mpsc::channel();
        std::thread::spawn(move || done.send(divide(&parents, &hits, &targets(&rooms))));
        // walking each way to the root takes most of an hour
        let shares = shares.recv_timeout(std::time::Duration::from_secs(120)).expect("short work");
        assert!(!shares.is_empty());
    }

    fn offers() -> impl Strategy<Value = (Vec<i32>, Vec<u32>)> {
        prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0_u32..100), 0..60)
            .prop_map(|blocks| {
                let parent = |(i, (index, root, _)): (usize, &(prop::sample::Index, bool, u32))| {
                    if *root || i == 0 { -1 } else { i32::try_from(index.index(i)).unwrap() }
                };
                (
                    blocks.iter().enumerate().map(parent).collect(),
                    blocks.iter().map(|b| b.2).collect(),
                )
            })
    }

    proptest! {
        #[test]
        fn what_is_lacking_before_a_unit_is_counted_as_if_walked(
            (parents, hits) in offers(), most in 0_usize..60, targets_n in 1_usize..6
        ) {
            let tree = Tree::new(&parents, &hits);
            let target = MigrationTarget { room: u32::try_from(most).unwrap(), used: 0 };
            let given = vec![false; hits.len()];
            let mut share_so_far = TargetShare { target: &target, given, blocks: 0, hits: 0 };
            for unit in tree.units(targets_n) {
                let lacking = tree.with_lacking(&unit, &share_so_far.given);
                let before = tree.lacking_before(&unit, &share_so_far.given);
                prop_assert_eq!(before + unit.blocks.len(), lacking.len());
                share_so_far.take(&lacking, unit.hits);
            }
        }

        #[test]
        fn no_block_goes_without_its_parent_and_nobody_gets_more_than_fits(
            (parents, hits) in offers(), rooms in prop::collection::vec(0_u32..80, 0..5)
        ) {
            let shares = divide(&parents, &hits, &targets(&rooms));
            for share in &shares {
                prop_assert!(share.blocks.len() <= rooms[share.target] as usize);
                prop_assert!(share.blocks.is_sorted_by(|a, b| a < b));
                for &block in &share.blocks {
                    let parent = parents[block as usize];
                    prop_assert!(parent < 0 || share.blocks.contains(&u32::try_from(parent).unwrap()));
                }
            }
            prop_assert!(shares.is_sorted_by_key(|share| share.target));
        }

        #[test]
        fn with_room_every_block_finds_an_heir((parents, hits) in offers(), targets_n in 1_usize..5) {
            let shares = divide(&parents, &hits, &targets(&vec![1000; targets_n]));
            for block in 0..u32::try_from(parents.len()).unwrap() {
                prop_assert!(shares.iter().any(|share| share.blocks.contains(&block)));
            }
        }
    }
}

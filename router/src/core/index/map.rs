//! A table that grows, shrinks and is swept little by little, so that no call takes long.
//!
//! **Moving** to a table of another size goes upwards: all keys with a home below `frontier` are in the new table, the
//! others in the old one. The frontier only stops behind an empty slot. Entries behind an empty slot have their home
//! behind it too (no probe passes an empty slot), so this always divides entries in the same way as homes. New entries of
//! the old table come to stand at or behind their home, deletions there move entries no further than to their home:
//! neither crosses the frontier. No slot is visited twice. Homes are in the same order in both tables, so the new one grows
//! with the frontier.
//!
//! **Sweeping** in place goes downwards. Entries move only downwards (see `table.rs`) and new ones have no set that needs
//! cleaning, so nothing unclean can get from below the cursor to above it: one pass from the top to the bottom meets
//! every entry that was there at its start. Moving cleans as well; a sweep that a move interrupts starts again after it.

use super::sets::EMPTY;
use super::table::Table;

#[derive(Debug)]
pub(super) struct BlockMap {
    table: Table,
    /// The table that `table` replaces, and its frontier.
    old: Option<(Table, usize)>,
    /// Slots of `table` that the sweep has yet to visit; 0 between two passes.
    cursor: usize,
    /// The table that the last move emptied, where `keeps_spare`.
    spare: Option<Table>,
    /// Somebody takes it: to give a large one back takes the system milliseconds.
    pub(super) keeps_spare: bool,
}

const LEAST_HOMES_LOG2: u32 = 10;

impl BlockMap {
    pub(super) fn new() -> Self {
        let table = Table::new(LEAST_HOMES_LOG2);
        Self { table, old: None, cursor: 0, spare: None, keeps_spare: false }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len() + self.old.as_ref().map_or(0, |(old, _)| old.len())
    }

    pub(super) fn bytes(&self) -> usize {
        let old = self.old.as_ref().map(|(old, _)| old);
        self.table.bytes() + old.into_iter().chain(&self.spare).map(Table::bytes).sum::<usize>()
    }

    /// The table that the last move emptied, once.
    pub(super) fn take_spare(&mut self) -> Option<Table> {
        self.spare.take()
    }

    /// The table in which `key` is or belongs.
    #[inline]
    fn table(&self, key: u64) -> &Table {
        match &self.old {
            Some((old, frontier)) if old.home(key) >= *frontier => old,
            Some(_) | None => &self.table,
        }
    }

    /// The same, to change it.
    #[inline]
    pub(super) fn table_mut(&mut self, key: u64) -> &mut Table {
        match &mut self.old {
            Some((old, frontier)) if old.home(key) >= *frontier => old,
            Some(_) | None => &mut self.table,
        }
    }

    /// The set of a key; `EMPTY` if it has no entry.
    #[inline]
    pub(super) fn get(&self, key: u64) -> u32 {
        let table = self.table(key);
        table.find(key).map_or(EMPTY, |at| table.set(at))
    }

    /// Brings the slots of keys to look up into the cache, all at the same time.
    #[inline]
    pub(super) fn read_ahead(&self, keys: impl Iterator<Item = u64>) {
        keys.for_each(|key| self.table(key).read_ahead(key));
    }

    /// The same for keys to store or remove.
    #[inline]
    pub(super) fn read_ahead_far(&self, keys: &[u64]) {
        keys.iter().for_each(|&key| self.table(key).read_ahead_far(key));
    }

    pub(super) fn is_moving(&self) -> bool {
        self.old.is_some()
    }

    /// Starts to move to another size where `coming` more entries would fill more than 3/4 of the homes, or where there
    /// are fewer than 1/4. A move goes over 16 slots for each new key, so it ends with at most 1/16 of the old homes'
    /// number added: 13/16 full where entries are still in the old table, less in the new one.
    pub(super) fn resize_where_needed(&mut self, coming: usize) {
        if self.is_moving() {
            return;
        }
        let homes_log2 = self.table.homes_log2();
        let homes = 1_usize << homes_log2;
        let wanted = if (self.len() + coming) * 4 > homes * 3 {
            homes_log2 + 1
        } else if self.len() * 4 < homes && homes_log2 > LEAST_HOMES_LOG2 {
            homes_log2 - 1
        } else {
            return;
        };
        let old = std::mem::replace(&mut self.table, Table::unreached(wanted));
        self.old = Some((old, 0));
    }

    /// Visits about `slots` slots (some more, to the end of a run of taken ones): moves their entries if there is a move,
    /// sweeps otherwise. `clean` says which set an entry should have; one with `EMPTY` goes. `crowded` gets the (cleaned)
    /// sets of entries that found no place in the new table, which random keys always do.
    pub(super) fn pass(
        &mut self,
        slots: usize,
        clean: impl FnMut(u32) -> u32,
        crowded: &mut Vec<u32>,
    ) {
        if self.is_moving() {
            self.move_on(slots, clean, crowded);
        } else {
            self.sweep(slots, clean);
        }
    }

    fn move_on(&mut self, slots: usize, mut clean: impl FnMut(u32) -> u32, crowded: &mut Vec<u32>) {
        let Some((old, frontier)) = &mut self.old else { return };
        let (from, to) = (old.homes_log2(), self.table.homes_log2());
        let homes = |slots: usize| (slots << to).div_ceil(1 << from); // of keys at home before that slot
        let least = *frontier + slots;
        self.table.reach(homes(least));
        let mut at = *frontier;
        while at < old.slots() {
            let set = old.set(at);
            at += 1;
            if set == EMPTY {
                if at >= least {
                    break;
                }
                continue;
            }
            let key = old.key(at - 1);
            old.moved();
            let set = clean(set);
            if set == EMPTY {
                continue;
            }
            self.table.reach(homes(at));
            match self.table.find(key) {
                Some(to) => self.table.put(to, key, set),
                None => crowded.push(set),
            }
        }
        self.table.reach(homes(at));
        *frontier = at;
        if at == old.slots() {
            let emptied = self.old.take().map(|(old, _)| old);
            self.spare = emptied.filter(|_| self.keeps_spare);
            self.cursor = 0;
        }
    }

    fn sweep(&mut self, slots: usize, mut clean: impl FnMut(u32) -> u32) {
        if self.cursor == 0 {
            self.cursor = self.table.slots();
        }
        let end = self.cursor.saturating_sub(slots);
        for at in (end..self.cursor).rev() {
            let set = self.table.set(at);
            if set == EMPTY {
                continue;
            }
            let to = clean(set);
            if to == EMPTY {
                self.table.delete(at);
            } else if to != set {
                self.table.put(at, self.table.key(at), to);
            }
        }
        self.cursor = end;
    }
}

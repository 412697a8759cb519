//! The numbers of places: who is there, how much each may hold and holds, and which number is free.
//!
//! A place that leaves keeps its number until no entry names it. That is counted, not assumed: each entry that is cleaned
//! takes one from `held`, and at 0 the number is free.

use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub(super) struct BlockHolders {
    places: Vec<State>,
    /// Free numbers below `places.len()`; the lowest is given out first, so that numbers stay dense.
    free: BTreeSet<u16>,
    leaving: Vec<u16>,
    /// Changes whenever `leaving` does, so that what was derived from it can be told to be old.
    version: u64,
}

#[derive(Debug, Clone, Copy)]
struct State {
    held: u32,
    capacity: u32,
    presence: Presence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    Leaving,
    Free,
}

impl BlockHolders {
    pub(super) fn join(&mut self, capacity: u32) -> Option<u16> {
        let state = State { held: 0, capacity, presence: Presence::Here };
        if let Some(place) = self.free.pop_first() {
            self.places[usize::from(place)] = state;
            return Some(place);
        }
        let place = u16::try_from(self.places.len()).ok()?;
        self.places.push(state);
        Some(place)
    }

    pub(super) fn leave(&mut self, place: u16) {
        if self.capacity(place).is_none() {
            return;
        }
        if self.held(place) == 0 {
            self.release(place);
            return;
        }
        self.places[usize::from(place)].presence = Presence::Leaving;
        self.leaving.push(place);
        self.version += 1;
    }

    /// `None` of a place that is not here.
    pub(super) fn capacity(&self, place: u16) -> Option<u32> {
        let state = self.places.get(usize::from(place))?;
        (state.presence == Presence::Here).then_some(state.capacity)
    }

    pub(super) fn held(&self, place: u16) -> u32 {
        self.places[usize::from(place)].held
    }

    /// One more entry names this place.
    #[inline]
    pub(super) fn gained(&mut self, place: u16) {
        self.places[usize::from(place)].held += 1;
    }

    /// One entry less names this place.
    #[inline]
    pub(super) fn lost(&mut self, place: u16) {
        let state = &mut self.places[usize::from(place)];
        state.held -= 1;
        if state.held == 0 && state.presence == Presence::Leaving {
            self.leaving.retain(|&other| other != place);
            self.version += 1;
            self.release(place);
        }
    }

    pub(super) fn is_leaving(&self, place: u16) -> bool {
        self.places[usize::from(place)].presence == Presence::Leaving
    }

    /// Those that left and are still named by entries.
    pub(super) fn leaving(&self) -> &[u16] {
        &self.leaving
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.places.capacity() * size_of::<State>()
            + self.leaving.capacity() * size_of::<u16>()
            + self.free.len() * 2 * size_of::<u16>() // a B-tree is at least half full
    }

    fn release(&mut self, place: u16) {
        self.places[usize::from(place)].presence = Presence::Free;
        self.free.insert(place);
        while self.places.last().is_some_and(|state| state.presence == Presence::Free) {
            self.places.pop();
            self.free.pop_last();
        }
    }
}

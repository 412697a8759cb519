//! The list of a model's workers. It knows which of them changed since decisions looked at them last: whatever changes a worker
//! gets it by this list, which takes note.

use std::ops::{Deref, Index, IndexMut};

use super::Worker;
use super::outline::Outline;
use crate::core::estimate::{FloorTable, WorkerStanding};
use crate::core::frame::Role;

/// See the head of this file. As a slice, the workers in the order of their ids.
#[derive(Debug)]
pub(in crate::core::scheduler) struct Workers<W> {
    list: Vec<Worker<W>>,
    /// Of those that did not change.
    outlines: Vec<Outline>,
    floors: FloorTable,
    /// Places of those that changed, each once.
    changed: Vec<usize>,
    is_changed: Vec<bool>,
    open: [usize; 2],
    /// See [`Self::kv_block_bytes`].
    kv_block_bytes: u64,
    prefills: usize,
    ranks: usize,
}

impl<W> Default for Workers<W> {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            outlines: Vec::new(),
            floors: FloorTable::default(),
            changed: Vec::new(),
            is_changed: Vec::new(),
            open: [0; 2],
            kv_block_bytes: 0,
            prefills: 0,
            ranks: 0,
        }
    }
}

impl<W> Workers<W> {
    /// One more, with a later id than all others.
    pub(in crate::core::scheduler) fn push(&mut self, worker: Worker<W>) {
        self.list.push(worker);
        self.list_changed();
    }

    /// One leaves; the places of those behind it change.
    pub(in crate::core::scheduler) fn remove(&mut self, place: usize) -> Worker<W> {
        let worker = self.list.remove(place);
        self.list_changed();
        worker
    }

    fn list_changed(&mut self) {
        let len = self.list.len();
        self.changed.clear();
        self.changed.extend(0..len);
        self.is_changed.clear();
        self.is_changed.resize(len, true);
        self.outlines.clear();
        self.floors = FloorTable::default();
        self.open = [0; 2];
        let prefills = self.list.iter().filter(|worker| !worker.decodes());
        self.kv_block_bytes = prefills.map(|worker| worker.kv_block_bytes).max().unwrap_or(0);
        self.prefills = self.list.iter().filter(|worker| !worker.decodes()).count();
        self.ranks = self.list.iter().filter(|worker| worker.group.is_some()).count();
    }

    fn change(&mut self, place: usize) {
        if !std::mem::replace(&mut self.is_changed[place], true) {
            self.changed.push(place);
        }
    }

    /// All of them, to be changed.
    pub(in crate::core::scheduler) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Worker<W>> {
        (0..self.list.len()).for_each(|place| self.change(place));
        self.list.iter_mut()
    }

    /// What the caller keeps of each, which no decision reads.
    pub(in crate::core::scheduler) fn members_mut(&mut self) -> impl Iterator<Item = &mut W> {
        self.list.iter_mut().map(|worker| &mut worker.member)
    }

    /// The same of one.
    pub(in crate::core::scheduler) fn member_mut(&mut self, place: usize) -> &mut W {
        &mut self.list[place].member
    }

    /// One to be changed, beside those before and behind it.
    pub(in crate::core::scheduler) fn split(
        &mut self,
        place: usize,
    ) -> (&[Worker<W>], &mut Worker<W>, &[Worker<W>]) {
        self.change(place);
        let (before, rest) = self.list.split_at_mut(place);
        let (worker, after) = rest.split_first_mut().expect("a place of a worker");
        (before, worker, after)
    }

    /// Looks anew at those that changed.
    pub(in crate::core::scheduler) fn look(&mut self, block_tokens: u32) {
        if self.outlines.is_empty() {
            self.changed.sort_unstable(); // the first look, in order
        }
        for place in self.changed.drain(..) {
            let worker = &mut self.list[place];
            worker.plan();
            let outline = Outline::of(worker, block_tokens);
            self.floors.set(
                place,
                &WorkerStanding {
                    role: worker.role,
                    worker_load: &outline.worker_load,
                    began_ms: worker.step_began_ms,
                    has_queue: outline.has_queue,
                    waiting: worker.waiting(),
                    in_group: worker.group.is_some(),
                },
            );
            let open = &mut self.open[usize::from(worker.decodes())];
            *open += usize::from(outline.is_open());
            match self.outlines.get_mut(place) {
                Some(before) => {
                    *open -= usize::from(before.is_open());
                    *before = outline;
                }
                None => self.outlines.push(outline),
            }
            self.is_changed[place] = false;
        }
    }

    /// Looks anew at what pulling KV costs each of them.
    pub(in crate::core::scheduler) fn look_at_pulls(&mut self, now_ms: f64) {
        for (worker, outline) in self.list.iter_mut().zip(&mut self.outlines) {
            if outline.pulls.is_due(now_ms) {
                worker.inbound.refresh(now_ms);
                outline.pulls = worker.inbound.looked_at();
            }
        }
    }

    /// As of the last look.
    pub(in crate::core::scheduler) fn outlines(&self) -> &[Outline] {
        &self.outlines
    }

    /// As of the last look.
    pub(in crate::core::scheduler) fn floors(&self) -> &FloorTable {
        &self.floors
    }

    /// How many take work, as of the last look: of those that only compute prompts, or of the others.
    pub(in crate::core::scheduler) fn open(&self, role: Role) -> usize {
        self.open[usize::from(role != Role::Prefill)]
    }

    /// Of the workers whose KV may have to be moved; one model's workers agree on it.
    pub(in crate::core::scheduler) fn kv_block_bytes(&self) -> u64 {
        self.kv_block_bytes
    }

    /// Some only compute prompts.
    pub(in crate::core::scheduler) fn has_prefills(&self) -> bool {
        self.prefills > 0
    }

    /// Some are ranks of groups.
    pub(in crate::core::scheduler) fn has_ranks(&self) -> bool {
        self.ranks > 0
    }
}

impl<W> Deref for Workers<W> {
    type Target = [Worker<W>];

    fn deref(&self) -> &[Worker<W>] {
        &self.list
    }
}

impl<W> Index<usize> for Workers<W> {
    type Output = Worker<W>;

    fn index(&self, place: usize) -> &Worker<W> {
        &self.list[place]
    }
}

impl<W> IndexMut<usize> for Workers<W> {
    fn index_mut(&mut self, place: usize) -> &mut Worker<W> {
        self.change(place);
        &mut self.list[place]
    }
}

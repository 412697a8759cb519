//! Lists: views of items that only grow, so that building one item by item is linear and a part of one costs nothing.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;

use super::{HEAD_BYTES, Value, above};
use crate::prompt::jinja::budget::Budget;
use crate::prompt::jinja::error::Error;

/// A view of a list that only grows, as [`Text`] is one of a string.
#[derive(Debug, Clone)]
pub(crate) struct List<'r> {
    items: Rc<Items<'r>>,
    start: u32,
    end: u32,
}

#[derive(Debug)]
struct Items<'r> {
    values: RefCell<Vec<Value<'r>>>,
    depth: Cell<u16>,
}

/// What an item takes.
const ITEM_BYTES: usize = size_of::<Value<'_>>();

impl<'r> List<'r> {
    /// A list of values that were charged as they came.
    pub(crate) fn new(values: Vec<Value<'r>>, budget: &Budget) -> Result<Self, Error> {
        budget.memory(HEAD_BYTES)?;
        let depth = above_all(&values, budget)?;
        let end = values.len() as u32;
        let items = Items { values: RefCell::new(values), depth: Cell::new(depth) };
        Ok(Self { items: Rc::new(items), start: 0, end })
    }

    pub(crate) fn depth(&self) -> u16 {
        self.items.depth.get()
    }

    pub(crate) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    pub(crate) fn get(&self, index: usize) -> Option<Value<'r>> {
        match index < self.len() {
            true => self.items.values.borrow().get(self.start as usize + index).cloned(),
            false => None,
        }
    }

    pub(crate) fn read(&self) -> Ref<'_, [Value<'r>]> {
        let (start, end) = (self.start as usize, self.end as usize);
        Ref::map(self.items.values.borrow(), |values| &values[start..end])
    }

    /// Items `start..end`, cut to what there is.
    pub(crate) fn part(&self, start: usize, end: usize) -> Self {
        let end = end.min(self.len());
        let start = start.min(end);
        let items = Rc::clone(&self.items);
        Self { items, start: self.start + start as u32, end: self.start + end as u32 }
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.items, &other.items) && (self.start, self.end) == (other.start, other.end)
    }

    /// This list and another one behind it.
    pub(crate) fn append(&self, more: &Self, budget: &Budget) -> Result<Self, Error> {
        let more: Vec<Value<'r>> = collect(more.read().iter().cloned(), more.len(), budget)?;
        let depth = above_all(&more, budget)?;
        if let Ok(mut values) = self.items.values.try_borrow_mut()
            && values.len() == self.end as usize
        {
            let needed = values.len() + more.len();
            if needed > values.capacity() {
                let capacity = needed.max(values.capacity() * 2);
                budget.room(capacity, ITEM_BYTES)?;
                let extra = capacity - values.len();
                values.reserve_exact(extra);
            }
            extend(&mut values, more.into_iter(), budget)?;
            self.items.depth.set(self.items.depth.get().max(depth));
            let end = values.len() as u32;
            return Ok(Self { items: Rc::clone(&self.items), start: self.start, end });
        }
        let mut all = collect(self.read().iter().cloned(), self.len() + more.len(), budget)?;
        extend(&mut all, more.into_iter(), budget)?;
        Self::new(all, budget)
    }
}

/// Collects values into a vector with room for `room`, charged.
pub(crate) fn collect<'r>(
    values: impl Iterator<Item = Value<'r>>,
    room: usize,
    budget: &Budget,
) -> Result<Vec<Value<'r>>, Error> {
    budget.room(room, ITEM_BYTES)?;
    let mut all = Vec::with_capacity(room);
    extend(&mut all, values, budget)?;
    Ok(all)
}

/// Items that are copied before the next ones are charged: some ten microseconds.
const CHUNK: usize = 1 << 10;

/// Adds values to a vector that has room for them, charged in chunks as they come.
fn extend<'r>(
    all: &mut Vec<Value<'r>>,
    mut values: impl Iterator<Item = Value<'r>>,
    budget: &Budget,
) -> Result<(), Error> {
    loop {
        let before = all.len();
        all.extend(values.by_ref().take(CHUNK));
        match all.len() - before {
            0 => return Ok(()),
            added => budget.items(added)?,
        }
    }
}

/// The depth of a list of these values.
fn above_all(values: &[Value<'_>], budget: &Budget) -> Result<u16, Error> {
    let mut deepest = 0;
    for chunk in values.chunks(CHUNK) {
        budget.items(chunk.len())?;
        deepest = chunk.iter().map(Value::depth).fold(deepest, u16::max);
    }
    above(deepest)
}

/// Adds one value to a vector under construction, charged.
pub(crate) fn push<'r>(
    values: &mut Vec<Value<'r>>,
    value: Value<'r>,
    budget: &Budget,
) -> Result<(), Error> {
    budget.items(1)?;
    if values.len() == values.capacity() {
        let capacity = (values.capacity() * 2).max(4);
        budget.room(capacity, ITEM_BYTES)?;
        values.reserve_exact(capacity - values.len());
    }
    values.push(value);
    Ok(())
}

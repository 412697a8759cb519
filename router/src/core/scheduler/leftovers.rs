//! What the scheduler has no use for any more. To give a large table back takes the system milliseconds, so who holds a lock
//! around the scheduler takes such a table along and drops it elsewhere.

use super::Scheduler;
use super::holdings::Holdings;
use crate::core::index::SpareTable;

/// Less than this is dropped at once. A guess: 0.1 ms.
const LARGE_BYTES: usize = 1 << 20;

/// To be dropped where nobody waits.
#[derive(Debug)]
pub struct Leftovers {
    table: Option<SpareTable>,
    holdings: Option<Holdings>,
}

impl Leftovers {
    fn bytes(&self) -> usize {
        self.table.as_ref().map_or(0, SpareTable::bytes)
            + self.holdings.as_ref().map_or(0, |all| all.size().1)
    }
}

impl<W> Scheduler<W> {
    /// What was left over since the last call, if that is much. Until it is taken it stays, or until there is more.
    pub fn take_leftovers(&mut self) -> Option<Leftovers> {
        let left = Leftovers { table: self.holdings.take_spare(), holdings: self.left.take() };
        Some(left).filter(|left| left.bytes() >= LARGE_BYTES)
    }
}

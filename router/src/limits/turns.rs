//! Turns at work of which only so much is done at a time: each address in turn, and each tenant of an address in turn, so that
//! whoever brings much of it waits behind nobody but itself.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::error::RouteError;
use crate::limits::shares::Holder;

/// Bounds of the turns at one kind of work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TurnLimits {
    /// Turns that are taken at a time.
    pub(crate) at_once: usize,
    /// Who waits for one, of all and of one tenant.
    pub(crate) waiting: usize,
    pub(crate) waiting_of_tenant: usize,
    /// The bound's name, where one tenant, or all, wait too much.
    pub(crate) what: &'static str,
}

/// All turns at one kind of work.
#[derive(Debug)]
pub(crate) struct TenantTurns {
    limits: TurnLimits,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    taken: usize,
    waiting: usize,
    /// The next one first.
    addresses: VecDeque<Of<VecDeque<Of<Waiting>>>>,
}

/// Of one tenant, in the order of their coming.
type Waiting = VecDeque<oneshot::Sender<TenantTurn>>;

/// What waits of one of them.
#[derive(Debug)]
struct Of<T> {
    who: u64,
    waits: T,
}

/// A turn, until this drops.
#[derive(Debug)]
pub(crate) struct TenantTurn {
    /// `None` once it was passed on.
    turns: Option<Arc<TenantTurns>>,
}

impl TenantTurns {
    pub(crate) fn new(limits: TurnLimits) -> Arc<Self> {
        Arc::new(Self { limits, inner: Mutex::default() })
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// `Overloaded` if too many wait.
    ///
    /// # Cancel safety
    /// A dropped call waits no longer. A turn that it was just given goes to the next one.
    pub(crate) async fn take(self: &Arc<Self>, holder: Holder) -> Result<TenantTurn, RouteError> {
        let answer = {
            let mut inner = self.inner();
            if inner.taken < self.limits.at_once {
                inner.taken += 1;
                return Ok(TenantTurn { turns: Some(Arc::clone(self)) });
            }
            inner.forget_the_gone();
            let full = |waiting, most| waiting >= most;
            if full(inner.waiting, self.limits.waiting)
                || full(inner.of_tenant(holder), self.limits.waiting_of_tenant)
            {
                let what = self.limits.what;
                return Err(RouteError::Overloaded { what, retry_after: Duration::from_secs(1) });
            }
            let (turn, answer) = oneshot::channel();
            inner.wait(holder, turn);
            answer
        };
        answer.await.map_err(|error| RouteError::internal("no turn", error))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn ended: the next one waiting has it.
    fn pass_on(self: Arc<Self>) {
        let mut turn = TenantTurn { turns: Some(Arc::clone(&self)) };
        loop {
            let mut inner = self.inner();
            let Some(next) = inner.next() else {
                inner.taken -= 1;
                turn.turns = None;
                return;
            };
            drop(inner);
            match next.send(turn) {
                Ok(()) => return,
                Err(back) => turn = back, // nobody waits there any more
            }
        }
    }
}

impl Inner {
    fn wait(&mut self, holder: Holder, turn: oneshot::Sender<TenantTurn>) {
        self.waiting += 1;
        let of_address = entry(&mut self.addresses, first_of(holder));
        entry(of_address, holder.tenant).push_back(turn);
    }

    fn of_tenant(&self, holder: Holder) -> usize {
        let address = self.addresses.iter().find(|of| of.who == first_of(holder));
        let tenant = address.and_then(|of| of.waits.iter().find(|of| of.who == holder.tenant));
        tenant.map_or(0, |of| of.waits.len())
    }

    /// Whose turn it is. The address and the tenant are the last ones of theirs from now on.
    fn next(&mut self) -> Option<oneshot::Sender<TenantTurn>> {
        let mut address = self.addresses.pop_front()?;
        let mut tenant = address.waits.pop_front()?;
        let turn = tenant.waits.pop_front()?;
        self.waiting -= 1;
        if !tenant.waits.is_empty() {
            address.waits.push_back(tenant);
        }
        if !address.waits.is_empty() {
            self.addresses.push_back(address);
        }
        Some(turn)
    }

    /// Who hung up while it waited takes no place.
    fn forget_the_gone(&mut self) {
        for address in &mut self.addresses {
            for tenant in &mut address.waits {
                tenant.waits.retain(|turn| !turn.is_closed());
            }
            address.waits.retain(|tenant| !tenant.waits.is_empty());
        }
        self.addresses.retain(|address| !address.waits.is_empty());
        let tenants = self.addresses.iter().flat_map(|address| &address.waits);
        self.waiting = tenants.map(|tenant| tenant.waits.len()).sum();
    }
}

/// Names of tenants can be made up at an address without keys, so its address goes first; a key is known by itself.
fn first_of(holder: Holder) -> u64 {
    if holder.address == 0 { holder.tenant } else { holder.address }
}

fn entry<T: Default>(list: &mut VecDeque<Of<T>>, who: u64) -> &mut T {
    let place = list.iter().position(|of| of.who == who).unwrap_or_else(|| {
        list.push_back(Of { who, waits: T::default() });
        list.len() - 1
    });
    &mut list[place].waits
}

impl Drop for TenantTurn {
    fn drop(&mut self) {
        if let Some(turns) = self.turns.take() {
            turns.pass_on();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;

    use futures_util::FutureExt as _;

    use super::*;

    type Asking = Pin<Box<dyn Future<Output = Result<TenantTurn, RouteError>>>>;

    fn turns(at_once: usize) -> Arc<TenantTurns> {
        let limits =
            TurnLimits { at_once, waiting: 8, waiting_of_tenant: 4, what: "work that waits" };
        TenantTurns::new(limits)
    }

    fn of(address: u64, tenant: u64) -> Holder {
        Holder { tenant, address, connection: 0 }
    }

    /// It waits from now on.
    fn waits(turns: &Arc<TenantTurns>, holder: Holder) -> Asking {
        let turns = Arc::clone(turns);
        let mut waiting: Asking = Box::pin(async move { turns.take(holder).await });
        assert!((&mut waiting).now_or_never().is_none(), "all turns are taken");
        waiting
    }

    fn now(turns: &Arc<TenantTurns>, holder: Holder) -> Result<TenantTurn, RouteError> {
        turns.take(holder).now_or_never().expect("it does not wait")
    }

    /// In which order these get their turns, one after the other.
    fn order(first: TenantTurn, mut waiting: Vec<Asking>) -> Vec<usize> {
        let (mut turn, mut order) = (first, Vec::new());
        while order.len() < waiting.len() {
            drop(turn);
            let ready = waiting.iter_mut().enumerate().filter(|(i, _)| !order.contains(i));
            let mut got: Vec<(usize, TenantTurn)> = ready
                .filter_map(|(i, one)| Some((i, one.as_mut().now_or_never()?.unwrap())))
                .collect();
            assert_eq!(got.len(), 1, "one at a time");
            let (i, next) = got.remove(0);
            order.push(i);
            turn = next;
            // what was polled to its end is not polled again
            waiting[i] = Box::pin(std::future::pending());
        }
        order
    }

    #[test]
    fn addresses_take_turns_and_within_one_its_tenants_do() {
        let turns = turns(1);
        let first = now(&turns, of(1, 1)).unwrap();
        let list = [(1, 1), (1, 1), (1, 1), (1, 2), (3, 1), (0, 7), (3, 1)];
        let waiting = list.map(|(address, tenant)| waits(&turns, of(address, tenant)));
        // 1/1, 3/1, key 7; 1/2, 3/1; 1/1; 1/1
        assert_eq!(order(first, waiting.into()), [0, 4, 5, 3, 6, 1, 2]);
        assert_eq!(turns.inner().taken, 0);
        assert_eq!(turns.inner().waiting, 0);
    }

    #[test]
    fn so_many_turns_are_taken_at_a_time() {
        let turns = turns(2);
        let held = [now(&turns, of(0, 1)).unwrap(), now(&turns, of(0, 1)).unwrap()];
        let mut third = waits(&turns, of(0, 1));
        drop(held);
        assert!(third.as_mut().now_or_never().is_some());
        assert_eq!(turns.inner().taken, 0, "and given back");
    }

    #[test]
    fn what_waits_is_bounded_of_a_tenant_and_of_all() {
        let turns = turns(1);
        let held = now(&turns, of(0, 1)).unwrap();
        let refused = |holder| match now(&turns, holder) {
            Err(RouteError::Overloaded { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        let mut waiting: Vec<Asking> = (0..4).map(|_| waits(&turns, of(0, 1))).collect();
        assert_eq!(refused(of(0, 1)), "work that waits");
        waiting.extend((0..4).map(|tenant| waits(&turns, of(5, tenant))));
        assert_eq!(refused(of(6, 1)), "work that waits");
        waiting.truncate(7);
        waiting.push(waits(&turns, of(6, 1)));
        drop(waiting.remove(0));
        let again = waits(&turns, of(0, 1));
        drop((waiting, again, held));
        assert!(now(&turns, of(0, 1)).is_ok());
    }

    #[test]
    fn whoever_left_is_passed_over_also_with_its_turn() {
        let turns = turns(1);
        let held = now(&turns, of(0, 1)).unwrap();
        let (gone, given, mut last) =
            (waits(&turns, of(0, 1)), waits(&turns, of(0, 2)), waits(&turns, of(0, 3)));
        drop(gone);
        drop(held); // to `given`
        assert!(last.as_mut().now_or_never().is_none());
        drop(given);
        assert!(last.as_mut().now_or_never().is_some());
    }
}

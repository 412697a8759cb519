//! Who may have how many answers in flight (`--max-streams`): choices count singly.
//!
//! A tenant may have seven times as many as are free, so that one alone gets seven eighths and leaves the rest to
//! newcomers, and several settle at equal parts as answers end. A connection may have as many as are free. Names of tenants
//! can be made up where nobody is known by a key, so all from one address together leave some places, too: few, as a gateway
//! may have many tenants behind its address. Whoever has few may take any place that is free. Beyond few, a tenant's answers yield on the workers to those of other tenants, until it has
//! half as few again: its own ones do not overtake each other as their number goes up and down.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::error::RouteError;
use crate::limits::key_ring::KeyPermit;
use crate::metrics::Metrics;

/// A tenant may have this many times what is free; a guess, see the head of this file.
const OF_FREE_TENANT: usize = 7;
/// The same of an address.
const OF_FREE_ADDRESS: usize = 31;
/// The same of a connection: alone, it gets half. Who needs more opens another one.
const OF_FREE_CONNECTION: usize = 1;
/// So many answers are few: they take any free place, and go at their full priority on the workers. A guess: more than a
/// person or an agent waits for at once.
pub const FEW: usize = 8;
/// Of fewer places nothing is kept for anybody.
const SMALL: usize = 64;

/// Whose share of the service a request takes; the default is nobody's in particular.
#[derive(Debug, Clone, Default)]
pub struct Account {
    /// Of its tenant; 0 where nobody says.
    pub id: u64,
    /// What people call it.
    pub name: Option<Arc<str>>,
}

/// Who has answers in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Holder {
    /// By its key, by what it says, or by its address.
    pub tenant: u64,
    /// Its address, see [`address_number`]; 0 of who is known by a key.
    pub address: u64,
    /// Number of its connection; 0 where there is none.
    pub connection: u64,
}

/// All answers in flight.
#[derive(Debug)]
pub(crate) struct Shares {
    metrics: Arc<Metrics>,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    most: usize,
    /// Of one tenant, whatever is free.
    most_of_tenant: usize,
    all: usize,
    by_tenant: HashMap<u64, Tenant>,
    by_address: HashMap<u64, usize>,
    by_connection: HashMap<u64, usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Tenant {
    held: usize,
    /// It had more than few, and still has half as many.
    many: bool,
}

/// Answers in flight, until this drops.
#[derive(Debug)]
pub(crate) struct StreamPermit {
    shares: Arc<Shares>,
    holder: Holder,
    n: usize,
    /// So many of them do not yield.
    few: usize,
    /// Their places among those of a key.
    of_key: Option<KeyPermit>,
}

impl Shares {
    /// `most_of_tenant`: a bound for each tenant besides.
    pub(crate) fn new(
        most: usize,
        most_of_tenant: Option<usize>,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let held = Held {
            most,
            most_of_tenant: most_of_tenant.unwrap_or(usize::MAX),
            all: 0,
            by_tenant: HashMap::new(),
            by_address: HashMap::new(),
            by_connection: HashMap::new(),
        };
        Arc::new(Self { metrics, held: Mutex::new(held) })
    }

    /// Sets other bounds. Answers that run go on, also where they are more than the new bounds let begin.
    pub(crate) fn change(&self, most: usize, most_of_tenant: Option<usize>) {
        let mut held = self.held();
        held.most = most;
        held.most_of_tenant = most_of_tenant.unwrap_or(usize::MAX);
    }

    /// Takes note of `n` answers that begin.
    ///
    /// # Errors
    /// `Overloaded` names the share that is used up.
    pub(crate) fn begin(
        self: &Arc<Self>,
        holder: Holder,
        n: usize,
    ) -> Result<StreamPermit, RouteError> {
        let mut held = self.held();
        let taken = held.take(holder, n);
        self.metrics.requests.streams.set(held.all as i64);
        drop(held);
        match taken {
            Ok(few) => Ok(StreamPermit { shares: Arc::clone(self), holder, n, few, of_key: None }),
            Err(what) => {
                self.metrics.scheduling.refused.inc(what);
                Err(RouteError::Overloaded { what, retry_after: Duration::from_secs(1) })
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("no holder panics")
    }
}

impl Held {
    /// How many of them do not yield, or the share that is used up.
    fn take(&mut self, holder: Holder, n: usize) -> Result<usize, &'static str> {
        let Holder { tenant, address, connection } = holder;
        let before = self.by_tenant.get(&tenant).copied().unwrap_or_default();
        let of_tenant = before.held;
        let of_address = self.by_address.get(&address).copied().unwrap_or(0);
        let of_connection = self.by_connection.get(&connection).copied().unwrap_or(0);
        if n > self.most.saturating_sub(self.all) {
            return Err("answers in flight");
        }
        let left = self.most - self.all - n;
        let fits = |held: usize, times: usize| {
            let together = held.saturating_add(n);
            self.most < SMALL || together <= FEW || together <= left.saturating_mul(times)
        };
        if of_tenant.saturating_add(n) > self.most_of_tenant || !fits(of_tenant, OF_FREE_TENANT) {
            return Err("answers of this tenant in flight");
        }
        if address != 0 && !fits(of_address, OF_FREE_ADDRESS) {
            return Err("answers of this address in flight");
        }
        // one request is bounded as its tenant is: it has no other connection to go to
        if connection != 0 && of_connection > 0 && !fits(of_connection, OF_FREE_CONNECTION) {
            return Err("answers on this connection in flight");
        }
        self.all += n;
        let few = if before.many { 0 } else { FEW.saturating_sub(of_tenant) };
        let now = Tenant { held: of_tenant + n, many: before.many || n > few };
        self.by_tenant.insert(tenant, now);
        for (held, who) in [(&mut self.by_address, address), (&mut self.by_connection, connection)]
        {
            if who != 0 {
                *held.entry(who).or_default() += n;
            }
        }
        Ok(few)
    }

    fn give_back(&mut self, Holder { tenant, address, connection }: Holder, n: usize) {
        self.all -= n;
        if let Entry::Occupied(mut entry) = self.by_tenant.entry(tenant) {
            let tenant = entry.get_mut();
            tenant.held -= n;
            tenant.many &= tenant.held >= FEW / 2;
            if tenant.held == 0 {
                entry.remove();
            }
        }
        for (held, who) in [(&mut self.by_address, address), (&mut self.by_connection, connection)]
        {
            if let Entry::Occupied(mut entry) = held.entry(who) {
                *entry.get_mut() -= n;
                if *entry.get() == 0 {
                    entry.remove();
                }
            }
        }
    }
}

/// An address as a number that is not 0; of IPv6 that of its /64, of which one machine has all.
pub(crate) fn address_number(address: IpAddr) -> u64 {
    /// No network that is given out begins like this, so no address of IPv6 has the number of one of IPv4.
    const V4: u64 = 0xFFFF_FFFF << 32;
    match address.to_canonical() {
        IpAddr::V4(address) => V4 | u64::from(address.to_bits()),
        IpAddr::V6(address) => ((address.to_bits() >> 64) as u64).max(1), // ::1 is in ::/64
    }
}

impl StreamPermit {
    /// The same, with what was taken of the places of a key.
    pub(crate) fn of_key(mut self, of_key: Option<KeyPermit>) -> Self {
        self.of_key = of_key;
        self
    }

    /// The key pays for the prompt, if there is one.
    ///
    /// # Errors
    /// `KeyLimit`.
    pub(crate) fn take_prompt(&self, tokens: usize) -> Result<(), RouteError> {
        self.of_key.as_ref().map_or(Ok(()), |permit| permit.take_prompt(tokens))
    }

    /// A worker has the prompt: what was paid for it is not given back.
    pub(crate) fn served(&self) {
        if let Some(permit) = &self.of_key {
            permit.served();
        }
    }

    /// The key pays for what came of the answers.
    pub(crate) fn charge_answer(&self, tokens: u32) {
        if let Some(permit) = &self.of_key {
            permit.charge_answer(tokens);
        }
    }

    /// The answer `index` of these is one of many of its tenant: it makes way for others.
    pub(crate) fn yields(&self, index: u32) -> bool {
        index as usize >= self.few
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut held = self.shares.held();
        held.give_back(self.holder, self.n);
        self.shares.metrics.requests.streams.set(held.all as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(most: usize) -> Arc<Shares> {
        Shares::new(most, None, Arc::default())
    }

    fn tenant(tenant: u64) -> Holder {
        Holder { tenant, ..Holder::default() }
    }

    /// As many as it gets, one by one.
    fn all_that(shares: &Arc<Shares>, holder: Holder) -> Vec<StreamPermit> {
        std::iter::from_fn(|| shares.begin(holder, 1).ok()).collect()
    }

    fn what(result: Result<StreamPermit, RouteError>) -> &'static str {
        match result {
            Err(RouteError::Overloaded { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_tenant_leaves_an_eighth_to_newcomers() {
        let shares = shares(1024);
        let first = all_that(&shares, tenant(1));
        assert_eq!(first.len(), 896);
        assert_eq!(what(shares.begin(tenant(1), 1)), "answers of this tenant in flight");
        let second = all_that(&shares, tenant(2));
        assert_eq!(second.len(), 112);
        let third = all_that(&shares, tenant(3));
        assert_eq!(third.len(), 14);
        // seven eighths of what the third one leaves
        drop(first);
        assert_eq!(all_that(&shares, tenant(2)).len() + 112, 7 * (1024 - 14) / 8);
    }

    #[test]
    fn fewer_than_run_let_none_begin_until_enough_have_ended() {
        let shares = shares(16);
        let mut running = all_that(&shares, tenant(1));
        assert_eq!(running.len(), 16);
        shares.change(2, Some(1));
        assert_eq!(what(shares.begin(tenant(2), 1)), "answers in flight");
        running.truncate(1);
        assert!(shares.begin(tenant(2), 1).is_ok());
        assert_eq!(what(shares.begin(tenant(1), 1)), "answers of this tenant in flight");
        shares.change(2, None);
        assert!(shares.begin(tenant(1), 1).is_ok());
    }

    #[test]
    fn eight_requests_of_many_choices_leave_places() {
        let shares = shares(1024);
        let greedy: Vec<_> = (0..8).map(|_| shares.begin(tenant(1), 128)).collect();
        assert_eq!(greedy.iter().filter(|taken| taken.is_ok()).count(), 7);
        assert!(shares.begin(tenant(2), 1).is_ok());
    }

    #[test]
    fn few_answers_take_any_place_and_no_more_than_there_are() {
        let shares = shares(64);
        let first = all_that(&shares, tenant(1));
        let second = all_that(&shares, tenant(2));
        assert_eq!((first.len(), second.len()), (56, FEW));
        assert_eq!(what(shares.begin(tenant(3), 1)), "answers in flight");
        assert_eq!(what(shares.begin(tenant(3), usize::MAX)), "answers in flight");
    }

    #[test]
    fn where_places_are_scarce_nobody_keeps_any() {
        let shares = shares(2);
        assert_eq!(all_that(&shares, tenant(1)).len(), 2);
        assert!(shares.begin(Holder { tenant: 1, connection: 1, ..Holder::default() }, 2).is_ok());
    }

    #[test]
    fn who_is_refused_is_counted_and_told_to_come_again() {
        let shares = shares(2);
        let _both = shares.begin(tenant(1), 2).unwrap();
        let refused = shares.begin(tenant(2), 1);
        let Err(RouteError::Overloaded { retry_after, .. }) = refused else { panic!("full") };
        assert!(retry_after >= Duration::from_secs(1));
        let text = shares.metrics.text();
        assert!(text.contains("headrace_refused_total{reason=\"answers in flight\"} 1"), "{text}");
    }

    #[test]
    fn a_connection_gets_half() {
        let shares = shares(1024);
        let on = |connection| Holder { tenant: 1, connection, ..Holder::default() };
        let first = all_that(&shares, on(1));
        assert_eq!(first.len(), 512);
        assert_eq!(what(shares.begin(on(1), 1)), "answers on this connection in flight");
        assert!(shares.begin(on(2), 300).is_ok(), "another one of the same tenant");
    }

    #[test]
    fn names_that_one_address_makes_up_do_not_take_all_places() {
        let shares = shares(1024);
        let from = |address, tenant| Holder { tenant, address, connection: 0 };
        let greedy: Vec<_> = (1..200).flat_map(|name| all_that(&shares, from(1, name))).collect();
        assert_eq!(greedy.len(), 992);
        assert_eq!(what(shares.begin(from(1, 1_000), 1)), "answers of this address in flight");
        assert_eq!(all_that(&shares, from(2, 1_001)).len(), 28, "of another one");
        assert!(shares.begin(tenant(7), 1).is_ok(), "who has a key has no address here");
        drop(greedy);
        assert!(shares.begin(from(1, 1), 800).is_ok());
    }

    #[test]
    fn addresses_are_told_apart_as_far_as_machines_are() {
        let number = |text: &str| address_number(text.parse().unwrap());
        assert_ne!(number("10.0.0.1"), number("10.0.0.2"));
        assert_eq!(number("::ffff:10.0.0.1"), number("10.0.0.1"));
        assert_eq!(number("2001:db8::1"), number("2001:db8::2"));
        assert_ne!(number("2001:db8:0:1::1"), number("2001:db8:0:2::1"));
        assert!(number("::1") != 0 && number("0.0.0.0") != 0);
    }

    #[test]
    fn a_bound_for_tenants_holds_besides() {
        let shares = Shares::new(1024, Some(3), Arc::default());
        assert_eq!(all_that(&shares, tenant(1)).len(), 3);
        assert_eq!(all_that(&shares, tenant(2)).len(), 3);
    }

    #[test]
    fn what_ends_is_given_back_and_forgotten() {
        let shares = shares(1024);
        let holder = Holder { tenant: 1, address: 5, connection: 9 };
        drop((shares.begin(holder, 100), shares.begin(holder, 20)));
        let held = shares.held();
        assert_eq!(held.all, 0);
        assert!(held.by_tenant.is_empty() && held.by_connection.is_empty());
        assert!(held.by_address.is_empty());
    }

    #[test]
    fn beyond_few_answers_yield() {
        let shares = shares(1024);
        let permit = shares.begin(tenant(1), 6).unwrap();
        let more = shares.begin(tenant(1), 6).unwrap();
        assert!((0..6).all(|index| !permit.yields(index)));
        assert!(!more.yields(1) && more.yields(2));
        assert!(!shares.begin(tenant(2), 1).unwrap().yields(0));
    }

    #[test]
    fn who_had_many_yields_until_it_has_half_as_few() {
        let shares = shares(1024);
        let many = shares.begin(tenant(1), FEW + 1).unwrap();
        let few = shares.begin(tenant(1), FEW / 2).unwrap();
        assert!(few.yields(0));
        drop(many);
        let next = shares.begin(tenant(1), 1).unwrap();
        assert!(next.yields(0), "as many as half");
        drop((few, next));
        let one = shares.begin(tenant(1), FEW / 2 - 1).unwrap();
        assert!(!one.yields(0));
        assert!(!shares.begin(tenant(1), 1).unwrap().yields(0));
    }
}

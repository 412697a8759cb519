//! One behaviour of the queue each.

use super::*;

const AGEING_MS: f64 = 1_000.0;
const NEVER: f64 = f64::INFINITY;

fn rules() -> QueueRules {
    let floors = [0.0; CLASSES];
    QueueRules { requests: 4_096, tokens: 1 << 40, bytes: 1 << 40, ageing_ms: AGEING_MS, floors }
}

/// A queue whose items are their tickets, as the tests see it.
struct Queue {
    admission: Admission<u64>,
    now_ms: f64,
    last_ticket: u64,
}

impl Queue {
    fn new(rules: QueueRules) -> Self {
        Self { admission: Admission::new(rules), now_ms: 0.0, last_ticket: 0 }
    }

    fn try_join(&mut self, class: Class, tenant: u64, tokens: u64) -> Result<u64, QueueBound> {
        self.last_ticket += 1;
        let (ticket, since_ms) = (self.last_ticket, self.now_ms);
        let entry = Entry {
            ticket,
            class,
            tenant,
            tokens,
            bytes: 4 * tokens,
            since_ms,
            deadline_ms: NEVER,
        };
        self.admission.join(entry, ticket).map_err(|(full, _)| full)?;
        Ok(ticket)
    }

    fn join(&mut self, class: Class, tenant: u64, tokens: u64) -> u64 {
        self.try_join(class, tenant, tokens).unwrap()
    }

    fn order(&mut self) -> Vec<u64> {
        self.admission.order(self.now_ms, usize::MAX)
    }

    /// Takes the first and charges a block-second a token.
    fn dispatch(&mut self) -> Option<Entry> {
        let ticket = *self.admission.order(self.now_ms, 1).first()?;
        let (entry, _) = self.admission.take(ticket)?;
        self.admission.charge(entry.tenant, as_f64(entry.tokens));
        Some(entry)
    }
}

#[test]
fn the_higher_class_goes_first_and_inside_it_the_one_that_came_first() {
    let mut queue = Queue::new(rules());
    let low = queue.join(Class::Low, 1, 10);
    let first = queue.join(Class::Normal, 1, 10);
    let second = queue.join(Class::Normal, 1, 10);
    let high = queue.join(Class::High, 1, 10);
    assert_eq!(queue.order(), [high, first, second, low]);
}

#[test]
fn one_that_waits_climbs_a_class_at_a_time() {
    let mut queue = Queue::new(rules());
    let low = queue.join(Class::Low, 1, 10);
    queue.now_ms = AGEING_MS - 1.0;
    let normal = queue.join(Class::Normal, 1, 10);
    assert_eq!(queue.order(), [normal, low]);
    queue.now_ms = AGEING_MS; // both are Normal now, and it came first
    assert_eq!(queue.order(), [low, normal]);
    let high = queue.join(Class::High, 1, 10);
    assert_eq!(queue.order(), [high, low, normal]);
    queue.now_ms = 2.0 * AGEING_MS; // all are High now
    assert_eq!(queue.order(), [low, normal, high]);
}

#[test]
fn tenants_take_turns_however_much_one_of_them_asks() {
    let mut queue = Queue::new(rules());
    let many: Vec<u64> = (0..4).map(|_| queue.join(Class::Normal, 1, 10)).collect();
    let few: Vec<u64> = (0..2).map(|_| queue.join(Class::Normal, 2, 10)).collect();
    assert_eq!(queue.order(), [many[0], few[0], many[1], few[1], many[2], many[3]]);
}

#[test]
fn what_a_tenant_gets_counts_not_how_often() {
    let mut queue = Queue::new(rules());
    for _ in 0..100 {
        queue.join(Class::Normal, 1, 90);
        queue.join(Class::Normal, 2, 10);
    }
    let mut got = [0_u64; 3];
    for _ in 0..60 {
        let entry = queue.dispatch().unwrap();
        got[usize::try_from(entry.tenant).unwrap()] += entry.tokens;
    }
    assert!(got[1].abs_diff(got[2]) <= 90, "{got:?}");
}

#[test]
fn a_correction_moves_the_tenant() {
    let mut queue = Queue::new(rules());
    let one = queue.join(Class::Normal, 1, 10);
    let two = queue.join(Class::Normal, 2, 10);
    queue.admission.charge(1, 5.0);
    assert_eq!(queue.order(), [two, one]);
    queue.admission.charge(1, -5.0);
    assert_eq!(queue.order(), [one, two]);
    queue.admission.charge(1, f64::NAN);
    assert_eq!(queue.order(), [one, two]);
}

#[test]
fn being_idle_or_new_saves_up_nothing() {
    let mut queue = Queue::new(rules());
    queue.join(Class::Normal, 2, 10);
    queue.dispatch().unwrap();
    for _ in 0..100 {
        queue.join(Class::Normal, 1, 10); // tenant 2 idles
        queue.dispatch().unwrap();
    }
    for _ in 0..10 {
        for tenant in 1..=3 {
            queue.join(Class::Normal, tenant, 10); // 2 comes back, 3 is new
        }
    }
    let mut got = [0; 4];
    for _ in 0..15 {
        got[usize::try_from(queue.dispatch().unwrap().tenant).unwrap()] += 1;
    }
    assert!(got[1..].iter().all(|n: &i32| (4..=6).contains(n)), "{got:?}");
}

#[test]
fn accounts_of_a_class_that_is_far_ahead_do_not_hold_back_the_others() {
    let mut queue = Queue::new(rules());
    queue.join(Class::Normal, 9, 10); // waits behind all of these
    for _ in 0..100 {
        queue.join(Class::High, 1, 10);
        queue.join(Class::High, 1, 10);
        queue.dispatch().unwrap();
    }
    // as new at High it begins where 1 is, not where 9 is
    for _ in 0..20 {
        queue.join(Class::High, 2, 10);
    }
    let mut got = [0_u64; 3];
    for _ in 0..20 {
        got[usize::try_from(queue.dispatch().unwrap().tenant).unwrap()] += 1;
    }
    assert!(got[1].abs_diff(got[2]) <= 2, "{got:?}");
    // and as new at Normal where 9 is, not where 1 is
    while queue.admission.of_class(Class::High).requests > 0 {
        queue.dispatch().unwrap();
    }
    queue.join(Class::Normal, 9, 10);
    for _ in 0..2 {
        queue.join(Class::Normal, 3, 10);
    }
    let tenants: Vec<u64> = (0..4).map(|_| queue.dispatch().unwrap().tenant).collect();
    assert_eq!(tenants, [9, 3, 9, 3]);
}

#[test]
fn a_class_that_waits_gets_its_floor_and_saves_up_nothing_before() {
    let rules = QueueRules { ageing_ms: NEVER, floors: [0.1, 0.0, 0.0], ..rules() };
    let mut queue = Queue::new(rules);
    for _ in 0..200 {
        queue.join(Class::High, 1, 100);
        queue.dispatch().unwrap();
    }
    for _ in 0..100 {
        queue.join(Class::High, 1, 100);
        queue.join(Class::Low, 2, 100);
    }
    let low = (0..50).filter(|_| queue.dispatch().unwrap().class == Class::Low).count();
    assert!((5..=6).contains(&low), "{low} of 50");
}

#[test]
fn what_a_class_was_owed_is_void_once_nobody_of_it_waits() {
    let rules = QueueRules { ageing_ms: NEVER, floors: [0.5, 0.0, 0.0], ..rules() };
    let mut queue = Queue::new(rules);
    let low = queue.join(Class::Low, 1, 100);
    queue.join(Class::High, 2, 100);
    assert_eq!(queue.dispatch().unwrap().class, Class::High);
    assert_eq!(queue.order(), [low], "and now half of that is owed to it");
    queue.admission.leave(low).unwrap();
    let low = queue.join(Class::Low, 1, 100);
    let high = queue.join(Class::High, 2, 100);
    assert_eq!(queue.order(), [high, low]);
}

#[test]
fn what_a_class_had_long_ago_is_not_held_against_it() {
    let rules = QueueRules { ageing_ms: NEVER, floors: [0.1, 0.0, 0.0], ..rules() };
    let mut queue = Queue::new(rules);
    for _ in 0..1_000 {
        queue.join(Class::Low, 1, 10_000); // ten million tokens, nine of which others could have had
        queue.dispatch().unwrap();
    }
    queue.join(Class::Low, 1, 10_000);
    let turn = (1..=1_000).find(|_| {
        queue.join(Class::High, 2, 10_000);
        queue.dispatch().unwrap().class == Class::Low
    });
    assert!(turn.is_some_and(|turn| (50..500).contains(&turn)), "{turn:?}");
}

#[test]
fn a_class_works_nothing_off_while_nobody_of_it_waits() {
    let rules = QueueRules { ageing_ms: NEVER, floors: [0.5, 0.0, 0.0], ..rules() };
    let mut queue = Queue::new(rules);
    for (class, turns) in [(Class::Low, 100), (Class::High, 200)] {
        for _ in 0..turns {
            queue.join(class, 1, 1_000);
            queue.dispatch().unwrap();
        }
    }
    queue.join(Class::Low, 1, 1_000);
    for turn in 0..20 {
        queue.join(Class::High, 2, 1_000);
        assert_eq!(queue.dispatch().unwrap().class, Class::High, "turn {turn}");
    }
}

#[test]
fn one_token_in_so_many_goes_to_the_oldest() {
    let mut queue = Queue::new(rules());
    let low = queue.join(Class::Low, 1, 10);
    queue.admission.charge(1, 1e9);
    queue.now_ms = 3.0 * AGEING_MS;
    let mut dispatched = Vec::new();
    while dispatched.last() != Some(&low) {
        let newcomer = 10 + dispatched.len() as u64;
        queue.join(Class::High, newcomer, 10);
        dispatched.push(queue.dispatch().unwrap().ticket);
    }
    assert_eq!(dispatched.len() as u64, OLDEST_SHARE);
}

#[test]
fn the_oldest_is_overdue_only_after_it_could_have_climbed_through_all_classes() {
    let mut queue = Queue::new(rules());
    let low = queue.join(Class::Low, 1, 10);
    queue.admission.charge(1, 1e9);
    queue.now_ms = 3.0 * AGEING_MS - 1.0;
    for newcomer in 10..50 {
        queue.join(Class::High, newcomer, 10);
        assert_ne!(queue.dispatch().unwrap().ticket, low);
    }
}

#[test]
fn requests_without_tokens_do_not_go_before_the_oldest_for_ever() {
    let mut queue = Queue::new(rules());
    let low = queue.join(Class::Low, 1, 0);
    queue.admission.charge(1, 1e9);
    queue.now_ms = 3.0 * AGEING_MS;
    let turn = (1..=40).find(|newcomer| {
        queue.join(Class::High, 10 + newcomer, 0);
        queue.dispatch().unwrap().ticket == low
    });
    assert_eq!(turn, Some(OLDEST_SHARE));
}

#[test]
fn of_two_classes_below_their_floors_the_one_that_has_waited_longer_for_its_share_goes_first() {
    let rules = QueueRules { ageing_ms: NEVER, floors: [0.1, 0.4, 0.0], ..rules() };
    let mut queue = Queue::new(rules);
    let high = [(); 2].map(|()| queue.join(Class::High, 1, 100));
    let low = queue.join(Class::Low, 2, 100);
    queue.admission.take(high[0]).unwrap();
    let normal = queue.join(Class::Normal, 3, 100);
    queue.admission.take(high[1]).unwrap();
    // 20 tokens are owed to the one, a tenth of 200, and 40 to the other, four tenths of 100
    assert_eq!(queue.order(), [low, normal]);
}

#[test]
fn of_a_class_below_its_floor_those_go_first_that_have_climbed() {
    let rules = QueueRules { floors: [0.5, 0.0, 0.0], ..rules() };
    let mut queue = Queue::new(rules);
    let old = queue.join(Class::Low, 1, 100);
    queue.admission.charge(1, 1_000.0);
    queue.now_ms = AGEING_MS;
    let new = queue.join(Class::Low, 2, 100);
    queue.join(Class::High, 3, 100);
    assert_eq!(queue.dispatch().unwrap().class, Class::High);
    assert_eq!(queue.order(), [old, new], "although its tenant got more");
}

#[test]
fn time_does_not_run_backwards() {
    let mut queue = Queue::new(rules());
    queue.now_ms = 2.0 * AGEING_MS;
    queue.order();
    queue.now_ms = 0.0;
    queue.order();
    let low = queue.join(Class::Low, 1, 10);
    let normal = queue.join(Class::Normal, 1, 10);
    assert_eq!(queue.order(), [low, normal], "both came long ago, and have climbed");
}

#[test]
fn what_a_token_costs_is_what_was_charged_for_those_that_were_dispatched() {
    let mut queue = Queue::new(rules());
    assert_eq!(queue.admission.seconds_per_token(), 1.0, "as long as nothing is known");
    let ticket = queue.join(Class::Normal, 1, 10);
    queue.admission.take(ticket).unwrap();
    queue.admission.charge(1, 25.0);
    assert_eq!(queue.admission.seconds_per_token(), 2.5);
}

#[test]
fn a_tenants_account_begins_where_its_class_is_and_is_not_forgiven_by_a_pause() {
    let mut queue = Queue::new(rules());
    let class = Class::Normal.index();
    let first = [(); 2].map(|()| queue.join(Class::Normal, 2, 10));
    let second = [(); 2].map(|()| queue.join(Class::Normal, 1, 10));
    queue.admission.charge(1, 100.0);
    queue.admission.charge(2, 100.0);
    queue.admission.take(first[0]).unwrap(); // the class is at 100 now
    queue.admission.charge(1, -50.0);
    queue.join(Class::Normal, 1, 10);
    let account = |queue: &Queue, tenant| queue.admission.lanes.account(class, tenant);
    assert_eq!(account(&queue, 1), 50.0, "it waits: a correction is its own");
    queue.admission.take(second[0]).unwrap();
    queue.join(Class::Normal, 3, 10);
    assert_eq!(account(&queue, 3), 100.0, "where the class is does not go back");
    queue.admission.charge(4, 5.0);
    assert_eq!(account(&queue, 4), 105.0, "nor is who went without waiting behind that");
    queue.admission.charge(3, 900.0);
    queue.admission.leave(queue.last_ticket).unwrap();
    queue.join(Class::Normal, 3, 10);
    assert_eq!(account(&queue, 3), 1_000.0);
}

#[test]
fn an_idle_tenant_that_is_charged_is_not_the_idlest() {
    let mut queue = Queue::new(rules());
    for tenant in 0..4_096 {
        queue.join(Class::Normal, tenant, 1);
        queue.dispatch().unwrap();
    }
    queue.admission.charge(0, 1.0);
    queue.join(Class::Normal, 5_000, 1);
    queue.dispatch().unwrap();
    let served = [0, 1, 2].map(|tenant| queue.admission.served(tenant));
    assert_eq!(served, [Some(2.0), None, Some(1.0)]);
}

#[test]
fn the_bounds_hold_and_say_which() {
    let rules = QueueRules { requests: 3, tokens: 100, bytes: 360, ..rules() };
    let mut queue = Queue::new(rules);
    queue.join(Class::Normal, 1, 60);
    assert_eq!(queue.try_join(Class::High, 1, 41), Err(QueueBound::Tokens));
    assert_eq!(queue.try_join(Class::High, 1, 31), Err(QueueBound::Bytes));
    assert_eq!(queue.admission.bound(40, 120), None, "this is all that there is room for");
    queue.join(Class::Normal, 1, 0);
    queue.join(Class::Normal, 1, 0);
    assert_eq!(queue.try_join(Class::High, 1, 0), Err(QueueBound::Requests));
    assert_eq!((queue.admission.len(), queue.admission.tokens()), (3, 60));
    assert_eq!(queue.admission.bytes(), 240);
    assert_eq!(queue.admission.bound(u64::MAX, u64::MAX), Some(QueueBound::Requests));
    queue.dispatch().unwrap();
    assert_eq!(queue.admission.bound(u64::MAX, 0), Some(QueueBound::Tokens));
}

#[test]
fn deadlines_end_the_wait() {
    let mut queue = Queue::new(rules());
    let entry = |ticket, deadline_ms| Entry {
        ticket,
        class: Class::Normal,
        tenant: 1,
        tokens: 1,
        bytes: 1,
        since_ms: 0.0,
        deadline_ms,
    };
    for (ticket, deadline_ms) in [(1, 30.0), (2, 10.0), (3, NEVER), (4, 20.0)] {
        queue.admission.join(entry(ticket, deadline_ms), ticket).unwrap();
    }
    assert_eq!(queue.admission.next_deadline_ms(), Some(10.0));
    assert!(queue.admission.expired(9.9).is_empty());
    let gone: Vec<u64> = queue.admission.expired(20.0).into_iter().map(|(_, t)| t).collect();
    assert_eq!(gone, [2, 4]);
    assert_eq!(queue.admission.next_deadline_ms(), Some(30.0));
    queue.admission.leave(1).unwrap();
    assert_eq!(queue.admission.next_deadline_ms(), None);
    assert!(queue.admission.expired(1e9).is_empty());
    assert_eq!(queue.order(), [3]);
}

#[test]
fn one_that_left_is_gone_and_counts_for_nothing() {
    let mut queue = Queue::new(rules());
    let one = queue.join(Class::Normal, 1, 10);
    let two = queue.join(Class::Normal, 1, 10);
    assert_eq!(queue.admission.leave(one).unwrap().1, one);
    assert!(queue.admission.leave(one).is_none() && queue.admission.take(one).is_none());
    assert_eq!(queue.admission.get(two).unwrap().1, &two);
    assert_eq!(queue.order(), [two]);
    assert_eq!(queue.admission.served(1), Some(0.0));
    assert_eq!(queue.admission.tickets().collect::<Vec<_>>(), [two]);
}

#[test]
fn the_idlest_tenants_are_forgotten() {
    let mut queue = Queue::new(rules());
    for tenant in 0..10_000 {
        queue.join(Class::Normal, tenant, 1);
        queue.dispatch().unwrap();
    }
    assert!(queue.admission.tenants() <= 4_096);
    assert_eq!(queue.admission.served(0), None);
    assert_eq!(queue.admission.served(9_999), Some(1.0));
    queue.admission.charge(0, -1.0); // of one that is forgotten
    queue.admission.charge(1, 1.0);
    assert_eq!((queue.admission.served(0), queue.admission.served(1)), (None, Some(1.0)));
}

#[test]
fn priorities_are_classes() {
    let classes = [-128, -1, 0, 1, 127].map(Class::of);
    assert_eq!(classes, [Class::Low, Class::Low, Class::Normal, Class::High, Class::High]);
    assert_eq!(Class::ALL.map(Class::as_str), ["low", "normal", "high"]);
}

#[test]
fn what_did_not_have_to_wait_counts_for_what_a_token_costs() {
    let mut queue = Queue::new(rules());
    queue.join(Class::Normal, 9, 1);
    queue.dispatch();
    for _ in 0..1_000 {
        queue.admission.passed_by(1_000);
        queue.admission.charge(9, 1_000.0);
    }
    let ahead = [queue.join(Class::Normal, 1, 1), queue.join(Class::Normal, 1, 1)];
    let behind = [queue.join(Class::Normal, 2, 1), queue.join(Class::Normal, 2, 1)];
    queue.admission.charge(1, 10.0);
    // one token more does not put the second tenant before the first
    assert_eq!(queue.order(), [behind, ahead].concat());
}

#[test]
fn a_bound_is_crowded_once_only_an_eighth_of_it_is_left() {
    let roomy = QueueRules { requests: 4_000, tokens: 1 << 40, bytes: 1 << 40, ..rules() };
    let crowded = |rules: QueueRules, joins: usize, tokens: u64| {
        let mut queue = Queue::new(rules);
        for _ in 0..joins {
            queue.join(Class::Normal, 1, tokens);
        }
        queue.admission.crowded()
    };
    let requests = |most| QueueRules { requests: most, ..roomy.clone() };
    assert_eq!(crowded(requests(8), 6, 1), None);
    assert_eq!(crowded(requests(8), 7, 1), Some(QueueBound::Requests));
    let tokens = QueueRules { tokens: 800, ..roomy.clone() };
    assert_eq!(crowded(tokens.clone(), 1, 700), None);
    assert_eq!(crowded(tokens, 1, 701), Some(QueueBound::Tokens));
    let bytes = QueueRules { bytes: 3_200, ..roomy };
    assert_eq!(crowded(bytes.clone(), 1, 700), None, "four bytes a token");
    assert_eq!(crowded(bytes, 1, 701), Some(QueueBound::Bytes));
}

//! What holds whatever comes: nothing is lost or counted twice, nobody waits for ever, floors and fairness.

use std::collections::HashSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const AGEING_MS: f64 = 100.0;

#[derive(Debug, Clone)]
enum Act {
    Join {
        class: Class,
        tenant: u64,
        tokens: u64,
        wait_ms: Option<u16>,
    },
    /// The one at this place of the order, with this charge for a token.
    Take {
        place: usize,
        charge: f64,
    },
    Leave {
        of: usize,
    },
    Charge {
        tenant: u64,
        block_seconds: f64,
    },
    Pass {
        ms: u16,
    },
}

fn class() -> impl Strategy<Value = Class> {
    prop_oneof![Just(Class::Low), Just(Class::Normal), Just(Class::High)]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (class(), 0..6u64, 0..50u64, proptest::option::of(0..500u16)).prop_map(
            |(class, tenant, tokens, wait_ms)| Act::Join { class, tenant, tokens, wait_ms }),
        2 => (0..4usize, 0.0..3.0).prop_map(|(place, charge)| Act::Take { place, charge }),
        1 => (0..40usize).prop_map(|of| Act::Leave { of }),
        1 => (0..8u64, -40.0..40.0).prop_map(
            |(tenant, block_seconds)| Act::Charge { tenant, block_seconds }),
        1 => (0..200u16).prop_map(|ms| Act::Pass { ms }),
    ]
}

fn rules(floors: [f64; CLASSES]) -> QueueRules {
    QueueRules { requests: 30, tokens: 600, bytes: 900, ageing_ms: AGEING_MS, floors }
}

fn entry(ticket: u64, class: Class, tenant: u64, tokens: u64, since_ms: f64) -> Entry {
    let (bytes, deadline_ms) = (2 * tokens, f64::INFINITY);
    Entry { ticket, class, tenant, tokens, bytes, since_ms, deadline_ms }
}

/// What the counters of the queue must say, from the entries alone.
fn check(queue: &mut Admission<u64>, waiting: &[Entry], now_ms: f64) {
    assert_eq!(queue.len(), waiting.len());
    assert_eq!(queue.is_empty(), waiting.is_empty());
    assert_eq!(queue.tokens(), waiting.iter().map(|entry| entry.tokens).sum::<u64>());
    assert_eq!(queue.bytes(), waiting.iter().map(|entry| entry.bytes).sum::<u64>());
    for class in Class::ALL {
        let of_class = waiting.iter().filter(|entry| entry.class == class);
        let (requests, tokens) =
            of_class.fold((0, 0), |(n, tokens), entry| (n + 1, tokens + entry.tokens));
        assert_eq!(queue.of_class(class), ClassWaiting { requests, tokens });
    }
    let oldest = waiting.iter().map(|entry| entry.since_ms).min_by(f64::total_cmp);
    assert_eq!(queue.oldest_ms(), oldest);
    let order = queue.order(now_ms, usize::MAX);
    let listed: HashSet<u64> = order.iter().copied().collect();
    assert_eq!(order.len(), listed.len(), "one is listed twice");
    assert_eq!(listed, waiting.iter().map(|entry| entry.ticket).collect());
    for most in [0, 1, 3] {
        assert_eq!(queue.order(now_ms, most), order[..most.min(order.len())]);
    }
    assert!(queue.len() <= 30 && queue.tokens() <= 600 && queue.bytes() <= 900);
}

proptest! {
    #[test]
    fn everything_that_joined_leaves_exactly_once(acts in vec(act(), 1..120)) {
        let mut queue = Admission::new(rules([0.1, 0.2, 0.3]));
        let (mut now_ms, mut last_ticket) = (0.0, 0);
        let mut waiting: Vec<Entry> = Vec::new();
        for act in acts {
            match act {
                Act::Join { class, tenant, tokens, wait_ms } => {
                    last_ticket += 1;
                    let mut entry = entry(last_ticket, class, tenant, tokens, now_ms);
                    entry.deadline_ms = wait_ms.map_or(f64::INFINITY, |ms| now_ms + f64::from(ms));
                    let bound = queue.bound(entry.tokens, entry.bytes);
                    match queue.join(entry.clone(), last_ticket) {
                        Ok(()) => waiting.push(entry),
                        Err((full, item)) => {
                            prop_assert_eq!((Some(full), item), (bound, last_ticket));
                        }
                    }
                }
                Act::Take { place, charge } => {
                    let order = queue.order(now_ms, place + 1);
                    if let Some(&ticket) = order.last() {
                        let (entry, item) = queue.take(ticket).unwrap();
                        queue.charge(entry.tenant, charge * as_f64(entry.tokens));
                        let i = waiting.iter().position(|other| other.ticket == item).unwrap();
                        prop_assert_eq!(waiting.remove(i), entry);
                    }
                }
                Act::Leave { of } if of < waiting.len() => {
                    let left = queue.leave(waiting[of].ticket).unwrap();
                    prop_assert_eq!(left.0, waiting.remove(of));
                }
                Act::Leave { .. } => prop_assert!(queue.leave(u64::MAX).is_none()),
                Act::Charge { tenant, block_seconds } => queue.charge(tenant, block_seconds),
                Act::Pass { ms } => {
                    now_ms += f64::from(ms);
                    let gone: Vec<u64> =
                        queue.expired(now_ms).into_iter().map(|(entry, _)| entry.ticket).collect();
                    let (late, still): (Vec<Entry>, Vec<Entry>) =
                        waiting.into_iter().partition(|entry| entry.deadline_ms <= now_ms);
                    waiting = still;
                    let late: HashSet<u64> = late.iter().map(|entry| entry.ticket).collect();
                    prop_assert_eq!(gone.len(), late.len());
                    prop_assert!(gone.iter().all(|ticket| late.contains(ticket)));
                }
            }
            check(&mut queue, &waiting, now_ms);
        }
    }

    #[test]
    fn the_list_is_what_one_dispatch_after_the_other_gives(
        joins in vec((class(), 0..5u64, 1..50u64, 0..400u16), 1..30),
        before in vec((0..5u64, 0.0..100.0), 0..6),
    ) {
        let mut queue = Admission::new(QueueRules { tokens: 10_000, bytes: 20_000, ..rules([0.2; 3]) });
        for (i, (class, tenant, tokens, since_ms)) in joins.into_iter().enumerate() {
            let entry = entry(i as u64, class, tenant, tokens, f64::from(since_ms));
            queue.join(entry, i as u64).unwrap();
        }
        for (tenant, block_seconds) in before {
            queue.lanes.charge(tenant, block_seconds); // the cost of a token stays unknown, and so 1
        }
        let list = queue.order(400.0, usize::MAX);
        let mut taken = Vec::new();
        while let Some(&ticket) = queue.order(400.0, 1).first() {
            let (entry, _) = queue.take(ticket).unwrap();
            queue.charge(entry.tenant, as_f64(entry.tokens));
            taken.push(ticket);
        }
        prop_assert_eq!(list, taken);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))] // these go through hundreds of dispatches each

    #[test]
    fn whatever_keeps_arriving_everything_is_first_in_bounded_time(
        first in vec((class(), 0..4u64, 0.0..1e6), 1..20),
        later in vec(vec((class(), 0..1_000u64), 1..3), 1..40),
        floors in prop_oneof![Just([0.0; 3]), Just([0.0, 0.0, 1.0]), Just([0.05, 0.2, 0.5])],
    ) {
        let mut queue = Admission::new(QueueRules { requests: 1_000, tokens: 1 << 40, bytes: 1 << 40,
            ..rules(floors) });
        let mut last_ticket = 0;
        let mut join = |queue: &mut Admission<()>, class, tenant, now_ms| {
            last_ticket += 1;
            let _ = queue.join(entry(last_ticket, class, tenant, 10, now_ms), ());
        };
        let number = first.len() as u64;
        for (class, tenant, owes) in first {
            join(&mut queue, class, tenant, 0.0);
            queue.charge(tenant, owes); // they got much before
        }
        // from the moment on that the last of them has waited so long, each needs its turn as the oldest
        let late_ms = 3.0 * AGEING_MS;
        let mut turns_since_late = 0;
        let mut now_ms = 0.0;
        for arrivals in later.iter().cycle() {
            for &(class, tenant) in arrivals {
                join(&mut queue, class, 10 + tenant, now_ms);
            }
            let ticket = queue.order(now_ms, 1)[0];
            queue.take(ticket).unwrap(); // newcomers are charged nothing: the worst for the others
            if queue.tickets().all(|ticket| ticket > number) {
                break;
            }
            now_ms += 7.0;
            turns_since_late += u64::from(now_ms >= late_ms);
            prop_assert!(turns_since_late <= OLDEST_SHARE * (number + 1));
        }
    }

    #[test]
    fn tenants_that_wait_get_the_same_however_much_they_ask(
        sizes in vec((1..100u64, 1..100u64), 20..60),
        late in 0..20usize,
    ) {
        // without climbing: those who wait longer are not of the same class
        let roomy = QueueRules { requests: 100_000, tokens: 1 << 40, bytes: 1 << 40,
            ageing_ms: f64::INFINITY, floors: [0.0; CLASSES] };
        let mut queue = Admission::new(roomy);
        let mut last_ticket = 0;
        let mut join = |queue: &mut Admission<()>, tenant, tokens, now_ms| {
            last_ticket += 1;
            queue.join(entry(last_ticket, Class::Normal, tenant, tokens, now_ms), ()).unwrap();
        };
        let mut waiting = [0_usize; 2];
        let mut got = [0_u64; 2]; // since both wait
        for (round, (big, small)) in sizes.iter().cycle().take(200).enumerate() {
            let now_ms = as_f64(round as u64);
            for _ in 0..10 {
                join(&mut queue, 0, *big, now_ms);
            }
            waiting[0] += 10;
            if round >= late {
                join(&mut queue, 1, *small, now_ms); // the late joiner
                join(&mut queue, 1, *small, now_ms);
                waiting[1] += 2;
            }
            let ticket = queue.order(now_ms, 1)[0];
            let (entry, ()) = queue.take(ticket).unwrap();
            queue.charge(entry.tenant, as_f64(entry.tokens));
            let tenant = usize::try_from(entry.tenant).unwrap();
            waiting[tenant] -= 1;
            got[tenant] += entry.tokens;
            if waiting[1] == 0 {
                got = [0; 2];
            }
            // a request of each at the start and at the end of the stretch
            prop_assert!(got[0].abs_diff(got[1]) <= 200, "{got:?}");
        }
    }

    #[test]
    fn floors_hold_over_any_stretch_in_which_a_class_waits(
        sizes in vec((1..200u64, 1..200u64, 1..200u64), 10..40),
        floors in prop_oneof![Just([0.05, 0.2, 0.5]), Just([0.3, 0.3, 0.3]), Just([0.5, 0.5, 0.0])],
        from in 0..100usize,
    ) {
        let roomy = QueueRules { requests: 100_000, tokens: 1 << 40, bytes: 1 << 40,
            ageing_ms: f64::INFINITY, floors };
        let mut queue = Admission::new(roomy);
        let mut last_ticket = 0;
        let mut got = [0; CLASSES];
        for (round, sizes) in sizes.iter().cycle().take(200).enumerate() {
            for (class, tokens) in Class::ALL.into_iter().zip([sizes.0, sizes.1, sizes.2]) {
                if round >= from || class == Class::High {
                    last_ticket += 1;
                    queue.join(entry(last_ticket, class, 0, tokens, 0.0), ()).unwrap();
                }
            }
            let ticket = queue.order(0.0, 1)[0];
            let (entry, ()) = queue.take(ticket).unwrap();
            if round >= from {
                got[entry.class.index()] += entry.tokens;
            }
        }
        let total = as_f64(got.iter().sum());
        for class in 0..CLASSES {
            // two requests: the one that is owed, and the last one of another class
            let least = floors[class] * total - 400.0;
            prop_assert!(as_f64(got[class]) >= least, "{got:?} {floors:?}");
        }
    }
}

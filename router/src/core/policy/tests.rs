//! What holds for every policy, and what each of them promises.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::session_hash::load_bound;
use super::*;
use crate::core::frame::{Capacity, Load};
use crate::core::schedule::{Booked, NoPlace, Placement, WorkerId, hash, schedule};

fn worker(id: u32, sequences: u32, waiting: u32) -> WorkerView {
    WorkerView {
        id: WorkerId(id),
        name_hash: hash(&format!("worker-{id}")),
        open: true,
        capacity: Capacity {
            blocks: 1000,
            sequences,
            batched_tokens: 1000,
            waiting,
            host_blocks: 0,
            disk_blocks: 0,
        },
        load: Load::default(),
        booked: Booked::default(),
        unreported: 0,
    }
}

fn fleet(n: u32) -> Vec<WorkerView> {
    (0..n).map(|id| worker(id, 64, 64)).collect()
}

fn ask(session: Option<&str>) -> Ask<'_> {
    Ask { tokens: 100, session, excluded: &[] }
}

/// Books `n` requests of sessions `0..` one after the other.
fn place(workers: &mut [WorkerView], policy: &mut Policy, n: usize) -> Vec<WorkerId> {
    let mut random = Random::new(1);
    let session = |i: usize| format!("session-{i}");
    (0..n)
        .map(|i| schedule(workers, &ask(Some(&session(i))), policy, &mut random).unwrap().worker)
        .collect()
}

fn any_policy() -> impl Strategy<Value = PolicyName> {
    proptest::sample::select(PolicyName::ALL.to_vec())
}

/// Workers in any state: closed, empty, half full, full.
fn any_fleet() -> impl Strategy<Value = Vec<WorkerView>> {
    let state = (any::<bool>(), 1..9u32, 0..9u32, 0..12u32, 0..12u32, 0..4u32, 0..12u32);
    proptest::collection::vec(state, 0..12).prop_map(|states| {
        let of = |(i, (open, sequences, queue, running, waiting, unreported, booked))| {
            let load = Load { running, waiting, ..Load::default() };
            let booked = Booked { requests: booked, tokens: u64::from(booked) * 10 };
            WorkerView { open, load, booked, unreported, ..worker(i, sequences, queue) }
        };
        (0..).zip(states).map(of).collect()
    })
}

proptest! {
    #[test]
    fn only_open_workers_with_room_that_are_not_excluded_are_chosen(
        name in any_policy(),
        workers in any_fleet(),
        excluded in proptest::collection::vec(0..12u32, 0..4),
        session in proptest::option::of("[a-z]{1,8}"),
        seed in any::<u64>(),
    ) {
        let excluded: Vec<_> = excluded.into_iter().map(WorkerId).collect();
        let ask = Ask { tokens: 100, session: session.as_deref(), excluded: &excluded };
        let mut after = workers.clone();
        let chosen = schedule(&mut after, &ask, &mut Policy::new(name), &mut Random::new(seed));
        let open: Vec<_> = workers.iter().filter(|worker| worker.open).collect();
        let allowed: Vec<_> =
            open.iter().filter(|worker| !excluded.contains(&worker.id)).collect();
        match chosen {
            Ok(Placement { worker, tokens }) => {
                let i = workers.iter().position(|other| other.id == worker).unwrap();
                prop_assert!(workers[i].has_room() && !excluded.contains(&worker));
                prop_assert_eq!(tokens, 100);
                prop_assert_eq!(after[i].booked.requests, workers[i].booked.requests + 1);
                prop_assert!(after[i].occupied() > workers[i].occupied()
                    || workers[i].booked.requests < workers[i].occupied());
                after[i].release(tokens);
                prop_assert_eq!(after[i].booked, workers[i].booked);
            }
            Err(NoPlace::NoneOpen) => prop_assert!(open.is_empty()),
            Err(NoPlace::AllExcluded) => prop_assert!(allowed.is_empty() && !open.is_empty()),
            Err(NoPlace::AllFull) => {
                prop_assert!(!allowed.is_empty());
                prop_assert!(allowed.iter().all(|worker| !worker.has_room()));
            }
        }
    }

    #[test]
    fn a_burst_fills_every_worker_and_no_worker_over_its_places(
        name in any_policy(),
        sizes in proptest::collection::vec((1..5u32, 0..5u32), 1..8),
    ) {
        let mut workers: Vec<_> =
            (0..).zip(sizes).map(|(id, (sequences, queue))| worker(id, sequences, queue)).collect();
        let places: u32 = workers.iter().map(WorkerView::places).sum();
        let mut policy = Policy::new(name);
        place(&mut workers, &mut policy, places as usize);
        for worker in &workers {
            prop_assert_eq!(worker.booked.requests, worker.places());
        }
        let full = schedule(&mut workers, &ask(None), &mut policy, &mut Random::new(1));
        prop_assert_eq!(full, Err(NoPlace::AllFull));
    }

    #[test]
    fn session_hash_keeps_to_its_bound(
        n in 1..12u32,
        requests in 1..200usize,
        sessions in 1..20usize,
    ) {
        let mut workers: Vec<_> = (0..n).map(|id| worker(id, 1000, 0)).collect();
        let mut policy = Policy::new(PolicyName::SessionHash);
        for i in 0..requests {
            let session = (i % sessions).to_string();
            let bound = load_bound(&workers.iter().collect::<Vec<_>>());
            let placed =
                schedule(&mut workers, &ask(Some(&session)), &mut policy, &mut Random::new(1));
            let id = placed.unwrap().worker;
            let chosen = workers.iter().find(|worker| worker.id == id).unwrap();
            prop_assert!(u64::from(chosen.occupied()) <= bound);
        }
    }
}

#[test]
fn every_policy_spreads() {
    for name in PolicyName::ALL {
        let mut workers = fleet(8);
        place(&mut workers, &mut Policy::new(name), 400);
        let booked = workers.iter().map(|worker| worker.booked.requests);
        let (least, most) = (booked.clone().min().unwrap(), booked.max().unwrap());
        let allowed = match name {
            PolicyName::RoundRobin | PolicyName::LeastLoaded => 0,
            PolicyName::PowerOfTwo => 8,
            PolicyName::SessionHash => 35, // hashing alone; the bound cuts at 63
        };
        assert!(most - least <= allowed, "{name:?}: {least} to {most}");
    }
}

#[test]
fn round_robin_goes_on_after_a_worker_left() {
    let mut workers = fleet(4);
    let mut policy = Policy::new(PolicyName::RoundRobin);
    assert_eq!(place(&mut workers, &mut policy, 2), [WorkerId(0), WorkerId(1)]);
    workers.remove(1);
    let next = place(&mut workers, &mut policy, 3);
    assert_eq!(next, [WorkerId(2), WorkerId(3), WorkerId(0)]);
}

#[test]
fn least_loaded_takes_the_share_of_the_places_and_not_the_number() {
    let mut workers = vec![worker(0, 10, 0), worker(1, 100, 0)];
    workers[0].booked.requests = 2;
    workers[1].booked.requests = 10;
    let chosen = place(&mut workers, &mut Policy::new(PolicyName::LeastLoaded), 1);
    assert_eq!(chosen, [WorkerId(1)]);
}

#[test]
fn a_report_counts_once_what_was_sent_before_it() {
    let mut worker = worker(0, 4, 0);
    let mut workers = vec![worker.clone()];
    place(&mut workers, &mut Policy::new(PolicyName::LeastLoaded), 3);
    worker = workers.remove(0);
    assert_eq!(worker.occupied(), 3, "sent, not reported");
    worker.report(Load { running: 3, ..Load::default() });
    assert_eq!(worker.occupied(), 3, "reported");
    worker.report(Load { running: 3, waiting: 2, ..Load::default() });
    assert_eq!(worker.occupied(), 5, "another router's are counted");
    worker.report(Load::default());
    assert_eq!(worker.occupied(), 3, "a report from before they arrived");
}

#[test]
fn session_hash_is_sticky_and_a_lost_worker_moves_only_its_own() {
    let mut policy = Policy::new(PolicyName::SessionHash);
    let mut home = |workers: &[WorkerView]| -> HashMap<usize, WorkerId> {
        let mut idle = |i| place_session(workers, &mut policy, i);
        (0..1000).map(|i| (i, idle(i))).collect()
    };
    let mut workers = fleet(10);
    let before = home(&workers);
    assert_eq!(home(&workers), before);
    assert_eq!(before.values().collect::<HashSet<_>>().len(), 10);
    let lost = workers.remove(3).id;
    let after = home(&workers);
    for (session, worker) in &before {
        assert!(*worker == lost || after[session] == *worker);
    }
    let moved = before.values().filter(|worker| **worker == lost).count();
    assert!((50..200).contains(&moved), "{moved} of 1000");
}

fn place_session(workers: &[WorkerView], policy: &mut Policy, i: usize) -> WorkerId {
    let session = i.to_string();
    schedule(&mut workers.to_vec(), &ask(Some(&session)), policy, &mut Random::new(1))
        .unwrap()
        .worker
}

#[test]
fn names_are_read_and_written() {
    for name in PolicyName::ALL {
        assert_eq!(name.as_str().parse(), Ok(name));
    }
    assert_eq!("kv2".parse::<PolicyName>(), Err(()));
}

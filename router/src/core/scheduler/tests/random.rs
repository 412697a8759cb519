//! Any sequence of events, with nothing left in the end.

use super::*;

#[derive(Debug, Clone)]
enum Event {
    Place(u64, u32),
    Alone(usize),
    Transferred(u32, u32, bool),
    Begin(usize),
    End(usize),
    Store(u32, u64),
    Remove(u32, u64),
    Leave(u32),
    Resync(u32),
    Tick(f64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..6u64, 1..30u32).prop_map(|(n, blocks)| Event::Place(n, blocks)),
        3 => (0..100usize).prop_map(Event::Begin),
        1 => (0..100usize).prop_map(Event::Alone),
        1 => (0..5u32, 0..5u32, any::<bool>()).prop_map(|(to, from, well)| Event::Transferred(to, from, well)),
        3 => (0..100usize).prop_map(Event::End),
        2 => (0..4u32, 0..6u64).prop_map(|(w, n)| Event::Store(w, n)),
        2 => (0..4u32, 0..6u64).prop_map(|(w, n)| Event::Remove(w, n)),
        1 => (0..4u32).prop_map(Event::Leave),
        1 => (0..4u32).prop_map(Event::Resync),
        2 => prop_oneof![Just(0.0), 0.0..20_000.0].prop_map(Event::Tick),
    ]
}

proptest! {
    /// Whatever happens in whatever order: once all legs ended, nothing is booked anywhere, and what counts as held is what
    /// was announced.
    #[test]
    fn nothing_stays_booked(
        events in proptest::collection::vec(event(), 1..120),
        roles in proptest::collection::vec(split::role(), 4),
        policy in proptest::sample::select(PolicyName::ALL.to_vec()),
    ) {
        let mut scheduler = split::scheduler_of(policy, &roles);
        let (mut open, mut now_ms, mut next) = (Vec::new(), 0.0, 0);
        for event in events {
            now_ms += 700.0;
            match event {
                Event::Place(n, blocks) => {
                    next += 1;
                    if let Ok(placement) = scheduler.place(&want(next, &keys(n, blocks, 3)), now_ms) {
                        open.push(placement.request);
                        open.extend(placement.prefill.map(|prefill| prefill.request));
                    }
                }
                Event::Alone(i) if !open.is_empty() => scheduler.alone(open[i % open.len()], now_ms),
                Event::Transferred(to, from, true) => {
                    scheduler.transferred(WorkerId(to), &format!("w{from}"), 1 << 20, 5.0, now_ms);
                }
                Event::Transferred(to, from, false) => {
                    scheduler.transfer_failed(WorkerId(to), &format!("w{from}"), now_ms);
                }
                Event::Begin(i) if !open.is_empty() => {
                    let _ = scheduler.begun(open[i % open.len()], 0, now_ms);
                }
                Event::End(i) if !open.is_empty() => {
                    let request = open.swap_remove(i % open.len());
                    scheduler.end(request, LegOutput { tokens: 5, complete: true }, now_ms);
                    prop_assert!(scheduler.end(request, LegOutput { tokens: 5, complete: true }, now_ms).is_none(), "twice");
                }
                Event::Begin(_) | Event::End(_) | Event::Alone(_) => {}
                Event::Store(worker, n) => {
                    let _ = scheduler.stored(WorkerId(worker), Tier::Device, &keys(n, 25, 3));
                }
                Event::Remove(worker, n) => {
                    scheduler.removed(WorkerId(worker), Tier::Device, &keys(n, 25, 3)[10..]);
                }
                Event::Leave(worker) => {
                    scheduler.leave(WorkerId(worker), now_ms);
                }
                Event::Resync(worker) => {
                    scheduler.withdraw(WorkerId(worker), Withdrawal::Lost);
                    scheduler.snapshot_begins(WorkerId(worker));
                    scheduler.snapshot_complete(WorkerId(worker));
                }
                Event::Tick(ms) => {
                    now_ms += ms;
                    let overdue = |leg: &&BookedLeg| leg.booked && leg.lease_ms <= now_ms;
                    let walked = scheduler.legs.values().filter(overdue).count();
                    prop_assert_eq!(scheduler.expire_leases(now_ms), walked, "as a walk over all legs finds");
                    prop_assert_eq!(scheduler.legs.values().filter(overdue).count(), 0);
                }
            }
        }
        for request in open {
            scheduler.end(request, LegOutput::default(), now_ms);
        }
        prop_assert_eq!(scheduler.legs(), 0);
        for worker in scheduler.workers.iter() {
            prop_assert_eq!((worker.booked_requests, worker.booked_tokens), (0, 0));
            prop_assert_eq!((worker.backlog_tokens(), worker.arriving_tokens, worker.pinned), (0, 0, 0));
            prop_assert_eq!(worker.worker_load(BLOCK, now_ms).blocks_used, 0.0);
            prop_assert!(worker.answers.is_empty());
            prop_assert_eq!(scheduler.holdings.booked(&worker.places), 0);
        }
    }
}

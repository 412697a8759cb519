//! Any sequence of events: each request ends in exactly one way.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Event {
    Submit { priority: i8, tenant: u64, deadline: bool, resumes: bool },
    End(usize),
    Leave(u64),
    Step(u32),
    WorkerLeaves(u32),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => (-1..2i8, 0..3u64, any::<bool>(), proptest::bool::weighted(0.2)).prop_map(
            |(priority, tenant, deadline, resumes)| Event::Submit { priority, tenant, deadline, resumes }
        ),
        3 => (0..50usize).prop_map(Event::End),
        1 => (0..80u64).prop_map(Event::Leave),
        2 => (0..3u32).prop_map(Event::Step),
        1 => (0..3u32).prop_map(Event::WorkerLeaves),
    ]
}

proptest! {
    /// Each request is placed once, refused once, or left; nothing else happens to it.
    #[test]
    fn every_request_ends_in_exactly_one_way(
        events in proptest::collection::vec((event(), 0..3_usize), 1..150),
        gather_ms in proptest::sample::select(vec![0.0, 2.0]),
    ) {
        let workers: Vec<_> = (0..3).map(|id| (id, 2, 0)).collect();
        let mut dispatch = gathering::gathering(gather_ms, &workers, 8);
        let (mut fate, mut running, mut now_ms, mut next) = (BTreeMap::new(), Vec::new(), 0.0, 0);
        for (event, pause) in events {
            now_ms += [0.0, 1.0, 300.0][pause];
            match event {
                Event::Submit { priority, tenant, deadline, resumes } => {
                    next += 1;
                    let deadline_ms = deadline.then_some(now_ms + 900.0);
                    let want = PlacementRequest { priority, tenant, deadline_ms, resumes, ..want(next) };
                    match submit(&mut dispatch, want, now_ms) {
                        Submitted::Placed(placement, item) => {
                            prop_assert_eq!(placement.request.0, item);
                            prop_assert!(fate.insert(item, "placed").is_none());
                            running.push(item);
                        }
                        Submitted::Waits => {}
                        Submitted::Refused(_, item) => {
                            prop_assert!(fate.insert(item, "refused").is_none());
                        }
                    }
                }
                Event::End(i) if !running.is_empty() => {
                    let item = running.swap_remove(i % running.len());
                    dispatch.end(RequestId(item), LegOutput { tokens: 3, complete: true }, now_ms);
                }
                Event::End(_) => {}
                Event::Leave(ticket) => {
                    if dispatch.leave(RequestId(ticket)).is_some() {
                        prop_assert!(fate.insert(ticket, "left").is_none());
                    }
                }
                Event::Step(id) => {
                    let step = Step {
                        step: next,
                        ms: 10.0,
                        waited_us: 0,
                        prefill_tokens: 100,
                        prefill_context: 0,
                        decode_rows: 1,
                        kv_tokens: 10,
                        waiting_tokens: 0,
                        drafted: 0,
                        accepted: 0,
                        load: Load::default(),
                        outputs: Vec::new(),
                    };
                    let _ = dispatch.scheduler.step(WorkerId(id), &step, Given::default(), now_ms);
                }
                Event::WorkerLeaves(id) => drop(dispatch.worker_left(WorkerId(id), now_ms)),
            }
            for (item, placed) in dispatch_waiting(&mut dispatch, now_ms) {
                let what = if placed.is_ok() { "placed" } else { "refused" };
                prop_assert!(fate.insert(item, what).is_none(), "{item} twice");
                if placed.is_ok() {
                    running.push(item);
                }
            }
        }
        if dispatch.returning() == 0 {
            prop_assert!(dispatch.gathers_until_ms().is_none_or(|until_ms| until_ms > now_ms));
        }
        let left = dispatch.refuse_all().len();
        prop_assert_eq!(fate.len() + left, usize::try_from(next).unwrap());
        prop_assert!(dispatch.nobody_waits());
    }
}

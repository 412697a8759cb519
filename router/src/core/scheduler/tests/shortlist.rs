//! A choice among many looks at few of them, and is the same as one that looks at all.

use super::*;
use crate::core::decision::{Decision, LeftOut};
use crate::core::frame::OtherPrompt;

#[derive(Debug, Clone)]
enum Event {
    Place(Wish),
    Begin(usize, u32),
    End(usize, u32),
    Alone(usize),
    Step(u32, Told),
    Others(u32, u32),
    Pulled(u32, u32, Option<f64>),
    Store(u32, u64),
    Remove(u32, u64),
    Open(u32, bool),
    Leave(u32),
    Join(u32),
    Withdraw(u32),
    Tick(f64),
}

#[derive(Debug, Clone)]
struct Wish {
    family: u64,
    blocks: u32,
    max_tokens: u32,
    session: Option<u8>,
    in_ms: Option<f64>,
    yields: bool,
    resumes: bool,
    reuses: bool,
    excluded: Vec<u32>,
}

#[derive(Debug, Clone)]
struct Told {
    ms: f64,
    prefill_tokens: u32,
    rows: u32,
    waiting: u32,
    used: u32,
    cached: u32,
}

const MOST: u32 = 40;

fn wish() -> impl Strategy<Value = Wish> {
    let rare = |often: bool| prop::sample::select(vec![often, often, often, often, !often]);
    let blocks = prop_oneof![4 => 1..40_u32, 1 => 100..300_u32];
    let max_tokens = prop_oneof![1 => Just(0), 8 => 1..400_u32];
    let excluded = prop_oneof![4 => Just(vec![]), 1 => prop::collection::vec(0..MOST, 0..50)];
    let whose = (prop::option::of(0..3_u8), prop::option::weighted(0.3, 0.0..2_000.0));
    (0..6_u64, blocks, max_tokens, whose, (rare(false), rare(false), rare(true)), excluded)
        .prop_map(
            |(
                family,
                blocks,
                max_tokens,
                (session, in_ms),
                (yields, resumes, reuses),
                excluded,
            )| {
                Wish {
                    family,
                    blocks,
                    max_tokens,
                    session,
                    in_ms,
                    yields,
                    resumes,
                    reuses,
                    excluded,
                }
            },
        )
}

fn told() -> impl Strategy<Value = Told> {
    let ms = prop_oneof![1 => 1.0..100.0, 1 => Just(12.0)];
    let used = prop_oneof![3 => 0..300_u32, 1 => 900..1_000_u32];
    (ms, 0..2_048_u32, 0..9_u32, 0..9_u32, used, 0..900_u32).prop_map(
        |(ms, prefill_tokens, rows, waiting, used, cached)| Told {
            ms,
            prefill_tokens,
            rows,
            waiting,
            used,
            cached: cached.min(1_000 - used),
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    let worker = || 0..MOST;
    prop_oneof![
        30 => wish().prop_map(Event::Place),
        9 => (0..100_usize, 0..400_u32).prop_map(|(i, cached)| Event::Begin(i, cached)),
        7 => (0..100_usize, 0..300_u32).prop_map(|(i, tokens)| Event::End(i, tokens)),
        1 => (0..100_usize).prop_map(Event::Alone),
        20 => (worker(), told()).prop_map(|(id, told)| Event::Step(id, told)),
        3 => (worker(), 0..3_000_u32).prop_map(|(id, tokens)| Event::Others(id, tokens)),
        4 => (worker(), worker(), prop::option::of(1.0..300.0))
            .prop_map(|(to, from, ms)| Event::Pulled(to, from, ms)),
        9 => (worker(), 0..6_u64).prop_map(|(id, family)| Event::Store(id, family)),
        3 => (worker(), 0..6_u64).prop_map(|(id, family)| Event::Remove(id, family)),
        3 => (worker(), any::<bool>()).prop_map(|(id, open)| Event::Open(id, open)),
        1 => worker().prop_map(Event::Leave),
        1 => (0..4_u32).prop_map(Event::Join),
        1 => worker().prop_map(Event::Withdraw),
        6 => prop_oneof![Just(0.0), 0.0..40.0, 0.0..5_000.0].prop_map(Event::Tick),
    ]
}

/// A fleet of these roles: alike, but that each fourth has a small pool.
#[derive(Debug, Clone)]
struct Fleet {
    workers: u32,
    /// Of so many, how many do what: prefill, decode, both.
    roles: [u32; 3],
    queue_ms: f64,
    ranks: bool,
}

fn fleet() -> impl Strategy<Value = Fleet> {
    let roles = prop::sample::select(vec![[0, 0, 1], [0, 0, 1], [1, 3, 0], [2, 2, 1], [1, 1, 4]]);
    let queue_ms = prop::sample::select(vec![1e6, 300.0, 40.0]);
    let ranks = prop::sample::select(vec![false, false, false, false, false, true]);
    (17..=MOST, roles, queue_ms, ranks).prop_map(|(workers, roles, queue_ms, ranks)| Fleet {
        workers,
        roles,
        queue_ms,
        ranks,
    })
}

impl Fleet {
    fn role(&self, id: u32) -> Role {
        let [prefill, decode, both] = self.roles;
        match id % (prefill + decode + both) {
            i if i < prefill => Role::Prefill,
            i if i < prefill + decode => Role::Decode,
            _ => Role::Both,
        }
    }

    fn join(&self, scheduler: &mut Scheduler, id: u32) {
        let capacity = Capacity { blocks: if id % 4 == 3 { 120 } else { 1_000 }, ..capacity() };
        let group = (self.ranks && id.is_multiple_of(5))
            .then(|| GroupRank { group: format!("group-{}", id / 10).into(), rank: id });
        let (kv_block_bytes, index_room) =
            (if id % 7 == 6 { 0 } else { 4 << 20 }, capacity.tiers());
        let role = self.role(id);
        let joining = Joining { role, kv_block_bytes, index_room, capacity, group, ..joining(id) };
        scheduler.join(joining, ());
        scheduler.snapshot_begins(WorkerId(id));
        scheduler.snapshot_complete(WorkerId(id));
        scheduler.set_open(WorkerId(id), true);
    }

    fn scheduler(&self) -> Scheduler {
        let worker_queue_ms = self.queue_ms;
        let rules = RoutingRules {
            policy: PolicyName::Kv,
            shadow: None,
            worker_queue_ms,
            gather_ms: 0.0,
            seed: 1,
        };
        let mut scheduler = Scheduler::new(rules, BLOCK);
        (0..self.workers).for_each(|id| self.join(&mut scheduler, id));
        scheduler
    }
}

impl Wish {
    fn request(&self, request: u64, now_ms: f64) -> PlacementRequest {
        PlacementRequest {
            prompt_tokens: self.blocks * BLOCK + u32::from(request.is_multiple_of(3)),
            max_tokens: self.max_tokens,
            session: self.session.map(|session| format!("session-{session}")),
            deadline_ms: self.in_ms.map(|ms| now_ms + ms),
            yields: self.yields,
            resumes: self.resumes,
            reuses: self.reuses,
            excluded: self.excluded.iter().copied().map(WorkerId).collect(),
            ..want(request, &keys(self.family, self.blocks, 4))
        }
    }
}

/// Two schedulers to which the same happens. One looks at few workers, and only at those that changed; the other one at all.
struct Both {
    few: Scheduler,
    all: Scheduler,
}

/// What a decision keeps, and what was booked for it.
type Placed = (Option<(WorkerId, Option<PrefillLeg>, f64)>, Option<Vec<WorkerId>>, Decision);

impl Both {
    fn do_with(&mut self, mut what: impl FnMut(&mut Scheduler)) {
        what(&mut self.few);
        what(&mut self.all);
    }

    fn place(&mut self, wanted: &PlacementRequest, now_ms: f64) -> [Placed; 2] {
        let few = self.few.place(wanted, now_ms);
        let _ = self.all.workers.iter_mut().count(); // all may have changed
        let all = self.all.place(&PlacementRequest { explains: true, ..wanted.clone() }, now_ms);
        let kept = |decision: &Decision| decision.clone().shortened(LeftOut::default()).0;
        [placed(few, Decision::clone), placed(all, kept)]
    }
}

fn placed(placed: Result<Placement, NotPlaced>, kept: impl Fn(&Decision) -> Decision) -> Placed {
    match placed {
        Ok(Placement { worker, prefill, expected_block_seconds, decision, .. }) => {
            (Some((worker, prefill, expected_block_seconds)), None, kept(&decision))
        }
        Err(NotPlaced { where_it_failed, decision, .. }) => {
            (None, where_it_failed, kept(&decision))
        }
    }
}

/// The soonest first token, by estimates of all workers.
fn soonest_of_all(all: &mut Scheduler, wanted: &PlacementRequest, now_ms: f64) -> Option<f64> {
    let ask = all.ask(wanted, now_ms);
    let candidates = all.candidates_at(wanted, now_ms).candidates;
    let room = [None, Some(Exclusion::Full), Some(Exclusion::Backlog)];
    let usable = || candidates.iter().filter(|one| room.contains(&one.excluded));
    let can_pull = usable().any(|one| one.sources.is_some());
    let soonest = usable().filter(|one| can_pull || one.decodes()).map(|one| one.estimate(&ask));
    soonest.map(|estimate| estimate.ttft_ms()).min_by(f64::total_cmp)
}

/// What is easy to read where two decisions differ.
fn outlined(decision: &Decision) -> impl std::fmt::Debug + PartialEq {
    let all = decision.candidates.iter().zip(&decision.estimates);
    let kept: Vec<_> = all.map(|(c, e)| (c.id.0, c.excluded, e.total_ms())).collect();
    (decision.winner, decision.prefill, decision.pair, kept, decision.left_out)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 4_000, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn a_choice_among_few_is_the_one_among_all(
        fleet in fleet(),
        events in prop::collection::vec(event(), 1..150),
    ) {
        let mut both = Both { few: fleet.scheduler(), all: fleet.scheduler() };
        let (mut now_ms, mut next_id, mut open, mut numbers) = (1_000.0, fleet.workers, Vec::new(), 0);
        for (request, event) in (1..).zip(events) {
            now_ms += 3.0;
            match event {
                Event::Place(wish) => {
                    let wanted = wish.request(request, now_ms);
                    let soonest = both.few.soonest_ms(&wanted, now_ms);
                    prop_assert_eq!(soonest, soonest_of_all(&mut both.all, &wanted, now_ms));
                    let [few, all] = both.place(&wanted, now_ms);
                    prop_assert_eq!(outlined(&few.2), outlined(&all.2));
                    prop_assert_eq!(&few, &all);
                    if let Some((_, prefill, _)) = few.0 {
                        open.push(wanted.request);
                        open.extend(prefill.map(|leg| leg.request));
                    }
                }
                Event::Begin(i, cached) if !open.is_empty() => {
                    let request = open[i % open.len()];
                    both.do_with(|scheduler| {
                        scheduler.begun(request, cached, now_ms);
                    });
                }
                Event::End(i, tokens) if !open.is_empty() => {
                    let request = open.swap_remove(i % open.len());
                    let output = LegOutput { tokens, complete: true };
                    both.do_with(|scheduler| {
                        scheduler.end(request, output, now_ms);
                    });
                }
                Event::Alone(i) if !open.is_empty() => {
                    let request = open[i % open.len()];
                    both.do_with(|scheduler| scheduler.alone(request, now_ms));
                }
                Event::Begin(..) | Event::End(..) | Event::Alone(_) => {}
                Event::Step(id, told) => {
                    numbers += 1;
                    let load = Load {
                        running: told.rows,
                        waiting: told.waiting,
                        blocks_used: told.used,
                        blocks_cached: told.cached,
                        ..Load::default()
                    };
                    let step = Step {
                        ms: told.ms,
                        decode_rows: told.rows,
                        kv_tokens: 300 * u64::from(told.rows),
                        waiting_tokens: 100 * u64::from(told.waiting),
                        ..report(numbers, told.prefill_tokens, load)
                    };
                    let given = Given { rows: told.rows, tokens: told.rows };
                    both.do_with(|scheduler| {
                        let _ = scheduler.step(WorkerId(id), &step, given, now_ms);
                    });
                }
                Event::Others(id, left) => {
                    let prompt = OtherPrompt { behind: id % 3, tokens: 3_000, left, prompts: 1 };
                    let told = OtherPrompts { prompts: vec![prompt; id as usize % 3] };
                    both.do_with(|scheduler| scheduler.other_prompts(WorkerId(id), &told));
                }
                Event::Pulled(to, from, Some(ms)) => both.do_with(|scheduler| {
                    scheduler.transferred(WorkerId(to), &format!("w{from}"), 9 << 20, ms, now_ms);
                }),
                Event::Pulled(to, from, None) => both.do_with(|scheduler| {
                    scheduler.transfer_failed(WorkerId(to), &format!("w{from}"), now_ms);
                }),
                Event::Store(id, family) => both.do_with(|scheduler| {
                    let _ = scheduler.stored(WorkerId(id), Tier::Device, &keys(family, 30, 4));
                }),
                Event::Remove(id, family) => both.do_with(|scheduler| {
                    scheduler.removed(WorkerId(id), Tier::Device, &keys(family, 30, 4)[10..]);
                }),
                Event::Open(id, open) => both.do_with(|scheduler| {
                    scheduler.set_open(WorkerId(id), open);
                }),
                Event::Leave(id) => both.do_with(|scheduler| {
                    scheduler.leave(WorkerId(id), now_ms);
                }),
                Event::Join(n) => {
                    (next_id..next_id + n).for_each(|id| both.do_with(|scheduler| fleet.join(scheduler, id)));
                    next_id += n;
                }
                Event::Withdraw(id) => {
                    both.do_with(|scheduler| scheduler.withdraw(WorkerId(id), Withdrawal::Lost));
                }
                Event::Tick(ms) => {
                    now_ms += ms;
                    both.do_with(|scheduler| {
                        scheduler.expire_leases(now_ms);
                    });
                }
            }
        }
    }
}

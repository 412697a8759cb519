//! Block events that are missing, doubled, of another life, too many or untrue: each by its name, and for its worker only.

use std::sync::Arc;

use headrace_router::app::App;
use headrace_router::core::frame::*;
use tokio::time::Instant;

use super::caching::*;
use super::requests::{answer, next};
use crate::fake_worker::*;

/// Blocks of each worker's own prompt.
const BLOCKS: u32 = 40;
const HELD: u32 = BLOCKS * BLOCK;

/// Two workers, each with a prompt of its own in its cache: what goes wrong goes wrong on the first.
struct Two {
    app: Arc<App>,
    faulty: Caching,
    sound: Caching,
}

fn of_faulty() -> Vec<u32> {
    prompt(1, BLOCKS)
}

fn of_sound() -> Vec<u32> {
    prompt(2, BLOCKS)
}

impl Two {
    async fn new() -> Self {
        Self::with(Behaviour::new("faulty")).await
    }

    async fn with(faulty: Behaviour) -> Self {
        let app = start_router(|_| {}).await;
        let mut faulty = Caching::ready_as(&app, faulty).await;
        faulty.stores(&faulty.keys(&of_faulty(), b""));
        faulty.indexed(&app, BLOCKS as usize).await;
        let sound = Caching::holding(&app, "sound", &of_sound()).await;
        Self { app, faulty, sound }
    }

    fn keys(&self) -> Vec<u64> {
        self.faulty.keys(&of_faulty(), b"")
    }

    /// Who answers a prompt, and how many cached tokens it had promised.
    async fn serves(&mut self, prompt: &[u32]) -> (String, u32) {
        honestly(&self.app, &mut [&mut self.faulty, &mut self.sound], prompt).await
    }

    /// The word of the first counts for nothing, for this reason, that of the second counts, and all requests are served.
    async fn only_one_lost_credit(&mut self, why: &str) {
        assert_eq!(
            (self.faulty.withdrawn(&self.app), state_of(&self.app, "faulty")),
            (why.into(), "ready".into())
        );
        assert_eq!(of_worker(&self.app, "faulty")["blocks_indexed"], 0);
        assert_eq!(self.sound.withdrawn(&self.app), "");
        assert_eq!(self.serves(&of_sound()).await, ("sound".into(), HELD));
        assert_eq!(self.serves(&of_faulty()).await.1, 0, "served without credit");
        assert_eq!(metric(&self.app, "headrace_link_errors_total", ""), 0.0);
        assert_eq!(metric(&self.app, "headrace_retries_total", ""), 0.0);
    }

    /// Both words count, and each gets the requests for what it holds.
    async fn both_have_credit(&mut self) {
        self.faulty.credited(&self.app).await;
        assert_eq!(self.serves(&of_sound()).await, ("sound".into(), HELD));
        assert_eq!(self.serves(&of_faulty()).await, ("faulty".into(), HELD));
    }

    fn ignored(&self, reason: &str) -> f64 {
        let reason = format!("reason=\"{reason}\"");
        metric(&self.app, "headrace_block_events_ignored_total", &reason)
    }

    fn lost(&self, reason: &str) -> f64 {
        let reason = format!("reason=\"{reason}\"");
        metric(&self.app, "headrace_blocks_lost_total", &reason)
    }

    /// Everything that the worker sent so far was taken in.
    async fn taken_in(&self) {
        let used = of_worker(&self.app, "faulty")["blocks_used"].as_u64().unwrap() + 1;
        let load = Load { blocks_used: used.try_into().unwrap(), ..Load::default() };
        self.faulty.send(Frame::Step(Step { load, ..step(vec![]) }));
        until("a step", || of_worker(&self.app, "faulty")["blocks_used"] == used).await;
    }
}

#[tokio::test]
async fn a_gap_costs_the_credit_of_its_worker_until_the_snapshot_comes_again() {
    let mut two = Two::new().await;
    let keys = two.keys();
    let mut answer = answer(&two.app, ask(&of_faulty())).await.unwrap();
    let request = two.faulty.submitted().await.request;
    two.faulty.sequence += 1; // lost
    two.faulty.stores(&keys[..1]);
    assert_eq!(two.faulty.resync().await, "block events 3 after 1");
    two.only_one_lost_credit("events_lost").await;
    assert_eq!((two.lost("sequence"), metric(&two.app, "headrace_resyncs_total", "")), (1.0, 1.0));
    two.faulty.stores(&keys[..1]); // sent before it heard
    until("it is counted", || two.ignored("resyncing") == 1.0).await;
    two.faulty.sends_snapshot(&keys);
    two.both_have_credit().await;
    two.faulty.stores(&two.faulty.keys(&prompt(3, 2), b""));
    two.faulty.indexed(&two.app, BLOCKS as usize + 2).await;
    two.faulty.begins(request, 0, Some(Finish::Length));
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "a", "it noticed nothing");
    all_is_given_back(&two.app).await;
}

#[tokio::test]
async fn a_delta_inside_a_snapshot_is_a_gap() {
    let mut two = Two::new().await;
    two.faulty.sequence += 1;
    let part = Snapshot { last: false, ..two.faulty.snapshot(&two.keys()[..3]) };
    two.faulty.send(Frame::Snapshot(part));
    until("the part", || two.faulty.withdrawn(&two.app) == "no_snapshot").await;
    two.faulty.stores(&two.keys()[3..]);
    assert_eq!(two.faulty.resync().await, "block events 3 inside snapshot 2");
    two.only_one_lost_credit("events_lost").await;
    assert_eq!(two.lost("part"), 1.0);
    two.faulty.sends_snapshot(&two.keys());
    two.both_have_credit().await;
}

#[tokio::test]
async fn events_that_are_old_or_of_another_life_or_tier_are_counted_and_change_nothing() {
    type Change = fn(&Two, &mut Blocks);
    let cases: [(&str, Change); 5] = [
        ("replayed", |_, delta| delta.sequence = 1),
        ("epoch", |two, delta| (delta.epoch, delta.sequence) = (two.faulty.epoch - 1, 1)),
        ("epoch", |two, delta| (delta.epoch, delta.sequence) = (two.faulty.epoch + 1, 9)),
        ("tier", |_, delta| delta.tier = 1),
        ("tier", |_, delta| delta.tier = 77),
    ];
    let mut two = Two::new().await;
    for (reason, change) in cases {
        let before = two.ignored(reason);
        let removed = pack(&two.keys());
        let mut delta = Blocks { removed, cleared: true, ..two.faulty.delta() };
        let numbered = delta.sequence;
        change(&two, &mut delta);
        if delta.sequence != numbered {
            two.faulty.sequence -= 1; // its number is still to come
        }
        two.faulty.send(Frame::Blocks(delta));
        until(reason, || two.ignored(reason) == before + 1.0).await;
        two.both_have_credit().await;
    }
    for (epoch, sequence, reason) in
        [(two.faulty.epoch + 1, 90, "epoch"), (two.faulty.epoch, 0, "replayed")]
    {
        let before = two.ignored(reason);
        let snapshot = Snapshot { epoch, sequence, ..two.faulty.snapshot(&[]) };
        two.faulty.send(Frame::Snapshot(snapshot));
        until(reason, || two.ignored(reason) == before + 1.0).await;
        two.both_have_credit().await;
    }
    two.faulty.stores(&two.faulty.keys(&prompt(3, 2), b""));
    two.faulty.indexed(&two.app, BLOCKS as usize + 2).await; // no gap was made
    assert_eq!(metric(&two.app, "headrace_resyncs_total", ""), 0.0);
}

#[tokio::test]
async fn before_its_snapshot_a_worker_gets_neither_work_nor_credit() {
    let app = start_router(|_| {}).await;
    let mut sound = Caching::holding(&app, "sound", &of_sound()).await;
    let behaviour = Behaviour { snapshots: false, ..Behaviour::new("early") };
    let epoch = behaviour.hello.epoch;
    let link = behaviour.join(&app).await.unwrap();
    until("it is there", || state_of(&app, "early") == "joining").await;
    let keys = sound.keys(&of_faulty(), b"");
    let delta = |sequence| {
        let (stored, removed) = (run(&keys), Vec::new());
        Frame::Blocks(Blocks { epoch, sequence, stored, removed, cleared: false, tier: 0 })
    };
    let ignored = |reason| metric(&app, "headrace_block_events_ignored_total", reason);
    link.send(delta(1));
    until("it is counted", || ignored("early") == 1.0).await;
    let snapshot = |epoch, keys: &[u64], last| {
        Frame::Snapshot(Snapshot { epoch, sequence: 1, hashes: pack(keys), last })
    };
    link.send(snapshot(epoch + 7, &keys, true));
    until("it is counted", || ignored("epoch") == 1.0).await;
    link.send(snapshot(epoch, &keys[..30], false));
    until("a part", || of_worker(&app, "early")["blocks_indexed"] == 30).await;
    assert_eq!(state_of(&app, "early"), "joining");
    assert_eq!(honestly(&app, &mut [&mut sound], &of_faulty()).await, ("sound".into(), 0));
    link.send(snapshot(epoch, &keys[30..], true));
    until("it is ready", || state_of(&app, "early") == "ready").await;
    let job = ask(&of_faulty());
    let _answer = answer(&app, job.clone()).await.unwrap();
    let chosen = chosen(&job.request_trace);
    assert_eq!((&*chosen.name, chosen.held_tokens), ("early", HELD));
}

#[tokio::test]
async fn blocks_stored_twice_count_once() {
    let mut two = Two::new().await;
    let keys = two.keys();
    two.faulty.stores(&keys);
    two.faulty.stores(&[&keys[..], &keys[..]].concat());
    two.faulty.removes(&keys[30..]);
    two.faulty.indexed(&two.app, 30).await;
    two.faulty.stores(&keys[30..]);
    two.both_have_credit().await;
    assert_eq!(of_worker(&two.app, "faulty")["blocks_indexed"], BLOCKS);
    assert_eq!(metric(&two.app, "headrace_index_blocks", ""), 2.0 * f64::from(BLOCKS));
}

#[tokio::test]
async fn blocks_removed_that_were_never_there_are_counted_and_change_nothing() {
    let mut two = Two::new().await;
    let unknown = two.faulty.keys(&prompt(9, 7), b"");
    let of_the_other = two.sound.keys(&of_sound(), b"");
    two.faulty.removes(&[unknown, of_the_other].concat());
    let counted = || metric(&two.app, "headrace_blocks_removed_unknown_total", "");
    until("they are counted", || counted() == 7.0 + f64::from(BLOCKS)).await;
    two.both_have_credit().await;
}

#[tokio::test]
async fn a_worker_that_claims_more_blocks_than_its_capacity_is_not_believed() {
    let mut behaviour = Behaviour::new("faulty");
    behaviour.hello.capacity.blocks = BLOCKS + 10;
    let mut two = Two::with(behaviour).await;
    let too_many = two.faulty.keys(&prompt(5, BLOCKS + 11), b"");
    // in deltas
    two.faulty.stores(&too_many[..10]);
    two.faulty.indexed(&two.app, BLOCKS as usize + 10).await;
    let runs = [&too_many[10..], &too_many[..5]].map(|keys| run(keys).remove(0));
    let delta = Blocks { stored: runs.to_vec(), ..two.faulty.delta() };
    two.faulty.send(Frame::Blocks(delta));
    assert_eq!(two.faulty.resync().await, "more blocks than the announced capacity");
    two.only_one_lost_credit("over_capacity").await;
    assert_eq!(two.lost("over_capacity"), 1.0);
    two.faulty.sends_snapshot(&two.keys());
    two.both_have_credit().await;
    // in a snapshot
    two.faulty.sequence += 1;
    two.faulty.sends_snapshot(&too_many);
    until("it is found out", || two.lost("over_capacity") == 2.0).await;
    two.only_one_lost_credit("over_capacity").await;
    assert!(metric(&two.app, "headrace_index_blocks", "") <= f64::from(3 * BLOCKS + 10), "bounded");
}

#[tokio::test]
async fn a_worker_that_lies_loses_its_credit_until_its_snapshot_and_later_each_time_for_longer() {
    let mut two = Two::new().await;
    tokio::time::pause();
    let keys = two.keys();
    let mut asked = Vec::new();
    for round in 1..4 {
        let mut lies = 0;
        while two.faulty.withdrawn(&two.app).is_empty() {
            let fleet = &mut [&mut two.faulty, &mut two.sound];
            let (who, _) = served(&two.app, fleet, ask(&of_faulty()), |_| 0).await;
            assert_eq!(who, "faulty");
            lies += 1;
        }
        assert!((2..10).contains(&lies), "{lies}: one miss is no proof");
        assert_eq!(two.lost("overclaimed"), f64::from(round));
        if round == 1 {
            two.only_one_lost_credit("overclaimed").await;
        }
        assert_eq!(two.faulty.resync().await, "cached tokens are not what the events promise");
        asked.push(Instant::now());
        two.faulty.sends_snapshot(&keys);
        two.faulty.credited(&two.app).await;
    }
    let pauses = [asked[1] - asked[0], asked[2] - asked[1]].map(|pause| pause.as_secs_f64());
    assert!(pauses[0] >= 1.0 && pauses[1] >= 2.0, "{pauses:?}");
    let tokens = |name| metric(&two.app, name, "");
    let missing = tokens("headrace_missing_tokens_total");
    assert!(missing >= 3.0 * f64::from(HELD) && missing < tokens("headrace_promised_tokens_total"));
    two.both_have_credit().await;
}

#[tokio::test]
async fn what_was_promised_before_a_snapshot_is_not_held_against_a_worker_after_it() {
    let mut two = Two::new().await;
    let mut answers = Vec::new();
    let mut requests = Vec::new();
    for _ in 0..8 {
        answers.push(answer(&two.app, ask(&of_faulty())).await.unwrap());
        requests.push(two.faulty.submitted().await.request);
    }
    two.faulty.sequence += 1;
    two.faulty.sends_snapshot(&[]); // it lost its cache, and says so
    two.faulty.indexed(&two.app, 0).await;
    for request in requests {
        two.faulty.begins(request, 0, Some(Finish::Length));
    }
    for answer in &mut answers {
        assert_eq!(next(answer).await.unwrap().unwrap().text, "a");
    }
    assert_eq!(two.faulty.withdrawn(&two.app), "");
    assert_eq!(metric(&two.app, "headrace_missing_tokens_total", ""), 0.0);
}

#[tokio::test]
async fn a_worker_that_does_not_say_what_its_cache_gave_gave_nothing() {
    let mut two = Two::new().await;
    while two.faulty.withdrawn(&two.app).is_empty() {
        let mut answer = answer(&two.app, ask(&of_faulty())).await.unwrap();
        let request = two.faulty.submitted().await.request;
        two.faulty.gives(request, &letters("a"), None);
        next(&mut answer).await.unwrap().unwrap();
        assert_eq!(of_worker(&two.app, "faulty")["backlog_tokens"], 0, "the prompt is done");
        two.faulty.gives(request, &letters("b"), Some(Finish::Length));
        next(&mut answer).await.unwrap().unwrap();
    }
    two.faulty.resync().await;
    two.only_one_lost_credit("overclaimed").await;
}

#[tokio::test]
async fn a_worker_that_computes_prompts_and_says_nothing_of_their_blocks_is_not_believed() {
    let mut two = Two::new().await;
    let mut n = 10;
    while two.faulty.withdrawn(&two.app).is_empty() {
        n += 1;
        assert!(n < 60, "it is found out");
        // the head is cached, the rest is new each time
        let long = [of_faulty()[..HELD as usize].to_vec(), prompt(n, 10)].concat();
        let (who, held) = two.serves(&long).await;
        assert_eq!((who.as_str(), held), ("faulty", HELD));
    }
    assert_eq!(two.faulty.resync().await, "prompts were computed and no blocks announced");
    two.only_one_lost_credit("events_silent").await;
    assert_eq!(two.lost("events_silent"), 1.0);
    two.faulty.sends_snapshot(&two.keys());
    two.both_have_credit().await;
}

#[tokio::test]
async fn a_worker_that_has_nothing_new_to_say_is_not_taken_for_silent() {
    let mut two = Two::new().await;
    for n in 0..100 {
        let mut answer = answer(&two.app, ask(&of_faulty())).await.unwrap();
        let request = two.faulty.submitted().await.request;
        // only the tokens after the last full block are computed: none of them makes a block
        let cached_tokens = Some(HELD);
        let outputs =
            vec![Output { cached_tokens, ..output(request, letters("a"), Some(Finish::Length)) }];
        let computed = Step { step: n + 2, prefill_tokens: 3 + 15, ..step(outputs) };
        two.faulty.send(Frame::Step(computed));
        next(&mut answer).await.unwrap().unwrap();
    }
    two.both_have_credit().await;
    assert_eq!(metric(&two.app, "headrace_blocks_lost_total", ""), 0.0);
}

#[tokio::test]
async fn a_newer_life_of_a_worker_inherits_nothing_of_the_older_one() {
    let Two { app, faulty, sound } = Two::new().await;
    let older = faulty.keys(&of_faulty(), b"");
    drop(faulty);
    until("it is gone", || state_of(&app, "faulty").is_empty()).await;
    let faulty = Caching::ready(&app, "faulty").await;
    let mut two = Two { app, faulty, sound };
    assert_eq!(of_worker(&two.app, "faulty")["blocks_indexed"], 0);
    assert_eq!(two.serves(&of_faulty()).await.1, 0);
    two.faulty.stores(&older);
    two.faulty.indexed(&two.app, BLOCKS as usize).await;
    two.both_have_credit().await;
}

#[tokio::test]
async fn lower_tiers_are_counted_apart() {
    let mut behaviour = Behaviour::new("faulty");
    behaviour.hello.capacity.host_blocks = 100;
    let mut two = Two::with(behaviour).await;
    let keys = two.keys();
    let below = Blocks { tier: 1, stored: run(&keys), ..two.faulty.delta() };
    two.faulty.send(Frame::Blocks(below));
    let cleared = Blocks { tier: 1, cleared: true, ..two.faulty.delta() };
    two.faulty.send(Frame::Blocks(cleared));
    two.taken_in().await;
    assert_eq!(
        of_worker(&two.app, "faulty")["blocks_announced"],
        BLOCKS,
        "the device keeps its own"
    );
    two.both_have_credit().await;
    let cleared = Blocks { cleared: true, ..two.faulty.delta() };
    two.faulty.send(Frame::Blocks(cleared));
    two.faulty.indexed(&two.app, 0).await;
    assert_eq!(two.serves(&of_faulty()).await.1, 0);
}

#[tokio::test]
async fn a_flood_of_cleared_caches_leaves_the_others_their_credit() {
    let mut two = Two::new().await;
    let keys = two.keys();
    for _ in 0..2_000 {
        let delta = Blocks { cleared: true, stored: run(&keys), ..two.faulty.delta() };
        two.faulty.send(Frame::Blocks(delta));
    }
    two.taken_in().await;
    two.sound.sequence += 1;
    two.sound.sends_snapshot(&two.sound.keys(&of_sound(), b""));
    two.both_have_credit().await;
    assert!(metric(&two.app, "headrace_index_bytes", "") < 4e6);
}

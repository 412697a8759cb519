use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;

pub(crate) const BLOCK_TOKENS: u32 = 4;

pub(crate) fn config(blocks: u32) -> EngineConfig {
    EngineConfig {
        cost: StepCost {
            fixed_ms: 1.0,
            prefill_ms: 0.01,
            context_ms: 1e-5,
            row_ms: 0.02,
            kv_ms: 1e-4,
        },
        capacity: Capacity {
            blocks,
            sequences: 4,
            batched_tokens: 24,
            waiting: 6,
            host_blocks: 0,
            disk_blocks: 0,
        },
        block_tokens: BLOCK_TOKENS,
        token_scale: 1,
        noise: 0.0,
        accepted: 1.0,
        seed: 1,
        vocab: 4096,
        epoch: 9,
    }
}

/// A prompt of `tokens` tokens; prompts share the keys of their first `common` blocks.
pub(crate) fn leg(request: u64, tokens: u32, common: u64, max_tokens: u32) -> Leg {
    let keys = (0..u64::from(tokens / BLOCK_TOKENS)).scan(0, |last, place| {
        *last = mix(*last ^ if place < common { place } else { place ^ (request << 32) });
        Some(*last)
    });
    Leg {
        request: RequestId(request),
        keys: keys.collect(),
        prompt_tokens: tokens,
        max_tokens,
        ends_after: None,
        seed: request,
        resumed: 0,
        kv_transfer: None,
        arrives: None,
        scores: Scores::default(),
        pooled: None,
        scripted: None,
    }
}

fn keys(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|key| u64::from_le_bytes(key.try_into().unwrap()))
}

/// What a router knows from the events.
#[derive(Default)]
struct View {
    sequence: u64,
    held: HashSet<u64>,
}

impl View {
    fn apply(&mut self, blocks: &Blocks) {
        assert_eq!((blocks.epoch, blocks.sequence), (9, self.sequence + 1));
        self.sequence += 1;
        for key in keys(&blocks.removed) {
            assert!(self.held.remove(&key), "a removed block was held");
        }
        for run in &blocks.stored {
            assert!(run.parent.is_none_or(|parent| self.held.contains(&parent)), "parents first");
            for key in keys(&run.hashes) {
                assert!(self.held.insert(key), "a stored block is new");
            }
        }
    }
}

/// An engine and what must come out of it.
struct Watched {
    engine: Engine,
    view: View,
    /// Tokens that are still to come of each request.
    open: BTreeMap<u64, u32>,
    prompts: BTreeMap<u64, Leg>,
    /// Those that ran before: one that gave way says again what it found at first.
    ran: HashSet<RequestId>,
    roomy: bool,
}

impl Watched {
    fn new(config: EngineConfig, roomy: bool) -> Self {
        let engine = Engine::new(config);
        let (open, prompts) = (BTreeMap::new(), BTreeMap::new());
        let ran = HashSet::new();
        Self { engine, view: View::default(), open, prompts, ran, roomy }
    }

    fn submit(&mut self, leg: Leg) {
        let number = leg.request.0;
        let room = self.engine.context_tokens();
        let answer = leg.max_tokens.min(room.saturating_sub(leg.prompt_tokens));
        match self.engine.submit(leg.clone()) {
            Ok(()) => {
                self.open.insert(number, answer);
                self.prompts.insert(number, leg);
            }
            Err(failed) => {
                let full = failed.kind == FailureKind::QueueFull;
                let too_big = failed.kind == FailureKind::TooBigForPool;
                assert!(full || (too_big && leg.prompt_tokens >= room));
            }
        }
        self.check();
    }

    fn cancel(&mut self, number: u64) {
        let freed = self.engine.cancel(RequestId(number));
        assert_eq!(freed.is_some(), self.open.remove(&number).is_some());
        self.check();
    }

    fn begin(&mut self) -> bool {
        let before: HashSet<_> = self.engine.running.iter().map(|s| s.leg.request).collect();
        let Some(ms) = self.engine.begin_step() else {
            assert!(self.open.is_empty(), "there is work as long as something is open");
            return false;
        };
        assert!(ms > 0.0);
        assert!(self.engine.running.len() <= 4);
        for sequence in self.engine.running.iter().filter(|s| !before.contains(&s.leg.request)) {
            if !self.ran.insert(sequence.leg.request) {
                continue;
            }
            let creditable = (sequence.leg.prompt_tokens - 1) / BLOCK_TOKENS;
            let held = sequence.leg.keys.iter().take_while(|key| self.view.held.contains(key));
            let most = BLOCK_TOKENS * creditable.min(held.count() as u32);
            // an eviction for the one before may have taken what the last event still had
            let cached_tokens = sequence.cached_tokens.expect("it was admitted");
            assert!(cached_tokens <= most);
            assert!(!self.roomy || cached_tokens == most, "all that is cached is used");
        }
        self.check();
        true
    }

    fn end(&mut self) {
        let result = self.engine.end_step(1.0);
        if let Some(blocks) = &result.blocks {
            self.view.apply(blocks);
        }
        let step = &result.step;
        assert!(step.prefill_tokens + step.decode_rows <= 24, "the budget");
        for output in &step.outputs {
            let left = self.open.get_mut(&output.request.0);
            let Some(left) = left else { panic!("tokens of a request that ended") };
            *left -= u32::try_from(output.ids.len()).unwrap();
            let leg = &self.prompts[&output.request.0];
            for (nth, id) in output.ids.iter().enumerate() {
                let position = leg.max_tokens.min(self.engine.context_tokens() - leg.prompt_tokens)
                    - *left
                    - u32::try_from(output.ids.len() - nth).unwrap();
                assert_eq!(*id, token(leg.seed, position, 4096), "decided by seed and position");
            }
            assert_eq!(output.finish.is_some(), *left == 0);
            if *left == 0 {
                assert!(result.freed.iter().any(|freed| freed.request == output.request));
                self.open.remove(&output.request.0);
            }
        }
        let held: HashSet<_> = self.engine.pool.keys().into_iter().collect();
        assert_eq!(self.view.held, held, "the events say exactly what is cached");
        self.check();
    }

    fn check(&self) {
        self.engine.check();
        assert_eq!(self.engine.known.len(), self.open.len());
    }

    fn finish(mut self) {
        while self.begin() {
            self.end();
        }
        assert!(self.open.is_empty());
    }
}

#[derive(Debug, Clone)]
enum Act {
    Submit { tokens: u32, common: u64, max_tokens: u32 },
    Cancel(u64),
    CancelInStep(u64),
    Step,
}

fn acts(most: usize) -> impl Strategy<Value = Vec<Act>> {
    let submit = (1_u32..70, 0_u64..12, 1_u32..20)
        .prop_map(|(tokens, common, max_tokens)| Act::Submit { tokens, common, max_tokens });
    let act = prop_oneof![
        3 => submit,
        1 => (0_u64..40).prop_map(Act::Cancel),
        1 => (0_u64..40).prop_map(Act::CancelInStep),
        4 => Just(Act::Step),
    ];
    proptest::collection::vec(act, 1..most)
}

fn play(mut watched: Watched, acts: Vec<Act>) {
    let mut next = 0;
    for act in acts {
        match act {
            Act::Submit { tokens, common, max_tokens } => {
                watched.submit(leg(next, tokens, common, max_tokens));
                next += 1;
            }
            Act::Cancel(number) => watched.cancel(number),
            Act::CancelInStep(number) => {
                if watched.begin() {
                    watched.cancel(number);
                    watched.end();
                }
            }
            Act::Step => {
                if watched.begin() {
                    watched.end();
                }
            }
        }
    }
    watched.finish();
}

proptest! {
    #[test]
    fn a_small_pool_keeps_its_promises(acts in acts(80), blocks in 1_u32..40, accepted in 0.2_f64..4.0) {
        play(Watched::new(EngineConfig { accepted, ..config(blocks) }, false), acts);
    }

    #[test]
    fn a_roomy_pool_uses_all_that_it_cached(acts in acts(30)) {
        play(Watched::new(config(30 * 90 / BLOCK_TOKENS), true), acts);
    }
}

fn run_alone(engine: &mut Engine, leg: Leg) -> (Vec<Step>, f64) {
    engine.submit(leg).unwrap();
    let (mut steps, mut total_ms) = (Vec::new(), 0.0);
    while let Some(ms) = engine.begin_step() {
        total_ms += ms;
        steps.push(engine.end_step(ms).step);
    }
    (steps, total_ms)
}

#[test]
fn the_same_prompt_again_computes_the_rest_and_its_last_block() {
    let mut engine = Engine::new(config(64));
    let (steps, _) = run_alone(&mut engine, leg(0, 16, 9, 2));
    assert_eq!(steps[0].outputs[0].cached_tokens, Some(0));
    let (steps, _) = run_alone(&mut engine, leg(1, 16, 9, 2));
    assert_eq!(steps[0].outputs[0].cached_tokens, Some(12));
    assert_eq!((steps[0].prefill_tokens, steps[0].prefill_context), (4, 12 + 13 + 14 + 15));
    assert_eq!(steps[1].outputs[0].cached_tokens, None);
    assert_eq!((steps[1].decode_rows, steps[1].kv_tokens), (1, 17));
}

#[test]
fn a_burst_with_one_prefix_computes_it_once() {
    let mut engine = Engine::new(config(64));
    for request in 0..4 {
        engine.submit(leg(request, 14, 3, 1)).unwrap();
    }
    let mut cached = Vec::new();
    while let Some(ms) = engine.begin_step() {
        let step = engine.end_step(ms).step;
        cached.extend(step.outputs.iter().filter_map(|output| output.cached_tokens));
    }
    assert_eq!(cached, [0, 12, 12, 12]);
}

#[test]
fn a_long_prompt_takes_several_steps_and_leaves_room_for_others() {
    let mut engine = Engine::new(config(64));
    engine.submit(leg(0, 100, 0, 1)).unwrap();
    engine.submit(leg(1, 8, 0, 1)).unwrap();
    engine.begin_step().unwrap();
    let step = engine.end_step(1.0).step;
    assert_eq!(step.prefill_tokens, 24, "the whole budget");
    assert_eq!(step.outputs.len(), 1, "the short one is done");
    assert_eq!(step.outputs[0].request, RequestId(1));
    assert_eq!(step.waiting_tokens, 100 - 16, "the rest of the prompt in flight");
}

#[test]
fn scaled_tokens_cost_what_they_stand_for() {
    let scaled = |token_scale, tokens| {
        let config = EngineConfig { token_scale, ..config(4096) };
        let capacity = Capacity { batched_tokens: 512, ..config.capacity };
        let mut engine = Engine::new(EngineConfig { capacity, ..config });
        let (steps, ms) = run_alone(&mut engine, leg(0, tokens, 0, 3));
        (steps.len(), ms, engine.capacity().batched_tokens)
    };
    let (steps, ms, batched) = scaled(1, 4096);
    let (scaled_steps, scaled_ms, scaled_batched) = scaled(32, 128);
    assert_eq!((steps, batched), (8 + 2, 512));
    assert_eq!((scaled_steps, scaled_batched), (8 + 2, 16));
    assert!((scaled_ms / ms - 1.0).abs() < 0.02, "{scaled_ms} and {ms} ms");
}

#[test]
fn drafts_shorten_answers_and_are_counted() {
    let mut engine = Engine::new(EngineConfig { accepted: 2.5, ..config(64) });
    let (steps, _) = run_alone(&mut engine, leg(0, 5, 0, 51));
    let decodes: u32 = steps.iter().map(|step| step.decode_rows).sum();
    assert_eq!(decodes, 20);
    assert_eq!(steps.iter().map(|step| step.accepted).sum::<u32>(), 30);
    assert_eq!(steps.iter().map(|step| step.drafted).sum::<u32>(), 40);
}

#[test]
fn a_wire_token_that_stands_for_several_takes_several_steps() {
    let mut engine = Engine::new(EngineConfig { accepted: 0.25, ..config(64) });
    let (steps, _) = run_alone(&mut engine, leg(0, 5, 0, 11));
    let decodes: u32 = steps.iter().map(|step| step.decode_rows).sum();
    assert!((37..=40).contains(&decodes), "{decodes}");
}

#[test]
fn noise_is_small_and_the_same_again() {
    let times = || {
        let mut engine = Engine::new(EngineConfig { noise: 0.03, ..config(64) });
        run_alone(&mut engine, leg(0, 5, 0, 50)).1
    };
    let quiet = run_alone(&mut Engine::new(config(64)), leg(0, 5, 0, 50)).1;
    assert_eq!(times(), times());
    assert!(times() != quiet && (times() / quiet - 1.0).abs() < 0.03);
}

#[test]
fn a_snapshot_holds_all_with_parents_first() {
    let mut engine = Engine::new(config(64));
    run_alone(&mut engine, leg(0, 20, 0, 6));
    let (sequence, keys) = engine.snapshot();
    assert_eq!(sequence, engine.sequence);
    let prompt = leg(0, 20, 0, 6).keys;
    assert_eq!(keys[..5], *prompt);
    assert_eq!(keys.len(), 6, "a full block of the answer is there too");
    engine.clear_cache();
    assert!(engine.snapshot().1.is_empty());
}

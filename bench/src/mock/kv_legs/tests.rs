//! Prefill and decode engines with the exchange between them and a router in miniature, in virtual time.

use std::collections::BTreeMap;

use headrace_router::core::frame::FailureKind;
use proptest::prelude::*;

use super::*;
use crate::mock::engine::tests::{BLOCK_TOKENS, config, leg};
use crate::mock::engine::{Leg, token};
use crate::mock::exchange::{Ills, Terms};

const PREFILL: usize = 2;
const WORKERS: usize = 4;
/// Names of prefill legs.
const OF_PREFILL: u64 = 1 << 32;

#[derive(Debug)]
struct Request {
    leg: Leg,
    prefill: usize,
    decode: usize,
    got: Vec<u32>,
    /// Its legs that have not ended.
    open: [bool; 2],
    /// Nobody wants it any more, or its decode worker died.
    is_given_up: bool,
}

struct World {
    engines: Vec<Engine>,
    ends_ms: Vec<Option<f64>>,
    frozen: Vec<bool>,
    exchange: Exchange,
    now_ms: f64,
    requests: BTreeMap<u64, Request>,
    lease_ms: u32,
    patience_ms: u32,
    /// One of so many transfers is lost; 0 for none.
    lost: u64,
    pulled: Vec<Pulled>,
}

#[derive(Debug, Clone)]
struct Setting {
    blocks: [u32; 2],
    bytes_per_ms: f64,
    lease_ms: u32,
    patience_ms: u32,
    lost: u64,
}

impl World {
    fn new(setting: &Setting) -> Self {
        let terms = Terms {
            bytes_per_ms: setting.bytes_per_ms,
            latency_ms: 0.25,
            block_bytes: 1_000,
            block_tokens: BLOCK_TOKENS,
        };
        let blocks = |worker| setting.blocks[usize::from(worker >= PREFILL)];
        Self {
            engines: (0..WORKERS).map(|worker| Engine::new(config(blocks(worker)))).collect(),
            ends_ms: vec![None; WORKERS],
            frozen: vec![false; WORKERS],
            exchange: Exchange::new(terms, WORKERS, 7),
            now_ms: 0.0,
            requests: BTreeMap::new(),
            lease_ms: setting.lease_ms,
            patience_ms: setting.patience_ms,
            lost: setting.lost,
            pulled: Vec::new(),
        }
    }

    fn kv_legs(&mut self, worker: usize) -> KvLegs<'_> {
        let engine = &mut self.engines[worker];
        KvLegs { engine, exchange: &mut self.exchange, worker, now_ms: self.now_ms }
    }

    fn submit(&mut self, number: u64, leg: Leg, prefill: usize, decode: usize) {
        let p = Leg {
            request: RequestId(number | OF_PREFILL),
            kv_transfer: Some(self.lease_ms),
            ..leg.clone()
        };
        let d = Leg { arrives: Some(self.patience_ms), ..leg.clone() };
        if self.engines[decode].submit(d).is_err() {
            return;
        }
        let taken = self.engines[prefill].submit(p).is_ok();
        let open = [taken, true];
        let got = Vec::new();
        let request = Request { leg, prefill, decode, got, open, is_given_up: false };
        self.requests.insert(number, request);
        if !taken {
            self.go_on(number, 0);
        }
        self.begin(prefill);
        self.begin(decode);
    }

    fn go_on(&mut self, number: u64, generated: u32) {
        let request = &self.requests[&number];
        if request.is_given_up {
            return;
        }
        let decode = request.decode;
        let said = self.kv_legs(decode).go_on(RequestId(number), generated);
        self.say(decode, said);
        self.begin(decode);
    }

    fn cancel(&mut self, number: u64) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        request.is_given_up = true;
        let (prefill, decode) = (request.prefill, request.decode);
        for (worker, id) in [(prefill, number | OF_PREFILL), (decode, number)] {
            let (said, freed) = self.kv_legs(worker).cancel(RequestId(id));
            self.say(worker, said);
            self.say(worker, freed.map(Say::Freed).into_iter().collect());
            self.begin(worker);
        }
    }

    fn die(&mut self, worker: usize) {
        self.exchange.forget(worker, self.now_ms);
        self.engines[worker] = Engine::new(config(self.engines[worker].capacity().blocks));
        self.ends_ms[worker] = None;
        let numbers: Vec<u64> = self.requests.keys().copied().collect();
        for number in numbers {
            let request = self.requests.get_mut(&number).unwrap();
            if request.prefill == worker && std::mem::take(&mut request.open[0]) {
                if request.got.is_empty() {
                    self.go_on(number, 0);
                }
            } else if request.decode == worker && std::mem::take(&mut request.open[1]) {
                self.cancel(number);
            }
        }
    }

    fn freeze(&mut self, worker: usize, frozen: bool) {
        self.frozen[worker] = frozen;
        self.exchange.freeze(worker, frozen);
        self.begin(worker);
    }

    fn begin(&mut self, worker: usize) {
        if self.ends_ms[worker].is_some() || self.frozen[worker] {
            return;
        }
        let ms = self.engines[worker].begin_step();
        self.ends_ms[worker] = ms.map(|ms| self.now_ms + ms);
        let lost = self.lost;
        let mut draws = self.now_ms.to_bits() >> 20;
        let said = self.kv_legs(worker).began(|| {
            draws = draws.wrapping_mul(25_214_903_917).wrapping_add(11);
            Ills { slow: 1.0, fails: lost > 0 && (draws >> 16).is_multiple_of(lost) }
        });
        self.say(worker, said);
    }

    fn end(&mut self, worker: usize) {
        self.ends_ms[worker] = None;
        let result = self.engines[worker].end_step(1.0);
        self.kv_legs(worker).ended(&result);
        self.begin(worker);
        for output in result.step.outputs {
            let number = output.request.0 & !OF_PREFILL;
            let request = self.requests.get_mut(&number).unwrap();
            let is_prefill = output.request.0 & OF_PREFILL > 0;
            assert!(!request.is_given_up, "tokens for nobody");
            request.got.extend(&output.ids);
            if output.finish.is_some() {
                request.open[usize::from(!is_prefill)] = false;
                if is_prefill {
                    self.cancel(number);
                }
            } else if is_prefill {
                assert_eq!(output.ids.len(), 1, "a prefill worker gives one token");
                self.go_on(number, 1);
            }
        }
    }

    fn say(&mut self, worker: usize, said: Vec<Say>) {
        for say in said {
            match say {
                Say::KvReady { request, ticket, .. } => {
                    let number = request.0 & !OF_PREFILL;
                    let request = &self.requests[&number];
                    if !request.is_given_up {
                        let decode = request.decode;
                        self.engines[decode].ticket(RequestId(number), ticket);
                        self.begin(decode);
                    }
                }
                Say::Freed(freed) => {
                    let number = freed.request.0 & !OF_PREFILL;
                    let request = self.requests.get_mut(&number).unwrap();
                    let is_decode = freed.request.0 & OF_PREFILL == 0;
                    assert!(std::mem::take(&mut request.open[usize::from(is_decode)]), "once");
                    self.begin(worker);
                }
                Say::Failed(failed) => panic!("{failed:?}"),
                Say::Transferred(pulled) => self.pulled.push(pulled),
            }
        }
    }

    /// Everything that happens up to `until_ms`.
    fn run(&mut self, until_ms: f64) {
        loop {
            let steps = (0..WORKERS).filter(|worker| !self.frozen[*worker]);
            let steps = steps.filter_map(|w| Some((self.ends_ms[w]?, w, true)));
            let news = (0..WORKERS).filter(|worker| !self.frozen[*worker]);
            let news = news.filter_map(|w| Some((self.exchange.next_ms(w)?, w, false)));
            let next = steps.chain(news).min_by(|a, b| a.0.total_cmp(&b.0));
            let Some((at_ms, worker, is_step)) = next.filter(|next| next.0 <= until_ms) else {
                break;
            };
            self.now_ms = self.now_ms.max(at_ms);
            if is_step {
                self.end(worker);
            } else {
                let said = self.kv_legs(worker).hear();
                self.say(worker, said);
                self.begin(worker);
            }
            self.check();
        }
        if until_ms.is_finite() {
            self.now_ms = self.now_ms.max(until_ms);
        }
    }

    fn check(&self) {
        self.engines.iter().for_each(Engine::check);
    }

    /// Lets everything end: nothing is left behind, and whoever was not given up has the whole answer.
    fn finish(mut self) -> Self {
        (0..WORKERS).for_each(|worker| self.freeze(worker, false));
        self.run(f64::INFINITY);
        for (number, request) in &self.requests {
            let room = self.engines[request.decode].context_tokens();
            let all = request.leg.max_tokens.min(room - request.leg.prompt_tokens);
            let expected: Vec<_> = (0..all).map(|at| token(request.leg.seed, at, 4096)).collect();
            assert_eq!(request.got[..], expected[..request.got.len()], "{number}");
            assert!(request.is_given_up || request.got.len() == all as usize, "{number} is whole");
            assert!(request.is_given_up || request.open == [false; 2], "{number} is freed");
        }
        assert!(self.engines.iter().all(Engine::is_idle));
        assert_eq!(self.exchange.len(), (0, 0), "nothing is on its way");
        self
    }
}

#[derive(Debug, Clone)]
enum Act {
    Submit { tokens: u32, common: u64, max_tokens: u32, prefill: usize, decode: usize },
    Cancel(u64),
    Run(f64),
    Die(usize),
    Freeze(usize, bool),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let submit = (1_u32..60, 0_u64..12, 1_u32..12, 0..PREFILL, PREFILL..WORKERS).prop_map(
        |(tokens, common, max_tokens, prefill, decode)| Act::Submit {
            tokens,
            common,
            max_tokens,
            prefill,
            decode,
        },
    );
    let act = prop_oneof![
        6 => submit,
        2 => (0_u64..30).prop_map(Act::Cancel),
        8 => (0.0_f64..4.0).prop_map(Act::Run),
        1 => (0..WORKERS).prop_map(Act::Die),
        1 => (0..WORKERS, any::<bool>()).prop_map(|(worker, frozen)| Act::Freeze(worker, frozen)),
    ];
    proptest::collection::vec(act, 1..60)
}

fn settings() -> impl Strategy<Value = Setting> {
    let blocks = (16_u32..60, 16_u32..60).prop_map(|(p, d)| [p, d]);
    let times = prop_oneof![Just(0_u32), 1_u32..4, Just(100)];
    (blocks, prop_oneof![Just(100.0), Just(1e5)], times.clone(), times, 0_u64..4).prop_map(
        |(blocks, bytes_per_ms, lease_ms, patience_ms, lost)| Setting {
            blocks,
            bytes_per_ms,
            lease_ms,
            patience_ms,
            lost,
        },
    )
}

proptest! {
    #[test]
    fn whatever_goes_wrong_answers_are_whole_and_nothing_is_left(setting in settings(), acts in acts()) {
        let mut world = World::new(&setting);
        let mut next = 0;
        for act in acts {
            match act {
                Act::Submit { tokens, common, max_tokens, prefill, decode } => {
                    world.submit(next, leg(next, tokens, common, max_tokens), prefill, decode);
                    next += 1;
                }
                Act::Cancel(number) => world.cancel(number),
                Act::Run(ms) => world.run(world.now_ms + ms),
                Act::Die(worker) => world.die(worker),
                Act::Freeze(worker, frozen) => world.freeze(worker, frozen),
            }
            world.check();
        }
        world.finish();
    }
}

const FINE: Setting =
    Setting { blocks: [64, 64], bytes_per_ms: 1e6, lease_ms: 1_000, patience_ms: 1_000, lost: 0 };

/// One request of 50 tokens, computed in three steps, and 5 of an answer.
fn one(setting: &Setting, change: impl FnOnce(&mut World)) -> World {
    let mut world = World::new(setting);
    world.submit(0, leg(0, 50, 0, 5), 0, 2);
    change(&mut world);
    world.finish()
}

#[test]
fn a_prompt_moves_once_and_the_prefill_worker_keeps_nothing() {
    let world = one(&FINE, |_| {});
    let [pulled] = &world.pulled[..] else { panic!("{:?}", world.pulled) };
    assert_eq!(
        (pulled.from, pulled.blocks, pulled.bytes, pulled.error),
        (Some(0), 13, 13_000, None)
    );
    assert!((pulled.ms - (13_000.0 / 1e6 + 0.25)).abs() < 1e-9, "waiting does not count");
}

#[test]
fn a_transfer_goes_on_while_the_prompt_is_computed() {
    let done_ms = |bytes_per_ms| {
        let mut world = World::new(&Setting { bytes_per_ms, ..FINE });
        world.submit(0, leg(0, 50, 0, 5), 0, 2);
        while world.pulled.is_empty() {
            world.run(world.now_ms + 0.01);
        }
        world.now_ms
    };
    let (fast, slow) = (done_ms(1e9), done_ms(8e3));
    // 13 blocks take 1.6 ms at 8 bytes/us; three steps take more, and only the last chunk's last part is seen
    assert!(slow - fast < 0.3, "{fast} {slow}");
    assert!(done_ms(1e3) - fast > 8.0, "13 ms, of which the steps hide the first few");
}

#[test]
fn only_what_the_decode_worker_lacks_is_moved() {
    let mut world = World::new(&FINE);
    world.submit(0, leg(0, 48, 9, 3), 0, 2);
    world.run(100.0);
    world.submit(1, leg(1, 48, 9, 3), 1, 2);
    let world = world.finish();
    assert_eq!(world.pulled.iter().map(|p| p.blocks).collect::<Vec<_>>(), [12, 3]);
}

#[test]
fn the_whole_prompt_may_be_there_already() {
    let mut world = World::new(&FINE);
    world.submit(0, leg(0, 48, 12, 3), 0, 2);
    world.run(100.0);
    world.submit(1, leg(1, 48, 12, 3), 1, 2);
    let world = world.finish();
    assert_eq!((world.pulled[1].blocks, world.pulled[1].error), (0, None));
}

#[test]
fn a_late_transfer_is_given_up_and_the_prompt_computed_again() {
    let world = one(&Setting { bytes_per_ms: 1.0, patience_ms: 3, ..FINE }, |world| {
        world.run(20.0);
        assert_eq!(world.requests[&0].got.len(), 5, "13 s before the bytes would have been there");
    });
    assert_eq!(world.pulled[0].error, Some(TransferFailure::Timeout));
}

#[test]
fn a_lease_that_ends_fails_the_transfer_and_not_the_request() {
    let world = one(&Setting { bytes_per_ms: 1.0, lease_ms: 3, ..FINE }, |_| {});
    assert_eq!(world.pulled[0].error, Some(TransferFailure::Expired));
}

#[test]
fn a_prefill_worker_that_dies_leaves_the_prompt_to_the_other() {
    let world = one(&FINE, |world| {
        world.run(1.5);
        world.die(0);
    });
    assert_eq!(world.pulled[0].error, Some(TransferFailure::Lost));
    let world = one(&Setting { bytes_per_ms: 1.0, ..FINE }, |world| {
        world.run(6.0);
        assert_eq!(world.requests[&0].got.len(), 1, "the first token is out");
        world.die(0);
    });
    assert_eq!(world.pulled[0].error, Some(TransferFailure::Lost));
}

#[test]
fn a_frozen_prefill_worker_does_not_say_that_its_pin_held() {
    let world = one(&Setting { patience_ms: 50, ..FINE }, |world| {
        while world.requests[&0].got.is_empty() {
            world.run(world.now_ms + 0.01);
        }
        world.freeze(0, true);
        world.run(200.0);
    });
    assert_eq!(world.pulled[0].error, Some(TransferFailure::Timeout));
}

#[test]
fn a_ticket_of_another_fleet_is_lost() {
    let mut world = World::new(&FINE);
    let d = Leg { arrives: Some(1_000), ..leg(0, 50, 0, 5) };
    world.engines[2].submit(d).unwrap();
    for ticket in [vec![], vec![1; 24], vec![0; 300]] {
        let pull =
            crate::mock::engine::Pull { request: RequestId(0), prompt_tokens: 50, held: 0, ticket };
        world.exchange.pull(2, &pull, 0.0);
        let news = world.exchange.take(2, 1.0);
        let [News::Pulled(pulled)] = &news[..] else { panic!("{news:?}") };
        assert_eq!((pulled.from, pulled.error), (None, Some(TransferFailure::Lost)));
    }
}

#[test]
fn an_answer_that_has_no_token_left_cannot_go_on() {
    let mut world = World::new(&FINE);
    let d = Leg { arrives: Some(1_000), ..leg(0, 50, 0, 5) };
    world.engines[2].submit(d).unwrap();
    let said = world.kv_legs(2).go_on(RequestId(0), 5);
    let [Say::Failed(failed)] = &said[..] else { panic!("{said:?}") };
    assert_eq!(failed.kind, FailureKind::BadResume);
    assert!(world.engines[2].is_idle());
}

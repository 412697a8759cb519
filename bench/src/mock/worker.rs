//! One mock worker: its engine, its faults, and its links to the router, one after the other.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use headrace_router::core::blocks::HASH_SCHEME;
use headrace_router::core::frame::{
    Fingerprints, Hello, PROTOCOL, QueueRule, RequestId, Role, StepCost, TransferBackend,
};
use headrace_router::core::secret::HashKey;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, broadcast, oneshot};
use tokio::time::sleep;

use super::clock::Clock;
use super::engine::{Engine, EngineConfig, POOLED_WIDTH, StepResult};
use super::exchange::Exchange;
use super::fault::{Fault, Health, Mischief};
use super::greeting::Refused;
use super::kv_legs::{KvLegs, Say};
use super::lockstep::Lockstep;
use super::model::Model;
use super::model::script::{Script, ScriptedAnswer};
use super::pace::Pace;
use super::session::{self, Ended};
use crate::random::Random;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// What all workers of a fleet share.
#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) router: String,
    pub(super) secret: Option<Vec<u8>>,
    pub(super) model: Model,
    pub(super) model_name: String,
    pub(super) engine: EngineConfig,
    pub(super) names: String,
    /// Everything runs so many times faster.
    pub(super) speed: f64,
    /// Answers end here unless the client wants more by `ignore_eos`.
    pub(super) longest_answer: u32,
    /// Do not dial again.
    pub(super) once: bool,
    pub(super) clock: Clock,
    pub(super) started: Instant,
    /// Faults that are asked for while the fleet runs.
    pub(super) faults: broadcast::Sender<Fault>,
    pub(super) pace: Mutex<Pace>,
    /// How many of each role there are.
    pub(super) roles: Roles,
    pub(super) kv_block_bytes: u64,
    /// Workers say what their steps cost.
    pub(super) priors: bool,
    /// Its time is that of the fleet's start, in ms.
    pub(super) exchange: Mutex<Exchange>,
    /// Ring when the exchange has something for a worker.
    pub(super) bells: Vec<Arc<Notify>>,
    /// Where workers are ranks.
    pub(super) groups: Vec<Mutex<Lockstep>>,
    /// Ranks wait for one another so long.
    pub(super) group_deadline: Duration,
    /// What requests are answered with, in the place of random tokens.
    pub(super) script: Option<Script>,
    /// It was said that scripted answers follow no grammar.
    pub(super) noted_grammar: Once,
}

/// Workers by what they do. Numbers begin with the prefill workers; those that do both are last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Roles {
    pub(crate) prefill: usize,
    pub(crate) decode: usize,
    pub(crate) both: usize,
    /// Ranks of a group; 1 where workers are alone.
    pub(crate) ep: usize,
}

impl Roles {
    /// Numbers of the groups; none where workers are alone.
    pub(crate) fn groups(self) -> std::ops::Range<usize> {
        if self.ep > 1 { 0..self.all() / self.ep } else { 0..0 }
    }

    /// The group of a worker, and its rank there.
    pub(crate) fn rank_of(self, number: usize) -> Option<(usize, usize)> {
        (self.ep > 1).then(|| (number / self.ep, number % self.ep))
    }

    /// The workers of a group.
    pub(crate) fn ranks_of(self, group: usize) -> std::ops::Range<usize> {
        group * self.ep..(group + 1) * self.ep
    }

    pub(crate) fn all(self) -> usize {
        self.prefill + self.decode + self.both
    }

    pub(crate) fn of(self, number: usize) -> Role {
        if number < self.prefill {
            Role::Prefill
        } else if number < self.prefill + self.decode {
            Role::Decode
        } else {
            Role::Both
        }
    }
}

/// A mock worker: its engine, its epoch, and the faults that it is to play.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) fleet: Arc<Fleet>,
    pub(super) number: usize,
    pub(super) engine: Engine,
    pub(super) mischief: Mischief,
    pub(super) faults: broadcast::Receiver<Fault>,
    epoch: u64,
    /// Of its group, when it began.
    pub(super) group_epoch: u64,
    key: Option<HashKey>,
    random: Random,
}

impl Worker {
    /// `planned` are the faults that were asked for at the start.
    pub(super) fn new(fleet: Arc<Fleet>, number: usize, planned: &[Fault]) -> Self {
        let seed = Random::new(fleet.engine.seed ^ (number as u64) << 32).next();
        let epoch = now_ms_since_1970();
        let engine = Engine::new(EngineConfig { seed, epoch, ..fleet.engine.clone() });
        let mut mischief = Mischief::new(number, fleet.engine.seed);
        planned.iter().for_each(|fault| mischief.add(fault));
        let random = Random::new(seed ^ epoch);
        let faults = fleet.faults.subscribe();
        let mut worker = Self {
            fleet,
            number,
            engine,
            mischief,
            faults,
            epoch,
            group_epoch: 0,
            key: None,
            random,
        };
        worker.enter_group();
        worker
    }

    /// Dials until it is drained.
    ///
    /// # Errors
    /// The router refused it.
    pub(super) async fn run(mut self) -> anyhow::Result<()> {
        let mut backoff = FIRST_BACKOFF;
        loop {
            let dialled = Instant::now();
            let ended = self.session().await;
            self.cancel_all();
            self.leave_rounds();
            match ended {
                Ok(Ended::Drained) => return Ok(()),
                Ok(Ended::Died) => {
                    self.be_born_again().await;
                    continue;
                }
                Ok(Ended::Closed) => {}
                Err(error) if error.is::<Refused>() && self.is_rank() => {
                    super::note(&format!("{}: {error:#}", self.name()));
                    self.be_born_again().await;
                    continue;
                }
                Err(error) if error.is::<Refused>() => return Err(error),
                Err(error) if self.fleet.once => return Err(error),
                Err(error) => {
                    self.note(|pace| pace.lost_links += 1);
                    if self.number == 0 {
                        super::note(&format!("{}: {error:#}; dialling again", self.name()));
                    }
                }
            }
            if self.fleet.once {
                return Ok(());
            }
            if dialled.elapsed() > MAX_BACKOFF {
                backoff = FIRST_BACKOFF;
            }
            // half of it is random, so that a fleet does not dial in step
            sleep(backoff.mul_f64(0.5 + self.random.unit() / 2.0)).await;
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }

    async fn session(&mut self) -> anyhow::Result<Ended> {
        while self.health() == Health::Frozen && !self.group_is_over() {
            self.until_change().await;
        }
        if self.health() == Health::Dead || self.group_is_over() {
            return Ok(Ended::Died);
        }
        let router = self.fleet.router.clone();
        let dialling = || format!("dialling {router}");
        if let Some(path) = router.strip_prefix("unix:") {
            let dialled = tokio::time::timeout(DIAL_TIMEOUT, UnixStream::connect(path)).await;
            let stream = dialled.with_context(dialling)?.with_context(dialling)?;
            let (read, write) = stream.into_split();
            session::serve(self, read, write).await
        } else {
            let dialled = tokio::time::timeout(DIAL_TIMEOUT, TcpStream::connect(&router)).await;
            let stream = dialled.with_context(dialling)?.with_context(dialling)?;
            stream.set_nodelay(true)?;
            let (read, write) = stream.into_split();
            session::serve(self, read, write).await
        }
    }

    /// Waits for the end of its death and begins anew, with nothing in its cache.
    async fn be_born_again(&mut self) {
        self.group_ends().await;
        while self.health() == Health::Dead {
            self.until_change().await;
        }
        self.epoch = now_ms_since_1970().max(self.epoch + 1);
        let seed = self.random.next();
        let (epoch, config) = (self.epoch, self.fleet.engine.clone());
        self.engine = Engine::new(EngineConfig { seed, epoch, ..config });
        self.key = None;
        self.enter_group();
    }

    pub(super) fn hello(&mut self) -> Hello {
        let fleet = Arc::clone(&self.fleet);
        let cost = self.engine.cost();
        let prior = StepCost {
            fixed_ms: cost.fixed_ms / fleet.speed,
            prefill_ms: cost.prefill_ms / fleet.speed,
            context_ms: cost.context_ms / fleet.speed,
            row_ms: cost.row_ms / fleet.speed,
            kv_ms: cost.kv_ms / fleet.speed,
        };
        let context_tokens = fleet.model.context_tokens.min(self.engine.context_tokens());
        let print = fleet.model.fingerprint.clone();
        let nonce = [self.random.next(), self.random.next()];
        Hello {
            protocol: PROTOCOL,
            worker: self.name(),
            epoch: self.epoch,
            role: fleet.roles.of(self.number),
            model: fleet.model_name.clone(),
            fingerprints: Fingerprints {
                weights: self.weights().into(),
                tokenizer: print.clone(),
                chat_template: print,
                kv_layout: "mock".into(),
                hash_scheme: HASH_SCHEME.into(),
                block_tokens: fleet.engine.block_tokens,
            },
            capacity: self.engine.capacity(),
            context_tokens,
            group: self.group(),
            transfer: vec![format!("{}:{}", TransferBackend::Mock, std::process::id())],
            nonce: nonce.iter().flat_map(|half| half.to_le_bytes()).collect(),
            // one that costs nothing is no prior, and would be refused
            step_prior: (fleet.priors && prior != StepCost::default()).then_some(prior),
            kv_block_bytes: fleet.kv_block_bytes,
            dtype: "mock".into(),
            aliases: Vec::new(),
            pooled_width: POOLED_WIDTH,
            queue_rule: QueueRule::Halves, // see `engine/plan.rs`
        }
    }

    /// Another key makes other block keys: what is cached under the old ones is never found again.
    pub(super) fn use_key(&mut self, key: HashKey) {
        if self.key.replace(key).is_some_and(|before| before != key) {
            self.engine.clear_cache();
        }
    }

    /// How long the step that begins at `start` takes, in ms; `None` when there is nothing to do. And what it makes known.
    pub(super) fn begin_step(&mut self, start: Instant) -> (Option<f64>, Vec<Say>) {
        let now_ms = self.now_ms();
        let slowdown = self.mischief.slowdown(now_ms);
        let ms = self.engine.begin_step().map(|ms| ms * slowdown / self.fleet.speed);
        let Self { fleet, engine, number, mischief, .. } = self;
        let began = |kv_legs: &mut KvLegs<'_>| kv_legs.began(|| mischief.ills(now_ms));
        let said = at_exchange(fleet, engine, *number, start, began);
        (ms, said)
    }

    /// Ends the step that took `ms` and should have ended at `end`.
    pub(super) fn end_step(&mut self, ms: f64, end: Instant) -> StepResult {
        let now_ms = self.now_ms();
        self.engine.claim_more(self.mischief.lie(now_ms));
        let mut result = self.engine.end_step(ms);
        self.kv_legs(end, |kv_legs| kv_legs.ended(&result));
        let blocks = result.blocks.take();
        result.blocks =
            blocks.and_then(|blocks| self.mischief.blocks(now_ms, blocks, &mut self.engine));
        let tokens = result.step.outputs.iter().map(|output| output.ids.len() as u64).sum::<u64>();
        let requests = result.freed.len() as u64;
        self.note(|pace| {
            pace.tokens += tokens;
            pace.requests += requests;
        });
        result
    }

    /// Does something at the exchange, as of `at`.
    pub(super) fn kv_legs<T>(&mut self, at: Instant, act: impl FnOnce(&mut KvLegs<'_>) -> T) -> T {
        at_exchange(&self.fleet, &mut self.engine, self.number, at, act)
    }

    /// When the exchange has something for it.
    pub(super) fn news_at(&self) -> Option<Instant> {
        let exchange = self.fleet.exchange.lock().expect("no holder panics");
        let at_ms = exchange.next_ms(self.number)?;
        // a lease may be as long as it likes
        Some(self.fleet.started + Duration::from_secs_f64(at_ms.min(1e12) / 1e3))
    }

    pub(super) fn bell(&self) -> Arc<Notify> {
        Arc::clone(&self.fleet.bells[self.number])
    }

    /// Tells the other workers whether it answers them.
    pub(super) fn freeze(&mut self, frozen: bool) {
        let worker = self.number;
        self.kv_legs(Instant::now(), |kv_legs| kv_legs.exchange.freeze(worker, frozen));
    }

    /// Stops all requests, and what others had to do with them; which they were.
    pub(super) fn cancel_all(&mut self) -> Vec<RequestId> {
        let worker = self.number;
        self.kv_legs(Instant::now(), |kv_legs| kv_legs.exchange.forget(worker, kv_legs.now_ms));
        self.engine.cancel_all()
    }

    /// Changes the counts of the fleet's pace.
    pub(super) fn note(&self, count: impl FnOnce(&mut Pace)) {
        count(&mut self.fleet.pace.lock().expect("no holder panics"));
    }

    /// Number of the last event, and all keys.
    pub(super) fn snapshot(&mut self) -> (u64, Vec<u64>) {
        let (sequence, keys) = self.engine.snapshot();
        (self.mischief.sequence(sequence), keys)
    }

    pub(super) fn health(&self) -> Health {
        self.mischief.health(self.now_ms())
    }

    /// The next moment at which something may be due, at most `latest`.
    pub(super) fn next_wake(&self, latest: Instant) -> Instant {
        let now_ms = self.now_ms();
        let change_ms = self.mischief.next_change_ms(now_ms) - now_ms;
        let wait = (latest.saturating_duration_since(Instant::now()).as_secs_f64() * 1e3)
            .min(change_ms)
            .max(0.0);
        Instant::now() + Duration::from_secs_f64(wait / 1e3)
    }

    /// Waits until a fault begins or ends.
    pub(super) async fn until_change(&mut self) {
        let far = Instant::now() + Duration::from_secs(3600);
        let wake = self.next_wake(far);
        let (bell, is_rank) = (self.bell(), self.is_rank());
        tokio::select! {
            fault = self.faults.recv() => self.add_fault(fault),
            () = bell.notified(), if is_rank => {}
            () = tokio::time::sleep_until(wake.into()) => {}
        }
    }

    /// Takes in a fault that was asked for while running: its times count from now.
    pub(super) fn add_fault(&mut self, fault: Result<Fault, broadcast::error::RecvError>) {
        // the fleet holds the other end, and who lags behind this far has faults enough
        if let Ok(fault) = fault {
            let now_ms = self.now_ms();
            let (from_ms, until_ms) = (fault.from_ms + now_ms, fault.until_ms + now_ms);
            self.mischief.add(&Fault { from_ms, until_ms, ..fault });
        }
    }

    /// `None` where `at` has passed.
    pub(super) fn alarm(&self, at: Instant) -> Option<oneshot::Receiver<()>> {
        (at > Instant::now()).then(|| self.fleet.clock.at(at))
    }

    pub(super) fn now_ms(&self) -> f64 {
        self.fleet.started.elapsed().as_secs_f64() * 1e3
    }

    pub(super) fn name(&self) -> String {
        format!("{}{}", self.fleet.names, self.number)
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn secret(&self) -> Option<&[u8]> {
        self.fleet.secret.as_deref()
    }

    pub(super) fn document(&self) -> &[u8] {
        &self.fleet.model.document
    }

    pub(super) fn vocab_size(&self) -> u32 {
        self.fleet.model.vocab_size
    }

    pub(super) fn longest_answer(&self) -> u32 {
        self.fleet.longest_answer
    }

    /// The answer that the script has for a request, or what it lacks; `None` without a script. Tokens have four bytes each.
    pub(super) fn scripted(
        &self,
        prompt: &[u8],
        generated: &[u8],
        stop_ids: &[u32],
    ) -> Option<Result<ScriptedAnswer, String>> {
        let ids = |tokens: &[u8]| {
            let ids = tokens.chunks_exact(4);
            ids.map(|id| u32::from_le_bytes(id.try_into().expect("4 bytes"))).collect::<Vec<_>>()
        };
        let script = self.fleet.script.as_ref()?;
        Some(script.answer(&ids(prompt), &ids(generated), stop_ids))
    }

    /// Says, once, that a request has a grammar.
    pub(super) fn note_grammar(&self, has_grammar: bool) {
        if has_grammar {
            let text =
                "a request has a grammar: it gets its scripted answer, whatever the grammar says";
            self.fleet.noted_grammar.call_once(|| super::note(text));
        }
    }

    pub(super) fn block_tokens(&self) -> NonZeroUsize {
        let tokens = self.fleet.engine.block_tokens as usize;
        NonZeroUsize::new(tokens).expect("checked by the flags")
    }
}

/// What one worker does at the exchange, and the ringing for whom it concerns.
fn at_exchange<T>(
    fleet: &Fleet,
    engine: &mut Engine,
    worker: usize,
    at: Instant,
    act: impl FnOnce(&mut KvLegs<'_>) -> T,
) -> T {
    let now_ms = at.saturating_duration_since(fleet.started).as_secs_f64() * 1e3;
    let mut exchange = fleet.exchange.lock().expect("no holder panics");
    let done = act(&mut KvLegs { engine, exchange: &mut exchange, worker, now_ms });
    for worker in exchange.take_told() {
        fleet.bells[worker].notify_one();
    }
    done
}

pub(super) fn now_ms_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

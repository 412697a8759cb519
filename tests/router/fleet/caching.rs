//! A fake worker with a prefix cache: block keys as a worker computes them, snapshots and deltas in their order.

use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use headrace_router::app::App;
use headrace_router::core::blocks::{BlockHash, hash_blocks};
use headrace_router::core::candidate::Candidate;
use headrace_router::core::frame::*;
use headrace_router::core::secret::HashKey;
use headrace_router::prompt::Prompt;
use headrace_router::request::{Job, RequestTrace};

use super::requests::{answer, job, next};
use crate::fake_worker::*;

/// Tokens in a block of the fake model.
pub(super) const BLOCK: u32 = 16;

/// What steps cost: 0.2 ms for each token of a prompt is most of it.
const COST: StepCost =
    StepCost { fixed_ms: 1.0, prefill_ms: 0.2, context_ms: 0.0, row_ms: 0.1, kv_ms: 1e-5 };

/// A prompt of so many full blocks and three tokens more. Other numbers share no block.
pub(super) fn prompt(number: u32, blocks: u32) -> Vec<u32> {
    let token = |i| 3 + (number * 101 + i * (2 * number + 7)) % 500;
    (0..BLOCK * blocks + 3).map(token).collect()
}

/// Asks for a short answer to a prompt.
pub(super) fn ask(prompt: &[u32]) -> Job {
    let prompt = Prompt::Tokens(prompt.to_vec());
    Job { prompt, max_tokens: Some(4), request_trace: RequestTrace::new("test", None), ..job() }
}

/// A worker that says what it caches.
pub(super) struct Caching {
    link: FakeWorker,
    pub(super) name: String,
    pub(super) epoch: u64,
    /// Of its last event.
    pub(super) sequence: u64,
}

impl Deref for Caching {
    type Target = FakeWorker;

    fn deref(&self) -> &FakeWorker {
        &self.link
    }
}

impl DerefMut for Caching {
    fn deref_mut(&mut self) -> &mut FakeWorker {
        &mut self.link
    }
}

impl Caching {
    /// Joins with an empty cache.
    pub(super) async fn ready(app: &App, name: &str) -> Self {
        Self::ready_as(app, Behaviour::new(name)).await
    }

    /// The same, for a worker with a behaviour of its own. All are equally fast.
    pub(super) async fn ready_as(app: &App, mut behaviour: Behaviour) -> Self {
        behaviour.hello.step_prior = Some(COST);
        let (name, epoch) = (behaviour.hello.worker.clone(), behaviour.hello.epoch);
        Self { link: behaviour.ready(app).await, name, epoch, sequence: 0 }
    }

    /// Joins and holds the blocks of a prompt.
    pub(super) async fn holding(app: &App, name: &str, prompt: &[u32]) -> Self {
        let mut worker = Self::ready(app, name).await;
        let keys = worker.keys(prompt, b"");
        worker.stores(&keys);
        worker.indexed(app, keys.len()).await;
        worker
    }

    /// Keys of the full blocks of a prompt, from the hash key of the welcome.
    pub(super) fn keys(&self, prompt: &[u32], salt: &[u8]) -> Vec<u64> {
        let key = HashKey(self.welcome.hash_key.as_slice().try_into().unwrap());
        let block = NonZeroUsize::new(BLOCK as usize).unwrap();
        let hashes = hash_blocks(&key, BlockHash::root(&key, salt), prompt, block);
        hashes.into_iter().map(|hash| hash.key().0).collect()
    }

    /// The next delta, to be changed by the test.
    pub(super) fn delta(&mut self) -> Blocks {
        self.sequence += 1;
        let (epoch, sequence) = (self.epoch, self.sequence);
        let (stored, removed) = (Vec::new(), Vec::new());
        Blocks { epoch, sequence, stored, removed, cleared: false, tier: 0 }
    }

    pub(super) fn stores(&mut self, keys: &[u64]) {
        let delta = Blocks { stored: run(keys), ..self.delta() };
        self.send(Frame::Blocks(delta));
    }

    pub(super) fn removes(&mut self, keys: &[u64]) {
        let delta = Blocks { removed: pack(keys), ..self.delta() };
        self.send(Frame::Blocks(delta));
    }

    /// All that it holds, in one part. As an answer to a `Resync` it has the number of the last delta.
    pub(super) fn snapshot(&self, keys: &[u64]) -> Snapshot {
        let (epoch, sequence) = (self.epoch, self.sequence);
        Snapshot { epoch, sequence, hashes: pack(keys), last: true }
    }

    pub(super) fn sends_snapshot(&self, keys: &[u64]) {
        self.send(Frame::Snapshot(self.snapshot(keys)));
    }

    /// The reason of the next `Resync`; what comes before is skipped.
    pub(super) async fn resync(&mut self) -> String {
        loop {
            match self.event().await {
                Event::Resync(reason) => return reason,
                Event::Closed => panic!("the link closed before a Resync"),
                _ => {}
            }
        }
    }

    /// Returns once the router counts on so many blocks here.
    pub(super) async fn indexed(&self, app: &App, blocks: usize) {
        let name = &self.name;
        until("the blocks", || of_worker(app, name)["blocks_indexed"] == blocks).await;
    }

    /// Why its word counts for nothing; empty while it counts.
    pub(super) fn withdrawn(&self, app: &App) -> String {
        let why = of_worker(app, &self.name)["credit_withdrawn"].clone();
        let credit = metric(app, "headrace_worker_credit", &format!("\"{}\"", self.name));
        assert_eq!(credit == 1.0, why.is_null(), "metric and /workers agree");
        why.as_str().unwrap_or_default().into()
    }

    /// Returns once its word counts.
    pub(super) async fn credited(&self, app: &App) {
        until("credit", || self.withdrawn(app).is_empty()).await;
    }

    /// The first token of a request, with what the cache gave.
    pub(super) fn begins(&self, request: RequestId, cached_tokens: u32, finish: Option<Finish>) {
        let cached_tokens = Some(cached_tokens);
        let output = Output { cached_tokens, ..output(request, letters("a"), finish) };
        self.send(Frame::Step(step(vec![output])));
    }
}

pub(super) fn pack(keys: &[u64]) -> Vec<u8> {
    keys.iter().flat_map(|key| key.to_le_bytes()).collect()
}

pub(super) fn run(keys: &[u64]) -> Vec<StoredRun> {
    vec![StoredRun { parent: None, hashes: pack(keys) }]
}

/// The worker that a job was placed on, as the decision saw it.
pub(super) fn chosen(request_trace: &RequestTrace) -> Candidate {
    request_trace.decisions()[0].chosen().unwrap().0.clone()
}

/// Asks, has the chosen one of `fleet` answer, and takes the answer. `cached`: what that one says its cache gave, from what
/// it had promised. Who it was, and what it had promised.
pub(super) async fn served(
    app: &Arc<App>,
    fleet: &mut [&mut Caching],
    job: Job,
    cached: impl FnOnce(u32) -> u32,
) -> (String, u32) {
    let request_trace = Arc::clone(&job.request_trace);
    let mut answer = answer(app, job).await.unwrap();
    let chosen = chosen(&request_trace);
    let worker = fleet.iter_mut().find(|worker| *worker.name == *chosen.name).unwrap();
    let request = worker.submitted().await.request;
    worker.begins(request, cached(chosen.held_tokens), Some(Finish::Length));
    assert_eq!(next(&mut answer).await.unwrap().unwrap().text, "a");
    assert!(next(&mut answer).await.is_none());
    (chosen.name.to_string(), chosen.held_tokens)
}

/// As [`served`], by workers that find what they promised.
pub(super) async fn honestly(
    app: &Arc<App>,
    fleet: &mut [&mut Caching],
    prompt: &[u32],
) -> (String, u32) {
    served(app, fleet, ask(prompt), |promised| promised).await
}

/// Nothing is booked, nothing waits, nothing is in flight.
pub(super) async fn all_is_given_back(app: &App) {
    let clean = || {
        let of_all = |name| metric(app, name, "") == 0.0;
        of_all("headrace_booked_legs")
            && of_all("headrace_queue_requests")
            && of_all("headrace_queue_tokens")
            && of_all("headrace_queue_bytes")
            && of_all("headrace_worker_booked_requests")
            && of_all("headrace_worker_booked_tokens")
            && of_all("headrace_worker_backlog_tokens")
    };
    until("all is given back", clean).await;
    for worker in app.fleet.workers()["workers"].as_array().unwrap() {
        assert_eq!((&worker["backlog_tokens"], &worker["in_flight"]), (&0.into(), &0.into()));
    }
}

//! What the registry shows: models, workers, metrics.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::{Registry, RegistryState};
use crate::core::admission::Class;
use crate::fleet::ModelInfo;
use crate::fleet::pool::{
    GROUP_GAUGES, PoolSnapshot, RANK_COUNTERS, Status, WORKER_COUNTERS, WORKER_GAUGES, WorkerPool,
    WorkerSnapshot, show_series,
};
use crate::metrics::Scrape;
use crate::prompt::CacheStats;

type OfCache = (&'static str, &'static str, fn(&CacheStats) -> u64);

/// What the tokenisers' caches did, by model.
const CACHE_COUNTERS: [OfCache; 3] = [
    ("headrace_prompt_cache_hits_total", "Stretches of prompts found.", |s| s.hits),
    ("headrace_prompt_cache_misses_total", "Stretches tokenised anew.", |s| s.misses),
    ("headrace_prompt_cache_hit_bytes_total", "Text not tokenised again.", |s| s.hit_bytes),
];

impl Registry {
    /// Models with a worker that can serve them.
    #[must_use]
    pub fn models(&self) -> Vec<ModelInfo> {
        self.state().pools.values().filter_map(WorkerPool::info).collect()
    }

    /// At least one worker takes new work, and the router is not shutting down.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.takes_requests().is_ok() && self.state().pools.values().any(WorkerPool::some_open)
    }

    /// The body of `/workers`.
    #[must_use]
    pub fn workers(&self) -> serde_json::Value {
        let now_ms = self.now_ms();
        let (pools, _) = self.snapshot(self.clock_ms());
        let workers = pools.iter().flat_map(|pool| &pool.workers);
        let workers: Vec<_> = workers.map(|one| one.as_json(now_ms)).collect();
        let groups = pools.iter().flat_map(PoolSnapshot::groups);
        let groups: Vec<_> = groups.map(|group| group.as_json()).collect();
        serde_json::json!({ "workers": workers, "groups": groups })
    }

    /// What is known at this moment. The lock is held for a copy, and not for what is made of it.
    pub(super) fn snapshot(&self, clock_ms: f64) -> (Vec<PoolSnapshot>, Totals) {
        let state = self.state();
        let pools = state.pools.values().map(|pool| pool.snapshot(clock_ms)).collect();
        (pools, Totals::of(&state, clock_ms))
    }
}

/// Sums over all models.
#[derive(Default)]
pub(super) struct Totals {
    held_off: usize,
    pub(super) waiting: usize,
    pub(super) waiting_by_class: [usize; Class::ALL.len()],
    waiting_tokens: u64,
    waiting_bytes: u64,
    pub(super) oldest_s: f64,
    returning: usize,
    index_blocks: usize,
    index_bytes: usize,
    legs: usize,
}

impl Totals {
    fn of(state: &RegistryState, clock_ms: f64) -> Self {
        let mut totals = Self { held_off: state.circuits.open(clock_ms), ..Self::default() };
        for pool in state.pools.values() {
            let queue = pool.dispatch.queue();
            totals.waiting += queue.len();
            for (sum, class) in totals.waiting_by_class.iter_mut().zip(Class::ALL) {
                *sum += queue.of_class(class).requests;
            }
            totals.waiting_tokens += queue.tokens();
            totals.waiting_bytes += queue.bytes();
            let oldest = queue.oldest_ms().map_or(0.0, |since_ms| (clock_ms - since_ms) / 1e3);
            totals.oldest_s = totals.oldest_s.max(oldest);
            totals.returning += pool.dispatch.returning();
            let (blocks, bytes) = pool.dispatch.scheduler.index_size();
            totals.index_blocks += blocks;
            totals.index_bytes += bytes;
            totals.legs += pool.dispatch.scheduler.legs();
        }
        totals
    }
}

/// What is known of the workers and the queue at the moment of a scrape.
impl Collector for Registry {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (now_ms, clock_ms) = (self.now_ms(), self.clock_ms());
        let (pools, totals) = self.snapshot(clock_ms);
        let mut scrape = Scrape::new(encoder);
        let workers = || pools.iter().flat_map(|pool| &pool.workers);
        let of_status = |status| workers().filter(|one| one.status == status).count();
        scrape.gauges(
            "headrace_workers",
            "Workers by state.",
            Status::ALL.map(|status| ([("state", status.as_str())], of_status(status))),
        )?;
        let held_off = totals.held_off;
        scrape.gauge("headrace_circuits_open", "Workers held off, or on probation.", held_off)?;
        let members: Vec<_> = pools
            .iter()
            .flat_map(|pool| pool.workers.iter().map(|one| (pool.model.as_str(), one)))
            .map(|(model, WorkerSnapshot { worker, view, .. })| (model, worker, view))
            .collect();
        for (name, help, value) in WORKER_GAUGES {
            let samples = members.iter().map(|(model, worker, view)| {
                let labels = [("worker", worker.hello.worker.as_str()), ("model", model)];
                (labels, value(worker, view, now_ms))
            });
            scrape.gauges(name, help, samples)?;
        }
        for (name, help, value) in WORKER_COUNTERS {
            let samples = members.iter().map(|(model, worker, _)| {
                ([("worker", worker.hello.worker.as_str()), ("model", model)], value(worker))
            });
            scrape.counters(name, help, samples)?;
        }
        show_series(&pools, &mut scrape)?;
        self.show_scale(&pools, &mut scrape)?;
        let groups: Vec<_> = pools.iter().flat_map(PoolSnapshot::groups).collect();
        for (name, help, value) in GROUP_GAUGES {
            let samples = groups.iter().map(|view| {
                ([("group", view.group.id.as_str()), ("model", view.model)], value(view))
            });
            scrape.gauges(name, help, samples)?;
        }
        for (name, help, value) in RANK_COUNTERS {
            let samples = groups.iter().flat_map(|view| &view.ranks).map(|worker| {
                let group = worker.hello.group.as_ref().map_or("", |group| group.id.as_str());
                ([("worker", worker.hello.worker.as_str()), ("group", group)], value(worker))
            });
            scrape.counters(name, help, samples)?;
        }
        let caches: Vec<_> = pools
            .iter()
            .filter_map(|pool| Some(([("model", pool.model.as_str())], pool.engine.as_ref()?)))
            .map(|(labels, engine)| (labels, engine.cache_stats()))
            .collect();
        for (name, help, value) in CACHE_COUNTERS {
            scrape.counters(
                name,
                help,
                caches.iter().map(|(labels, stats)| (*labels, value(stats))),
            )?;
        }
        scrape.gauges(
            "headrace_prompt_uncut",
            "1 if long texts cannot be tokenised in pieces.",
            caches.iter().map(|(labels, stats)| (*labels, u32::from(stats.uncut.is_some()))),
        )?;
        scrape.gauges(
            "headrace_prompt_encoder",
            "What makes a model's tokens: `fast`, or the crate `tokenizers`.",
            caches.iter().map(|([model], stats)| ([*model, ("encoder", stats.encoder())], 1_u32)),
        )?;
        let (cache, tokenizer) = (&self.setup.prefix_cache, &self.setup.tokenize_pool);
        let mut gauge = |name, help, value: usize| scrape.gauge(name, help, value);
        gauge(
            "headrace_prompt_cache_bytes",
            "Memory of tokenised stretches, of all models.",
            cache.bytes(),
        )?;
        gauge("headrace_prompt_cache_entries", "Tokenised stretches held.", cache.entries())?;
        gauge(
            "headrace_chain_memo_bytes",
            "Memory of the chains of block hashes that prompts have in common, of all models.",
            self.setup.chain_memo.bytes(),
        )?;
        gauge(
            "headrace_tokenizer_queue_requests",
            "Prompts that wait to be tokenised.",
            tokenizer.queued(),
        )?;
        gauge("headrace_tokenizer_queue_bytes", "Their text, in bytes.", tokenizer.queued_bytes())?;
        gauge("headrace_queue_requests", "Legs that wait for a worker.", totals.waiting)?;
        gauge(
            "headrace_returning_requests",
            "Answers in flight that wait for a worker to go on with.",
            totals.returning,
        )?;
        gauge("headrace_index_blocks", "Blocks that some worker holds.", totals.index_blocks)?;
        gauge("headrace_index_bytes", "Memory of the block index.", totals.index_bytes)?;
        gauge(
            "headrace_description_bytes",
            "Bytes of the models' descriptions, as workers sent them.",
            self.descriptions.used(),
        )?;
        gauge("headrace_booked_legs", "Legs that are booked on workers.", totals.legs)?;
        let classes = Class::ALL.iter().zip(totals.waiting_by_class);
        scrape.gauges(
            "headrace_queue_class_requests",
            "Legs that wait for a worker, by the class of their request.",
            classes.map(|(class, waiting)| ([("class", class.as_str())], waiting)),
        )?;
        let (tokens, bytes) = (totals.waiting_tokens, totals.waiting_bytes);
        scrape.gauge("headrace_queue_tokens", "Prompt tokens of the legs that wait.", tokens)?;
        scrape.gauge("headrace_queue_bytes", "Memory of the legs that wait.", bytes)?;
        scrape.gauge("headrace_queue_oldest_seconds", "Longest wait so far.", totals.oldest_s)
    }
}

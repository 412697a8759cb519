//! What the registry shows: models, workers, metrics.

use super::Registry;
use crate::core::admission::Admission;
use crate::fleet::ModelInfo;
use crate::fleet::pool::{Status, WORKER_GAUGES, WorkerPool};
use crate::metrics::Text;
use crate::prompt::CacheStats;

type CacheFamily = (&'static str, &'static str, &'static str, fn(&CacheStats) -> u64);

/// What the tokenisers' caches did, by model.
const CACHE_FAMILIES: [CacheFamily; 4] = [
    ("headrace_prompt_cache_hits_total", "counter", "Stretches of prompts found.", |s| s.hits),
    ("headrace_prompt_cache_misses_total", "counter", "Stretches tokenised anew.", |s| s.misses),
    ("headrace_prompt_cache_hit_bytes_total", "counter", "Text not tokenised again.", |s| {
        s.hit_bytes
    }),
    ("headrace_prompt_uncut", "gauge", "1 if long texts cannot be tokenised in pieces.", |s| {
        u64::from(s.uncut.is_some())
    }),
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
        let state = self.state();
        let workers: Vec<_> =
            state.pools.values().flat_map(|pool| pool.describe_workers(now_ms)).collect();
        serde_json::json!({ "workers": workers })
    }

    /// Adds what is known of the workers and the queue at this moment.
    pub(crate) fn render(&self, text: &mut Text) {
        let now_ms = self.now_ms();
        let state = self.state();
        let pools = || state.pools.values();
        text.family("headrace_workers", "gauge", "Workers by state.");
        for status in Status::ALL {
            let n = pools().flat_map(WorkerPool::statuses).filter(|other| *other == status).count();
            text.sample("", &[("state", &status.as_str())], n);
        }
        let held_off = state.circuits.open(self.clock_ms());
        text.single(
            "headrace_circuits_open",
            "gauge",
            "Workers held off, or on probation.",
            held_off,
        );
        for (name, help, value) in WORKER_GAUGES {
            text.family(name, "gauge", help);
            for pool in pools() {
                for (worker, view) in pool.dispatch.scheduler.views() {
                    let labels: [(&str, &dyn std::fmt::Display); 2] =
                        [("worker", &worker.hello.worker), ("model", &pool.model)];
                    text.sample("", &labels, value(worker, &view, now_ms));
                }
            }
        }
        for (name, kind, help, value) in CACHE_FAMILIES {
            text.family(name, kind, help);
            for pool in pools() {
                if let Some(engine) = &pool.engine {
                    text.sample("", &[("model", &pool.model)], value(&engine.cache_stats()));
                }
            }
        }
        let (cache, pool) = (&self.setup.prefix_cache, &self.setup.tokenize_pool);
        let help = "Memory of tokenised stretches, of all models.";
        text.single("headrace_prompt_cache_bytes", "gauge", help, cache.bytes());
        let help = "Tokenised stretches held.";
        text.single("headrace_prompt_cache_entries", "gauge", help, cache.entries());
        let help = "Prompts that wait to be tokenised.";
        text.single("headrace_tokenizer_queue_requests", "gauge", help, pool.queued());
        let help = "Their text, in bytes.";
        text.single("headrace_tokenizer_queue_bytes", "gauge", help, pool.queued_bytes());
        let queues = || pools().map(|pool| pool.dispatch.queue());
        let queued = queues().map(Admission::len).sum::<usize>();
        text.single("headrace_queue_requests", "gauge", "Legs that wait for a worker.", queued);
        let returning = pools().map(|pool| pool.dispatch.returning()).sum::<usize>();
        let help = "Answers under way that wait for a worker to go on with.";
        text.single("headrace_returning_requests", "gauge", help, returning);
        let tokens = queues().map(Admission::tokens).sum::<u64>();
        text.single("headrace_queue_tokens", "gauge", "Their prompt tokens.", tokens);
        let bytes = queues().map(Admission::bytes).sum::<u64>();
        text.single("headrace_queue_bytes", "gauge", "Their memory.", bytes);
        let oldest = queues().filter_map(Admission::oldest_ms).reduce(f64::min);
        let age = oldest.map_or(0.0, |since| (self.clock_ms() - since).max(0.0) / 1e3);
        text.single("headrace_queue_oldest_seconds", "gauge", "Longest wait so far.", age);
        let sizes = || pools().map(|pool| pool.dispatch.scheduler.index_size());
        let blocks = sizes().map(|(blocks, _)| blocks).sum::<usize>();
        text.single("headrace_index_blocks", "gauge", "Blocks that some worker holds.", blocks);
        let bytes = sizes().map(|(_, bytes)| bytes).sum::<usize>();
        text.single("headrace_index_bytes", "gauge", "Memory of the block index.", bytes);
        text.single(
            "headrace_description_bytes",
            "gauge",
            "Bytes of the models' descriptions, as workers sent them.",
            self.descriptions.used(),
        );
        let legs = pools().map(|pool| pool.dispatch.scheduler.legs()).sum::<usize>();
        text.single("headrace_booked_legs", "gauge", "Legs that are booked on workers.", legs);
    }
}

//! What is counted of each model under the names that vLLM has for it (`--metrics-compat vllm`), so that dashboards and
//! gateways made for vLLM read this router. The numbers are those of `metrics::models` and of the workers' last words, the
//! buckets of histograms are ours.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::Registry;
use crate::fleet::pool::PoolSnapshot;
use crate::metrics::{Histogram, ModelMetrics, Scrape, Tokens};

/// Shows them beside Headrace's own.
#[derive(Debug)]
pub(crate) struct VllmNames(pub(crate) Arc<Registry>);

type Sizes<S> = (&'static str, &'static str, fn(&ModelMetrics) -> &Histogram<S>);

/// Times, some under a name of older versions, too.
const TIMES: [Sizes<crate::metrics::Seconds>; 6] = [
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", |model| &model.ttft_seconds),
    ("vllm:inter_token_latency_seconds", "From token to token.", |model| &model.itl_seconds),
    (
        "vllm:time_per_output_token_seconds",
        "The older name of vllm:inter_token_latency_seconds.",
        |model| &model.itl_seconds,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time for each token of a whole answer after its first.",
        |model| &model.tpot_seconds,
    ),
    ("vllm:e2e_request_latency_seconds", "Arrival to the end of the answer.", |model| {
        &model.request_seconds
    }),
    ("vllm:request_queue_time_seconds", "Wait in the router for a worker with room.", |model| {
        &model.queue_seconds
    }),
];

/// Lengths.
const LENGTHS: [Sizes<Tokens>; 2] = [
    ("vllm:request_prompt_tokens", "Prompts, in tokens.", |model| &model.prompt_sizes),
    ("vllm:request_generation_tokens", "Answers, in tokens.", |model| &model.output_sizes),
];

type Count = (&'static str, &'static str, fn(&ModelMetrics) -> u64);

const COUNTS: [Count; 5] = [
    ("vllm:prompt_tokens_total", "Tokens of prompts.", |model| model.prompt_tokens.get()),
    ("vllm:generation_tokens_total", "Tokens of answers.", |model| model.completion_tokens.get()),
    ("vllm:prefix_cache_queries_total", "Tokens looked for in prefix caches.", |model| {
        model.prompt_tokens.get()
    }),
    ("vllm:prefix_cache_hits_total", "Tokens found in prefix caches.", |model| {
        model.cached_tokens.get()
    }),
    ("vllm:num_preemptions_total", "Running requests that lost their blocks.", |model| {
        model.preemptions.get()
    }),
];

type Gauge = (&'static str, &'static str, fn(&PoolSnapshot) -> f64);

/// What gateways choose by: the sums over a model's workers, and the router's queue.
const GAUGES: [Gauge; 4] = [
    ("vllm:num_requests_running", "Requests in the workers' batches.", |pool| {
        pool.workers.iter().map(|one| f64::from(one.view.load.running)).sum()
    }),
    ("vllm:num_requests_waiting", "Requests that wait in workers and in the router.", |pool| {
        let inside: f64 = pool.workers.iter().map(|one| f64::from(one.view.load.waiting)).sum();
        inside + pool.queued as f64
    }),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks that running requests hold, up to 1.",
        kv_used,
    ),
    ("vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", kv_used),
];

fn blocks(pool: &PoolSnapshot) -> u64 {
    pool.workers.iter().map(|one| u64::from(one.worker.hello.capacity.blocks)).sum()
}

fn kv_used(pool: &PoolSnapshot) -> f64 {
    let used: u64 = pool.workers.iter().map(|one| u64::from(one.view.load.blocks_used)).sum();
    used as f64 / blocks(pool).max(1) as f64
}

/// How choices ended, by vLLM's words for it.
fn ends(model: &ModelMetrics) -> Vec<(&'static str, u64)> {
    let mut ends: Vec<_> = model.finish_reasons.so_far().into_iter().collect();
    let (mut aborted, mut failed) = (0, 0);
    for (outcome, count) in model.requests.so_far() {
        match outcome {
            "finished" => {} // by their reasons
            "client_gone" => aborted += count,
            _ => failed += count,
        }
    }
    ends.extend([("abort", aborted), ("error", failed)]);
    ends
}

impl Collector for VllmNames {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (pools, _) = self.0.snapshot(self.0.clock_ms());
        let mut scrape = Scrape::new(encoder);
        let of = |pool| [("model_name", name(pool))];
        for (name, help, value) in GAUGES {
            scrape.gauges(name, help, pools.iter().map(|pool| (of(pool), value(pool))))?;
        }
        for (name, help, value) in COUNTS {
            let samples = pools.iter().map(|pool| (of(pool), value(&pool.metrics)));
            scrape.counters(name, help, samples)?;
        }
        for (name, help, sizes) in TIMES {
            let samples = pools.iter().map(|pool| (of(pool), sizes(&pool.metrics).so_far()));
            scrape.histograms(name, help, samples)?;
        }
        for (name, help, sizes) in LENGTHS {
            let samples = pools.iter().map(|pool| (of(pool), sizes(&pool.metrics).so_far()));
            scrape.histograms(name, help, samples)?;
        }
        let ended = pools.iter().flat_map(|pool| {
            let ends = ends(&pool.metrics).into_iter();
            ends.map(|(word, count)| {
                ([("model_name", name(pool)), ("finished_reason", word)], count)
            })
        });
        scrape.counters("vllm:request_success_total", "Choices, by how they ended.", ended)?;
        let sizes = pools.iter().map(|pool| {
            let block_tokens = pool.block_tokens.to_string();
            (block_tokens, blocks(pool).to_string(), name(pool))
        });
        let sizes: Vec<_> = sizes.collect();
        scrape.gauges(
            "vllm:cache_config_info",
            "The KV blocks of a model's workers; always 1.",
            sizes.iter().map(|(block_tokens, blocks, name)| {
                let block_size = ("block_size", block_tokens.as_str());
                ([("model_name", *name), block_size, ("num_gpu_blocks", blocks.as_str())], 1_u32)
            }),
        )
    }
}

fn name(pool: &PoolSnapshot) -> &str {
    &pool.model
}

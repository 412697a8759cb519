//! What operators see of each worker: its entry in `/workers`, its tile on the dashboard, and its gauges.

use super::PooledWorker;
use super::snapshot::WorkerSnapshot;
use crate::core::scheduler::{Doubt, Withdrawal, WorkerView};
use crate::core::transfer::TransferCost;

impl WorkerSnapshot {
    /// Its entry in `/workers`.
    pub(in crate::fleet) fn as_json(&self, now_ms: u64) -> serde_json::Value {
        let Self { worker, view, sources, status } = self;
        let (hello, load) = (&worker.hello, view.load);
        let sources = sources.iter();
        let sources: serde_json::Map<_, _> =
            sources.map(|one| (one.worker.to_string(), cost_json(&one.cost))).collect();
        serde_json::json!({
            "id": hello.worker,
            "role": hello.role,
            "state": status.as_str(),
            "model": hello.model,
            "dtype": hello.dtype,
            "epoch": hello.epoch,
            "address": &*worker.address,
            "blocks_total": hello.capacity.blocks,
            "blocks_used": load.blocks_used,
            "blocks_cached": load.blocks_cached,
            "blocks_announced": worker.blocks_known,
            "blocks_indexed": view.held_blocks,
            "credit_withdrawn": view.withdrawn.map(Withdrawal::as_str),
            "running": load.running,
            "waiting": load.waiting,
            "booked_requests": view.booked_requests,
            "booked_tokens": view.booked_tokens,
            "backlog_tokens": view.backlog_tokens,
            "arriving_tokens": view.arriving_tokens,
            "pinned_requests": view.pinned_requests,
            "in_flight": worker.link.in_flight(),
            "heartbeat_age_ms": now_ms.saturating_sub(worker.link.heard_ms()),
            "block_tokens": hello.fingerprints.block_tokens,
            "context_tokens": hello.context_tokens,
            "capacity": {
                "sequences": hello.capacity.sequences,
                "batched_tokens": hello.capacity.batched_tokens,
                "waiting": hello.capacity.waiting,
            },
            "group": hello.group,
            "transfer": {
                "offers": hello.transfer,
                "block_bytes": hello.kv_block_bytes,
                "pulls": worker.pulls.as_json(),
                "expected": cost_json(&view.pull_cost),
                "sources": sources,
            },
            "speed_doubted": view.doubt.map(Doubt::as_str),
            "step_cost": view.cost,
            "steps_learnt": view.steps_learnt,
            "accepted_tokens": view.accepted,
            "step": worker.last.as_ref().map(|step| serde_json::json!({
                "number": step.step,
                "ms": step.ms,
                "prefill_tokens": step.prefill_tokens,
                "decode_rows": step.decode_rows,
                "kv_tokens": step.kv_tokens,
                "waiting_tokens": step.waiting_tokens,
                "drafted": step.drafted,
                "accepted": step.accepted,
            })),
        })
    }

    /// Its tile on the dashboard: what changes from second to second, and who it is.
    pub(in crate::fleet) fn as_tile(&self, now_ms: u64) -> serde_json::Value {
        let Self { worker, view, status, .. } = self;
        let (hello, load) = (&worker.hello, view.load);
        serde_json::json!({
            "id": hello.worker,
            "model": hello.model,
            "role": hello.role,
            "state": status.as_str(),
            "group": hello.group.as_ref().map(|group| serde_json::json!({
                "id": group.id, "rank": group.rank, "size": group.size,
            })),
            "blocks": hello.capacity.blocks,
            "blocks_used": load.blocks_used,
            "blocks_cached": load.blocks_cached,
            "running": load.running,
            "waiting": load.waiting,
            "sequences": hello.capacity.sequences,
            "backlog_tokens": view.backlog_tokens,
            "step_ms": worker.last.as_ref().map(|step| step.ms),
            "decode_rows": worker.last.as_ref().map(|step| step.decode_rows),
            "accepted": view.accepted,
            "drafts": worker.last.as_ref().is_some_and(|step| step.drafted > 0),
            "credit_withdrawn": view.withdrawn.map(Withdrawal::as_str),
            "speed_doubted": view.doubt.map(Doubt::as_str),
            "heard_ms": now_ms.saturating_sub(worker.link.heard_ms()),
        })
    }
}

fn cost_json(cost: &TransferCost) -> serde_json::Value {
    serde_json::json!({
        "latency_ms": cost.latency_ms,
        "mib_per_s": 1e3 / cost.mib_ms.max(1e-9),
        "failing": cost.failing,
    })
}

type WorkerGauge = (&'static str, &'static str, fn(&PooledWorker, &WorkerView, u64) -> f64);

/// One sample for each worker.
pub(in crate::fleet) const WORKER_GAUGES: [WorkerGauge; 16] = [
    ("headrace_worker_blocks_indexed", "Blocks that placements may count on.", |_, view, _| {
        view.held_blocks.into()
    }),
    ("headrace_worker_credit", "1 if what it says of its blocks is believed.", |_, view, _| {
        f64::from(u8::from(view.withdrawn.is_none()))
    }),
    (
        "headrace_worker_speed_doubted",
        "1 if its speed is not what it says and is measured by the router.",
        |_, view, _| f64::from(u8::from(view.doubt.is_some())),
    ),
    ("headrace_worker_backlog_tokens", "Prompt tokens that are still to come.", |_, view, _| {
        view.backlog_tokens as f64
    }),
    (
        "headrace_worker_arriving_tokens",
        "Prompt tokens whose KV comes from others.",
        |_, view, _| view.arriving_tokens as f64,
    ),
    ("headrace_worker_pinned_requests", "Prompts kept for others to pull.", |_, view, _| {
        view.pinned_requests.into()
    }),
    ("headrace_worker_blocks", "KV blocks in the pool.", |worker, _, _| {
        worker.hello.capacity.blocks.into()
    }),
    ("headrace_worker_blocks_used", "KV blocks held by running requests.", |_, view, _| {
        view.load.blocks_used.into()
    }),
    ("headrace_worker_blocks_cached", "KV blocks held by the prefix cache only.", |_, view, _| {
        view.load.blocks_cached.into()
    }),
    ("headrace_worker_running", "Requests in the batch.", |_, view, _| view.load.running.into()),
    ("headrace_worker_waiting", "Requests that wait inside the worker.", |_, view, _| {
        view.load.waiting.into()
    }),
    ("headrace_worker_booked_requests", "Legs that this router has there.", |_, view, _| {
        view.booked_requests.into()
    }),
    ("headrace_worker_booked_tokens", "Their prompts and longest answers.", |_, view, _| {
        view.booked_tokens as f64
    }),
    ("headrace_worker_step_seconds", "Duration of the last step.", |worker, _, _| {
        worker.last.as_ref().map_or(0.0, |step| step.ms / 1e3)
    }),
    (
        "headrace_worker_grammar_memory_bytes",
        "What its grammars and the answers that follow them hold.",
        |worker, _, _| worker.grammars.memory_bytes as f64,
    ),
    ("headrace_worker_heartbeat_age_seconds", "Since its last frame.", |worker, _, now_ms| {
        now_ms.saturating_sub(worker.link.heard_ms()) as f64 / 1e3
    }),
];

type WorkerCounter = (&'static str, &'static str, fn(&PooledWorker) -> f64);

/// One sample for each worker; they begin anew with its start.
pub(in crate::fleet) const WORKER_COUNTERS: [WorkerCounter; 9] = [
    ("headrace_worker_grammar_masks_total", "Masks of tokens that it filled.", |worker| {
        worker.grammars.masks as f64
    }),
    ("headrace_worker_grammar_mask_seconds_total", "What that took, beside its model.", |worker| {
        worker.grammars.mask_us as f64 / 1e6
    }),
    ("headrace_worker_grammar_late_steps_total", "Steps that waited for their masks.", |worker| {
        worker.grammars.late as f64
    }),
    ("headrace_worker_grammar_wait_seconds_total", "What these steps waited.", |worker| {
        worker.grammars.wait_us as f64 / 1e6
    }),
    ("headrace_worker_grammar_compiled_total", "Grammars that it compiled.", |worker| {
        worker.grammars.compiled as f64
    }),
    ("headrace_worker_grammar_compile_seconds_total", "What that took, beside steps.", |worker| {
        worker.grammars.compile_us as f64 / 1e6
    }),
    (
        "headrace_worker_grammar_known_total",
        "Requests whose grammar it had compiled before.",
        |worker| worker.grammars.known as f64,
    ),
    (
        "headrace_worker_grammar_put_off_total",
        "Answers without a token in a step, as their masks were too much work for it.",
        |worker| worker.grammars.put_off as f64,
    ),
    (
        "headrace_worker_grammar_refused_total",
        "Grammars that it did not compile, as those in use hold too much memory.",
        |worker| worker.grammars.refused as f64,
    ),
];

//! What spans say of a request, in the words of OpenTelemetry's conventions where there are some: nothing of any text.

use std::time::Duration;

use tokio::time::Instant;

use super::request_trace::RequestTrace;
use super::{Job, Usage};
use crate::core::decision::Decision;
use crate::error::{Causes, RouteError};
use crate::fleet::booking::Reservation;
use crate::log::traces::Span;
use crate::prompt::Prompt;

/// What a job asks for. Of several jobs of a request it is the last one that is told.
pub(super) fn asked(span: &Span, job: &Job, model: &str) {
    if !span.is_kept() {
        return;
    }
    let operation = match &job.prompt {
        _ if job.pooling.is_some() => "embeddings",
        Prompt::Chat(_) => "chat",
        Prompt::Text(_) | Prompt::Bare(_) | Prompt::Tokens(_) => "text_completion",
    };
    span.set("gen_ai.operation.name", operation);
    span.set("gen_ai.provider.name", "headrace");
    span.set("gen_ai.request.model", model.to_owned());
    span.set("gen_ai.response.model", model.to_owned());
    span.set("gen_ai.response.id", job.name.clone());
    span.set_some("gen_ai.request.max_tokens", job.max_tokens);
    if job.n > 1 {
        span.set("gen_ai.request.choice.count", job.n);
    }
    let sampling = &job.sampling;
    span.set("gen_ai.request.temperature", sampling.temperature);
    span.set("gen_ai.request.top_p", sampling.top_p);
    if sampling.top_k > 0 {
        span.set("gen_ai.request.top_k", f64::from(sampling.top_k)); // a double by the convention
    }
    span.set("headrace.priority", job.priority);
}

/// The search of a place, which ended now.
pub(super) fn route(trace: &RequestTrace, choice: u32, place: &Reservation, route: Duration) {
    let Some(span) = trace.span().filter(|span| span.is_kept()) else { return };
    let now = Instant::now();
    let span = span.child_since("route", now.checked_sub(route).unwrap_or(now));
    span.set("headrace.choice", choice);
    span.set("headrace.worker", place.worker_name().to_owned());
    span.set_some("headrace.prefill_worker", place.prefill_name().map(str::to_owned));
    let decision: &Decision = place.decision();
    span.set("headrace.policy", decision.chooser.policy.name().as_str());
    if let Some((chosen, estimate)) = decision.chosen() {
        span.set("headrace.predicted_ttft_ms", estimate.ttft_ms());
        span.set("headrace.predicted_cached_tokens", chosen.cached_tokens);
    }
    span.end_at(now);
}

/// A part of it is over, and came to this.
pub(super) fn end<T>(part: Option<Span>, result: &Result<T, RouteError>) {
    if let (Some(part), Err(error)) = (part, result) {
        failed(&part, error);
    }
}

/// A part of it did not come to its end.
pub(super) fn failed(span: &Span, error: &RouteError) {
    span.set("headrace.result", "failed");
    span.fail(error.kind(), &Causes(error).to_string());
}

/// All that is known of it at its end. Whose fault an error was, its status says; a client that left is nobody's.
pub(super) fn ended(span: &Span, usage: Option<Usage>, finish: Vec<&'static str>) {
    if let Some(usage) = usage {
        span.set("gen_ai.usage.input_tokens", usage.prompt_tokens);
        span.set("gen_ai.usage.output_tokens", usage.completion_tokens);
        span.set("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens);
    }
    if !finish.is_empty() {
        span.set("gen_ai.response.finish_reasons", finish);
    }
}

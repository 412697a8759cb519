//! The span of a leg: from its submit to the worker's last word about it. The worker's own spans are under it.

use std::sync::Arc;

use tokio::time::Instant;

use super::leg::LegWork;
use crate::core::frame::{Finish, Submit, Word as _};
use crate::error::{Causes, RouteError};
use crate::log::traces::Span;

/// What a leg is a part of, where requests are traced.
#[derive(Debug, Clone)]
pub(crate) struct LegParent {
    /// Of the request.
    pub(crate) span: Arc<Span>,
    /// Number of the choice among all of that.
    pub(crate) choice: u32,
    /// Another worker had it before.
    pub(crate) is_retry: bool,
}

/// Nothing where the leg is not traced, or its trace is not kept.
#[derive(Debug, Default)]
pub(super) struct LegSpan(Option<Box<Span>>);

impl LegSpan {
    /// It begins now; the worker is told what its spans are under.
    pub(super) fn begin(
        parent: Option<&LegParent>,
        work: &LegWork,
        worker: &str,
        submit: &mut Submit,
    ) -> Self {
        let Some(LegParent { span: request, choice, is_retry }) = parent else {
            return Self(None);
        };
        if !request.is_kept() {
            submit.trace = Some(Box::new(request.context().clone()));
            return Self(None);
        }
        let span = request.call(match work {
            LegWork::Whole => "leg",
            LegWork::Prefill(_) => "prefill leg",
            LegWork::Decode { .. } => "decode leg",
        });
        submit.trace = Some(Box::new(span.context().clone()));
        span.set("headrace.worker", worker.to_owned());
        span.set("headrace.leg", submit.request.0);
        span.set("headrace.choice", *choice);
        span.set("headrace.retry", *is_retry);
        let resumed = submit.resume.as_ref().map_or(0, |resume| resume.generated.len() / 4);
        span.set("headrace.resumed_tokens", resumed as u64);
        Self(Some(Box::new(span)))
    }

    pub(super) fn first_token(&self, now: Instant) {
        if let Some(span) = &self.0 {
            span.event("first_token", now);
        }
    }

    pub(super) fn finished(&self, finish: Finish) {
        if let Some(span) = &self.0 {
            span.set("gen_ai.response.finish_reasons", vec![finish.as_str()]);
        }
    }

    /// The router wants no more of it, as far as it had come then, or for this fault.
    pub(super) fn cancelled(&self, stage: &'static str) {
        if let Some(span) = &self.0 {
            span.set("headrace.cancelled", stage);
        }
    }

    /// How it ended, as `headrace_legs_total` counts it, after so many tokens.
    pub(super) fn end(&self, outcome: &'static str, tokens: u32) {
        if let Some(span) = &self.0 {
            span.set("headrace.result", outcome);
            span.set("gen_ai.usage.output_tokens", tokens);
        }
    }

    pub(super) fn fail(&self, error: &RouteError) {
        if let Some(span) = &self.0 {
            span.fail(error.kind(), &Causes(error).to_string());
        }
    }
}

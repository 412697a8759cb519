//! A span while it is made: it ends when it drops, and goes to the queue if its trace is kept.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use opentelemetry::trace::{
    Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState as OtherState,
};
use opentelemetry::{InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{
    IdGenerator as _, RandomIdGenerator, Sampler, SamplingDecision, ShouldSample as _, SpanData,
    SpanEvents, SpanLinks,
};
use tokio::time::Instant;

use super::export::SpanQueue;
use crate::core::frame::{TraceContext, TraceParent};
use crate::metrics::Metrics;

/// Longest text of an attribute, in characters: names, and why something failed.
const TEXT: usize = 256;
/// Most attributes of a span, and most events; there are half as many.
const MOST_ATTRIBUTES: usize = 64;
const MOST_EVENTS: usize = 16;

/// Makes spans, and takes them when they end.
#[derive(Debug)]
pub(super) struct Tracer {
    queue: SpanQueue,
    sampler: Sampler,
    ids: RandomIdGenerator,
    scope: InstrumentationScope,
    metrics: Arc<Metrics>,
}

impl Tracer {
    pub(super) fn new(queue: SpanQueue, sample_ratio: f64, metrics: Arc<Metrics>) -> Self {
        let scope = InstrumentationScope::builder("headrace-router");
        Self {
            queue,
            sampler: Sampler::TraceIdRatioBased(sample_ratio),
            ids: RandomIdGenerator::default(),
            scope: scope.with_version(env!("CARGO_PKG_VERSION")).build(),
            metrics,
        }
    }

    /// A span under that of `client`, whose trace is kept as the client says; or the first of a trace.
    pub(super) fn request(
        self: &Arc<Self>,
        name: String,
        kind: SpanKind,
        client: Option<TraceContext>,
    ) -> Span {
        let span = self.ids.new_span_id().to_bytes();
        let (context, under) = match client {
            Some(client) => {
                let under = client.parent.span;
                (TraceContext { parent: TraceParent { span, ..client.parent }, ..client }, under)
            }
            None => {
                let trace = self.ids.new_trace_id();
                let asked = self.sampler.should_sample(None, trace, &name, &kind, &[], &[]);
                let sampled = asked.decision == SamplingDecision::RecordAndSample;
                let parent = TraceParent { trace: trace.to_bytes(), span, sampled };
                (TraceContext { parent, state: None }, [0; 8])
            }
        };
        let is_remote = under != [0; 8];
        Span {
            tracer: Arc::clone(self),
            context,
            under,
            is_remote,
            kind,
            began: Instant::now(),
            told: Mutex::new(Told { name: name.into(), ..Told::default() }),
        }
    }
}

/// A part of a request that takes time. One that is not sampled keeps nothing, and those under it are it itself.
#[derive(Debug)]
pub(crate) struct Span {
    tracer: Arc<Tracer>,
    /// With its own number.
    context: TraceContext,
    under: [u8; 8],
    /// Another process made the one that it is under.
    is_remote: bool,
    kind: SpanKind,
    began: Instant,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    name: Cow<'static, str>,
    attributes: Vec<KeyValue>,
    events: Vec<(&'static str, Instant)>,
    status: Status,
    ended: Option<Instant>,
}

/// What an attribute can be: a text of strangers is cut.
#[derive(Debug)]
pub(crate) struct SpanValue(Value);

impl Span {
    /// What is under it is under this.
    pub(crate) fn context(&self) -> &TraceContext {
        &self.context
    }

    /// Its trace is kept. Otherwise nothing needs to be told.
    pub(crate) fn is_kept(&self) -> bool {
        self.context.parent.sampled
    }

    /// A part of it, in this process, that began then.
    pub(crate) fn child_since(&self, name: &'static str, began: Instant) -> Self {
        self.part(name, SpanKind::Internal, began)
    }

    /// A part of it that another process does.
    pub(crate) fn call(&self, name: &'static str) -> Self {
        self.part(name, SpanKind::Client, Instant::now())
    }

    fn part(&self, name: &'static str, kind: SpanKind, began: Instant) -> Self {
        let mut context = self.context.clone();
        if self.is_kept() {
            context.parent.span = self.tracer.ids.new_span_id().to_bytes();
        }
        Self {
            tracer: Arc::clone(&self.tracer),
            context,
            under: self.context.parent.span,
            is_remote: false,
            kind,
            began,
            told: Mutex::new(Told { name: name.into(), ..Told::default() }),
        }
    }

    /// Says something of it. A later word goes before an earlier one.
    pub(crate) fn set(&self, key: &'static str, value: impl Into<SpanValue>) {
        if !self.is_kept() {
            return;
        }
        let value = value.into().0;
        let mut told = self.told();
        if let Some(known) = told.attributes.iter_mut().find(|known| known.key.as_str() == key) {
            known.value = value;
        } else if told.attributes.len() < MOST_ATTRIBUTES {
            told.attributes.push(KeyValue::new(key, value));
        }
    }

    /// The same of what is known.
    pub(crate) fn set_some(&self, key: &'static str, value: Option<impl Into<SpanValue>>) {
        if let Some(value) = value {
            self.set(key, value);
        }
    }

    /// Something happened.
    pub(crate) fn event(&self, name: &'static str, at: Instant) {
        if self.is_kept() {
            let mut told = self.told();
            if told.events.len() < MOST_EVENTS {
                told.events.push((name, at));
            }
        }
    }

    /// It failed: with a word of the program, and why.
    pub(crate) fn fail(&self, error: &'static str, why: &str) {
        if self.is_kept() {
            self.set("error.type", error);
            self.told().status = Status::error(clipped(why).into_owned());
        }
    }

    /// It ended then, and not when it drops.
    pub(crate) fn end_at(self, at: Instant) {
        self.told().ended = Some(at);
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().expect("no holder panics")
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if !self.is_kept() {
            return;
        }
        let told = std::mem::take(self.told.get_mut().expect("no holder panics"));
        let (now, clock) = (Instant::now(), SystemTime::now());
        // an instant has no date: it is so long ago
        let date = |at: Instant| clock - now.saturating_duration_since(at);
        let TraceParent { trace, span, .. } = self.context.parent;
        let mut events = SpanEvents::default();
        events.events = told
            .events
            .into_iter()
            .map(|(name, at)| Event::new(name, date(at), Vec::new(), 0))
            .collect();
        let state = self.context.state.as_ref();
        let state = state.and_then(|state| state.as_str().parse::<OtherState>().ok());
        self.tracer.queue.push(
            SpanData {
                span_context: SpanContext::new(
                    TraceId::from_bytes(trace),
                    SpanId::from_bytes(span),
                    TraceFlags::SAMPLED,
                    false,
                    state.unwrap_or_default(),
                ),
                parent_span_id: SpanId::from_bytes(self.under),
                parent_span_is_remote: self.is_remote,
                span_kind: self.kind.clone(),
                name: told.name,
                start_time: date(self.began),
                end_time: date(told.ended.unwrap_or(now).max(self.began)),
                attributes: told.attributes,
                dropped_attributes_count: 0,
                events,
                links: SpanLinks::default(),
                status: told.status,
                instrumentation_scope: self.tracer.scope.clone(),
            },
            &self.tracer.metrics,
        );
    }
}

/// At most so many characters of a text.
fn clipped(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(TEXT) {
        Some((end, _)) => format!("{}...", &text[..end]).into(),
        None => text.into(),
    }
}

impl From<&'static str> for SpanValue {
    fn from(word: &'static str) -> Self {
        Self(word.into())
    }
}

impl From<String> for SpanValue {
    fn from(text: String) -> Self {
        Self(clipped(&text).into_owned().into())
    }
}

impl From<&Arc<str>> for SpanValue {
    fn from(text: &Arc<str>) -> Self {
        Self(clipped(text).into_owned().into())
    }
}

impl From<Vec<&'static str>> for SpanValue {
    fn from(words: Vec<&'static str>) -> Self {
        let words: Vec<StringValue> = words.into_iter().map(Into::into).collect();
        Self(Value::Array(words.into()))
    }
}

macro_rules! numbers {
    ($($kind:ty)*) => {$(
        impl From<$kind> for SpanValue {
            fn from(number: $kind) -> Self {
                Self(i64::from(number).into())
            }
        }
    )*};
}

numbers! { u8 u16 u32 i8 }

impl From<u64> for SpanValue {
    fn from(number: u64) -> Self {
        Self(i64::try_from(number).unwrap_or(i64::MAX).into())
    }
}

impl From<f64> for SpanValue {
    fn from(number: f64) -> Self {
        Self(number.into())
    }
}

impl From<bool> for SpanValue {
    fn from(truth: bool) -> Self {
        Self(truth.into())
    }
}

//! What is told of requests to a collector of OpenTelemetry: spans, with their times, under the span of the client where it
//! names one.
//!
//! A request that is not traced has no [`Span`], and one that is not sampled has spans that keep nothing. No span is made of a
//! step or a token. Whoever ends a span puts it into a bounded queue and goes on ([`export`]): a collector that is slow or
//! gone costs spans, which are counted, and no request any time.
//!
//! The batches of `opentelemetry_sdk` are not used, as they count what they lose nowhere, and sleep on the thread that
//! polls them; its `Tracer` is not, as spans here end at any place and with the times of `tokio`. Ids, sampling, the
//! resource and what is sent are the libraries' own.

mod collector;
mod export;
mod span;

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, Method};
use opentelemetry::trace::SpanKind;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::SpanExporter as _;

use self::collector::Collector;
use self::export::Export;
pub(crate) use self::span::Span;
use self::span::Tracer;
use crate::config::TracesConfig;
use crate::core::frame::{TraceContext, TraceParent, TraceState};
use crate::metrics::Metrics;

/// At the end of the process spans get this long to be sent. A guess: a collector that works takes them in far less.
const LAST_SPANS: Duration = Duration::from_secs(1);

/// The name of this service, where nobody gives it another.
const SERVICE: &str = "headrace-router";

/// Why nothing can be traced.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// The certificates that vouch for the collector.
    #[error("cannot use {file} to check the collector's certificate: {why}")]
    Certificates {
        /// The file, or `those of this system`.
        file: String,
        /// What is wrong with it.
        why: String,
    },
    /// What the variables of OpenTelemetry say is not possible here.
    #[error("the variables OTEL_EXPORTER_OTLP_... cannot be followed: {0}")]
    Variables(#[source] ExporterBuildError),
}

/// Makes spans of requests, where requests are traced.
#[derive(Debug, Default)]
pub(crate) struct Traces(Option<Tracing>);

#[derive(Debug)]
struct Tracing {
    tracer: Arc<Tracer>,
    export: Export,
}

impl Traces {
    /// Spans go from `router` to the collector of `config` from now on, if there is one.
    ///
    /// # Errors
    /// Nothing can be sent there.
    pub(crate) fn start(
        config: Option<&TracesConfig>,
        router: &str,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, TracesError> {
        let Some(config) = config else { return Ok(Self(None)) };
        let collector = Collector::new(config)?;
        let refused = collector.refused();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(collector)
            .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
            .with_endpoint(config.endpoint.to_string())
            .with_timeout(config.timeout)
            .build();
        let mut exporter = exporter.map_err(TracesError::Variables)?;
        exporter.set_resource(&resource(config, router));
        let (export, queue) = Export::start(exporter, refused, Arc::clone(metrics));
        tracing::info!(endpoint = %config.endpoint, share = config.sample_ratio, "tracing requests");
        let tracer = Tracer::new(queue, config.sample_ratio, Arc::clone(metrics));
        Ok(Self(Some(Tracing { tracer: Arc::new(tracer), export })))
    }

    /// The span of a request with these headers, which begins now. What only looks has none: such requests come by the
    /// second from probes, scrapers and pages.
    pub(crate) fn request(
        &self,
        method: &Method,
        route: &str,
        headers: &HeaderMap,
    ) -> Option<Arc<Span>> {
        let Tracing { tracer, .. } = self.0.as_ref()?;
        if [Method::GET, Method::HEAD, Method::OPTIONS].contains(method) {
            return None;
        }
        let name = format!("{method} {route}");
        Some(Arc::new(tracer.request(name, SpanKind::Server, of_client(headers))))
    }

    /// Sends what is left, within [`LAST_SPANS`]; what comes later is lost, and counted.
    pub(crate) async fn end(&self) {
        if let Some(Tracing { export, .. }) = &self.0 {
            export.end(LAST_SPANS).await;
        }
    }
}

/// The span that a client names; `None` where it names none, or what it says is none.
fn of_client(headers: &HeaderMap) -> Option<TraceContext> {
    let mut parents = headers.get_all("traceparent").iter();
    let (parent, None) = (parents.next()?, parents.next()) else { return None };
    let parent = TraceParent::of_header(parent.to_str().ok()?.trim()).ok()?;
    let states = headers.get_all("tracestate").iter();
    // one that is no text makes all of it none
    let states: Result<Vec<&str>, _> = states.map(|state| state.to_str()).collect();
    let state = states.ok().and_then(TraceState::of_headers);
    Some(TraceContext { parent, state })
}

/// Who says all this. What the variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes before what is said here.
fn resource(config: &TracesConfig, router: &str) -> Resource {
    let own = [
        ("service.name", SERVICE.to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", router.to_owned()),
    ];
    let own = own.map(|(key, value)| opentelemetry::KeyValue::new(key, value));
    let resource = Resource::builder_empty()
        .with_attributes(own)
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_detector(Box::new(EnvResourceDetector::new()));
    match config.service.clone() {
        Some(service) => resource.with_service_name(service).build(),
        None => resource.build(),
    }
}

#[cfg(test)]
mod tests;

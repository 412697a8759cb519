//! The kinds of metrics, and how a group of them is declared. Updating one is an atomic addition, or a short lock where
//! there are labels or buckets.

use std::fmt;
use std::hash::Hash;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
pub use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
pub use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric as _, histogram};
use prometheus_client::registry::{Metric, Registry, Unit};

/// A time in seconds that grows.
pub type SecondsCounter = Counter<f64, AtomicU64>;

/// Upper bounds in seconds, for everything from a token to a long answer.
const SECONDS: [f64; 20] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0, 160.0, 320.0, 640.0,
];

/// Declares the metrics of one subject: field, kind, name as scrapers see it, and what it counts. A metric that is declared
/// is registered.
macro_rules! group {
    ($(#[$about:meta])* $Group:ident {
        $($field:ident: $Kind:ty = $name:literal, $help:literal;)+
    }) => {
        $(#[$about])*
        #[derive(Debug, Default)]
        pub struct $Group {
            $(#[doc = $help] pub $field: $Kind,)+
        }

        impl $Group {
            pub(super) fn register(&self, registry: &mut prometheus_client::registry::Registry) {
                $($crate::metrics::kinds::register(registry, $name, $help, self.$field.clone());)+
            }
        }
    };
}
pub(super) use group;

/// Registers a metric under the name that scrapers see. The registry appends the suffix of a counter and a full stop itself.
pub(super) fn register(registry: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    let (name, unit) = stem_and_unit(name);
    let help = help.strip_suffix('.').unwrap_or(help);
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit.clone(), metric),
        None => registry.register(name, help, metric),
    }
}

/// A name as scrapers see it, without the suffix of a counter and without its unit; both are said apart in OpenMetrics.
pub(super) fn stem_and_unit(name: &str) -> (&str, Option<&'static Unit>) {
    let name = name.strip_suffix("_total").unwrap_or(name);
    let units = [("_seconds", &Unit::Seconds), ("_bytes", &Unit::Bytes)];
    let found =
        units.into_iter().find_map(|(suffix, unit)| Some((name.strip_suffix(suffix)?, unit)));
    found.map_or((name, None), |(stem, unit)| (stem, Some(unit)))
}

/// Durations, counted by size.
#[derive(Debug, Clone)]
pub struct Histogram(histogram::Histogram);

impl Default for Histogram {
    fn default() -> Self {
        Self(histogram::Histogram::new(SECONDS))
    }
}

impl Histogram {
    /// Counts a duration.
    pub fn observe(&self, duration: Duration) {
        self.0.observe(duration.as_secs_f64());
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        self.0.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        histogram::Histogram::TYPE
    }
}

/// Counters that differ in labels. The values of labels come from the program, not from clients: their number is
/// bounded.
#[derive(Debug, Clone)]
pub struct Labelled<L>(Family<L, Counter>);

impl<L: Clone + Eq + Hash> Default for Labelled<L> {
    fn default() -> Self {
        Self(Family::default())
    }
}

impl<L: Clone + Eq + Hash> Labelled<L> {
    /// Counts one with these labels.
    pub fn inc(&self, labels: impl Into<L>) {
        self.0.get_or_create(&labels.into()).inc();
    }
}

impl<L: Clone + Eq + Hash + EncodeLabelSet> EncodeMetric for Labelled<L> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        self.0.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        Counter::<u64>::TYPE
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

//! The kinds of metrics, and how a group of them is declared. Updating one is an atomic addition, or a short lock where
//! there are labels or buckets.

use std::fmt;
use std::hash::Hash;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
pub use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
pub use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric as _};
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
#[derive(Debug, Clone, Default)]
pub struct Histogram(Arc<Mutex<Observations>>);

/// Durations that are not in a histogram yet: whoever sees many gathers them, and takes the histogram's lock once.
#[derive(Debug, Clone, Copy, Default)]
pub struct Observations {
    sum_s: f64,
    /// By the bound that they are below, and those above all bounds.
    counts: [u64; SECONDS.len() + 1],
}

impl Observations {
    /// Counts a duration.
    pub fn observe(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        self.sum_s += seconds;
        self.counts[SECONDS.partition_point(|bound| *bound < seconds)] += 1;
    }
}

impl Histogram {
    /// Counts a duration.
    pub fn observe(&self, duration: Duration) {
        self.observed().observe(duration);
    }

    /// Counts all of them, and leaves none.
    pub fn observe_all(&self, observations: &mut Observations) {
        let Observations { sum_s, counts } = std::mem::take(observations);
        if counts.iter().all(|count| *count == 0) {
            return;
        }
        let mut observed = self.observed();
        observed.sum_s += sum_s;
        for (all, more) in observed.counts.iter_mut().zip(counts) {
            *all += more;
        }
    }

    fn observed(&self) -> MutexGuard<'_, Observations> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // a count more or less
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let Observations { sum_s, counts } = *self.observed();
        let bounds = SECONDS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        encoder.encode_histogram::<NoLabelSet>(sum_s, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_below_their_bounds_together_or_one_by_one() {
        let (one_by_one, together) = (Histogram::default(), Histogram::default());
        let mut gathered = Observations::default();
        for us in [0, 500, 501, 1_000, 640_000_000, 640_000_001] {
            one_by_one.observe(Duration::from_micros(us));
            gathered.observe(Duration::from_micros(us));
        }
        together.observe_all(&mut gathered);
        together.observe_all(&mut gathered); // there is nothing left
        for histogram in [one_by_one, together] {
            let Observations { sum_s, counts } = *histogram.observed();
            assert!((sum_s - 1_280.002_002).abs() < 1e-6, "{sum_s}");
            assert_eq!((counts[0], counts[1], counts[19], counts[20]), (2, 2, 1, 1));
        }
    }
}

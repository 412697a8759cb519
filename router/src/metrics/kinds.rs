//! The kinds of metrics, and how a group of them is declared. Updating one is an atomic addition, or a short lock where
//! there are labels or buckets.

pub(super) mod labels;

use std::collections::BTreeMap;
use std::fmt;
use std::hash::Hash;
use std::marker::PhantomData;
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

/// Upper bounds of a histogram's buckets; one more has no bound.
const BOUNDS: usize = 20;

/// What a histogram counts the sizes of.
pub trait Size: fmt::Debug + Clone + Copy + Default + Send + Sync + 'static {
    /// Upper bounds of the buckets.
    const BOUNDS: [f64; BOUNDS];
}

/// Durations, from a token to a long answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seconds;

impl Size for Seconds {
    const BOUNDS: [f64; BOUNDS] = [
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0,
        40.0, 80.0, 160.0, 320.0, 640.0,
    ];
}

/// Tokens, from one to the longest contexts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tokens;

impl Size for Tokens {
    const BOUNDS: [f64; BOUNDS] = [
        1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5,
        2e5, 5e5, 1e6, 2e6,
    ];
}

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

/// Sizes, counted by bucket: durations, or tokens.
#[derive(Debug, Clone, Default)]
pub struct Histogram<S: Size = Seconds>(Arc<Mutex<Observations<S>>>);

/// Sizes that are not in a histogram yet: whoever sees many gathers them, and takes the histogram's lock once.
#[derive(Debug, Clone, Copy, Default)]
pub struct Observations<S: Size = Seconds> {
    sum: f64,
    counts: [u64; BOUNDS + 1],
    size: PhantomData<S>,
}

impl<S: Size> Observations<S> {
    /// Counts a size. What cannot be one, as a peer may say, counts for 0.
    pub fn add(&mut self, size: f64) {
        let size = if size.is_finite() { size.max(0.0) } else { 0.0 };
        self.sum += size;
        self.counts[S::BOUNDS.partition_point(|bound| *bound < size)] += 1;
    }

    /// Counts all of the others, too.
    pub fn add_all(&mut self, others: &Self) {
        self.sum += others.sum;
        for (all, more) in self.counts.iter_mut().zip(others.counts) {
            *all += more;
        }
    }

    /// How many were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Writes the sample of a family.
    pub(super) fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = S::BOUNDS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(self.counts).collect();
        encoder.encode_histogram::<NoLabelSet>(self.sum, self.count(), &buckets, None)
    }
}

impl Observations {
    /// Counts a duration.
    pub fn observe(&mut self, duration: Duration) {
        self.add(duration.as_secs_f64());
    }
}

impl Histogram {
    /// Counts a duration.
    pub fn observe(&self, duration: Duration) {
        self.observed().observe(duration);
    }
}

impl<S: Size> Histogram<S> {
    /// Counts a size.
    pub fn add(&self, size: f64) {
        self.observed().add(size);
    }

    /// Counts all of them.
    pub fn observe_all(&self, observations: &Observations<S>) {
        if observations.count() > 0 {
            self.observed().add_all(observations);
        }
    }

    /// What was counted up to now.
    #[must_use]
    pub fn so_far(&self) -> Observations<S> {
        *self.observed()
    }

    fn observed(&self) -> MutexGuard<'_, Observations<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // a count more or less
    }
}

impl<S: Size> EncodeMetric for Histogram<S> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        self.so_far().encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Counts by a word of the program, so that their number is bounded.
#[derive(Debug, Clone, Default)]
pub struct WordCounts(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl WordCounts {
    /// Counts one of this word.
    pub fn inc(&self, word: &'static str) {
        *self.counted().entry(word).or_default() += 1;
    }

    /// What was counted up to now.
    #[must_use]
    pub fn so_far(&self) -> BTreeMap<&'static str, u64> {
        self.counted().clone()
    }

    fn counted(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // a count more or less
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
        self.add(labels, 1);
    }

    /// Counts so many with these labels.
    pub fn add(&self, labels: impl Into<L>, count: u64) {
        self.0.get_or_create(&labels.into()).inc_by(count);
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
        together.observe_all(&gathered);
        together.observe_all(&Observations::default());
        for histogram in [one_by_one, together] {
            let Observations { sum, counts, .. } = histogram.so_far();
            assert!((sum - 1_280.002_002).abs() < 1e-6, "{sum}");
            assert_eq!((counts[0], counts[1], counts[19], counts[20]), (2, 2, 1, 1));
        }
    }

    #[test]
    fn what_is_no_size_counts_and_adds_nothing() {
        let mut tokens = Observations::<Tokens>::default();
        for size in [f64::NAN, f64::INFINITY, -3.0, 1.0, 1.5, 3e6] {
            tokens.add(size);
        }
        assert!((tokens.sum - (2.5 + 3e6)).abs() < 1e-9, "{}", tokens.sum);
        assert_eq!((tokens.count(), tokens.counts[0], tokens.counts[1]), (6, 4, 1));
        assert_eq!(tokens.counts[20], 1);
    }
}

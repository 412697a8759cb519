//! The kinds of metrics, and how a group of them is declared. Updating one is an atomic addition, or a short lock where
//! there are labels.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::text::Text;

/// Upper bounds in seconds, for everything from a token to a long answer.
const SECONDS: [f64; 20] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0, 160.0, 320.0, 640.0,
];

/// Declares the metrics of one subject: field, kind, name, names of labels where there are any, and what it counts. A
/// metric that is declared is rendered.
macro_rules! group {
    ($(#[$about:meta])* $Group:ident {
        $($field:ident: $Kind:ty = $name:literal $([$($label:literal),+])?, $help:literal;)+
    }) => {
        $(#[$about])*
        #[derive(Debug, Default)]
        pub struct $Group {
            $(#[doc = $help] pub $field: $Kind,)+
        }

        impl $Group {
            pub(super) fn render(&self, text: &mut $crate::metrics::Text) {
                $(self.$field.render(text, $name, $help $(, [$($label),+])?);)+
            }
        }
    };
}
pub(super) use group;

/// A number that grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// By one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// By `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Its value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(super) fn render(&self, text: &mut Text, name: &'static str, help: &str) {
        text.single(name, "counter", help, self.get());
    }
}

/// A number that comes and goes.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// To `n`.
    pub fn set(&self, n: usize) {
        self.0.store(i64::try_from(n).unwrap_or(i64::MAX), Relaxed);
    }

    /// By `n`, up or down.
    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Its value.
    #[must_use]
    pub fn get(&self) -> i64 {
        self.0.load(Relaxed)
    }

    pub(super) fn render(&self, text: &mut Text, name: &'static str, help: &str) {
        text.single(name, "gauge", help, self.get());
    }
}

/// Durations, counted by size.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; SECONDS.len() + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    /// One more.
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        self.buckets[SECONDS.partition_point(|bound| *bound < seconds)].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    pub(super) fn render(&self, text: &mut Text, name: &'static str, help: &str) {
        text.family(name, "histogram", help);
        let mut total = 0;
        for (bound, bucket) in SECONDS.iter().zip(&self.buckets) {
            total += bucket.load(Relaxed);
            text.sample("_bucket", &[("le", bound)], total);
        }
        total += self.buckets[SECONDS.len()].load(Relaxed);
        text.sample("_bucket", &[("le", &"+Inf")], total);
        let seconds = Duration::from_nanos(self.sum_ns.load(Relaxed)).as_secs_f64();
        text.sample("_sum", &[], seconds);
        text.sample("_count", &[], total);
    }
}

/// Counters that differ in labels. The values of labels come from the program, not from clients: their number is
/// bounded.
#[derive(Debug)]
pub struct Labelled<const N: usize>(Mutex<BTreeMap<[String; N], u64>>);

impl<const N: usize> Default for Labelled<N> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<const N: usize> Labelled<N> {
    /// One more of these.
    pub fn inc(&self, labels: [&str; N]) {
        // a count is there or not: no panic leaves it half changed
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(labels.map(str::to_owned)).or_default() += 1;
    }

    pub(super) fn render(
        &self,
        text: &mut Text,
        name: &'static str,
        help: &str,
        labels: [&str; N],
    ) {
        text.family(name, "counter", help);
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (values, count) in counts.iter() {
            let pairs: Vec<(&str, &dyn Display)> =
                labels.into_iter().zip(values.iter().map(|value| value as &dyn Display)).collect();
            text.sample("", &pairs, count);
        }
    }
}

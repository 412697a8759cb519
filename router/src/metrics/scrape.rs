//! Metrics that are read off at the moment of a scrape, rather than counted as things happen.

use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, MetricEncoder,
    NoLabelSet,
};
use prometheus_client::metrics::MetricType;

use super::kinds::{Observations, Size, stem_and_unit};

/// Takes the families of one scrape, under the names that scrapers see.
#[derive(Debug)]
pub struct Scrape<'a>(DescriptorEncoder<'a>);

impl<'a> Scrape<'a> {
    /// What a `Collector` is given.
    pub fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// A gauge without labels.
    ///
    /// # Errors
    /// The text takes no more; memory always does.
    pub fn gauge(
        &mut self,
        name: &str,
        help: &str,
        value: impl EncodeGaugeValue + Copy,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Gauge)?.encode_gauge(&value)
    }

    /// A gauge with a sample for each set of labels.
    ///
    /// # Errors
    /// The text takes no more; memory always does.
    pub fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, impl EncodeGaugeValue)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Gauge)?;
        samples
            .into_iter()
            .try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }

    /// A counter without labels.
    ///
    /// # Errors
    /// The text takes no more; memory always does.
    pub fn counter(
        &mut self,
        name: &str,
        help: &str,
        value: impl EncodeCounterValue + Copy,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Counter)?;
        family.encode_counter::<NoLabelSet, _, u64>(&value, None)
    }

    /// A counter with a sample for each set of labels.
    ///
    /// # Errors
    /// The text takes no more; memory always does.
    pub fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, impl EncodeCounterValue)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Counter)?;
        samples.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)
        })
    }

    /// A histogram with a sample for each set of labels.
    ///
    /// # Errors
    /// The text takes no more; memory always does.
    pub fn histograms<L: EncodeLabelSet, S: Size>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, Observations<S>)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Histogram)?;
        samples
            .into_iter()
            .try_for_each(|(labels, sizes)| sizes.encode(family.encode_family(&labels)?))
    }

    fn family<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        let (stem, unit) = stem_and_unit(name);
        self.0.encode_descriptor(stem, help, unit, kind)
    }
}

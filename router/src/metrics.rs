//! Names, units and buckets of every metric.

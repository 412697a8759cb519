//! Spans of requests, on their way to a collector.

use super::kinds::labels::ByReason;
use super::kinds::{Counter, Labelled, group};

group! {
    /// Spans of requests, on their way to a collector.
    Spans {
        exported: Counter = "headrace_spans_exported_total",
            "Spans that the collector took.";
        dropped: Labelled<ByReason> = "headrace_spans_dropped_total",
            "Spans that are lost: of a full queue, not taken by the collector, refused by it, or left at the shutdown.";
    }
}

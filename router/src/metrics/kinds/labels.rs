//! The sets of labels. Their values are words of the program, so that their number is bounded.

use std::borrow::Cow;

use prometheus_client::encoding::EncodeLabelSet;

/// Declares sets of one label; a word alone makes such a set.
macro_rules! one_label {
    ($($(#[$about:meta])* $Set:ident { $label:ident })+) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
        pub struct $Set {
            $label: Cow<'static, str>,
        }

        impl<W: Into<Cow<'static, str>>> From<W> for $Set {
            fn from(word: W) -> Self {
                Self { $label: word.into() }
            }
        }
    )+};
}

one_label! {
    /// Why something went wrong, or did not happen.
    ByReason { reason }
    /// How something ended.
    ByOutcome { outcome }
    /// How far something had come.
    ByStage { stage }
    /// Whether a target was met.
    ByResult { result }
    /// The routing policy that chose.
    ByPolicy { policy }
}

/// What was answered to an HTTP request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByAnswer {
    pub(in crate::metrics) route: String,
    pub(in crate::metrics) status: u16,
    pub(in crate::metrics) error: &'static str,
}

/// What moved KV, and how that ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByPull {
    pub(in crate::metrics) backend: &'static str,
    pub(in crate::metrics) outcome: &'static str,
}

//! How far predictions of first tokens are off, over what the first tokens took.

use headrace_router::core::scheduler::Begun;

use crate::report::TtftErrors;
use crate::report::stats::Quantiles;

/// Of each first token.
#[derive(Debug, Default)]
pub(super) struct Predictions {
    placed: Vec<f64>,
    settled: Vec<f64>,
    last: Vec<f64>,
    undisturbed: Vec<f64>,
}

impl Predictions {
    /// `disturbed`: somebody was placed on the same worker between the placement and the first token.
    pub(super) fn note(&mut self, begun: &Begun, disturbed: bool) {
        let off =
            |predicted_ms: f64| (predicted_ms - begun.ttft_ms).abs() / begun.ttft_ms.max(1e-3);
        self.placed.push(off(begun.predicted_ttft_ms));
        self.settled.push(off(begun.settled_ttft_ms));
        self.last.push(off(begun.last_ttft_ms));
        if !disturbed {
            self.undisturbed.push(off(begun.predicted_ttft_ms));
        }
    }

    pub(super) fn report(&self) -> TtftErrors {
        let quantiles = |errors: &[f64]| Quantiles::of_ms(errors.iter().copied());
        TtftErrors {
            ttft_prediction_error: quantiles(&self.placed),
            ttft_prediction_error_settled: quantiles(&self.settled),
            ttft_prediction_error_last: quantiles(&self.last),
            ttft_prediction_error_undisturbed: quantiles(&self.undisturbed),
        }
    }
}

//! Grammars of answers, as the router checks them.

use super::kinds::{Counter, Histogram, group};

group! {
    /// Grammars of answers, as the router checks them.
    Grammars {
        known: Counter = "headrace_grammar_known_total",
            "Requests whose grammar was checked before.";
        refused: Counter = "headrace_grammar_refused_total",
            "Requests whose grammar cannot be followed.";
        turned_away: Counter = "headrace_grammar_turned_away_total",
            "Requests whose grammar was not checked, as too many waited for that.";
        check_seconds: Histogram = "headrace_grammar_check_seconds",
            "Compiling a grammar that was not known, for its check.";
    }
}

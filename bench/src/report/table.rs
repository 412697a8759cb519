//! The report for people: what matters first, one line each.

use std::fmt::{self, Display, Formatter};

use super::Report;
use crate::report::stats::Quantiles;

impl Display for Report {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let mut head = vec![self.mode.to_owned()];
        head.extend(self.policy.clone());
        head.extend(self.trace.clone());
        writeln!(out, "{}", head.join(" · "))?;
        let kinds: Vec<_> = self.errors_by_kind.iter().map(|(k, n)| format!("{k}: {n}")).collect();
        let kinds =
            if kinds.is_empty() { String::new() } else { format!(" ({})", kinds.join(", ")) };
        line(out, "requests", format!("{}, errors {}{kinds}", self.requests, self.errors))?;
        for sample in &self.error_samples {
            line(out, "", sample)?;
        }
        let rate =
            format!("{:.2} requests/s, {:.1} tokens/s", self.requests_per_s, self.tokens_per_s);
        line(out, "throughput", format!("{rate} over {:.1} s", self.wall_s))?;
        if let Some(good) = &self.goodput {
            let share = good.share * 100.0;
            line(out, "goodput", format!("{:.2} requests/s, {share:.1} % of all", good.per_s))?;
        }
        if let Some(rate) = self.token_hit_rate {
            let bound = self.bound_hit_rate.map(|bound| bound * 100.0);
            let bound = bound.map(|b| format!(", one cache as large as all: {b:.1} %"));
            let hits = format!("{:.1} % of prompt tokens", rate * 100.0);
            line(out, "cache hits", hits + &bound.unwrap_or_default())?;
        }
        if let Some(imbalance) = self.imbalance {
            line(out, "imbalance", format!("{imbalance:.2} (most computed by a worker / mean)"))?;
        }
        let names = ["mean", "p50", "p90", "p99", "max"].map(|name| format!("{name:>10}"));
        writeln!(out, "{:14}{}", "ms", names.concat())?;
        quantiles(out, "first token", self.ttft_ms)?;
        quantiles(out, "per token", self.tpot_quantiles_ms)?;
        quantiles(out, "between events", self.itl_ms)?;
        quantiles(out, "behind pace", self.late_ms)?;
        quantiles(out, "whole answer", self.e2e_ms)?;
        quantiles(out, "sent late by", self.client_lag_ms)?;
        if let (Some(cpu_s), Some(share)) = (self.client_cpu_s, self.client_cpu_share) {
            let share = share * 100.0;
            line(out, "client", format!("{cpu_s:.2} s of CPU time, {share:.0} % of a core"))?;
        }
        for note in &self.notes {
            line(out, "note", note)?;
        }
        Ok(())
    }
}

fn line(out: &mut Formatter<'_>, name: &str, text: impl Display) -> fmt::Result {
    writeln!(out, "{name:14}  {text}")
}

fn quantiles(out: &mut Formatter<'_>, name: &str, ms: Option<Quantiles>) -> fmt::Result {
    let Some(q) = ms else { return Ok(()) };
    let values = [q.mean, q.p50, q.p90, q.p99, q.max].map(|ms| format!("{ms:>10.2}"));
    writeln!(out, "{name:14}{}", values.concat())
}

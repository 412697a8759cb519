//! `--autoscale`: an autoscaler that does what the router says of its needs, so that a trace shows what that would have done.
//! It goes by the rules of the usual ones: what is missing is started at once, and what is too much goes once nothing has
//! spoken for it for a while.

use std::collections::VecDeque;

use crate::BadInput;
use crate::load::positive;
use crate::mock::worker::Roles;
use crate::report::AutoscaleReport;

/// When workers come and go.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct AutoscaleArgs {
    /// Start with so many workers, and follow the router's word on how many are needed for --slo, up to --workers.
    #[arg(long, value_name = "MIN", value_parser = least)]
    autoscale: Option<usize>,
    /// A worker takes requests so many seconds after it was started.
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = positive, requires = "autoscale")]
    autoscale_start_s: f64,
    /// The router is asked every so many seconds.
    #[arg(long, value_name = "S", default_value_t = 15.0, value_parser = positive, requires = "autoscale")]
    autoscale_every_s: f64,
    /// No worker leaves that was needed within so many seconds.
    #[arg(long, value_name = "S", default_value_t = 300.0, value_parser = positive, requires = "autoscale")]
    autoscale_idle_s: f64,
}

fn least(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| *number >= 1);
    number.ok_or_else(|| format!("{text} is not 1 or more"))
}

impl AutoscaleArgs {
    /// `None` where the fleet stays as it is.
    ///
    /// # Errors
    /// Fleets for which there is no such rule here.
    pub(crate) fn rules(
        &self,
        roles: Roles,
        routers: usize,
        faults: bool,
    ) -> Result<Option<AutoscaleRules>, BadInput> {
        let Some(least) = self.autoscale else { return Ok(None) };
        let refused = |what: &str| Err(BadInput(format!("--autoscale: {what}")));
        if roles.both != roles.all() || roles.ep > 1 {
            return refused("give --workers alone, without --prefill, --decode and --ep");
        }
        if routers > 1 || faults {
            return refused("leave --routers and --fault out");
        }
        if least > roles.all() {
            return refused(&format!("{least} is more than --workers {}", roles.all()));
        }
        Ok(Some(AutoscaleRules {
            least,
            most: roles.all(),
            start_ms: self.autoscale_start_s * 1e3,
            every_ms: self.autoscale_every_s * 1e3,
            idle_ms: self.autoscale_idle_s * 1e3,
        }))
    }
}

/// The same, checked; times in ms.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AutoscaleRules {
    pub(super) least: usize,
    most: usize,
    pub(super) start_ms: f64,
    pub(super) every_ms: f64,
    idle_ms: f64,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Autoscaler {
    pub(super) rules: AutoscaleRules,
    /// What was needed of late.
    needed: VecDeque<(f64, usize)>,
    /// Workers that are there or start.
    running: usize,
    since_ms: f64,
    worker_ms: f64,
    peak: usize,
    started: usize,
    stopped: usize,
}

impl Autoscaler {
    pub(super) fn new(rules: AutoscaleRules) -> Self {
        Self {
            rules,
            needed: VecDeque::new(),
            running: rules.least,
            since_ms: 0.0,
            worker_ms: 0.0,
            peak: rules.least,
            started: 0,
            stopped: 0,
        }
    }

    /// How many workers there are to be, now that so many are needed; `None` where that is not known.
    pub(super) fn target(&mut self, needed: Option<usize>, now_ms: f64) -> usize {
        let needed = needed.unwrap_or(self.running);
        self.needed.push_back((now_ms, needed));
        while self.needed.front().is_some_and(|(at_ms, _)| *at_ms <= now_ms - self.rules.idle_ms) {
            self.needed.pop_front();
        }
        // before so much time has passed, nothing is known of it
        let kept = if now_ms < self.rules.idle_ms { self.running } else { 0 };
        let of_late = self.needed.iter().map(|(_, needed)| *needed).max().unwrap_or(needed);
        let falls = of_late.max(kept).min(self.running);
        needed.max(falls).clamp(self.rules.least, self.rules.most)
    }

    pub(super) fn starts(&mut self, now_ms: f64) {
        self.passes(now_ms);
        self.running += 1;
        self.started += 1;
        self.peak = self.peak.max(self.running);
    }

    pub(super) fn stops(&mut self, now_ms: f64) {
        self.passes(now_ms);
        self.running -= 1;
        self.stopped += 1;
    }

    fn passes(&mut self, now_ms: f64) {
        self.worker_ms += self.running as f64 * (now_ms - self.since_ms);
        self.since_ms = now_ms;
    }

    pub(super) fn report(&self, end_ms: f64) -> AutoscaleReport {
        let worker_ms = self.worker_ms + self.running as f64 * (end_ms - self.since_ms);
        AutoscaleReport {
            worker_hours: worker_ms / 3.6e6,
            mean_workers: worker_ms / end_ms.max(f64::MIN_POSITIVE),
            peak_workers: self.peak,
            started: self.started,
            stopped: self.stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler() -> Autoscaler {
        let (start_ms, every_ms, idle_ms) = (60e3, 15e3, 300e3);
        Autoscaler::new(AutoscaleRules { least: 2, most: 8, start_ms, every_ms, idle_ms })
    }

    #[test]
    fn what_is_missing_comes_at_once_and_what_is_too_much_goes_after_a_while() {
        let mut scaler = scaler();
        assert_eq!(scaler.target(None, 0.0), 2, "nothing is known");
        assert_eq!(scaler.target(Some(5), 15e3), 5);
        (0..3).for_each(|_| scaler.starts(15e3));
        assert_eq!(scaler.target(Some(1), 30e3), 5);
        assert_eq!(scaler.target(Some(3), 200e3), 5, "it is not long since five were needed");
        assert_eq!(scaler.target(Some(1), 314e3), 5);
        assert_eq!(scaler.target(Some(1), 316e3), 3, "it was three within the time");
        (0..2).for_each(|_| scaler.stops(316e3));
        assert_eq!(scaler.target(Some(1), 616e3), 2, "the least");
        assert_eq!(scaler.target(Some(99), 617e3), 8, "the most");
        let report = scaler.report(1_000e3);
        let ms = 2.0 * 15e3 + 5.0 * 301e3 + 3.0 * 684e3;
        assert!((report.worker_hours - ms / 3.6e6).abs() < 1e-9, "{report:?}");
        assert!((report.mean_workers - ms / 1_000e3).abs() < 1e-9, "{report:?}");
        assert_eq!((report.peak_workers, report.started, report.stopped), (5, 3, 2));
    }
}

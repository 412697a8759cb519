//! What work that is done now costs those who come later.

use crate::core::frame::Role;

/// Time over which the load is looked at. A guess: long against a prompt, short against the hours of a day.
const WINDOW_MS: f64 = 30_000.0;
/// A fleet is never taken for busier than this share of its time.
const MOST: f64 = 0.9;

/// That of the workers that only compute prompts, and that of the others: who comes later waits for his own kind.
#[derive(Debug, Default)]
pub(in crate::core::scheduler) struct Pressures {
    prefill: Pressure,
    others: Pressure,
}

impl Pressures {
    pub(in crate::core::scheduler) fn of(&mut self, role: Role) -> &mut Pressure {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode | Role::Both => &mut self.others,
        }
    }
}

/// The share of its time that a fleet spends on prompts. In a queue with utilisation `u`, each ms of work makes those who
/// come later wait `u / (1 - u)` ms in all (M/G/1): nothing on an idle fleet, as much again at one half, nine times at 90 %.
/// So a cache hit is worth the more the busier the fleet is, without a weight to tune.
#[derive(Debug, Default)]
pub(in crate::core::scheduler) struct Pressure {
    /// Ms of prompt work, fading with the window.
    work_ms: f64,
    at_ms: f64,
    since_ms: Option<f64>,
}

impl Pressure {
    /// A step computed prompts for so many ms.
    pub(in crate::core::scheduler) fn computed(&mut self, ms: f64, now_ms: f64) {
        if !ms.is_finite() {
            return;
        }
        self.work_ms = self.faded(now_ms) + ms;
        self.at_ms = now_ms;
        self.since_ms.get_or_insert(now_ms - ms);
    }

    /// Ms of waiting by others for a ms of work, in a fleet of so many workers.
    pub(in crate::core::scheduler) fn at(&self, workers: usize, now_ms: f64) -> f64 {
        let Some(since_ms) = self.since_ms else { return 0.0 };
        // work since the start only, until the window has passed once
        let window = WINDOW_MS * (1.0 - (-(now_ms - since_ms) / WINDOW_MS).exp());
        let busy = self.faded(now_ms) / (window.max(1.0) * workers.max(1) as f64);
        let busy = busy.clamp(0.0, MOST);
        busy / (1.0 - busy)
    }

    fn faded(&self, now_ms: f64) -> f64 {
        self.work_ms * (-(now_ms - self.at_ms).max(0.0) / WINDOW_MS).exp()
    }
}

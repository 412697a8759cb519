//! Holds off workers that come and go again and again: one that never settles costs every fleet-mate a share of the router.
//!
//! Each name has a circuit. It opens when links of that name ended more than so often within a window; dials are then
//! refused for a pause that grows from opening to opening. After the pause one link is let in as a probe: if it lasts, the
//! circuit closes; if it breaks as well, the pause is longer. Links that end in good order count for nothing.

use std::collections::{HashMap, VecDeque};

/// When to open, and for how long. All times in ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CircuitRule {
    /// Broken links within the window that are still borne; 0 never opens.
    pub breaks: u32,
    /// How far back they count.
    pub window_ms: f64,
    /// Of the first opening; doubles from there.
    pub first_pause_ms: f64,
    /// Where doubling ends.
    pub longest_pause_ms: f64,
    /// A probe that lasts this long closes the circuit.
    pub probe_ms: f64,
}

impl CircuitRule {
    /// The times are guesses: a worker that loads a small model anew is there again within seconds.
    #[must_use]
    pub fn new(breaks: u32) -> Self {
        Self {
            breaks,
            window_ms: 60_000.0,
            first_pause_ms: 1_000.0,
            longest_pause_ms: 60_000.0,
            probe_ms: 5_000.0,
        }
    }
}

/// A dial that comes too early.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOff {
    /// Until a dial is let in.
    pub wait_ms: f64,
    /// Links that broke lately.
    pub breaks: usize,
}

/// Names that are remembered at most. Beyond that the calmest are forgotten.
const NAMES: usize = 4_096;

/// The circuits of all workers, by name.
#[derive(Debug)]
pub struct Circuits {
    rule: CircuitRule,
    by_name: HashMap<String, Circuit>,
}

#[derive(Debug, Default)]
struct Circuit {
    breaks: VecDeque<f64>,
    /// Openings since it was last closed.
    openings: u32,
    /// Closed until the first opening; then when the pause ends.
    paused_until_ms: Option<f64>,
    /// The link that is up, and when it joined.
    up: Option<(u32, f64)>,
}

impl Circuits {
    /// None of them open.
    #[must_use]
    pub fn new(rule: CircuitRule) -> Self {
        Self { rule, by_name: HashMap::new() }
    }

    /// Whether a dial of this name is let in now. Changes nothing.
    ///
    /// # Errors
    /// When to come back.
    pub fn check(&self, name: &str, now_ms: f64) -> Result<(), HeldOff> {
        let Some(circuit) = self.by_name.get(name) else { return Ok(()) };
        let Some(paused_until_ms) = circuit.paused_until_ms else { return Ok(()) };
        let probed_until_ms = circuit.up.map_or(0.0, |(_, joined)| joined + self.rule.probe_ms);
        let wait_ms = paused_until_ms.max(probed_until_ms) - now_ms;
        if wait_ms <= 0.0 {
            return Ok(());
        }
        Err(HeldOff { wait_ms, breaks: circuit.breaks.len() })
    }

    /// A link of this name is up; `link` names it.
    pub fn joined(&mut self, name: &str, link: u32, now_ms: f64) {
        if self.rule.breaks == 0 {
            return;
        }
        if self.by_name.len() >= NAMES && !self.by_name.contains_key(name) {
            self.forget(now_ms);
        }
        self.by_name.entry(name.to_owned()).or_default().up = Some((link, now_ms));
    }

    /// Its link ended; `orderly` if it said so before, or if that was the router's own doing. `Some`: the circuit opens
    /// for so many ms.
    pub fn left(&mut self, name: &str, link: u32, orderly: bool, now_ms: f64) -> Option<f64> {
        let rule = self.rule;
        let circuit = self.by_name.get_mut(name)?;
        // another one may have replaced it
        let up = circuit.up.take_if(|(up, _)| *up == link);
        let lasted_ms = up.map_or(0.0, |(_, joined)| now_ms - joined);
        if orderly {
            self.by_name.remove(name);
            return None;
        }
        let probe = circuit.paused_until_ms.is_some();
        if probe && lasted_ms >= rule.probe_ms {
            *circuit = Circuit::default(); // it had closed
        }
        circuit.breaks.push_back(now_ms);
        while circuit.breaks.front().is_some_and(|then| now_ms - then > rule.window_ms)
            || circuit.breaks.len() > rule.breaks as usize + 1
        {
            circuit.breaks.pop_front();
        }
        let failed_probe = circuit.paused_until_ms.is_some();
        if !failed_probe && circuit.breaks.len() <= rule.breaks as usize {
            return None;
        }
        let doubled = rule.first_pause_ms * f64::from(circuit.openings.min(30)).exp2();
        let pause_ms = doubled.min(rule.longest_pause_ms);
        circuit.openings += 1;
        circuit.paused_until_ms = Some(now_ms + pause_ms);
        Some(pause_ms)
    }

    /// Circuits that let no link in, or only a probe that has not lasted yet.
    #[must_use]
    pub fn open(&self, now_ms: f64) -> usize {
        self.by_name
            .values()
            .filter(|circuit| match (circuit.paused_until_ms, circuit.up) {
                (None, _) => false,
                (Some(_), Some((_, joined))) => now_ms - joined < self.rule.probe_ms,
                (Some(until), None) => now_ms < until + self.rule.window_ms,
            })
            .count()
    }

    /// Forgets who is calm; if nobody is, everybody: to be let in once too often harms less than memory without end.
    fn forget(&mut self, now_ms: f64) {
        let window_ms = self.rule.window_ms;
        self.by_name.retain(|_, circuit| {
            let broke = circuit.breaks.back().is_some_and(|then| now_ms - then <= window_ms);
            let paused = circuit.paused_until_ms.is_some_and(|until| now_ms <= until + window_ms);
            broke || paused || circuit.up.is_some()
        });
        if self.by_name.len() >= NAMES {
            self.by_name.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn circuits() -> Circuits {
        Circuits::new(CircuitRule::new(3))
    }

    /// A link that breaks at once.
    fn flap(circuits: &mut Circuits, now_ms: f64) -> Option<f64> {
        circuits.check("w", now_ms).unwrap();
        circuits.joined("w", 1, now_ms);
        circuits.left("w", 1, false, now_ms)
    }

    #[test]
    fn it_opens_after_so_many_breaks_and_for_longer_each_time() {
        let mut circuits = circuits();
        for now in [0.0, 10.0, 20.0] {
            assert_eq!(flap(&mut circuits, now), None);
        }
        assert_eq!(flap(&mut circuits, 30.0), Some(1_000.0));
        let held = circuits.check("w", 40.0).unwrap_err();
        assert_eq!(held, HeldOff { wait_ms: 990.0, breaks: 4 });
        assert!(circuits.check("other", 40.0).is_ok());
        assert_eq!(circuits.open(40.0), 1);
        assert_eq!(flap(&mut circuits, 1_030.0), Some(2_000.0), "the probe broke");
        assert_eq!(flap(&mut circuits, 3_030.0), Some(4_000.0));
        let mut now = 7_030.0;
        for _ in 0..20 {
            now += flap(&mut circuits, now).unwrap();
        }
        assert_eq!(flap(&mut circuits, now), Some(60_000.0), "but not for ever longer");
    }

    #[test]
    fn one_probe_is_let_in_and_closes_it_by_lasting() {
        let mut circuits = circuits();
        for _ in 0..4 {
            flap(&mut circuits, 0.0);
        }
        circuits.joined("w", 1, 1_000.0);
        assert!(circuits.check("w", 1_001.0).is_err(), "a second one beside the probe");
        assert_eq!(circuits.open(1_001.0), 1);
        assert!(circuits.check("w", 6_000.0).is_ok());
        assert_eq!(circuits.open(6_000.0), 0);
        assert_eq!(circuits.left("w", 1, false, 6_001.0), None, "counts as the first one again");
        for _ in 0..2 {
            assert_eq!(flap(&mut circuits, 6_002.0), None);
        }
        assert_eq!(flap(&mut circuits, 6_003.0), Some(1_000.0));
    }

    #[test]
    fn orderly_ends_and_old_breaks_count_for_nothing() {
        let mut circuits = circuits();
        for i in 0..100 {
            circuits.joined("w", 1, f64::from(i));
            assert_eq!(circuits.left("w", 1, true, f64::from(i)), None);
        }
        for i in 0..100 {
            assert_eq!(flap(&mut circuits, f64::from(i) * 21_000.0), None, "three in a minute");
        }
        assert_eq!(circuits.left("nobody", 1, false, 0.0), None);
        let mut never = Circuits::new(CircuitRule::new(0));
        for _ in 0..100 {
            assert_eq!(flap(&mut never, 0.0), None);
        }
    }

    #[test]
    fn the_end_of_a_link_that_was_replaced_is_not_that_of_the_new_one() {
        let mut circuits = circuits();
        for link in 0..4 {
            circuits.joined("w", link, 0.0);
            circuits.joined("w", link + 1, 0.0);
            circuits.left("w", link, false, 0.0);
        }
        assert!(circuits.check("w", 0.0).is_err(), "it came too often");
        assert!(circuits.check("w", 5_000.0).is_ok(), "the last one lasts");
        assert_eq!(circuits.left("w", 4, false, 9_000.0), None);
    }

    #[test]
    fn names_are_bounded() {
        let mut circuits = circuits();
        for i in 0..3 * NAMES {
            circuits.joined(&format!("w{i}"), 1, i as f64);
            assert!(circuits.by_name.len() <= NAMES);
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_everybody_is_let_in_within_the_longest_pause(
            events in prop::collection::vec((0_u8..4, 0.0..30_000.0_f64), 0..200)
        ) {
            let (mut circuits, mut now_ms) = (circuits(), 0.0);
            for (what, after_ms) in events {
                now_ms += after_ms;
                match what {
                    0 => {
                        circuits.left("w", 1, true, now_ms);
                    }
                    1 | 2 => {
                        circuits.left("w", 1, false, now_ms);
                    }
                    _ => {
                        if circuits.check("w", now_ms).is_ok() {
                            circuits.joined("w", 1, now_ms);
                        }
                    }
                }
                if let Err(held) = circuits.check("w", now_ms) {
                    prop_assert!(held.wait_ms > 0.0 && held.wait_ms < 60_000.001);
                    prop_assert!(circuits.check("w", now_ms + held.wait_ms + 0.001).is_ok());
                }
                prop_assert!(circuits.by_name.get("w").is_none_or(|c| c.breaks.len() <= 4));
            }
        }
    }
}

//! Ranks that step together, as one decision sees them: to each of them the steps of the others.

use std::sync::Arc;

use super::Scheduler;
use crate::core::candidate::Candidate;

/// What the ranks of a group do, in one pass over them.
struct Group<'a> {
    name: &'a Arc<str>,
    /// Longest steps without prompts.
    steps: TopTwo,
    /// Most ms of prompts ahead.
    prompts: TopTwo,
    occupied: f64,
    /// Since the step began that runs.
    elapsed_ms: f64,
}

impl<W> Scheduler<W> {
    /// Tells the load of each rank what the others of its group do.
    pub(super) fn meet_ranks(&self, ranks: &mut [Candidate], now_ms: f64) {
        let mut groups: Vec<Group<'_>> = Vec::new();
        for (i, worker) in self.workers.iter().enumerate() {
            let Some(rank) = &worker.group else { continue };
            let at = groups.iter().position(|group| Arc::ptr_eq(group.name, &rank.group));
            let at = at.unwrap_or_else(|| {
                groups.push(Group {
                    name: &rank.group,
                    steps: TopTwo::default(),
                    prompts: TopTwo::default(),
                    occupied: 0.0,
                    elapsed_ms: f64::INFINITY,
                });
                groups.len() - 1
            });
            let (group, load) = (&mut groups[at], &ranks[i].worker_load);
            let (steps, ms) = load.prompt_steps();
            group.steps.add(i, load.decode_step_ms());
            group.prompts.add(i, steps * ms);
            group.occupied += load.occupied;
            group.elapsed_ms = group.elapsed_ms.min((now_ms - worker.step_began_ms).max(0.0));
        }
        for group in &groups {
            let members =
                self.workers.iter().enumerate().filter(|(_, worker)| worker.is_in(group.name));
            let others = members.map(|(i, _)| {
                let prompt_steps = |j: usize| ranks[j].worker_load.prompt_steps();
                let prompts = group.prompts.without(i).map_or((0.0, 0.0), |(j, _)| prompt_steps(j));
                (i, group.steps.without(i).map_or(0.0, |(_, ms)| ms), prompts)
            });
            for (i, step_ms, (prompt_steps, prompt_ms)) in others.collect::<Vec<_>>() {
                let load = &mut ranks[i].worker_load;
                load.group_ms = step_ms;
                load.group_rows = group.occupied - load.occupied;
                (load.group_prompt_steps, load.group_prompt_ms) = (prompt_steps, prompt_ms);
                if group.occupied > 0.0 {
                    load.elapsed_ms = group.elapsed_ms; // they all began it together
                }
            }
        }
    }
}

/// The two greatest of some values, and whose they are.
#[derive(Default)]
struct TopTwo {
    first: Option<(usize, f64)>,
    second: Option<(usize, f64)>,
}

impl TopTwo {
    fn add(&mut self, of: usize, value: f64) {
        if self.first.is_none_or(|(_, first)| value > first) {
            self.second = self.first.replace((of, value));
        } else if self.second.is_none_or(|(_, second)| value > second) {
            self.second = Some((of, value));
        }
    }

    /// The greatest that is not `of`'s.
    fn without(&self, of: usize) -> Option<(usize, f64)> {
        self.first.filter(|(first, _)| *first != of).or(self.second)
    }
}

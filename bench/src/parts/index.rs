//! The block index alone: lookups, events, memory, leaving and growing, on one core without a router.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use headrace_router::core::index::{BlockHolder, BlockIndex};
use serde::Serialize;

use crate::BadInput;
use crate::random::{Random, mix};
use crate::report::stats::{Quantiles, cpu_seconds};

/// Blocks of one conversation that a worker holds.
const CHAIN: usize = 800;
/// Prompts of which every worker holds the beginning, each a different length of it.
const SHARED: usize = 8;
/// An event is a run of 1 to this many blocks.
const LONGEST_RUN: usize = 64;
/// Of so many stored runs one is a copy of what another worker just stored.
const COPIES: usize = 4;

/// The block index, measured without a router.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct IndexArgs {
    /// Workers, one tier each.
    #[arg(long, default_value_t = 32)]
    workers: u16,
    /// Blocks that each worker holds; at least 8 prompts.
    #[arg(long, default_value_t = 80_000)]
    blocks: u32,
    /// Blocks of a prompt, at most 800.
    #[arg(long, default_value_t = 768)]
    prompt: usize,
    /// Lookups of each kind.
    #[arg(long, default_value_t = 5_000)]
    queries: usize,
    /// Block events in each of five rounds.
    #[arg(long, default_value_t = 1_000_000)]
    events: usize,
}

/// Result of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    workers: u16,
    blocks_per_worker: u32,
    prompt_blocks: usize,
    /// Blocks with an entry, and (block, worker) pairs.
    entries: usize,
    pairs: u64,
    bytes: usize,
    bytes_per_pair: f64,
    overlaps_us: Overlaps,
    /// Stores and removes in equal parts, runs of 1 to 64, a quarter of the runs held twice.
    events: Rate,
    /// From an empty table to the full one.
    filling: Rate,
    /// `leave` of one worker, in us, and the events that sweep up after it.
    leave_us: f64,
    sweeping: Rate,
    /// As many workers again: the table moves to one of twice the size.
    growing: Rate,
}

/// All workers' overlaps with one prompt, a different prompt each time.
#[derive(Debug, Serialize)]
struct Overlaps {
    /// Each worker holds another length of the prompt's beginning.
    every_worker: Option<Quantiles>,
    /// One worker holds all of it.
    one_worker: Option<Quantiles>,
    nobody: Option<Quantiles>,
}

/// Blocks stored and removed.
#[derive(Debug, Default, Serialize)]
struct Rate {
    events: usize,
    events_per_s: f64,
    /// By time on a core; differs from the above where this machine does something else as well.
    events_per_cpu_s: f64,
    longest_call_ms: f64,
}

/// Runs all of it.
///
/// # Errors
/// The sizes do not fit together, or there is no `/proc`.
pub(crate) fn run(args: &IndexArgs) -> anyhow::Result<Report> {
    let shared = SHARED * args.prompt;
    let rules = [
        (args.prompt > 0 && args.prompt <= CHAIN, format!("--prompt is 1 to {CHAIN}")),
        (args.blocks as usize > shared, format!("--blocks is more than {shared}")),
        (args.workers > 1, "--workers is 2 or more".to_owned()),
    ];
    if let Some((_, rule)) = rules.into_iter().find(|(kept, _)| !kept) {
        return Err(BadInput(rule).into());
    }
    let mut fleet = Fleet::default();
    let filling = fleet.fill(args)?;
    let (entries, bytes) = (fleet.index.len(), fleet.index.bytes());
    let pairs = fleet.pairs();
    let overlaps_us = fleet.look_up(args);
    let mut rounds =
        (0..5).map(|_| fleet.churn(args.events)).collect::<anyhow::Result<Vec<_>>>()?;
    rounds.sort_by(|a, b| a.events_per_s.total_cmp(&b.events_per_s));
    let longest_call_ms = rounds.iter().map(|round| round.longest_call_ms).fold(0.0, f64::max);
    let events = Rate { longest_call_ms, ..rounds.swap_remove(2) }; // the median round
    let left = fleet.workers.swap_remove(usize::from(args.workers) / 2);
    let start = Instant::now();
    fleet.index.leave(left.place);
    let leave_us = start.elapsed().as_secs_f64() * 1e6;
    let sweeping = fleet.churn(args.events)?;
    let growing = fleet.fill(args)?;
    Ok(Report {
        workers: args.workers,
        blocks_per_worker: args.blocks,
        prompt_blocks: args.prompt,
        entries,
        pairs,
        bytes,
        bytes_per_pair: bytes as f64 / pairs as f64,
        overlaps_us,
        events,
        filling,
        leave_us,
        sweeping,
        growing,
    })
}

/// The key of a block, random as a keyed hash is.
fn key(chain: u64, depth: usize) -> u64 {
    mix((chain << 10 | depth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

fn keys(chain: u64, depths: std::ops::Range<usize>) -> Vec<u64> {
    depths.map(|depth| key(chain, depth)).collect()
}

struct Fleet {
    index: BlockIndex,
    workers: Vec<Worker>,
    random: Random,
    /// Chains below `SHARED` are the shared prompts.
    next_chain: u64,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            index: BlockIndex::new(),
            workers: Vec::new(),
            random: Random::new(1),
            next_chain: SHARED as u64,
        }
    }
}

struct Worker {
    place: BlockHolder,
    /// Its conversations, oldest first.
    chains: VecDeque<Chain>,
}

struct Chain {
    number: u64,
    blocks: std::ops::Range<usize>,
}

/// A call to come. Calls are made up before they are timed.
struct Call {
    place: BlockHolder,
    store: bool,
    keys: Vec<u64>,
}

impl Fleet {
    /// `workers` more workers, stored in turns.
    fn fill(&mut self, args: &IndexArgs) -> anyhow::Result<Rate> {
        let room = u32::MAX; // a copied run may come on top
        let old = self.workers.len();
        for _ in 0..args.workers {
            let place = self.index.join(room).context("too many workers")?;
            self.workers.push(Worker { place, chains: VecDeque::new() });
        }
        let mut per_worker: Vec<VecDeque<Call>> = Vec::new();
        for nth in 0..usize::from(args.workers) {
            let mut runs = VecDeque::new();
            let place = self.workers[old + nth].place;
            let mut left = args.blocks as usize;
            for shared in 0..SHARED {
                // 1/n, 2/n ... n/n of the prompt, another worker first for each prompt
                let part = (nth + shared * 5) % usize::from(args.workers) + 1;
                let depth = args.prompt * part / usize::from(args.workers);
                self.cut(place, shared as u64, 0..depth, &mut runs);
                left -= depth;
            }
            while left > 0 {
                let number = self.next_chain;
                self.next_chain += 1;
                let blocks = 0..CHAIN.min(left);
                left -= blocks.end;
                self.cut(place, number, blocks.clone(), &mut runs);
                self.workers[old + nth].chains.push_back(Chain { number, blocks });
            }
            per_worker.push(runs);
        }
        let mut calls = Vec::new();
        while !per_worker.is_empty() {
            let at = self.random.below(per_worker.len());
            match per_worker[at].pop_front() {
                Some(call) => calls.push(call),
                None => drop(per_worker.swap_remove(at)),
            }
        }
        self.apply(&calls)
    }

    /// Stores of these blocks in runs of 1 to 64.
    fn cut(
        &mut self,
        place: BlockHolder,
        chain: u64,
        mut blocks: std::ops::Range<usize>,
        calls: &mut VecDeque<Call>,
    ) {
        while !blocks.is_empty() {
            let end = (blocks.start + 1 + self.random.below(LONGEST_RUN)).min(blocks.end);
            calls.push_back(Call { place, store: true, keys: keys(chain, blocks.start..end) });
            blocks.start = end;
        }
    }

    /// A full fleet at work: a worker evicts the last blocks of its oldest conversation and stores as many new ones.
    fn churn(&mut self, events: usize) -> anyhow::Result<Rate> {
        let mut calls = Vec::new();
        let mut made = 0;
        let mut recent: Option<(usize, Chain)> = None;
        while made < events {
            let at = self.random.below(self.workers.len());
            let wanted = 1 + self.random.below(LONGEST_RUN);
            let copy = self.random.below(COPIES) == 0;
            let Worker { place, chains } = &mut self.workers[at];
            let oldest = chains.front_mut().context("a worker holds blocks")?;
            let start = oldest.blocks.end.saturating_sub(wanted).max(oldest.blocks.start);
            let evicted = keys(oldest.number, start..oldest.blocks.end);
            oldest.blocks.end = start;
            if oldest.blocks.is_empty() {
                chains.pop_front();
            }
            let stored = match recent.take() {
                Some((other, chain)) if copy && other != at => chain,
                Some(_) | None => {
                    let number = self.next_chain;
                    self.next_chain += 1;
                    recent = Some((at, Chain { number, blocks: 0..evicted.len() }));
                    Chain { number, blocks: 0..evicted.len() }
                }
            };
            let new = keys(stored.number, stored.blocks.clone());
            chains.push_back(stored);
            made += evicted.len() + new.len();
            calls.push(Call { place: *place, store: false, keys: evicted });
            calls.push(Call { place: *place, store: true, keys: new });
        }
        self.apply(&calls)
    }

    /// Times the calls. All of their keys have to count: none is a duplicate or unknown.
    fn apply(&mut self, calls: &[Call]) -> anyhow::Result<Rate> {
        let mut longest = Duration::ZERO;
        let mut counted = 0;
        let (start, cpu) = (Instant::now(), cpu_seconds(std::process::id())?);
        for Call { place, store, keys } in calls {
            let start = Instant::now();
            counted += if *store {
                self.index.store(*place, keys)? as usize
            } else {
                self.index.remove(*place, keys) as usize
            };
            longest = longest.max(start.elapsed());
        }
        let (wall_s, cpu_s) =
            (start.elapsed().as_secs_f64(), cpu_seconds(std::process::id())? - cpu);
        let events: usize = calls.iter().map(|call| call.keys.len()).sum();
        anyhow::ensure!(counted == events, "{counted} of {events} blocks counted");
        Ok(Rate {
            events,
            events_per_s: events as f64 / wall_s,
            events_per_cpu_s: events as f64 / cpu_s,
            longest_call_ms: longest.as_secs_f64() * 1e3,
        })
    }

    /// Kinds of lookup in turns, so that none finds the cache as it left it.
    fn look_up(&mut self, args: &IndexArgs) -> Overlaps {
        let mut samples = [const { Vec::new() }; 3];
        let mut overlaps = Vec::new();
        for turn in 0..args.queries {
            let worker = self.random.below(self.workers.len());
            let chains = &self.workers[worker].chains;
            let own = chains[self.random.below(chains.len() - 1)].number; // the last may be short
            let chains = [(turn % SHARED) as u64, own, u64::from(u32::MAX) + turn as u64];
            for (samples, chain) in samples.iter_mut().zip(chains) {
                let prompt = keys(chain, 0..args.prompt);
                let start = Instant::now();
                self.index.overlaps(&prompt, &mut overlaps);
                samples.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        let [every_worker, one_worker, nobody] = samples.map(Quantiles::of_ms);
        Overlaps { every_worker, one_worker, nobody }
    }

    fn pairs(&self) -> u64 {
        self.workers.iter().map(|worker| u64::from(self.index.held(worker.place))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_fleet_is_measured_from_end_to_end() {
        let args =
            IndexArgs { workers: 4, blocks: 2_000, prompt: 100, queries: 20, events: 20_000 };
        let report = run(&args).unwrap();
        assert_eq!(report.pairs, 8_000);
        assert!(report.entries < 8_000 && report.entries > 6_000, "{}", report.entries);
        assert_eq!(report.growing.events, 8_000);
        assert_eq!(report.overlaps_us.one_worker.unwrap().count, 20);
    }

    #[test]
    fn sizes_that_do_not_fit_together_are_named() {
        let args = IndexArgs { workers: 4, blocks: 100, prompt: 100, queries: 1, events: 1 };
        assert!(run(&args).unwrap_err().to_string().contains("--blocks"));
    }
}

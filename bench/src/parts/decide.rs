//! One whole decision, alone on one core at a steady rate: hash the prompt, look its blocks up, score every worker, book.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use headrace_router::core::blocks::{BlockHash, hash_blocks};
use headrace_router::core::candidate::WorkerId;
use headrace_router::core::frame::{Capacity, Load, QueueRule, RequestId, Role, Step, StepCost};
use headrace_router::core::policy::PolicyName;
use headrace_router::core::scheduler::{
    Given, Joining, LegOutput, PlacementRequest, RoutingRules, Scheduler, Tier,
};
use headrace_router::core::secret::HashKey;
use serde::Serialize;

use crate::random::Random;
use crate::report::stats::{Quantiles, cpu_seconds};

/// Prompts begin with one of so many prefixes, each of another length.
const PREFIXES: u64 = 200;
/// Decisions after which a leg has its first token, and after which it has ended.
const BEGUN_AFTER: usize = 64;
const ENDED_AFTER: usize = 512;

/// Decisions at a steady rate, without a router around them.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DecideArgs {
    /// Workers to choose from.
    #[arg(long, default_value_t = 64)]
    workers: u32,
    /// Of them, those that only compute prompts.
    #[arg(long, default_value_t = 0)]
    prefill: u32,
    /// Blocks that each worker holds.
    #[arg(long, default_value_t = 20_000)]
    blocks: u32,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 32_768)]
    tokens: usize,
    /// Tokens of a block.
    #[arg(long, default_value_t = NonZeroUsize::new(64).expect("64 is not 0"))]
    block_tokens: NonZeroUsize,
    /// Decisions a second.
    #[arg(long, default_value_t = 1_000)]
    rate: u64,
    /// How many seconds.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Decisions in all, instead of those of `--seconds`.
    #[arg(long)]
    decisions: Option<u64>,
    /// Time is the number of the decision divided by `--rate`, and nothing is waited for. For counting instructions, which are
    /// then the same in every run.
    #[arg(long)]
    own_clock: bool,
    /// Step frames a second that each worker sends meanwhile.
    #[arg(long, default_value_t = 20)]
    steps: u64,
    /// `kv` or a baseline.
    #[arg(long, default_value = "kv")]
    policy: String,
}

/// Result of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    policy: &'static str,
    workers: u32,
    prefill_workers: u32,
    blocks_per_worker: u32,
    prompt_tokens: usize,
    block_tokens: usize,
    decisions: usize,
    decisions_per_s: f64,
    /// From token ids to a booked placement, in us.
    decision_us: Micros,
    /// Of it, hashing.
    hash_us: Micros,
    /// Of it, the rest: overlaps of all workers, estimates, choice, booking.
    place_us: Micros,
    /// A Step frame taken in, in us; `None` without any.
    step_us: Option<Micros>,
    /// Share of a core that everything together took, the making of prompts left out.
    core_share: f64,
    hit_rate: f64,
    /// Share of the decisions that split the request.
    split_rate: f64,
    index_bytes: usize,
}

#[derive(Debug, Serialize)]
struct Micros {
    p50: f64,
    p99: f64,
    max: f64,
}

impl Micros {
    fn of(samples: &[Duration]) -> anyhow::Result<Self> {
        let ms = Quantiles::of(samples).context("nothing was measured")?;
        Ok(Self { p50: ms.p50 * 1e3, p99: ms.p99 * 1e3, max: ms.max * 1e3 })
    }
}

/// Makes the decisions.
///
/// # Errors
/// An unknown policy, or a run without a decision.
pub(crate) fn run(args: &DecideArgs) -> anyhow::Result<Report> {
    let policy: PolicyName = args
        .policy
        .parse()
        .map_err(|()| crate::BadInput(format!("there is no policy {:?}", args.policy)))?;
    let mut bench = Bench::new(args, policy);
    let (mut hash, mut place, mut whole, mut step) = (vec![], vec![], vec![], vec![]);
    let total = args.decisions.unwrap_or(args.rate * args.seconds);
    let gap = Duration::from_secs_f64(1.0 / args.rate.max(1) as f64);
    let steps_each = args.steps * u64::from(args.workers);
    let (mut making, mut steps) = (0.0, 0);
    let own = std::process::id();
    let cpu_before = cpu_seconds(own)?;
    let begin = Instant::now();
    for n in 0..total {
        let due = gap * u32::try_from(n)?;
        let clock =
            |moment: Instant| if args.own_clock { due } else { moment.duration_since(begin) };
        while steps * args.rate < n * steps_each {
            let started = Instant::now();
            bench.step(steps, clock(started));
            step.push(started.elapsed());
            steps += 1;
        }
        let started = Instant::now();
        let tokens = bench.prompt(n);
        making += started.elapsed().as_secs_f64();
        if !args.own_clock {
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
        }
        let started = Instant::now();
        let keys = bench.hash(&tokens);
        let hashed = started.elapsed();
        bench.place(n, tokens.len(), keys, clock(started))?;
        let decided = started.elapsed();
        hash.push(hashed);
        place.push(decided.saturating_sub(hashed));
        whole.push(decided);
        bench.settle(clock(started));
    }
    let wall = begin.elapsed().as_secs_f64();
    Ok(Report {
        policy: policy.as_str(),
        workers: args.workers,
        prefill_workers: args.prefill,
        blocks_per_worker: args.blocks,
        prompt_tokens: args.tokens,
        block_tokens: args.block_tokens.get(),
        decisions: whole.len(),
        decisions_per_s: whole.len() as f64 / wall,
        decision_us: Micros::of(&whole)?,
        hash_us: Micros::of(&hash)?,
        place_us: Micros::of(&place)?,
        step_us: (!step.is_empty()).then(|| Micros::of(&step)).transpose()?,
        core_share: (cpu_seconds(own)? - cpu_before - making) / wall,
        hit_rate: bench.cached as f64 / bench.asked.max(1) as f64,
        split_rate: bench.split as f64 / total.max(1) as f64,
        index_bytes: bench.scheduler.index_size().1,
    })
}

struct Bench {
    args: DecideArgs,
    key: HashKey,
    scheduler: Scheduler,
    /// Requests in the order of their placement, with what their legs hold.
    placed: VecDeque<Placed>,
    begun: usize,
    asked: u64,
    cached: u64,
    split: u64,
}

struct Placed {
    keys: Arc<[u64]>,
    /// Of the prefill worker first, in a split.
    legs: Vec<Leg>,
}

struct Leg {
    request: RequestId,
    worker: WorkerId,
    cached_tokens: u32,
}

const COST: StepCost =
    StepCost { fixed_ms: 8.0, prefill_ms: 0.06, context_ms: 1e-6, row_ms: 0.05, kv_ms: 2e-5 };

/// Of a block of 64 tokens: that of a model with compressed KV (DeepSeek), 70 KB for each token.
const KV_BLOCK_BYTES: u64 = 64 * 70_272;

/// Every second one computes prompts, until there are enough.
fn role(args: &DecideArgs, id: WorkerId) -> Role {
    match (args.prefill, id.0 % 2) {
        (0, _) => Role::Both,
        (n, 0) if id.0 / 2 < n => Role::Prefill,
        (_, _) => Role::Decode,
    }
}

impl Bench {
    fn new(args: &DecideArgs, policy: PolicyName) -> Self {
        let rules = RoutingRules {
            policy,
            shadow: None,
            worker_queue_ms: f64::INFINITY,
            gather_ms: 0.0,
            seed: 1,
        };
        let block_tokens = u32::try_from(args.block_tokens.get()).unwrap_or(u32::MAX);
        let mut scheduler = Scheduler::new(rules, block_tokens);
        for id in 0..args.workers {
            let id = WorkerId(id);
            scheduler.join(
                Joining {
                    id,
                    name: format!("worker-{}", id.0).into(),
                    role: role(args, id),
                    kv_block_bytes: KV_BLOCK_BYTES,
                    index_room: [args.blocks * 2, 0, 0],
                    capacity: Capacity {
                        blocks: args.blocks * 2,
                        sequences: 4096,
                        batched_tokens: 8192,
                        waiting: 1 << 20,
                        host_blocks: 0,
                        disk_blocks: 0,
                    },
                    group: None,
                    queue_rule: QueueRule::default(),
                    step_prior: Some(COST),
                },
                (),
            );
            scheduler.snapshot_begins(id);
            scheduler.snapshot_complete(id);
            scheduler.set_open(id, true);
        }
        let args = args.clone();
        let mut bench = Self {
            args,
            key: HashKey([7; 32]),
            scheduler,
            placed: VecDeque::new(),
            begun: 0,
            asked: 0,
            cached: 0,
            split: 0,
        };
        bench.fill();
        bench
    }

    /// Every worker holds some of the prefixes, and for the rest blocks that nobody asks for.
    fn fill(&mut self) {
        let mut random = Random::new(3);
        for id in 0..self.args.workers {
            let mut held = 0;
            for prefix in 0..PREFIXES {
                if random.below(4) == 0 {
                    let keys = self.hash(&self.prefix(prefix));
                    held += keys.len();
                    let _ = self.scheduler.stored(WorkerId(id), Tier::Device, &keys);
                }
            }
            let rest: Vec<u64> = (held..self.args.blocks as usize).map(|_| random.next()).collect();
            let _ = self.scheduler.stored(WorkerId(id), Tier::Device, &rest);
        }
    }

    fn prefix(&self, prefix: u64) -> Vec<u32> {
        let tokens = self.args.tokens * (1 + (prefix as usize % 8)) / 10;
        let mut random = Random::new(prefix);
        (0..tokens).map(|_| random.below(100_000) as u32).collect()
    }

    fn prompt(&self, n: u64) -> Vec<u32> {
        let mut random = Random::new(n ^ 0x5eed);
        let mut tokens = self.prefix(random.next() % PREFIXES);
        tokens.extend((tokens.len()..self.args.tokens).map(|_| random.below(100_000) as u32));
        tokens
    }

    fn hash(&self, tokens: &[u32]) -> Arc<[u64]> {
        let root = BlockHash::root(&self.key, &[]);
        let hashes = hash_blocks(&self.key, root, tokens, self.args.block_tokens);
        hashes.into_iter().map(|hash| hash.key().0).collect()
    }

    fn place(
        &mut self,
        n: u64,
        tokens: usize,
        keys: Arc<[u64]>,
        now: Duration,
    ) -> anyhow::Result<()> {
        let wanted = PlacementRequest {
            request: RequestId(n),
            prefill_request: RequestId(n | 1 << 63),
            name: Arc::default(),
            prompt_tokens: u32::try_from(tokens)?,
            max_tokens: 256,
            keys,
            reuses: true,
            session: None,
            tenant: 0,
            priority: 0,
            yields: false,
            deadline_ms: None,
            excluded: Vec::new(),
            resumes: false,
            explains: false,
        };
        let placed = self.scheduler.place(&wanted, now.as_secs_f64() * 1e3);
        let placement = placed.map_err(|_| anyhow::anyhow!("no worker was chosen"))?;
        let (chosen, _) = placement.decision.chosen().context("a placement has a winner")?;
        let (request, worker) = (placement.request, placement.worker);
        let mut legs = vec![Leg { request, worker, cached_tokens: chosen.cached_tokens }];
        if let (Some(leg), Some(chosen)) = (placement.prefill, placement.decision.chosen_prefill())
        {
            let (request, worker) = (leg.request, leg.worker);
            legs.insert(0, Leg { request, worker, cached_tokens: chosen.cached_tokens });
            self.split += 1;
        }
        self.asked += tokens as u64;
        self.cached += u64::from(legs[0].cached_tokens);
        self.placed.push_back(Placed { keys: wanted.keys, legs });
        Ok(())
    }

    /// What workers would say of earlier legs: first token and stored blocks, later the end and the eviction.
    fn settle(&mut self, now: Duration) {
        let now_ms = now.as_secs_f64() * 1e3;
        if self.placed.len() - self.begun > BEGUN_AFTER {
            let Placed { keys, legs } = &self.placed[self.begun];
            for leg in legs {
                let _ = self.scheduler.stored(leg.worker, Tier::Device, keys);
                self.scheduler.begun(leg.request, leg.cached_tokens, now_ms);
            }
            if let [from, to] = &**legs {
                let bytes = KV_BLOCK_BYTES * keys.len() as u64;
                let from = format!("worker-{}", from.worker.0);
                self.scheduler.transferred(to.worker, &from, bytes, bytes as f64 / 25e6, now_ms);
            }
            self.begun += 1;
        }
        if self.placed.len() > ENDED_AFTER
            && let Some(Placed { keys, legs }) = self.placed.pop_front()
        {
            self.begun -= 1;
            for leg in legs {
                self.scheduler.end(leg.request, LegOutput { tokens: 200, complete: true }, now_ms);
                let own = leg.cached_tokens as usize / self.args.block_tokens;
                self.scheduler.removed(leg.worker, Tier::Device, &keys[own..]);
            }
        }
    }

    fn step(&mut self, n: u64, now: Duration) {
        let step = Step {
            step: n + 1,
            ms: 40.0,
            waited_us: 0,
            prefill_tokens: 512,
            prefill_context: 512 * 1000,
            decode_rows: 16,
            kv_tokens: 16 * 8000,
            waiting_tokens: 0,
            drafted: 0,
            accepted: 0,
            load: Load { running: 8, ..Load::default() },
            outputs: Vec::new(),
        };
        let worker = WorkerId((n % u64::from(self.args.workers)) as u32);
        let _ = self.scheduler.step(worker, &step, Given::default(), now.as_secs_f64() * 1e3);
    }
}
